"""SGLang's real factory and types over a store of kvtide: run by `test_sglang` for each version.

    PYTHONPATH=FOLDER:. python -m tests.integrations.hicache_checks FOLDER SCRATCH

Prints the name of every check that holds.
"""

from __future__ import annotations

import ast
import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from kvtide.storage import StoreError
from tests.integrations.bare_packages import bare

bare(Path(sys.argv[1]), "sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.observability")

from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

PAGE, PAGES = 16, 24


class HostPool:
    """Host memory as SGLang's pools have it: keys and values apart, page by page."""

    def __init__(self, pages: int, page_bytes: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.page_size, self.layout, self.dtype = PAGE, "page_first_direct", dtype
        rng = torch.Generator().manual_seed(page_bytes)
        self.buffer = torch.randint(
            0, 255, (2, pages, page_bytes), dtype=torch.uint8, generator=rng
        )

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = [int(i) // PAGE for i in indices[::PAGE]]
        addresses = [self.buffer[part, page].data_ptr() for page in pages for part in (0, 1)]
        return addresses, [self.buffer.shape[2]] * len(addresses)


class DSAIndexerPoolHost(HostPool):
    """Index keys, which are the same on every tensor rank."""


class AsymmetricMHATokenToKVPoolHost(HostPool):
    """A draft's heads, which tensor ranks divide."""


class LogicalHostPool(HostPool):
    """The anchor of DeepSeek-V4's pools, without bytes."""

    size_per_token = 0

    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:  # type: ignore[override]
        return None


def backend(folder: str, extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    options = {
        "backend_name": "kvtide",
        "module_path": "kvtide.integrations.sglang",
        "class_name": "KvtideStorage",
        "interface_v1": 1,
        "url": f"file://{folder}?cap=64MB&floor=0",
        "fingerprint": "r1",
    }
    config: dict[str, Any] = {
        **{"tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1},
        **{"attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False},
        **{"enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "model"},
    }
    config |= changes
    made = HiCacheStorageConfig(**config, extra_config={**options, **(extra or {})})
    one = StorageBackendFactory.create_backend("dynamic", made, None)
    one.register_mem_pool_host(HostPool(2 * PAGES, 4096))
    one.register_mem_host_pool_v2(HostPool(2 * PAGES, 1000), PoolName.MAMBA)
    one.register_mem_host_pool_v2(DSAIndexerPoolHost(2 * PAGES, 512), PoolName.INDEXER)
    one.register_mem_host_pool_v2(AsymmetricMHATokenToKVPoolHost(2 * PAGES, 512), PoolName.DRAFT)
    return one


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except StoreError as error:
        return str(error)
    return "it was not refused"


def keys(count: int = PAGES) -> list[str]:
    return [f"{number:064x}" for number in range(count)]


def at(first: int, count: int) -> torch.Tensor:
    return torch.arange(first * PAGE, (first + count) * PAGE)


def transfer(name: Any, numbers: list[int], policy: Any, first: int = 0) -> PoolTransfer:
    return PoolTransfer(
        name=name,
        keys=[keys()[number] for number in numbers],
        host_indices=at(first, len(numbers)),
        hit_policy=policy,
    )


def check_pages_written_by_one_process_are_read_by_another(folder: str) -> None:
    writer, reader = backend(folder), backend(folder)
    assert writer.batch_exists(keys()) == 0
    assert writer.batch_set_v1(keys(), at(0, PAGES)) == [True] * PAGES
    assert reader.batch_exists([*keys(), "f" * 64]) == PAGES
    assert reader.exists(keys()[3]) and not reader.exists("f" * 64)
    wanted = writer.mem_pool_host.buffer[:, :PAGES]
    target = reader.mem_pool_host.buffer[:, PAGES:].zero_()
    assert reader.batch_get_v1(keys(), at(PAGES, PAGES)) == [True] * PAGES
    assert torch.equal(wanted, target)
    assert reader.batch_get_v1(["f" * 64], at(0, 1)) == [False]
    assert torch.equal(reader.mem_pool_host.buffer[:, 0], wanted[:, 0])


def check_a_boundary_needs_every_pool(folder: str) -> None:
    one = backend(folder)
    one.batch_set_v1(keys()[:20], at(0, 20))
    everything, last = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES
    one.batch_set_v2([transfer(PoolName.INDEXER, list(range(16)), everything)])
    one.batch_set_v2([transfer(PoolName.MAMBA, [3, 7, 8, 18], last)])
    state, two = transfer(PoolName.MAMBA, [0], last), transfer(PoolName.MAMBA, [0, 1], last)
    index = transfer(PoolName.INDEXER, [], everything)
    for pools, boundaries, own in (
        ([], list(range(1, 21)), {}),
        ([index], list(range(1, 17)), {PoolName.INDEXER: 16}),
        ([state], [4, 8, 9, 19], {PoolName.MAMBA: 19}),
        ([state, index], [4, 8, 9], {PoolName.MAMBA: 19, PoolName.INDEXER: 16}),
        ([two], [9], {PoolName.MAMBA: 9}),
    ):
        found = one.batch_exists_v2(keys(), pools)
        assert found.kv_hit_pages == boundaries[-1], found
        assert found.extra_pool_hit_pages == {PoolName.KV: 20, **own}, found
        if hasattr(found, "restorable_prefix_pages"):
            assert found.restorable_prefix_pages == boundaries, found
    nothing = one.batch_exists_v2(["f" * 64], [state])
    assert nothing.kv_hit_pages == 0 and not nothing.extra_pool_hit_pages


def check_pools_of_hybrids_come_back(folder: str) -> None:
    writer, reader = backend(folder), backend(folder)
    stored = transfer(PoolName.MAMBA, [5, 9], PoolHitPolicy.TRAILING_PAGES)
    assert writer.batch_set_v2([stored]) == {PoolName.MAMBA: [True, True]}
    wanted = transfer(PoolName.MAMBA, [5, 6, 9], PoolHitPolicy.TRAILING_PAGES, first=30)
    assert reader.batch_get_v2([wanted]) == {PoolName.MAMBA: [True, False, True]}
    ours, theirs = (one.registered_pools[PoolName.MAMBA].buffer for one in (writer, reader))
    assert torch.equal(theirs[:, [30, 32]], ours[:, [0, 1]])


def check_another_model_slice_or_format_finds_nothing(folder: str) -> None:
    backend(folder).batch_set_v1(keys(), at(0, PAGES))
    for changes in (
        {"model_name": "b"},
        {"tp_rank": 1},
        {"tp_size": 4},
        {"pp_rank": 1, "pp_size": 2},
    ):
        assert backend(folder, **changes).batch_exists(keys()) == 0, changes
    assert backend(folder, {"fingerprint": "r2"}).batch_exists(keys()) == 0
    other = backend(folder)
    other.registered_pools[PoolName.KV] = HostPool(2 * PAGES, 4096, torch.float16)
    assert other.batch_exists(keys()) == 0


def check_tensor_ranks_of_any_size_share_latents_and_nothing_else(folder: str) -> None:
    writer = backend(folder, is_mla_model=True)
    writer.batch_set_v1(keys(), at(0, PAGES))
    for name in (PoolName.MAMBA, PoolName.DRAFT):
        writer.batch_set_v2([transfer(name, [5], PoolHitPolicy.TRAILING_PAGES)])
    writer.batch_set_v2([transfer(PoolName.INDEXER, [5], PoolHitPolicy.ALL_PAGES)])
    for rank in ({"tp_rank": 1}, {"tp_size": 1}, {"tp_size": 4}, {"tp_size": 4, "tp_rank": 3}):
        reader = backend(folder, is_mla_model=True, **rank)
        assert reader.batch_exists(keys()) == PAGES, rank
        for name in (PoolName.MAMBA, PoolName.DRAFT, PoolName.INDEXER):
            wanted = transfer(name, [5], PoolHitPolicy.TRAILING_PAGES)
            assert reader.batch_get_v2([wanted]) == {name: [name == PoolName.INDEXER]}, rank


def check_the_classes_of_pools_that_ranks_share_are_sglangs(folder: str) -> None:
    sources = Path(sys.argv[1], "sglang", "srt", "mem_cache").rglob("*.py")
    defined = set(re.findall(r"^class (\w+)", "\n".join(map(Path.read_text, sources)), re.M))
    backend(folder)
    shared = sys.modules["kvtide.integrations.sglang"]._REPLICATED
    assert shared <= defined, shared - defined


def check_an_anchor_without_bytes_has_pages_that_are_found(folder: str) -> None:
    one = backend(folder, is_mla_model=True)
    one.registered_pools[PoolName.KV] = LogicalHostPool(2 * PAGES, 0)
    assert one.batch_exists(keys()) == 0
    assert one.batch_set_v1(keys(), at(0, PAGES)) == [True] * PAGES
    assert one.batch_exists([*keys(), "f" * 64]) == PAGES


def check_bad_calls_and_settings_are_refused(folder: str) -> None:
    one = backend(folder)
    assert one.batch_get_v1(keys()[:2], at(0, 1)) == [False, False]
    assert one.batch_set_v1([], at(0, 0)) == []
    for extra, sentence in (
        ({"url": None}, "names no store"),
        ({"interface_v1": 0}, "interface_v1"),
        ({"cap": "4GB"}, "has cap; kvtide knows url and fingerprint"),
    ):
        assert sentence in refusal(lambda extra=extra: backend(folder, extra))


def check_sglang_exports_what_moved(folder: str) -> None:
    """By its real collector, and as its server gathers the metrics of all its processes."""
    collector = metrics_collector()
    one = backend(folder, enable_storage_metrics=True)
    one.batch_set_v1(keys(), at(0, PAGES))
    assert one.batch_get_v1(keys(), at(PAGES, PAGES)) == [True] * PAGES
    sums = collector.StorageMetricsCollector({"tp_rank": "0"})
    sums.log_storage_metrics(one.get_stats())
    shown = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in MultiProcessCollector(CollectorRegistry()).collect()
        for sample in family.samples
    }
    for name in ("prefetch", "backup"):
        assert shown[f"sglang:{name}_pgs_sum", ("tp_rank", "0")] == PAGES
        assert shown[f"sglang:{name}_bandwidth_count", ("tp_rank", "0")] == 1
    ours = {key[1:]: value for key, value in shown.items() if key[0] == "kvtide_engine_pages_total"}
    assert ours[("engine", "sglang"), ("event", "written")] >= PAGES
    sums.log_storage_metrics(backend(folder).get_stats())


def metrics_collector() -> ModuleType:
    """SGLang's module of that name, but for what needs its whole server: the classes of storage's
    metrics, from its source."""
    name = "sglang.srt.observability.metrics_collector"
    source = Path(sys.argv[1]).joinpath(*name.split(".")).with_suffix(".py").read_text()
    wanted = ("_StatLoggerDIMixin", "StorageMetrics", "StorageMetricsCollector")
    classes = [one for one in ast.parse(source).body if getattr(one, "name", "") in wanted]
    assert len(classes) == len(wanted)
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(vars(typing), dataclass=dataclass, field=field)
    code = "from __future__ import annotations\n" + "\n".join(map(ast.unparse, classes))
    exec(compile(code, name, "exec"), vars(module))
    return module


def check_clear_removes_this_slice_alone(folder: str) -> None:
    one, other = backend(folder), backend(folder, tp_rank=1)
    for each in (one, other):
        each.batch_set_v1(keys(), at(0, PAGES))
    one.clear()
    assert (one.batch_exists(keys()), other.batch_exists(keys())) == (0, PAGES)
    assert one.objects.counts["written"] == PAGES


def main() -> None:
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            folder = Path(sys.argv[2]) / name
            folder.mkdir()
            check(str(folder))
            print(name, flush=True)


if __name__ == "__main__":
    main()
