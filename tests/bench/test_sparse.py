"""`kvtide bench sparse` measures what its rows name, in tiny shapes on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from kvtide.bench.gpu.shapes import Shape, deepseek_v4_flash, deepseek_v32, tiny
from kvtide.bench.gpu.sparse import row_reads, sparse_residency
from kvtide.bench.gpu.sparse.driven_choices import OWN, DrivenChoices
from kvtide.bench.gpu.sparse.host_span import huge_fraction
from kvtide.bench.gpu.sparse.hot_reads import HotReads
from kvtide.bench.gpu.sparse.sparse_residency import DecodeLoad, SparseShape, StepResult, SumResult
from kvtide.cli.bench import bench_sparse
from kvtide.cli.main import main
from kvtide.layers import ForwardPass, Rows, Step
from kvtide.layers.backend.triton_ops import TritonOps
from kvtide.layers.step import Batch
from kvtide.spec.families import KVDType, declare
from kvtide.spec.residency import served_hot

CPU = torch.device("cpu")


def a_pass(past: tuple[int, ...], count: int = 1) -> ForwardPass:
    """So many tokens of each sequence."""
    no_slots = {"x": torch.zeros(1)}
    rows = tuple(Rows(n * count, (n + 1) * count, p, no_slots) for n, p in enumerate(past))
    at = torch.cat([torch.arange(p, p + count) for p in past])
    step = Step(at, at, rows, 64, lambda *_: {}, lambda _: None, Batch.of(rows, CPU))
    return ForwardPass(step)


@pytest.mark.parametrize("overlap", [0.0, 0.8, 0.95, 1.0])
def test_choices_overlap_from_token_to_token(overlap: float) -> None:
    """In decode steps, and in a prefill that chooses as these do."""
    choices = DrivenChoices(2, 4, 256, 1, CPU)
    choices.keep(overlap)
    own = torch.full((3, 256), -7, dtype=torch.int32)
    kept, steps = [], list[torch.Tensor]()
    for step in range(20):
        run = a_pass((8192 + step, 4096, 100))
        found = [choices.of(run, layer, [own])[0] for layer in (0, 1)]
        assert not torch.equal(*found), "layers choose for themselves"
        for entries, past in zip(found[0], run.batch.rows[:, 2].tolist(), strict=True):
            seen = entries[entries >= 0]
            assert len(set(seen.tolist())) == len(seen) and bool((seen < past).all())
        if steps:
            kept.append(float((found[0][0] == steps[-1]).float().mean()))
        steps.append(found[0][0])
    assert sum(kept) / len(kept) == pytest.approx(overlap, abs=0.02)
    prefilled = choices.of(a_pass((8192, 40), 20), 0, [own.new_zeros(40, 256)])[0]
    assert torch.equal(prefilled[:20], torch.stack(steps))
    assert bool((prefilled[20:] < torch.arange(40, 60)[:, None]).all())
    choices.keep(OWN)
    assert torch.equal(choices.of(run, 0, [own])[0], own)


@pytest.mark.parametrize(
    "shape", [deepseek_v32(), deepseek_v4_flash()], ids=lambda shape: str(shape.name)
)
def test_packed_rows_fill_the_entries_of_a_tier(shape: Shape) -> None:
    page = shape.page_tokens
    memory = declare(shape.config, model="x", page_tokens=page, kv_dtype=KVDType.FP8)
    sizes = {pool.name: pool.entry.bytes for pool in memory.pools}
    assert (sizes["kv"], sizes.get("c4", 584)) == ((656 if "v3" in shape.name else 0), 584)
    for pool in memory.pools:
        rows = sparse_residency._packed_rows(pool, page, 2, CPU)
        entries = pool.tail_entries or pool.entries_per_page(page)
        assert rows.shape == (2, entries * pool.entry.bytes), pool.name


def test_hot_contexts_fit_the_device_bytes_of_resident_ones() -> None:
    shape, load = deepseek_v32(), DecodeLoad()
    resident = declare(shape.config, model="x", page_tokens=64, kv_dtype=KVDType.FP8)
    hot = served_hot(resident, 4096)
    contexts, budget = load.contexts(resident, hot), load.device_bytes(resident, load.resident)
    assert load.device_bytes(hot, contexts) <= budget < load.device_bytes(hot, contexts + 1)
    assert 70 < contexts < 90
    few = DecodeLoad(host_bytes=10 << 30)
    assert few.contexts(resident, hot) < contexts


def test_rows_are_read_by_swap_ins_of_which_all_miss() -> None:
    with row_reads.host_block(1 << 22, CPU) as host:
        bed = row_reads.RowBed(584, 2, 16, 512, CPU, host)
        choices = bed.choices(row_reads.ROUNDS)
        assert bed.swap_s(choices) > 0
        hits, misses, gathered = bed.buffers.counts[0].tolist()
        assert hits == gathered == 0 and misses % (2 * 16 * row_reads.ROUNDS) == 0 < misses
        bed.swap_s([choices[-1]] * 2)
        assert bed.buffers.counts[0, 1] == misses, "all that is chosen again is hot"


def test_a_driven_step_has_the_hit_rate_of_its_overlap() -> None:
    shape = SparseShape(tiny(deepseek_v32()), 16, "tiny", None)
    load = DecodeLoad(context=512, resident=1, max_hot=2, steps=6)
    bed = shape.bed(CPU, torch.float32, hot=True)
    with sparse_residency.decode_bed(bed, load, 2) as decoding:
        always, never = decoding.measure(2, (1.0, 0.0))
    assert always.hit_rate == 1.0 and always.missing_bytes == 0
    assert never.hit_rate is not None and never.hit_rate < 0.2
    entry = bed.model.memory.pool("kv").entry.bytes
    assert never.missing_bytes == pytest.approx(never.layer_misses * 4 * entry)


def test_rows_can_come_from_a_small_span_of_the_host() -> None:
    """As many of them, and each still lies on a page of entries."""
    shape, span = SparseShape(tiny(deepseek_v32()), 16, "tiny", None), 20_000
    load = DecodeLoad(context=512, resident=1, max_hot=2, steps=2, host_span=span)
    bed = shape.bed(CPU, torch.float32, hot=True)
    with sparse_residency.decode_bed(bed, load, 2) as decoding:
        assert decoding.host == "rows of a layer come from 20.00 KB"
        (found,) = decoding.measure(2, (0.0,))
        assert found.missing_bytes > 0
        (hot,) = decoding._engine._runner._hot.pools.values()
        entry = bed.model.memory.pool("kv").entry.bytes
        for layer in hot.layers:
            rows = hot.host_rows(layer)
            reached = rows[-1].data_ptr() + rows.shape[1] - rows[0].data_ptr()
            assert reached <= max(span, 3 * rows.shape[1]) and rows.stride(0) % entry == 0
        home = decoding._engine.cache.hardware.host.data
    (hot,) = decoding._engine._runner._hot.pools.values()
    assert hot.host_rows(hot.layers[0]).data_ptr() >= home.data_ptr()


def test_huge_pages_are_counted_by_the_kernels_word(tmp_path: Path) -> None:
    data, maps = torch.zeros(8 << 20, dtype=torch.uint8), tmp_path / "smaps"
    start = data.data_ptr()
    assert huge_fraction(data, maps) is None
    entries = [
        f"{begin:x}-{begin + (4 << 20):x} rw-p 00000000 00:00 0\nRss: 4096 kB\n"
        f"AnonHugePages:      {huge} kB\nVmFlags: rd wr\n"
        for begin, huge in ((start - (4 << 20), 4096), (start, 4096), (start + (4 << 20), 2048))
    ]
    maps.write_text("".join(entries))
    assert huge_fraction(data, maps) == 0.75
    maps.write_text("".join(entries).replace("AnonHugePages", "AnonPages"))
    assert huge_fraction(data, maps) is None


def test_the_speed_of_served_rows_is_their_bytes_over_the_time_that_they_add() -> None:
    hot = StepResult("hot:16", 2, 0.9, 0.012, 0.9, 10.0, missing_bytes=4e7)
    both = SumResult(hot, 0.010, 2e10)
    assert both.served_bytes_s == pytest.approx(2e10) and both.read_s == pytest.approx(0.002)
    assert both.of_larger == pytest.approx(1.2) and both.of_sum == pytest.approx(1.0)
    assert {"served_bytes_s", "of_sum"} <= both.as_json().keys()
    assert SumResult(hot, 0.012, 2e10).served_bytes_s is None, "rows add no time"


@pytest.mark.full
def test_prefill_and_first_token_say_what_they_read() -> None:
    shape = SparseShape(tiny(deepseek_v32()), 16, "tiny", None)
    hot, resident = (shape.bed(CPU, torch.float32, hot=each) for each in (True, False))
    pool = hot.model.memory.pool("kv")
    row_bytes = pool.entry.bytes * len(pool.layers)
    for found in sparse_residency.prefill(hot, resident, 128, 1, (0.95, OWN), 64):
        assert found.reads.missing_bytes == 0 < (found.reads.hit_rate or 0)
        assert 0 < found.reads.gathered_bytes <= 48 * row_bytes, "not what the first left in rows"
    topk = pool.selected or 0
    read = {}
    for new_tokens in (1, 5):
        for one in sparse_residency.first_token(hot, 128, new_tokens, 1, (0.0, 1.0)):
            few, reads = new_tokens <= 16 // topk, one.reads
            assert (reads.missing_bytes > 0, reads.gathered_bytes > 0) == (few, not few)
            read[new_tokens, one.overlap] = reads.gathered_bytes
    assert read[5, 1.0] < read[5, 0.0], "tokens that choose alike read less"
    (alone,) = sparse_residency.first_token(resident, 128, 1, 1, (OWN,))
    assert alone.reads == HotReads()
    assert alone.device_s > 0 and alone.loaded_bytes > 0


@pytest.mark.full
def test_every_part_has_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, chart = tmp_path / "found.json", tmp_path / "chart.svg"
    only = ["--only", "rows,single,decode,sum,prefill,ttft", "--prompt-tokens", "128,192"]
    args = ["bench", "sparse", "--device", "cpu", "--tiny", "--json", str(found)]
    assert main([*args, "--plot", str(chart), *only]) == 0, capsys.readouterr().out
    numbers = json.loads(found.read_text())
    assert {name: len(rows) for name, rows in numbers.items()} == {
        "rows": 2, "single": 4, "decode": 4, "sum": 4, "prefill": 4, "ttft": 4, "failed": 0,
    }  # fmt: skip
    everything, _, hot, _ = numbers["ttft"]
    assert 0 < hot["loaded_bytes"] < everything["loaded_bytes"]
    assert [found["tokens"] for found in numbers["prefill"]] == [128, 128, 192, 192]
    assert "prefers-color-scheme: dark" in chart.read_text()
    assert ElementTree.parse(chart).getroot().tag.endswith("svg")


def test_what_fails_is_named_and_the_rest_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*given: object, **named: object) -> None:
        raise RuntimeError("no such rows")

    monkeypatch.setattr(row_reads, "measure", broken)
    monkeypatch.setattr(bench_sparse._Bench, "first_token", lambda self, shape: print("still run"))
    args = ["bench", "sparse", "--device", "cpu", "--tiny", "--only", "rows,ttft"]
    assert main(args) == 1
    printed = capsys.readouterr().out
    assert "no such rows" in printed and "still run" in printed
    assert "failed (tracebacks above): 64 rows of 584 B" in printed


@pytest.mark.parametrize(
    "args",
    [
        ["--only", "speed"],
        ["--device", "cpu"],
        ["--device", "cpu", "--tiny", "--prompt-tokens=9k"],
        ["--device", "cpu", "--tiny", "--host-span=9x"],
    ],
    ids=["unknown part", "full size on a CPU", "no number", "no size"],
)
def test_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sparse", *args]) == 2
    assert "bench sparse" in capsys.readouterr().err


@pytest.mark.parametrize("row_bytes", row_reads.LIMITS_GB_S)
def test_kernels_copy_the_rows_that_are_named(row_bytes: int) -> None:
    with row_reads.host_block(1 << 22, CPU) as host:
        host.random_(0, 255)
        bed = row_reads.RowBed(row_bytes, 2, 16, 512, CPU, host)
        bed.ops = TritonOps()
        (chosen,) = bed.choices(1)
        bed.hot.pages.zero_()
        bed._move(chosen)()
        size = row_reads.PAGE * row_bytes
        arena, rows = (
            pages[:, :size].reshape(-1, row_bytes)
            for pages in (bed.hot.pages, bed.hot.host_rows(0))
        )
        for sequence, entries in enumerate(chosen.long()):
            first = sequence * bed.hot.row_pages * row_reads.PAGE
            source = (sequence * bed.pages * row_reads.PAGE + entries) % len(rows)
            assert torch.equal(arena[first : first + 16], rows[source])
        assert bed.swap_s([chosen]) > 0
        assert bed.buffers.counts[0, 1] == 2 * 16
