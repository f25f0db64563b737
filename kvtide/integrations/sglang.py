"""kvtide's stores behind SGLang's HiCache: `--hicache-storage-backend dynamic`.

    --hicache-storage-backend-extra-config '{"backend_name": "kvtide",
      "module_path": "kvtide.integrations.sglang", "class_name": "KvtideStorage",
      "interface_v1": 1, "url": "file:///var/cache/kvtide?cap=200GB"}'

A page of a pool is one object (`page_objects`). SGLang's page hashes are chained over the tokens
from the first on, so that they are keys already. A prefix of b pages can be restored if the KV pool
has all of them and every other pool what its hit policy asks for before b; `batch_exists_v2`
reports every such b, and the longest as the hit.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtide.integrations.engine_versions import require_version

TESTED = ("0.5.18", "0.5.23")
require_version("sglang", ["sglang"], TESTED)

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvtide.integrations.engine_settings import (  # noqa: E402
    refuse_unknown,
    require_store,
    weights_of,
)
from kvtide.integrations.page_objects import (  # noqa: E402
    MemoryRuns,
    PageObjects,
    PagePool,
    leading,
    space_of,
)
from kvtide.storage import StoreError  # noqa: E402

_SGLANGS = {
    *("backend_name", "module_path", "class_name", "interface_v1"),
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
    *("prefetch_timeout_max", "hicache_storage_pass_prefix_keys", "tp_lcm_size"),
}
"""What the extra config may say beside kvtide's settings."""
_WHERE = "the extra config"
_NOT_THE_SLICE = {"extra_config", "enable_storage_metrics", "model_name", "dp_rank"}
_OF_TENSOR_RANKS = {"tp_rank", "tp_size", "tp_lcm_size"}
"""Not part of the space of an MLA model, whose latents are the same on every tensor rank."""
_REPLICATED = {
    *("MLATokenToKVPoolHost", "DSAIndexerPoolHost", "LogicalHostPool"),
    *("DeepSeekV4PagedHostPool", "DeepSeekV4StateHostPool"),
}
"""Classes of pools, beside the KV pool itself, that an MLA model has alike on all tensor ranks. It
may have others (Mamba states, heads of a draft) of which each rank has a part."""

GIGABYTE = 1 << 30
"""As SGLang's own backends report rates."""

log = logging.getLogger("kvtide")
MovePages = Callable[[PagePool, Sequence[bytes], Sequence[MemoryRuns]], list[bool]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Moved:
    """A call that moved pages: how many, and its rate."""

    pages: int
    gigabytes_s: float


class KvtideStorage(HiCacheStorage):  # type: ignore[misc]
    """One rank's pages. SGLang calls it from its prefetch and its backup thread."""

    def __init__(self, config: HiCacheStorageConfig, options: Mapping[str, Any] | None = None):
        extra = dict(config.extra_config or {})
        url = require_store(extra, _WHERE)
        refuse_unknown(extra, _WHERE, _SGLANGS)
        if not extra.get("interface_v1"):
            raise StoreError(
                'the extra config lacks "interface_v1": 1, without which SGLang copies pages'
            )
        left_out = _NOT_THE_SLICE | (_OF_TENSOR_RANKS if config.is_mla_model else set())
        if getattr(config, "dcp_size", 1) > 1:
            left_out -= {"tp_size"}  # As SGLang's own file backend does it.
        names = {one.name for one in dataclasses.fields(config)} - left_out
        part = {name: getattr(config, name) for name in names}
        weights = weights_of(extra, _WHERE, config.model_name or "")
        space = space_of("sglang", f"{config.model_name} {weights}", part)
        self.objects = PageObjects("sglang", url, space)
        self.registered_pools: dict[str, Any] = {}
        self._is_mla, self._tensor_rank = config.is_mla_model, [config.tp_rank, config.tp_size]
        self._pools: dict[str, PagePool] = {}
        self._reports = config.enable_storage_metrics
        self._fetched: queue.SimpleQueue[_Moved] = queue.SimpleQueue()
        self._stored: queue.SimpleQueue[_Moved] = queue.SimpleQueue()

    def register_mem_pool_host(self, pool: Any) -> None:
        super().register_mem_pool_host(pool)
        self.registered_pools.setdefault(PoolName.KV, pool)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools.pop(host_pool_name, None)  # Pages of another pool may have another format.

    # -- one pool, as the attention layers have it ------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return leading(self._exists(PoolName.KV, keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._set(PoolName.KV, keys, host_indices)

    # -- several pools, as hybrids have them ------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        run = self.batch_exists(keys)
        hits: dict[str, int] = {PoolName.KV: run} if run else {}
        boundaries = set(range(1, run + 1))
        for transfer in (pool_transfers or []) if run else []:
            reach = _reach(transfer)
            if reach is None:
                continue
            valid = _boundaries(self._exists(transfer.name, keys[:run]), reach)
            if valid:
                hits[transfer.name] = max(valid)
            boundaries &= valid
        found = sorted(boundaries)
        more = {"restorable_prefix_pages": found} if _REPORTS_BOUNDARIES else {}
        return PoolTransferResult(found[-1] if found else 0, hits, **more)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        return {
            one.name: self._get(one.name, one.keys or [], one.host_indices) for one in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        return {
            one.name: self._set(one.name, one.keys or [], one.host_indices) for one in transfers
        }

    # -- the rest of the interface ----------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self._exists(PoolName.KV, [key])[0]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError('pages go by batch_get_v1; set "interface_v1": 1')

    def batch_get(self, keys: list[str], target_locations: Any = None, sizes: Any = None) -> Any:
        return self.get("")

    def set(self, key: str, value: Any = None, location: Any = None, sizes: Any = None) -> bool:
        raise NotImplementedError('pages go by batch_set_v1; set "interface_v1": 1')

    def batch_set(
        self, keys: list[str], values: Any = None, locations: Any = None, sizes: Any = None
    ) -> bool:
        return self.set("")

    def get_stats(self) -> Any:
        """What moved since the last call, as SGLang's collector of metrics takes it; None unless
        the server was started with metrics."""
        if not self._reports:
            return None
        # Its module imports all of SGLang's server, which is running where this is called.
        from sglang.srt.observability.metrics_collector import StorageMetrics

        fetched, stored = _taken(self._fetched), _taken(self._stored)
        return StorageMetrics(
            prefetch_pgs=[one.pages for one in fetched],
            backup_pgs=[one.pages for one in stored],
            prefetch_bandwidth=[one.gigabytes_s for one in fetched],
            backup_bandwidth=[one.gigabytes_s for one in stored],
        )

    def clear(self) -> None:
        self.objects.clear()

    def close(self) -> None:
        self.objects.close()

    # -- the steps --------------------------------------------------------------------------

    def _exists(self, name: str, keys: Sequence[str]) -> list[bool]:
        return self.objects.exists(self._pool(name), _names(keys))

    def _get(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        return self._move(self.objects.read, self._fetched, name, keys, indices)

    def _set(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        return self._move(self.objects.write, self._stored, name, keys, indices)

    def _move(
        self,
        transfer: MovePages,
        moved: queue.SimpleQueue[_Moved],
        name: str,
        keys: Sequence[str],
        indices: torch.Tensor | None,
    ) -> list[bool]:
        memory = self._memory(name, keys, indices)
        if memory is None:
            return [False] * len(keys)
        pool, began = self._pool(name), time.perf_counter()
        done = transfer(pool, _names(keys), memory)
        if self._reports and (pages := sum(done)):
            size, took = pages * pool.format.payload_bytes, time.perf_counter() - began
            moved.put(_Moved(pages, size / GIGABYTE / took))
        return done

    def _pool(self, name: str) -> PagePool:
        """The format of a pool's pages, from its first page in host memory."""
        known = self._pools.get(name)
        if known is None:
            host = self.registered_pools[name]
            first = _page_runs(host, torch.arange(_page_tokens(host)), 1)[0]
            kinds = {kind.__name__ for kind in type(host).__mro__}
            replicated = self._is_mla and (name == PoolName.KV or bool(kinds & _REPLICATED))
            described = {
                "dtype": str(getattr(host, "dtype", "")),
                "page_tokens": _page_tokens(host),
                "layout": str(getattr(host, "layout", "")),
                "runs": [len(run) for run in first],
                "tensor_rank": None if replicated else self._tensor_rank,
            }
            size = sum(map(len, first))
            known = self._pools[name] = self.objects.pool(str(name), size, described)
        return known

    def _memory(
        self, name: str, keys: Sequence[str], indices: torch.Tensor | None
    ) -> list[MemoryRuns] | None:
        host = self.registered_pools[name]
        expected = len(keys) * _page_tokens(host)
        if indices is None or indices.numel() != expected:
            found = 0 if indices is None else indices.numel()
            log.error(
                "pool %s: %d indices for %d keys; expected %d", name, found, len(keys), expected
            )
            return None
        return _page_runs(host, indices, len(keys)) if keys else []


_REPORTS_BOUNDARIES = "restorable_prefix_pages" in {
    one.name for one in dataclasses.fields(PoolTransferResult)
}


def _reach(transfer: PoolTransfer) -> int | None:
    """How many pages before a boundary the pool has to have; None: it does not decide."""
    match str(transfer.hit_policy.value):
        case "all_pages":
            return 1 << 62
        case "trailing_pages":
            return max(1, len(transfer.keys or []))
        case "block_groups":
            return None  # A second form of the KV pages: SGLang does without it.
    raise ValueError(f"pool {transfer.name}: no such hit policy {transfer.hit_policy}")


def _boundaries(there: Sequence[bool], reach: int) -> set[int]:
    """The rule of kvtide's index: the run that ends at a valid b is at least min(reach, b)."""
    valid: set[int] = set()
    run = 0
    for b, found in enumerate(there, 1):
        run = run + 1 if found else 0
        if run >= min(reach, b):
            valid.add(b)
    return valid


def _taken(moved: queue.SimpleQueue[_Moved]) -> list[_Moved]:
    return [moved.get() for _ in range(moved.qsize())]


def _names(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _page_tokens(host: Any) -> int:
    return int(getattr(host, "page_size", 1) or 1)


def _page_runs(host: Any, indices: torch.Tensor, pages: int) -> list[MemoryRuns]:
    """The memory of every page, as runs of bytes: none, if an anchor has no bytes of its own."""
    meta = host.get_page_buffer_meta(indices)
    if meta is None and getattr(host, "size_per_token", None) == 0:
        return [()] * pages
    if meta is None or not meta[0] or len(meta[0]) % pages:
        raise StoreError(
            f"{type(host).__name__} does not name the memory of its pages; start SGLang with "
            "--hicache-mem-layout page_first_direct"
        )
    runs = [
        memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        for address, size in zip(*meta, strict=True)
    ]
    count = len(runs) // pages
    return [runs[at : at + count] for at in range(0, len(runs), count)]
