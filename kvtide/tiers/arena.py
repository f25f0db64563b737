"""Memory that a tier's pages lie in: one run of bytes per tier, taken whole at the start.

An arena owns its run; buffers and transfers hold views of it. `Hardware` closes the arena after the
last transfer through it has landed.

What always holds: an arena that was handed out is all there. A size the machine cannot give is
refused before a byte is taken, every page of a mapped arena was touched, and pinned means that
CUDA took all of it. So first use never faults and a step never runs out of memory half-way.
Closing never pulls memory from under a view: the bytes go with the last view of them.

A host arena can be *shared*: a file in memory that another process maps and writes to.

Linux only: what the machine has is read from /proc and from the control groups of version 2.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

HUGE_PAGE_BYTES = 2 << 20
TOUCH_BYTES = 32 * HUGE_PAGE_BYTES
"""What one thread touches at a time: whole huge pages, enough of them to make a call worth it."""
TOUCH_THREADS = 16
FREE_FRACTION = 0.05
"""The part of a machine's or device's memory that no arena takes: others live there too."""
REGISTER_PORTABLE_MAPPED = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped: every device may copy and read in place."""


class TierError(ValueError):
    """A tier that cannot be had. The message names the remedy."""


class Cudart(Protocol):
    """The two calls of the CUDA runtime that pin memory; 0 is success."""

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int: ...  # noqa: N802

    def cudaHostUnregister(self, ptr: int) -> int: ...  # noqa: N802


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What a machine or a device has, and what of it is to be had now."""

    total_bytes: int
    available_bytes: int

    @property
    def max_bytes(self) -> int:
        """The largest arena that leaves FREE_FRACTION alone; 0 or less when there is no room."""
        return self.available_bytes - int(self.total_bytes * FREE_FRACTION)

    def portion(self, fraction: float) -> int:
        """So much of what is to be had, but not more than an arena may take."""
        return min(int(fraction * self.available_bytes), self.max_bytes)

    def within(self, limit: MachineMemory) -> MachineMemory:
        """This memory where a limit binds as well: the smaller of each counts."""
        return MachineMemory(
            min(self.total_bytes, limit.total_bytes),
            min(self.available_bytes, limit.available_bytes),
        )


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Where shared memory lies: a file descriptor of this process, and an offset in the file.

    Another process opens it as /proc/PID/fd/FD, while the arena is open.
    """

    fd: int
    offset: int


class Arena:
    """Owner of one run of bytes: open, then closed for good.

    pinned      CUDA copies to and from it without a detour.
    huge_pages  the kernel accepted the advice to use huge pages.
    shared      the file that the bytes lie in, if other processes may map them.
    """

    def __init__(
        self,
        data: torch.Tensor,
        *,
        pinned: bool = False,
        huge_pages: bool = False,
        shared: SharedFile | None = None,
        unpin: Callable[[], None] | None = None,
    ) -> None:
        self.bytes = data.numel()
        self.pinned = pinned
        self.huge_pages = huge_pages
        self.shared = shared
        self._data: torch.Tensor | None = data
        # A finalizer runs once: at close, else when the arena is collected or the process ends,
        # and in each case before the memory is unmapped.
        self._unpin = weakref.finalize(self, unpin) if unpin else None
        self._close_file = weakref.finalize(self, os.close, shared.fd) if shared else None

    @property
    def data(self) -> torch.Tensor:
        """All bytes, as one uint8 tensor."""
        assert self._data is not None, "the arena is closed"
        return self._data

    @property
    def closed(self) -> bool:
        return self._data is None

    def close(self) -> None:
        """Unpin and let go of the bytes; closing again does nothing.

        The mapping belongs to the tensor: unmapping it here would turn a remaining view into a
        crash.
        """
        for undo in (self._unpin, self._close_file):
            if undo is not None:
                undo()
        self.shared = None
        self._data = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# -- making one -----------------------------------------------------------------------------


def host_arena(
    total_bytes: int,
    pinned: bool,
    *,
    shared: bool = False,
    machine: MachineMemory | None = None,
    cudart: Cudart | None = None,
) -> Arena:
    """Host memory, touched before use; keep the arena as long as its data is used.

    `shared`: other processes may map it. `machine` and `cudart` are the real ones unless given.
    """
    runtime = (cudart or _loaded_cudart()) if pinned else None
    _refuse_beyond("host", total_bytes, "the machine", machine or machine_memory())
    file: SharedFile | None = None
    if shared and total_bytes:
        data, huge_pages, file = _mapped_file(total_bytes)
    else:
        data, huge_pages = _mapped("host", total_bytes)
    try:
        unpin = _pin(data, runtime) if runtime is not None and total_bytes else None
    except TierError:
        if file is not None:
            os.close(file.fd)
        raise
    return Arena(data, pinned=pinned, huge_pages=huge_pages, shared=file, unpin=unpin)


def device_arena(
    total_bytes: int, device: torch.device, *, machine: MachineMemory | None = None
) -> Arena:
    """Memory of a device. `machine` stands for what it has, in place of asking it.

    On a CPU the device tier is host memory too, and touched like it: else a host arena made
    later would count its pages as free.
    """
    if device.type == "cpu":
        _refuse_beyond("device", total_bytes, "the machine", machine or machine_memory())
        data, huge_pages = _mapped("device", total_bytes)
        return Arena(data, huge_pages=huge_pages)
    memory = machine or device_memory(device)
    _refuse_beyond("device", total_bytes, str(device), memory)
    try:
        return Arena(torch.empty(total_bytes, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError as error:
        raise TierError(
            f"device memory: {_rounded_up(total_bytes)} wanted, and {device} had no such run left "
            f"of {_rounded_down(memory.available_bytes)}; use a smaller device size"
        ) from error


def _mapped(tier: str, total_bytes: int) -> tuple[torch.Tensor, bool]:
    """Private memory on a huge-page border, all of it touched; whether huge pages were granted."""
    if not total_bytes:
        return torch.empty(0, dtype=torch.uint8), False
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapping = mmap.mmap(-1, total_bytes + HUGE_PAGE_BYTES, flags=flags)
    except OSError as error:
        raise _not_mapped(tier, total_bytes, error) from error
    data, huge_pages, _ = _on_a_border(mapping, total_bytes)
    return data, huge_pages


def _mapped_file(total_bytes: int) -> tuple[torch.Tensor, bool, SharedFile]:
    """The same in a file without a name: of reserved huge pages, if there are enough of them."""
    whole_pages = -(-total_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        fd, mapping = _new_file(whole_pages, os.MFD_HUGETLB)
        reserved = True
    except OSError:
        try:
            fd, mapping = _new_file(total_bytes + HUGE_PAGE_BYTES)
            reserved = False
        except OSError as error:
            raise _not_mapped("host", total_bytes, error) from error
    data, advised, border = _on_a_border(mapping, total_bytes)
    huge_pages = reserved or (advised and _files_take_advice())
    return data, huge_pages, SharedFile(fd, border)


def _new_file(length: int, flags: int = 0) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("kvtide-host", os.MFD_CLOEXEC | flags)
    try:
        os.ftruncate(fd, length)
        return fd, mmap.mmap(fd, length, flags=mmap.MAP_SHARED)
    except OSError:
        os.close(fd)
        raise


def _files_take_advice(root: Path = Path("/")) -> bool:
    """Whether files in memory get huge pages: the kernel takes the advice in any case."""
    switch = root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return switch.exists() and any(f"[{one}]" in switch.read_text() for one in _GRANTED)


_GRANTED = ("always", "within_size", "advise", "force")


def _on_a_border(mapping: mmap.mmap, total_bytes: int) -> tuple[torch.Tensor, bool, int]:
    """The touched part of a mapping from its first huge-page border on, and where that is."""
    border = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE, border, total_bytes)
        huge_pages = True
    except OSError:
        huge_pages = False
    data = torch.frombuffer(mapping, dtype=torch.uint8, count=total_bytes, offset=border)
    _touch(data)
    return data, huge_pages, border


def _not_mapped(tier: str, total_bytes: int, error: OSError) -> TierError:
    return TierError(
        f"{tier} memory: {_rounded_up(total_bytes)} wanted, and the kernel did not map them "
        f"({error.strerror}); use a smaller {tier} size, or raise the limit on virtual memory"
    )


def _touch(data: torch.Tensor) -> None:
    """Write every byte. ctypes lets go of the GIL, so threads share the page faults."""
    starts = range(0, data.numel(), TOUCH_BYTES)

    def touch(start: int) -> None:
        ctypes.memset(data.data_ptr() + start, 0, min(TOUCH_BYTES, data.numel() - start))

    threads = min(TOUCH_THREADS, len(os.sched_getaffinity(0)), len(starts))
    with ThreadPoolExecutor(threads, thread_name_prefix="kvtide-touch") as pool:
        list(pool.map(touch, starts))


# -- pinning --------------------------------------------------------------------------------


def _loaded_cudart() -> Cudart:
    if not torch.cuda.is_available():
        raise TierError(
            f"host memory: pinned memory wanted, but torch {torch.__version__} sees no CUDA "
            "device; use unpinned host memory, or a torch built for CUDA on a machine with a GPU"
        )
    runtime: Cudart = torch.cuda.cudart()
    return runtime


def _pin(data: torch.Tensor, cudart: Cudart) -> Callable[[], None]:
    """Pin the pages; what undoes it. That must not keep the tensor alive."""
    code = int(cudart.cudaHostRegister(data.data_ptr(), data.numel(), REGISTER_PORTABLE_MAPPED))
    if code:
        raise TierError(
            f"host memory: {_rounded_up(data.numel())} wanted pinned, and CUDA refused with error "
            f"{code}; use a smaller host size, or unpinned host memory"
        )
    return partial(_unpin, cudart, data.data_ptr())


def _unpin(cudart: Cudart, address: int) -> None:
    # Only a context that is broken already refuses this, and whatever broke it is the error
    # that has to surface, not this one.
    cudart.cudaHostUnregister(address)


# -- what there is --------------------------------------------------------------------------


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """What this process may use: the machine's memory within all its control groups' limits."""
    rows = _rows(root / "proc/meminfo")
    memory = MachineMemory(rows["MemTotal:"] * 1024, rows["MemAvailable:"] * 1024)
    for group in _control_groups(root):
        limit = _group_limit(group)
        memory = memory if limit is None else memory.within(limit)
    return memory


def device_memory(device: torch.device) -> MachineMemory:
    if not torch.cuda.is_available():
        raise TierError(
            f"device memory: {device} wanted, but torch {torch.__version__} sees no CUDA device; "
            "use the cpu, or a torch built for CUDA on a machine with a GPU"
        )
    # What torch keeps for later allocations would otherwise count as taken.
    torch.cuda.empty_cache()
    available_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return MachineMemory(total_bytes, available_bytes)


def _control_groups(root: Path) -> Iterator[Path]:
    """The process's own control group and the ones around it; each may set a limit."""
    mount = root / "sys/fs/cgroup"
    listing = root / "proc/self/cgroup"
    lines = listing.read_text().splitlines() if listing.exists() else []
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    group = mount / own.strip("/")
    while group != mount:
        yield group
        group = group.parent
    yield mount


def _group_limit(group: Path) -> MachineMemory | None:
    """A group's limit and what is left of it; None where it sets none.

    Cached files count as used but are given up for an arena, so they count as available. A
    container that has just read its weights would look full otherwise.
    """
    try:
        limit = (group / "memory.max").read_text().strip()
        used_bytes = int((group / "memory.current").read_text())
    except OSError:
        return None
    if limit == "max":
        return None
    stat = group / "memory.stat"
    cached_bytes = _rows(stat).get("inactive_file", 0) if stat.exists() else 0
    return MachineMemory(int(limit), max(0, int(limit) - used_bytes + cached_bytes))


def _rows(path: Path) -> dict[str, int]:
    """A file of the kernel's with a name and a number on each line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


# -- refusing -------------------------------------------------------------------------------


def _refuse_beyond(tier: str, wanted_bytes: int, owner: str, memory: MachineMemory) -> None:
    """Raise unless the memory holds so many bytes and leaves FREE_FRACTION alone."""
    assert wanted_bytes >= 0, f"a {tier} arena of {wanted_bytes} bytes"
    if wanted_bytes <= max(0, memory.max_bytes):
        return
    if memory.max_bytes > 0:
        remedy = f"use a {tier} size of at most {_rounded_down(memory.max_bytes)}"
    else:
        remedy = f"free memory there first: {FREE_FRACTION:.0%} of it stay free, and less is"
    raise TierError(
        f"{tier} memory: {_rounded_up(wanted_bytes)} wanted, {owner} has "
        f"{_rounded_down(memory.total_bytes)} of which {_rounded_down(memory.available_bytes)} are "
        f"available; {remedy}"
    )


# What is wanted is rounded up and what there is rounded down, so that a size copied from a
# remedy fits and a refusal never reads as if it did.


def _rounded_up(count: int) -> str:
    unit, name = _unit(count)
    return f"{-(-count * 10 // unit) / 10:.1f} {name}" if unit > 1 else f"{count} bytes"


def _rounded_down(count: int) -> str:
    unit, name = _unit(count)
    return f"{count * 10 // unit / 10:.1f} {name}" if unit > 1 else f"{count} bytes"


def _unit(count: int) -> tuple[int, str]:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if count >= unit:
            return unit, name
    return 1, "bytes"
