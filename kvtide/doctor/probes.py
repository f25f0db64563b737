"""What is measured on this machine: small, each within its time, with code that benchmarks use.

A probe that fails or takes too long is reported with the reason, and the others go on. One that
blocks keeps its thread, which does not outlive the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from kvtide.bench import transfer_speed
from kvtide.bench.codecs.codec_speed import StoreGain
from kvtide.bench.gpu import ceilings
from kvtide.bench.link import Link
from kvtide.bench.progress import quietly
from kvtide.bench.transfer_speed import TransferCase, TransferMeasurement
from kvtide.byte_sizes import format_bytes
from kvtide.doctor.judged_store import JudgedStore, codec_gain, store_rates
from kvtide.spec import DType, ModelMemory
from kvtide.tiers import Layout, host_arena
from kvtide.transfer.backends import CELLS
from kvtide.transfer.strided import Way

T = TypeVar("T")

CPU_BUDGET_S, GPU_BUDGET_S = 24.0, 120.0
"""All probes together. On a GPU contexts are made and kernels compiled."""
PROBE_S = {"cpu": 8.0, "cuda": 60.0}
CPU_BLOCK_BYTES, GPU_BLOCK_BYTES = 64 << 20, 1 << 30
CPU_GEMM, GPU_GEMM = 768, 8192
CASE_BYTES = 32 << 20
"""What a comparison of layouts copies."""


@dataclass(slots=True)
class Measured:
    """Rates in bytes or FLOPs per second, by name, and why others could not be measured.

    copy           CPU copies in host memory
    allocation     host memory mapped and touched, and pinned beside a GPU
    load, backup   plain copies over the link; both_ways: both at once, added up
    gpu_memory     a copy within the GPU's memory, read plus written
    gemm           of the dtype that a server computes in, on its device
    storage_write, storage_read  pages by the store that is judged
    codec          pages through it in fewer bytes, beside those as they are; None: not measured
    cells          pages of the model with each layout and backend
    seconds        that each probe took
    """

    rates: dict[str, float] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)
    codec: StoreGain | None = None
    cells: list[TransferMeasurement] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def measure_machine(
    device: torch.device,
    store: JudgedStore,
    memory: ModelMemory | None,
    budget_s: float | None = None,
) -> Measured:
    """Run every probe that this machine and model have."""
    if budget_s is None:
        budget_s = GPU_BUDGET_S if device.type == "cuda" else CPU_BUDGET_S
    found = Measured()
    session = _Session(found, budget_s, PROBE_S[device.type])
    session.probe(("copy",), _copies)
    session.probe(("allocation",), lambda: {"allocation": _allocation_bytes_s(device)})
    if device.type == "cuda":
        session.probe(("load", "backup", "both_ways"), lambda: _link(device))
        session.probe(
            ("gpu_memory",),
            lambda: {"gpu_memory": ceilings.memory_bytes_s(device, GPU_BLOCK_BYTES)},
        )
    else:
        why = "torch finds no GPU here"
        for name in ("load", "backup", "both_ways", "gpu_memory"):
            found.unmeasured[name] = why
    session.probe(("gemm",), lambda: {"gemm": _gemm_flops(device)})
    session.probe(("storage_write", "storage_read"), lambda: store_rates(store, memory))
    if memory is not None and "storage_read" in found.rates:
        dtype = DType.BF16 if device.type == "cuda" else DType.FP32
        found.codec = session.run(("codec",), lambda: codec_gain(store, memory, dtype))
    if memory is not None:
        found.cells.extend(session.run(("layouts",), lambda: _cells(device, memory)) or [])
    return found


class _Session:
    """Runs probes one after another within a budget of time."""

    def __init__(self, found: Measured, budget_s: float, probe_s: float) -> None:
        self._found = found
        self._deadline = time.monotonic() + budget_s
        self._probe_s = probe_s

    def probe(self, names: Sequence[str], function: Callable[[], dict[str, float]]) -> None:
        rates = self.run(names, function)
        self._found.rates.update(rates or {})

    def run(self, names: Sequence[str], function: Callable[[], T]) -> T | None:
        """What a probe finds; None, and the reason is noted, if it fails or takes too long."""
        began = time.monotonic()
        limit_s = min(self._probe_s, self._deadline - began)
        try:
            return bounded(function, limit_s)
        except Exception as error:  # Whatever a driver or a disk raises is the answer.
            self._found.unmeasured.update(dict.fromkeys(names, _sentence(error)))
            return None
        finally:
            self._found.seconds[names[0]] = time.monotonic() - began


def bounded(function: Callable[[], T], limit_s: float) -> T:
    """A function's result, or `TimeoutError`; it then goes on in a thread that ends with us."""
    if limit_s <= 0:
        raise TimeoutError("no time was left for it")
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="kvtide-probe", daemon=True).start()
    try:
        return future.result(limit_s)
    except TimeoutError:
        if future.done():
            raise
        raise TimeoutError(f"it took more than {limit_s:.0f} s") from None


def _sentence(error: Exception) -> str:
    return str(error) or type(error).__name__


# -- the probes -------------------------------------------------------------------------------


def _copies() -> dict[str, float]:
    link = Link(torch.device("cpu"), CPU_BLOCK_BYTES)
    try:
        return {"copy": max(link.limit_bytes_s(Way.LOAD) for _ in range(5))}
    finally:
        link.close()


def _link(device: torch.device) -> dict[str, float]:
    link = Link(device, GPU_BLOCK_BYTES)
    try:
        rates = {way.name.lower(): max(link.limit_bytes_s(way) for _ in range(3)) for way in Way}
        return {**rates, "both_ways": max(link.both_ways_bytes_s() for _ in range(3))}
    finally:
        link.close()


def _allocation_bytes_s(device: torch.device) -> float:
    on_gpu = device.type == "cuda"
    size = GPU_BLOCK_BYTES if on_gpu else CPU_BLOCK_BYTES
    if on_gpu:
        torch.empty(1, device=device)  # The context is not part of the allocation.
    start = time.perf_counter()
    with host_arena(size, pinned=on_gpu):
        return size / (time.perf_counter() - start)


def _gemm_flops(device: torch.device) -> float:
    if device.type == "cuda":
        return ceilings.gemm_flops(device, GPU_GEMM)
    return ceilings.gemm_flops(device, CPU_GEMM, torch.float32)


def _cells(device: torch.device, memory: ModelMemory) -> list[TransferMeasurement]:
    """Every layout and backend of this device, with the model's pages."""
    cases = [
        TransferCase(f"{layout.value}/{backend}", memory, _tokens(memory), layout, backend)
        for (kind, backend), layouts in CELLS.items()
        for layout in Layout
        if kind == device.type and layout in layouts
    ]
    link = Link(device, transfer_speed.block_bytes(cases))
    try:
        return transfer_speed.measure(cases, link, 3, quietly)
    finally:
        link.close()


def _tokens(memory: ModelMemory) -> int:
    """A prefix whose pages are about CASE_BYTES."""
    page_bytes = max(1, sum(memory.at_rest.slot_bytes(one.name) for one in memory.anchors))
    return memory.page_tokens * max(1, CASE_BYTES // page_bytes)


def shown(name: str, rate: float) -> str:
    """A rate as people read it."""
    return f"{rate / 1e12:,.2f} TFLOP/s" if name == "gemm" else f"{format_bytes(rate)}/s"
