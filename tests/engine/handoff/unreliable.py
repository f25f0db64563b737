"""A transport whose writes wait, fail or come late, where a test says so."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtide.transfer.peer.transport import (
    Descriptor,
    PeerLink,
    PendingWrite,
    Region,
    Transport,
    TransportError,
    WriteBatch,
    write,
)
from kvtide.transfer.peer.transport_registry import open_transport

TIMEOUT_S = 10.0


@dataclass
class Unreliable:
    """Over shared memory, as a sender's end. Writes are counted from 0.

    fails    the writes that break after half of their rows
    silent   whether they say that no byte of them comes any more
    held     while True, writes are in flight and none of their bytes have landed
    late     rows of broken writes that were not silent: `deliver_late` writes them after all
    """

    fails: set[int] = field(default_factory=set)
    silent: bool = True
    held: bool = False
    name: str = "shm"

    def __post_init__(self) -> None:
        self._inner: Transport = open_transport("shm")
        self.begun = 0
        self.late: list[tuple[PeerLink, WriteBatch]] = []
        self._lock = threading.Lock()

    def expose(self, regions: Sequence[Region]) -> Descriptor:
        return self._inner.expose(regions)

    def revoke(self) -> Descriptor | None:
        return self._inner.revoke()

    def register(self, regions: Sequence[Region]) -> None:
        self._inner.register(regions)

    def connect(self, descriptor: Descriptor) -> PeerLink:
        return UnreliableLink(
            self._inner.connect(descriptor), self._inner.connect(descriptor), self
        )

    def close(self) -> None:
        self._inner.close()

    def begin(self, link: UnreliableLink, batch: WriteBatch, timeout_s: float) -> PendingWrite:
        with self._lock:
            number, self.begun = self.begun, self.begun + 1
        return WaitingWrite(self, link, batch, number, timeout_s)

    def end(self, link: UnreliableLink, batch: WriteBatch, number: int, timeout_s: float) -> None:
        """Write the rows, or as many of them as come before it breaks."""
        if number not in self.fails:
            write(link.inner, batch, timeout_s)
            return
        half = len(batch) // 2
        write(link.inner, batch.part(0, half), timeout_s)
        if not self.silent:
            with self._lock:
                self.late.append((link.late, batch.part(half, len(batch))))
        raise TransportError(f"write {number} broke", silent=self.silent)

    def deliver_late(self) -> int:
        """The bytes of broken writes land now; returns how many."""
        with self._lock:
            late, self.late = self.late, []
        for link, batch in late:
            write(link, batch, TIMEOUT_S)
        return sum(batch.total_bytes for _, batch in late)


@dataclass
class WaitingWrite:
    transport: Unreliable
    link: UnreliableLink
    batch: WriteBatch
    number: int
    timeout_s: float

    def poll(self) -> bool:
        if self.transport.held:
            return False
        self.transport.end(self.link, self.batch, self.number, self.timeout_s)
        return True


@dataclass
class UnreliableLink:
    """`late` is a second way there, for bytes that come after the first one has failed. It stays
    open: they come in any case."""

    inner: PeerLink
    late: PeerLink
    transport: Unreliable
    poll_s: float = 500e-6

    def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
        return self.transport.begin(self, batch, timeout_s)

    def alive(self) -> bool:
        return self.inner.alive()

    def close(self) -> None:
        self.inner.close()
