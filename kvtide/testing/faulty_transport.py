"""Transports that break one rule each, over shared memory: the conformance kit finds every one.

They are named to the kit as `kvtide.testing.faulty_transport:DropsTheLastRow`. `AsOverANetwork` is
none of them: it keeps the rules although a frozen receiver takes no bytes before it continues, as
with a network. Faults with frozen receivers are variations of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvtide.transfer.peer.page_sender import SendQuota
from kvtide.transfer.peer.process_watch import ProcessIdentity, ProcessWatch
from kvtide.transfer.peer.shm import SharedMemory, SharedMemoryLink
from kvtide.transfer.peer.transport import (
    Column,
    Descriptor,
    Landed,
    PeerLink,
    PendingWrite,
    Region,
    TransportError,
    TransportSettings,
    WriteBatch,
)

LATER_S = 0.05
MIB = 1 << 20


class FaultyLink:
    """A link of shared memory that a fault stands before."""

    poll_s = 500e-6

    def __init__(self, link: SharedMemoryLink, descriptor: Descriptor) -> None:
        self.link = link
        self.pid = int(descriptor["process"]["pid"])
        self.sizes = [int(region["bytes"]) for region in descriptor["regions"]]

    def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
        batch.check(self.sizes)
        return self.link.begin(self.changed(batch), timeout_s)

    def changed(self, batch: WriteBatch) -> WriteBatch:
        return batch

    def alive(self) -> bool:
        return self.link.alive()

    def close(self) -> None:
        self.link.close()

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()


class FaultyTransport(SharedMemory):
    """Opens links of its class."""

    link_class: type[FaultyLink] = FaultyLink

    def connect(self, descriptor: Descriptor) -> PeerLink:  # type: ignore[override]
        return self.link_class(super().connect(descriptor), descriptor)


def _rows(
    batch: WriteBatch,
    source: Column | None = None,
    region: Column | None = None,
    target: Column | None = None,
    sizes: Column | None = None,
) -> WriteBatch:
    """The batch with other columns."""
    return WriteBatch(
        batch.source if source is None else source,
        batch.region if region is None else region,
        batch.target if target is None else target,
        batch.bytes if sizes is None else sizes,
    )


# -- bytes ----------------------------------------------------------------------------------


class DropsTheLastRow(FaultyTransport):
    class link_class(FaultyLink):  # noqa: N801
        def changed(self, batch: WriteBatch) -> WriteBatch:
            return batch.part(0, len(batch) - 1)


class WritesToAWrongOffset(FaultyTransport):
    class link_class(FaultyLink):  # noqa: N801
        def changed(self, batch: WriteBatch) -> WriteBatch:
            return _rows(batch, target=batch.target & ~np.int64(1))


class WritesPastTheEnd(FaultyTransport):
    """Rounds sizes up to words."""

    class link_class(FaultyLink):  # noqa: N801
        def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
            batch.check(self.sizes)
            self.link._sizes = [size + 8 for size in self.sizes]
            return self.link.begin(_rows(batch, sizes=-(-batch.bytes // 8) * 8), timeout_s)


class KnowsOneRegion(FaultyTransport):
    class link_class(FaultyLink):  # noqa: N801
        def changed(self, batch: WriteBatch) -> WriteBatch:
            return _rows(batch, region=np.zeros_like(batch.region))


class SwapsRowsOfLargeBatches(FaultyTransport):
    class link_class(FaultyLink):  # noqa: N801
        def changed(self, batch: WriteBatch) -> WriteBatch:
            source = batch.source.copy()
            if len(batch) > 1000:
                source[[0, 999]] = source[[999, 0]]
            return _rows(batch, source=source)


class JoinsRowsByTheirTargetsAlone(FaultyTransport):
    class link_class(FaultyLink):  # noqa: N801
        def changed(self, batch: WriteBatch) -> WriteBatch:
            ends = batch.target + batch.bytes
            starts = np.concatenate(([0], np.flatnonzero(ends[:-1] != batch.target[1:]) + 1))
            sizes = np.add.reduceat(batch.bytes, starts)
            return _rows(batch.picked(starts), sizes=sizes)


class CutsLongRows(FaultyTransport):
    class link_class(FaultyLink):  # noqa: N801
        def changed(self, batch: WriteBatch) -> WriteBatch:
            return _rows(batch, sizes=np.minimum(batch.bytes, 16 * MIB))


class MixesUpReceivers(FaultyTransport):
    """Has one link for all of them."""

    first: PeerLink | None = None

    def connect(self, descriptor: Descriptor) -> PeerLink:  # type: ignore[override]
        self.first = self.first or super().connect(descriptor)
        return self.first


# -- time -----------------------------------------------------------------------------------


class ReportsBeforeBytesAreThere(FaultyTransport):
    class link_class(FaultyLink):  # noqa: N801
        def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
            batch.check(self.sizes)
            self.later(LATER_S, lambda: self.link.begin(batch, timeout_s))
            return Landed()


class RepeatsOldWrites(FaultyTransport):
    """As a retry would that was not needed: of every second write."""

    class link_class(FaultyLink):  # noqa: N801
        count = 0

        def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
            if self.count % 2 == 0:
                self.later(10 * LATER_S, lambda: self.link.begin(batch, timeout_s))
            self.count += 1
            return super().begin(batch, timeout_s)


class IgnoresTheQuota(FaultyTransport):
    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings)
        SendQuota.take = lambda self, count: True  # type: ignore[method-assign]


# -- refusals and ends ----------------------------------------------------------------------


class FailsOnEmptyBatches(FaultyTransport):
    class link_class(FaultyLink):  # noqa: N801
        def changed(self, batch: WriteBatch) -> WriteBatch:
            if not batch.total_bytes:
                raise TransportError("nothing to write", silent=True)
            return batch


class WritesTheGoodRowsOfABadBatch(FaultyTransport):
    class link_class(FaultyLink):  # noqa: N801
        def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
            pending: PendingWrite = Landed()
            for row in range(len(batch)):
                one = batch.part(row, row + 1)
                one.check(self.sizes)
                pending = self.link.begin(one, timeout_s)
            return pending


class RefusesWithoutSilence(FaultyTransport):
    class link_class(FaultyLink):  # noqa: N801
        def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
            try:
                return super().begin(batch, timeout_s)
            except TransportError as error:
                raise TransportError(str(error), silent=False) from error


class OpensAnyDescriptor(FaultyTransport):
    def connect(self, descriptor: Descriptor) -> PeerLink:  # type: ignore[override]
        try:
            return super().connect(descriptor)
        except TransportError:
            return super().connect(self.expose([]))


class CrashesOnWrongDescriptors(FaultyTransport):
    def connect(self, descriptor: Descriptor) -> PeerLink:  # type: ignore[override]
        assert descriptor["regions"][0]["bytes"] > 0
        return super().connect(descriptor)


class ClosesOnce(FaultyTransport):
    open = True

    def close(self) -> None:
        if not self.open:
            raise TransportError("not open", silent=True)
        self.open = False


class WritesOverAClosedLink(FaultyTransport):
    class link_class(FaultyLink):  # noqa: N801
        def close(self) -> None:
            """Nothing is closed."""


class WritesToTheDead(FaultyTransport):
    class link_class(FaultyLink):  # noqa: N801
        def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
            return super().begin(batch, timeout_s) if self.link.alive() else Landed()


class WaitsForTheDead(FaultyTransport):
    class link_class(FaultyLink):  # noqa: N801
        def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
            return super().begin(batch, timeout_s) if self.link.alive() else _Never()


class _Never:
    def poll(self) -> bool:
        return False


class WritesByAnotherProcess(FaultyTransport):
    """A process that the sender leaves behind, and that writes as long as the receiver lives."""

    def connect(self, descriptor: Descriptor) -> PeerLink:  # type: ignore[override]
        link = super().connect(descriptor)
        if os.fork() == 0:
            watch = ProcessWatch(ProcessIdentity.from_json(descriptor["process"]))
            source = np.empty(4096, np.uint8)
            while watch.alive():
                source += 1
                super().connect(descriptor).begin(WriteBatch.of(source.ctypes.data, 0, 4096), 1.0)
                time.sleep(LATER_S)
            os._exit(0)
        return link


# -- receivers that take no bytes while they are frozen -------------------------------------


class LateWrite:
    """A write that lands when its receiver runs, be it after the deadline."""

    def __init__(self, link: LateLink, batch: WriteBatch, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._done = threading.Event()
        self._error: TransportError | None = None
        threading.Thread(target=self._run, args=(batch,), daemon=True).start()

    def _run(self, batch: WriteBatch) -> None:
        while self._link.frozen():
            time.sleep(LATER_S)
        try:
            self._link.link.begin(batch, self._timeout_s)
        except TransportError as error:
            self._error = error
        self._done.set()

    def poll(self) -> bool:
        if self._done.is_set():
            if self._error is not None:
                raise self._error
            return True
        if time.monotonic() > self._deadline and not self._link.patient:
            self._link.gave_up()
            raise TransportError("the receiver takes no bytes", silent=self._link.says_silent)
        return False


class LateLink(FaultyLink):
    patient = says_silent = False
    dead = False

    def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
        batch.check(self.sizes)
        if self.dead:
            raise TransportError("an earlier write did not end", silent=True)
        return LateWrite(self, batch, timeout_s)

    def frozen(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def gave_up(self) -> None:
        self.dead = True

    def alive(self) -> bool:
        return not self.dead and self.link.alive()


class AsOverANetwork(FaultyTransport):
    """Keeps the rules: bytes come late, and it says so."""

    link_class = LateLink


class SilentButLate(FaultyTransport):
    class link_class(LateLink):  # noqa: N801
        says_silent = True


class IgnoresTheDeadline(FaultyTransport):
    class link_class(LateLink):  # noqa: N801
        patient = True


class AliveAfterALateWrite(FaultyTransport):
    class link_class(LateLink):  # noqa: N801
        def gave_up(self) -> None:
            """It goes on as if nothing had happened."""


class BlocksItsCaller(FaultyTransport):
    class link_class(LateLink):  # noqa: N801
        def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
            pending = super().begin(batch, timeout_s)
            while not pending.poll():
                time.sleep(LATER_S)
            return Landed()


class OutlivesItsSender(FaultyTransport):
    """Another process carries the bytes, as sockets do, and the death of the sender is no end."""

    class link_class(LateLink):  # noqa: N801
        def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
            batch.check(self.sizes)
            if self.frozen() and os.fork() == 0:
                while self.frozen():
                    time.sleep(LATER_S)
                with suppress(TransportError):
                    self.link.begin(batch, timeout_s)
                os._exit(0)
            return super().begin(batch, timeout_s)


class RevokesNothing(FaultyTransport):
    """Gives a new descriptor, and links with the old one go on."""

    exposed: Sequence[Region] = ()

    def expose(self, regions: Sequence[Region]) -> Descriptor:
        self.exposed = regions
        return super().expose(regions)

    def revoke(self) -> Descriptor | None:
        return self.expose(self.exposed)


class RevokesNothingOverANetwork(RevokesNothing):
    link_class = LateLink
