"""Plain stand-ins for what plug-ins import of their engines, for tests without the engines.

They have the names, fields and calls of the tested versions, and nothing behind them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from math import prod
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtide.integrations import engine_versions

Bytes = npt.NDArray[np.uint8]

# -- SGLang -------------------------------------------------------------------------------------


class PoolName(StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"
    DRAFT = "draft"


@dataclass
class HiCacheStorageConfig:
    tp_rank: int = 0
    tp_size: int = 2
    pp_rank: int = 0
    pp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    model_name: str | None = "model"
    tp_lcm_size: int | None = None
    extra_config: dict[str, Any] | None = None
    dp_rank: int = 0
    dcp_size: int = 1
    dcp_rank: int = 0


@dataclass
class PoolTransfer:
    name: PoolName
    keys: list[str]
    host_indices: torch.Tensor


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]


class HiCacheStorage:
    def register_mem_pool_host(self, pool: Any) -> None:
        self.mem_pool_host = pool

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        self.registered_pools[host_pool_name] = host_pool


class HostPool:
    """Pages of one token and one run each."""

    page_size, layout, dtype = 1, "page_first_direct", "bf16"

    def __init__(self, pages: int = 8, page_bytes: int = 256, seed: int = 0) -> None:
        self.buffer: Bytes = np.random.default_rng(seed).integers(
            0, 256, (pages, page_bytes), np.uint8
        )

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]] | None:
        rows = [self.buffer[int(index)] for index in indices]
        return [row.ctypes.data for row in rows], [len(row) for row in rows]


class MLATokenToKVPoolHost(HostPool):
    """Latents, which are the same on every tensor rank."""


class AsymmetricMHATokenToKVPoolHost(HostPool):
    """Heads, which tensor ranks divide."""


class MambaPoolHost(HostPool):
    """States, which tensor ranks divide."""


class LogicalHostPool(HostPool):
    """The anchor of DeepSeek-V4's pools, without bytes."""

    size_per_token = 0

    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
        return None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int]
    backup_pgs: list[int]
    prefetch_bandwidth: list[float]
    backup_bandwidth: list[float]


_SGLANG: dict[str, dict[str, Any]] = {
    "sglang": {},
    "sglang.srt": {},
    "sglang.srt.mem_cache": {},
    "sglang.srt.mem_cache.hicache_storage": {
        one.__name__: one
        for one in (
            *(HiCacheStorage, HiCacheStorageConfig),
            *(PoolName, PoolTransfer, PoolTransferResult),
        )
    },
    "sglang.srt.observability": {},
    "sglang.srt.observability.metrics_collector": {"StorageMetrics": StorageMetrics},
}


# -- LMCache ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str = "model"
    kv_rank: int = 1 << 24
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class MemoryLayoutDesc:
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]


class MemoryObj:
    def __init__(self, layout: MemoryLayoutDesc, seed: int) -> None:
        size = sum(prod(s) * d.itemsize for s, d in zip(layout.shapes, layout.dtypes, strict=True))
        self.data: Bytes = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        self._layout = layout

    def get_shapes(self) -> list[torch.Size]:
        return self._layout.shapes

    def get_dtypes(self) -> list[torch.dtype]:
        return self._layout.dtypes

    @property
    def byte_array(self) -> memoryview:
        return self.data.data


class Bitmap(list[bool]):
    def __init__(self, size: int) -> None:
        super().__init__([False] * size)

    def set(self, index: int) -> None:
        self[index] = True


class L2StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int) -> L2StoreResult:
        return super().__new__(cls, bytes_transferred if success else -1)


class L2AdapterInterface:
    """Remembers what it is notified of, in place of LMCache's accounts and listeners."""

    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.max_capacity_bytes = max_capacity_bytes
        self.notified: list[tuple[str, list[ObjectKey]]] = []
        self.listener: Callable[[], None] = lambda: None

    def _notify_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.notified.append(("stored", keys))
        self.listener()

    def _notify_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.notified.append(("accessed", keys))
        self.listener()

    def _notify_keys_deleted(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.notified.append(("deleted", keys))


class EventNotifier:
    def __init__(self) -> None:
        self._file = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._file

    def notify(self) -> None:
        os.eventfd_write(self._file, 1)

    def close(self) -> None:
        os.close(self._file)


_LMCACHE: dict[str, dict[str, Any]] = {
    "lmcache": {},
    "lmcache.lmcache_native": {"Bitmap": Bitmap},
    "lmcache.v1": {},
    "lmcache.v1.distributed": {},
    "lmcache.v1.distributed.api": {"MemoryLayoutDesc": MemoryLayoutDesc, "ObjectKey": ObjectKey},
    "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
    "lmcache.v1.distributed.l2_adapters": {},
    "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
    "lmcache.v1.platform": {"create_event_notifier": EventNotifier},
}

_ENGINES = {"sglang": (_SGLANG, "0.5.23"), "lmcache": (_LMCACHE, "0.5.6")}


@contextmanager
def plug_in(engine: str) -> Iterator[Any]:
    """kvtide's module for that engine, imported over the stand-ins."""
    modules, version = _ENGINES[engine]
    name = f"kvtide.integrations.{engine}"
    assert name not in sys.modules and engine not in sys.modules
    checked = engine_versions.version
    for path, contents in modules.items():
        module = ModuleType(path)
        module.__dict__.update(contents)
        sys.modules[path] = module
    engine_versions.version = lambda package: version  # type: ignore[assignment]
    try:
        yield import_module(name)
    finally:
        engine_versions.version = checked
        for path in (*modules, name):
            sys.modules.pop(path, None)
