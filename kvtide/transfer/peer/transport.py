"""What a transport is: one process writes rows into memory that another process exposes.

The *receiver* owns memory and exposes it: `expose` gives a descriptor, plain JSON, which travels to
the *sender* over a channel. The sender opens a `PeerLink` with it and writes batches of rows. The
receiver's CPU and GPU take no part, and no message announces the bytes: the sender says over the
channel what has landed.

What always holds:

- A write that ended without an error has landed: the receiver reads the bytes from then on.
- A write that failed says whether it is `silent`. Silent: no byte of it lands from now on. Not
  silent: bytes may land at any later moment, so its target is reused only after `revoke`, or after
  the death of the sender where the transport writes by itself (`shm`).
- A write ends within its time-out, also when the receiver is frozen.
- Nothing outside the exposed regions is ever written: a batch that would is refused as a whole.
- After `revoke` has returned, no byte of a write through an earlier descriptor lands, whether its
  sender heard of an end or is still frozen in the middle of it.

A receiver with several peers opens one transport for each of them, so that a revocation concerns
one peer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtide.tiers.arena import Arena, SharedFile

PROTOCOLS = ("tcp", "rdma")
"""Of Mooncake's engine."""
HostOrDevice = Literal["host", "device"]
Column = npt.NDArray[np.int64]
Descriptor = dict[str, Any]
"""Exposed memory as JSON: `transport` names the transport, the rest is its own."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3


class TransportError(RuntimeError):
    """A write or a connection that failed. `silent`: no byte lands after this."""

    def __init__(self, message: str, *, silent: bool) -> None:
        super().__init__(message)
        self.silent = silent


class TransportUnavailableError(ValueError):
    """A transport that this machine does not have. The message names the remedy."""


@dataclass(frozen=True, slots=True)
class Region:
    """A run of this process's memory. `shared`: where it lies in a file that others can map."""

    address: int
    bytes: int
    kind: HostOrDevice = "host"
    shared: SharedFile | None = None

    @classmethod
    def of(cls, arena: Arena) -> Region:
        """All of an arena."""
        kind: HostOrDevice = "host" if arena.data.device.type == "cpu" else "device"
        return cls(arena.data.data_ptr(), arena.bytes, kind, arena.shared)


@dataclass(frozen=True, slots=True, eq=False)
class WriteBatch:
    """Rows to write: `bytes[i]` from `source[i]` to offset `target[i]` of region `region[i]`.

    source       addresses in the sender's memory
    region       numbers of the receiver's regions, in the order in which they were exposed
    target       offsets in these regions
    source_kind  where all the sources are
    """

    source: Column
    region: Column
    target: Column
    bytes: Column
    source_kind: HostOrDevice = "host"

    def __post_init__(self) -> None:
        assert len(self.source) == len(self.region) == len(self.target) == len(self.bytes)

    @classmethod
    def of(
        cls,
        source: npt.ArrayLike,
        target: npt.ArrayLike,
        sizes: npt.ArrayLike,
        region: npt.ArrayLike = 0,
        source_kind: HostOrDevice = "host",
    ) -> WriteBatch:
        """From arrays or lists; a single number counts for all rows."""
        given = (
            np.atleast_1d(np.asarray(one, np.int64)) for one in (source, region, target, sizes)
        )
        a, b, c, d = (np.ascontiguousarray(column) for column in np.broadcast_arrays(*given))
        return cls(a, b, c, d, source_kind)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def total_bytes(self) -> int:
        return int(self.bytes.sum())

    def part(self, first: int, last: int) -> WriteBatch:
        """The rows from `first` up to `last`."""
        rows = slice(first, last)
        columns = (self.source[rows], self.region[rows], self.target[rows], self.bytes[rows])
        return WriteBatch(*columns, self.source_kind)

    def parts(self, max_bytes: int) -> list[WriteBatch]:
        """The batch in parts of at most so many bytes; a larger row is cut."""
        whole = self._cut(max_bytes)
        if not len(whole):
            return []
        ends = np.cumsum(whole.bytes)
        bounds, done = [0], 0
        while bounds[-1] < len(whole):
            last = int(np.searchsorted(ends, done + max_bytes, "right"))
            bounds.append(last)
            done = int(ends[last - 1])
        return [whole.part(*pair) for pair in pairwise(bounds)]

    def _cut(self, max_bytes: int) -> WriteBatch:
        pieces = -(-self.bytes // max_bytes)
        if not (pieces > 1).any():
            return self if pieces.all() else self.picked(np.flatnonzero(pieces))
        row = np.repeat(np.arange(len(self)), pieces)
        within = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * max_bytes
        sizes = np.minimum(self.bytes[row] - within, max_bytes)
        columns = (self.source[row] + within, self.region[row], self.target[row] + within, sizes)
        return WriteBatch(*columns, self.source_kind)

    def picked(self, rows: npt.NDArray[np.intp]) -> WriteBatch:
        """These rows only."""
        columns = (self.source[rows], self.region[rows], self.target[rows], self.bytes[rows])
        return WriteBatch(*columns, self.source_kind)

    def check(self, region_bytes: Sequence[int]) -> None:
        """Refuse rows that lie outside the receiver's regions, before anything is written."""
        sizes = np.asarray(region_bytes, np.int64)
        known = (self.region >= 0) & (self.region < len(sizes))
        room = np.where(known, sizes[np.where(known, self.region, 0)] if len(sizes) else -1, -1)
        wrong = (self.bytes < 0) | (self.target < 0) | (self.target + self.bytes > room)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            number, start, count = (
                int(column[row]) for column in (self.region, self.target, self.bytes)
            )
            has = f"has {int(room[row]):,} B" if known[row] else f"is not one of {len(sizes)}"
            raise TransportError(
                f"row {row}: {count:,} B to offset {start:,} of region {number}, which {has}; "
                "nothing was written",
                silent=True,
            )


class PendingWrite(Protocol):
    """A write in flight."""

    def poll(self) -> bool:
        """Whether all has landed; raises TransportError if it failed. Never blocks.

        Called until it answers True or raises, and not again after that.
        """


class PeerLink(Protocol):
    """The way to one receiver. Writes are made by one thread; any thread may close it.

    poll_s  how often a write in flight wants to be polled
    """

    poll_s: float

    def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
        """Start writing. The sources stay unchanged until the end of the write.

        A transport may do the whole work here. Raises TransportError for a batch that it refuses.
        """

    def alive(self) -> bool:
        """Whether a write may still succeed. A link that failed without silence is dead."""

    def close(self) -> None:
        """Closing again does nothing. Pending writes fail."""


class Transport(Protocol):
    """A process's end of a transport, as a receiver, a sender, or both."""

    name: str

    def expose(self, regions: Sequence[Region]) -> Descriptor:
        """Receiver: let senders write into this memory."""

    def revoke(self) -> Descriptor | None:
        """Receiver: end all earlier writes for good, and expose the same memory anew.

        None: this transport cannot, and only the sender's silence or death ends a write.
        """

    def register(self, regions: Sequence[Region]) -> None:
        """Sender: the memory that sources lie in."""

    def connect(self, descriptor: Descriptor) -> PeerLink:
        """Sender: the way to exposed memory; TransportError, silent, if there is none."""

    def close(self) -> None:
        """Let go of all memory. Closing again does nothing."""


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """What a transport is opened with.

    host      the address under which other machines reach this process
    protocol  one of PROTOCOLS
    devices   network devices, with commas between them; empty: all
    device    where sources lie, if they lie on a GPU
    stall_s   the library's own limit for a connection on which nothing moves
    """

    host: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""
    device: torch.device | None = None
    stall_s: float = 2.0


def write(link: PeerLink, batch: WriteBatch, timeout_s: float) -> None:
    """Write and wait for the end; raises TransportError."""
    pending = link.begin(batch, timeout_s)
    pause_s = _FIRST_PAUSE_S
    while not pending.poll():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class Landed:
    """A write that `begin` has done."""

    def poll(self) -> bool:
        return True
