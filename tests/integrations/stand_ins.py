"""Plain stand-ins for what plug-ins import of their engines, for tests without the engines.

They have the names, fields and calls of the tested versions, and nothing behind them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
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
}


_ENGINES = {"sglang": (_SGLANG, "0.5.23")}


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
