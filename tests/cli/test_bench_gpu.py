"""The rows of `kvtide bench gpu`, from results that no GPU had to give."""

from __future__ import annotations

import pytest
import torch

from kvtide.bench.gpu import constrained, multi_turn, overheads, throughput, transformers_peer, ttft
from kvtide.bench.gpu.ceilings import Ceilings
from kvtide.bench.gpu.engine_bed import Bed
from kvtide.bench.gpu.shapes import deepseek_v4_flash, qwen3_8b, tiny
from kvtide.cli.bench import bench_gpu
from kvtide.cli.main import main

BEST = Ceilings(flops=1e12, bytes_s=1e10, link_bytes_s=1e9)
SPEED = throughput.ThroughputResult("speed", 0.5, 4e11, 0.8)
OVERHEAD = overheads.OverheadResult("overhead", on_s=0.125, off_s=0.1)
TURNS = [
    multi_turn.MultiTurnResult("x", 1, 1, 100, seconds, 9, {}, {}, 0.0)
    for seconds in (10.0, 40.0, 9.5)
]
PEERS = [
    transformers_peer.PeerResult("a", 0.3, 0.1),
    transformers_peer.PeerResult("b", None, 0.1, "no"),
]
EXPECTED = {
    "prefill": ["500.0 ms | 1 of 1 TFLOPS | ≥ 50% of GEMM: 80.0%, yes"],
    "decode": ["500.0 ms | 400.0 GB, 0.80 TB/s | ≥ 65% of memory: 80.0%, yes"] * 2,
    "ttft": [
        "10.0 ms | 100 MB at link speed 9.0 ms, prefix on the device 4.0 ms | "
        "≤ 1.15 × the larger: 1.11, yes",
        "10.0 ms | recompute 70.0 ms, storage 20.0 ms | ≥ 8 × recompute: 7.00, no",
    ],
    "write-through": ["125.0 ms | no host tier 100.0 ms | ≥ 98% of the speed without: 80.0%, no"],
    "decode-with-backup": [
        "125.0 ms | no host tier 100.0 ms | ≥ 99% of the speed without: 80.0%, no"
    ],
    "sampling": ["125.0 ms | greedy 100.0 ms, 80.0% of its speed | –"],
    "constrained": [
        "125.0 ms | free 100.0 ms; masks 1.0 ms of the host's time | "
        "≥ 95% of the speed without: 80.0%, no"
    ],
    "multi-turn": [
        "10.0 requests/s | no host tier 2.5 | ≥ 3 ×: 4.00, yes",
        "10.0 requests/s | unlimited device 10.5 | ≥ 90%: 95.0%, yes",
    ],
    "transformers": ["100.0 ms | transformers 300.0 ms, 3.0 × | –", "100.0 ms | no | –"],
    "ttft-v4": [
        "10.0 ms | 100 MB at link speed 9.0 ms, prefix on the device 4.0 ms | "
        "≤ 1.15 × the larger: 1.11, yes",
        "10.0 ms | recompute 70.0 ms, storage 20.0 ms | ≥ 15 × recompute: 7.00, no",
    ],
    "write-through-v4": [
        "125.0 ms | no host tier 100.0 ms | ≥ 98% of the speed without: 80.0%, no"
    ],
    "decode-v4": ["500.0 ms | 400.0 GB, 0.80 TB/s | ≥ 50% of memory: 80.0%, yes"] * 3,
}


@pytest.fixture(autouse=True)
def results(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prefill", "decode", "decode_v4"):
        monkeypatch.setattr(throughput, name, lambda *given: SPEED)
    for name in ("write_through_prefill", "decode_with_backup", "sampling"):
        monkeypatch.setattr(overheads, name, lambda *given: OVERHEAD)
    halved = constrained.ConstrainedResult("halved", on_s=0.125, off_s=0.1, masks_s=0.001)
    monkeypatch.setattr(constrained, "measure", lambda *given: halved)
    restored = ttft.TtftResult("x", 1, 0.07, 0.02, 0.01, 0.004, 1, 100_000_000, 0.009)
    monkeypatch.setattr(ttft, "measure", lambda *given: restored)
    monkeypatch.setattr(multi_turn, "measure", lambda *given: TURNS)
    monkeypatch.setattr(transformers_peer, "measure", lambda *given: iter(PEERS))


def test_every_benchmark_has_a_name_of_the_field() -> None:
    assert bench_gpu._BENCHMARKS.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_rows_compare_a_result_with_its_reference_and_goal(name: str) -> None:
    is_v4, benchmark = bench_gpu._BENCHMARKS[name]
    shape = deepseek_v4_flash() if is_v4 else qwen3_8b()
    bed = Bed(tiny(qwen3_8b()).build(torch.device("cpu"), torch.float32), torch.device("cpu"))
    rows = [row for row, _ in benchmark(bed, shape, BEST)]
    assert [" | ".join(row[2:]) for row in rows] == EXPECTED[name]
    assert {row[0] for row in rows} == {shape.name}


def test_an_unknown_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["bench", "gpu", "--only", "prefill,drawing"]) != 0
    assert "['drawing'] is not known; use prefill, decode," in capsys.readouterr().err
