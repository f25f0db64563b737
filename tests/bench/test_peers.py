"""The parts of `bench/peers` that run without the peers."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtide.bench import hitrate
from kvtide.bench.store_speed import MemoryBlocks, StoreCase
from kvtide.planner import workloads

PEERS = Path(__file__).parents[2] / "bench" / "peers"
COMMANDS = (
    *("run", "index", "index_memory", "hit_rate", "file_store", "vllm_cpu", "vllm_tier"),
    *("llama_cpp", "transformers_cache", "vllm_connector"),
)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PEERS))
    return importlib.import_module


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_executable_shell_scripts(name: str) -> None:
    assert os.access(PEERS / name, os.X_OK)
    subprocess.run(["bash", "-n", str(PEERS / name)], check=True)


def test_a_simulated_lru_finds_what_the_index_finds(peers: Any) -> None:
    trace = workloads.parse("chat:users=6,turns=4")
    found = hitrate.compare(trace, ["lru"], [0.5], 64, lambda items, count, label: items)
    row = found.rows[0]
    simulated = peers("hit_rate").simulated_lru(trace, row.capacity_tokens // 64, 64)
    assert simulated == pytest.approx(row.hit_rates["lru"], rel=0.05)
    unlimited = peers("hit_rate").simulated_lru(trace, 1 << 30, 64)
    assert unlimited == pytest.approx(found.unlimited)


def test_missing_packages_are_stubbed_and_others_left_alone(peers: Any) -> None:
    stubs = peers("gpu_stubs")
    before = list(sys.meta_path)
    try:
        stubs.install(["no_such_gpu_package", "json"])
        stub = importlib.import_module("no_such_gpu_package.kernels")
        assert stub.jit(len) is len and not stub.anything.at(3)[1]
        assert importlib.import_module("json").loads("1") == 1
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_other_package")
    finally:
        sys.meta_path[:] = before
        for name in [name for name in sys.modules if name.startswith("no_such_gpu")]:
            del sys.modules[name]


def test_file_stores_return_what_was_written(peers: Any, tmp_path: Path) -> None:
    stores, bench = peers("file_stores"), peers("file_store")
    case = StoreCase("8 KiB", 8192, 16)
    blocks = MemoryBlocks(case.bytes)
    opened = [
        stores.Kvtide(tmp_path / "kvtide", blocks),
        stores.Disk(tmp_path / "disk", blocks, case.bytes),
    ]
    try:
        rates = bench._measure(case, opened, blocks, tmp_path, 1)
    finally:
        for store in opened:
            store.close()
    rows = bench._rows(case, rates)
    assert [row[1] for row in rows] == [store.name for store in opened]
    assert rows[0][3] == rows[0][5] == "1.00×"


def test_a_store_that_returns_other_bytes_fails_the_benchmark(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, bench = peers("file_stores"), peers("file_store")
    case = StoreCase("8 KiB", 8192, 4)
    blocks = MemoryBlocks(case.bytes)
    store = stores.Disk(tmp_path / "disk", blocks, case.bytes)
    monkeypatch.setattr(store, "read", lambda keys: None)
    try:
        with pytest.raises(OSError, match="returned other bytes"):
            bench._turn(case, store, blocks, tmp_path)
    finally:
        store.close()


def test_files_are_on_the_disk_before_the_page_cache_drops_them(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").write_bytes(b"1")
    calls: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("written"))
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: calls.append("dropped"))
    peers("page_cache").drop_page_cache(tmp_path)
    assert calls == ["written", "dropped"], "the kernel drops no page that is not written"


def test_a_kept_prefix_of_transformers_is_found_again_by_both_ways(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark refuses a prefix that is computed instead."""
    made = peers("transformers_cache")
    bench = made.Bench(1, 2 * made.PAGE, tmp_path)
    found = made.row(bench, made.measure(bench, 1))
    assert found[0] == "128" and len(found) == len(made.HEADS)
    assert all(cell.endswith("×") for cell in (found[5], found[8]))
    monkeypatch.setattr(made.PrefixCache, "_fetch", lambda self, prompt: None)
    with pytest.raises(OSError, match="0 tokens were found, not 128"):
        bench.kept_by_kvtide(bench.prompt(9))


class KeptByPrompt:
    """In place of vLLM's process: computing takes 4 s, loading 1 s."""

    def __init__(self, kind: str, found_tokens: int) -> None:
        self.kind = kind
        self._found_tokens = found_tokens
        self._kept: set[int] = set()

    def first_token(self, prompt: int) -> tuple[float, int]:
        is_kept = prompt in self._kept
        if self.kind != "none":
            self._kept.add(prompt)
        return (1.0, self._found_tokens) if is_kept else (4.0, 0)


def test_connectors_take_turns_and_one_that_computes_again_fails_the_benchmark(
    peers: Any, tmp_path: Path
) -> None:
    bench, tokens = peers("vllm_connectors"), 64
    engines = [KeptByPrompt(kind, tokens) for kind in ("none", "kvtide", "example")]
    seconds = bench.measure(engines, tmp_path, tokens, 2)
    assert {name: len(some) for name, some in seconds.items()} == {
        **{"none first": 2, "kvtide first": 2, "kvtide again": 2},
        **{"example first": 2, "example again": 2},
    }
    found = bench.row(tokens, seconds)
    assert len(found) == len(bench.HEADS)
    assert found == ("64", "4.00", "4.00", "4.00", "1.00", "4.00×", "1.00", "1.00×")
    with pytest.raises(SystemExit, match="kvtide: 32 tokens were found, not 64"):
        bench.measure([KeptByPrompt("kvtide", 32)], tmp_path, tokens, 1)
