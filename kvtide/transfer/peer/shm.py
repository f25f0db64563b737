"""`shm`: both processes on one machine, the receiver's host arena in shared memory.

The sender maps the arena and copies rows into it: by the CPU, or from its GPU by the copy engine,
on a stream of its own. So the device→host copy is the whole handoff.

- The receiver's arena is a file in memory (`host_arena(shared=True)`), which the sender opens as
  /proc/PID/fd/FD: both processes need the same user and the same PID namespace.
- A write fails silently: copies are made by the sender itself, which knows when the last one ended.
  Only a GPU that does not finish a copy leaves a write that may land later.
- A frozen receiver is written to as any other. A frozen sender may write when it is continued, and
  nothing here can stop it: `revoke` gives None, and the receiver waits for the sender's word or its
  death (`ProcessWatch`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from kvtide.tiers.arena import REGISTER_PORTABLE_MAPPED, Cudart
from kvtide.transfer.peer.cpu_copies import copies
from kvtide.transfer.peer.device_copies import DeviceCopies
from kvtide.transfer.peer.process_watch import OtherMachineError, ProcessIdentity, ProcessWatch
from kvtide.transfer.peer.transport import (
    Column,
    Descriptor,
    Landed,
    PendingWrite,
    Region,
    TransportError,
    TransportSettings,
    TransportUnavailableError,
    WriteBatch,
)

_DONE = object()


class SharedMemory:
    """The transport. A sender may have links to many receivers."""

    name = "shm"

    def __init__(self, settings: TransportSettings) -> None:
        self._device = settings.device
        self._copies: DeviceCopies | None = None

    def expose(self, regions: Sequence[Region]) -> Descriptor:
        return {
            "transport": self.name,
            "process": ProcessIdentity.own().to_json(),
            "regions": [_described(region) for region in regions],
        }

    def revoke(self) -> Descriptor | None:
        return None

    def register(self, regions: Sequence[Region]) -> None:
        """All memory of the process can be copied from."""

    def connect(self, descriptor: Descriptor) -> SharedMemoryLink:
        if self._device is not None and self._device.type == "cuda" and self._copies is None:
            self._copies = DeviceCopies(self._device)
        return SharedMemoryLink(descriptor, self._copies)

    def close(self) -> None:
        """Links are closed by their owners, exposed memory by its arena."""


def _described(region: Region) -> Descriptor:
    if region.kind == "device":
        raise TransportUnavailableError(
            "transport shm: device destinations are not written to; use host destinations"
        )
    if region.shared is None:
        raise TransportUnavailableError(
            "transport shm: the host memory is not shared; make the arena with shared=True, or use "
            "another transport"
        )
    status = os.fstat(region.shared.fd)
    return {
        "bytes": region.bytes,
        "fd": region.shared.fd,
        "offset": region.shared.offset,
        "file": [status.st_dev, status.st_ino],
    }


class SharedMemoryLink:
    """`lock` is held while rows are copied, so that no thread unmaps memory under a copy."""

    poll_s = 50e-6

    def __init__(self, descriptor: Descriptor, device_copies: DeviceCopies | None) -> None:
        self._device_copies = device_copies
        self._files: list[MappedFile] = []
        self._stuck = False
        self.lock, self.closing = threading.Lock(), False
        try:
            process = ProcessIdentity.from_json(descriptor["process"])
            self._watch = ProcessWatch(process)
        except OtherMachineError as error:
            raise _no_way(f"{error}; or use another transport") from error
        except (KeyError, TypeError, ValueError) as error:
            raise _no_way(f"the descriptor is not one of shm ({error!r})") from error
        try:
            self._map(process.pid, descriptor)
        except BaseException:
            self.close()
            raise

    def _map(self, pid: int, descriptor: Descriptor) -> None:
        bases, sizes = [], []
        try:
            for region in descriptor["regions"]:
                start, count = int(region["offset"]), int(region["bytes"])
                file = self._file(pid, int(region["fd"]), tuple(region["file"]))
                if start < 0 or count < 0 or start + count > file.bytes:
                    raise _no_way(f"the file has {file.bytes:,} B, less than its region")
                bases.append(file.address + start)
                sizes.append(count)
        except (KeyError, TypeError, ValueError) as error:
            raise _no_way(f"the descriptor is not one of shm ({error!r})") from error
        self._bases, self._sizes = np.array(bases, np.int64), sizes

    def _file(self, pid: int, fd: int, identity: tuple[object, ...]) -> MappedFile:
        """Regions of one file share its mapping."""
        known = next((file for file in self._files if file.identity == identity), None)
        if known is None:
            known = MappedFile.open(pid, fd, identity)
            self._files.append(known)
            if self._device_copies is not None:
                known.pin()
        return known

    def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
        batch.check(self._sizes)
        if not self.alive():
            why = "the link is closed" if self.closing else "the receiver's process is gone"
            raise TransportError(f"shm: {why}", silent=True)
        target = self._bases[batch.region] + batch.target
        if batch.source_kind == "device":
            if self._device_copies is None:
                raise TransportError(
                    "shm: the sources are on a GPU, and the transport was opened without one",
                    silent=True,
                )
            return self._device_copies.begin(batch.source, target, batch.bytes, timeout_s, self)
        with self.lock:
            self._copy(batch, target, timeout_s)
        return Landed()

    def _copy(self, batch: WriteBatch, target: Column, timeout_s: float) -> None:
        deadline, rows = time.monotonic() + timeout_s, copies(batch.source, target, batch.bytes)
        while not self.closing:
            if next(rows, _DONE) is _DONE:
                return
            if time.monotonic() > deadline:
                raise TransportError(f"shm: not written within {timeout_s:g} s", silent=True)
        raise TransportError("shm: the link is closed", silent=True)

    def alive(self) -> bool:
        return not self._stuck and not self.closing and self._watch.alive()

    def stuck(self) -> None:
        """A copy of the GPU did not end: it may still write, so the mapping stays for ever."""
        self._stuck = True

    def close(self) -> None:
        self.closing = True
        with self.lock:
            if self._files and self._device_copies is not None and not self._device_copies.drain():
                self._stuck = True
            while self._files and not self._stuck:
                self._files.pop().close()
            self._watch.close()


@dataclass(slots=True)
class MappedFile:
    """A file of another process, mapped whole."""

    identity: tuple[object, ...]
    mapping: mmap.mmap
    address: int
    bytes: int
    cudart: Cudart | None = None

    @classmethod
    def open(cls, pid: int, fd: int, identity: tuple[object, ...]) -> MappedFile:
        path = f"/proc/{pid}/fd/{fd}"
        try:
            own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _no_way(
                f"cannot open {path} ({error.strerror}); run both processes as the same user, with "
                "permission to trace each other, or use another transport"
            ) from error
        try:
            status = os.fstat(own)
            if (status.st_dev, status.st_ino) != identity:
                raise _no_way(f"{path} is not the receiver's memory any more")
            mapping = mmap.mmap(own, status.st_size, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise _no_way(f"cannot map {path} ({error.strerror})") from error
        finally:
            os.close(own)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        return cls(identity, mapping, address, status.st_size)

    def pin(self) -> None:
        cudart: Cudart = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(self.address, self.bytes, REGISTER_PORTABLE_MAPPED))
        if code:
            raise _no_way(f"CUDA does not pin {self.bytes:,} B of the receiver's (error {code})")
        self.cudart = cudart

    def close(self) -> None:
        if self.cudart is not None:
            self.cudart.cudaHostUnregister(self.address)
        with suppress(BufferError):
            self.mapping.close()


def _no_way(why: str) -> TransportError:
    return TransportError(f"shm: {why}", silent=True)
