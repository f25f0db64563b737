"""The link between device and host: plain copies over it, and a GEMM beside them."""

from __future__ import annotations

import time

import torch

from kvtide.tiers import device_arena, host_arena
from kvtide.transfer.strided import Way

LIMIT_BYTES = 2 << 30
_GEMMS = 10


class Link:
    """A block of memory on either side, and plain copies between them."""

    def __init__(self, device: torch.device, block_bytes: int) -> None:
        self.device = device
        self._arenas = (
            device_arena(block_bytes, device),
            host_arena(block_bytes, pinned=device.type == "cuda"),
        )
        self.device_block, self.host_block = (arena.data for arena in self._arenas)
        self.limit_bytes = min(LIMIT_BYTES, block_bytes)
        self._on_gpu = device.type == "cuda"
        self._streams = {way: torch.cuda.Stream(device) for way in Way} if self._on_gpu else {}
        for way in Way:
            self.limit_bytes_s(way)  # The first copies of a process are slow.

    def close(self) -> None:
        del self.device_block, self.host_block
        for arena in self._arenas:
            arena.close()

    def synchronize(self) -> None:
        """Wait for all work queued on the device."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)

    def finish(self) -> None:
        """Wait for the calling thread's stream, and for the work that it waits for."""
        if self._on_gpu:
            torch.cuda.current_stream(self.device).synchronize()

    def time(self, way: Way, size: int) -> float:
        """Seconds for one plain copy of so many bytes."""
        self.synchronize()
        start = time.perf_counter()
        self._copy(way, size)
        self.synchronize()
        return time.perf_counter() - start

    def limit_bytes_s(self, way: Way) -> float:
        return self.limit_bytes / self.time(way, self.limit_bytes)

    def both_ways_bytes_s(self) -> float:
        """Plain copies in both directions at once, over different halves of the blocks."""
        size = self.limit_bytes // 2
        self.synchronize()
        start = time.perf_counter()
        for _ in range(2):
            for number, way in enumerate(Way):
                self._copy(way, size, number * size)
        self.synchronize()
        return 4 * size / (time.perf_counter() - start)

    def gemm(self) -> Gemm:
        return Gemm(self.device)

    def _copy(self, way: Way, size: int, offset: int = 0) -> None:
        device = self.device_block[offset : offset + size]
        host = self.host_block[offset : offset + size]
        target, source = (device, host) if way is Way.LOAD else (host, device)
        if not self._on_gpu:
            target.copy_(source)
            return
        with torch.cuda.stream(self._streams[way]):
            target.copy_(source, non_blocking=True)


class Gemm:
    """A GEMM of 8192³ in bf16 on random data, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._a, self._b = (
            torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        self._out = torch.empty_like(self._a)
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def time(self) -> float:
        """Seconds per GEMM, by CUDA events."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            start.record()
            for _ in range(_GEMMS):
                torch.mm(self._a, self._b, out=self._out)
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / _GEMMS
