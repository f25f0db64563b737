"""How much host memory rows of a hot pool come from, and in which pages of the machine it is.

Rows of a served step lie all over the host tier. Whether that is what makes them slow shows where
the same step reads them from a few bytes: its pages then lie over each other, shifted by whole
entries. The answers mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kvtide.engine import Engine
from kvtide.layers.step import HotPool
from kvtide.tiers import host_arena

_ALIGNED = 16
_HUGE = ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:")


@contextmanager
def narrowed(engine: Engine, span_bytes: int) -> Iterator[None]:
    """Each layer of its hot pools has all host pages in about so many bytes of memory of its own.

    CUDA graphs must be captured meanwhile.
    """
    hot, on_gpu = engine._runner._hot, engine.cache.config.torch_device.type == "cuda"
    whole = hot.pools
    shifts = {p.name: math.lcm(p.entry.bytes, _ALIGNED) for p in engine.cache.memory.hot_pools}
    with ExitStack() as arenas:

        def block(size: int) -> Tensor:
            return arenas.enter_context(host_arena(size, on_gpu)).data

        hot.pools = {
            name: _over_each_other(pool, shifts[name], span_bytes, block)
            for name, pool in whole.items()
        }
        try:
            yield
        finally:
            if on_gpu:
                torch.cuda.synchronize()
            hot.pools = whole


def _over_each_other(
    hot: HotPool, shift: int, span_bytes: int, block: Callable[[int], Tensor]
) -> HotPool:
    """With pages that begin a multiple of `shift` bytes after one another."""
    narrow = {}
    for layer in hot.layers:
        wide = hot.host_rows(layer)
        slots, row_bytes = wide.shape
        stride = shift * max(1, (span_bytes - row_bytes) // slots // shift)
        data = block(stride * (slots - 1) + row_bytes)
        some = wide[: 1 + data.numel() // row_bytes].flatten()
        data.copy_(some[: data.numel()])
        narrow[layer] = data.as_strided((slots, row_bytes), (stride, 1))
    return replace(hot, host_rows=narrow.__getitem__)


def huge_fraction(data: Tensor, maps: Path = Path("/proc/self/smaps")) -> float | None:
    """The part of this memory that lies in huge pages; None where the kernel does not say."""
    first, last = data.data_ptr(), data.data_ptr() + data.numel()
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    huge, known, inside = 0, False, False
    for line in lines:
        name, *rest = line.split()
        if not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))
            inside = start < last and first < end
        elif inside and name in _HUGE:
            huge, known = huge + 1024 * int(rest[0]), True
    return min(1.0, huge / data.numel()) if known and data.numel() else None
