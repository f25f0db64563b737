"""From pages of a sequence to writes into a peer's memory.

A writer belongs to one rank of the prefill side. It knows the manifests of all ranks of both sides
(`tiers.pairing`), and writes this rank's part of every page to each rank of the peer that keeps a
part of it. The page sender's thread does the writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.tiers.manifest import PAGES, TAIL, MemoryManifest
from kvtide.tiers.pairing import Pairing, pair
from kvtide.tiers.row_copies import RegionRuns, RowCopy, expand
from kvtide.transfer.peer.page_sender import OnDone, OnSilent, PageSender, SendJob
from kvtide.transfer.peer.transport import Descriptor, PeerLink, Region, Transport, WriteBatch

Integers = npt.NDArray[np.integer]


class PlacedPages(NamedTuple):
    """Pages of a sequence, and the peer's slots of one anchor."""

    anchor: str
    pages: Integers
    slots: Integers


class PageWrite(NamedTuple):
    """Pages to write for a room, all to one area.

    tables  the sequence's slots here, by anchor and page
    """

    room: str
    epoch: int
    area: str
    tables: Mapping[str, Integers]
    places: Sequence[PlacedPages]


@dataclass(frozen=True, slots=True)
class _Peer:
    pairing: Pairing
    links: Sequence[PeerLink]


class PageWriter:
    """`sources` are the manifests of all ranks here, of which this one is number `own`.

    regions  this rank's memory, in the order of its manifest's regions
    """

    def __init__(
        self,
        sources: Sequence[MemoryManifest],
        own: int,
        regions: Sequence[Region],
        transport: Transport,
        sender: PageSender,
        timeout_s: float = 10.0,
    ) -> None:
        self.sender, self.own = sender, own
        self._sources, self._timeout_s = sources, timeout_s
        self._transport = transport
        self._addresses = np.array([region.address for region in regions], np.int64)
        self._kinds = [region.kind for region in regions]
        self._peers: dict[str, _Peer] = {}
        transport.register(regions)

    def add_peer(
        self, peer: str, targets: Sequence[MemoryManifest], descriptors: Sequence[Descriptor]
    ) -> None:
        """Pair with a peer's ranks, and connect to those that this rank writes to.

        Raises `PairingError` or `TransportError` in a sentence, and nothing has moved.
        """
        pairing = pair(self._sources, targets)
        links = [self._transport.connect(descriptor) for descriptor in descriptors]
        self.drop_peer(peer)
        self._peers[peer] = _Peer(pairing, links)

    def drop_peer(self, peer: str) -> None:
        """Its links are closed between two writes: the sender's thread may be in one."""
        known = self._peers.pop(peer, None)
        for link in known.links if known is not None else ():
            self.sender.run(link.close)

    def knows(self, peer: str) -> bool:
        return peer in self._peers

    def absent(self, peer: str) -> frozenset[str]:
        """Optional pools of the peer that no rank here writes."""
        return self._peers[peer].pairing.absent

    def tail_anchors(self, peer: str) -> list[str]:
        """The peer's anchors of which this rank writes a part of the tail."""
        known = self._peers[peer]
        copies = (known.pairing.copies(self.own, n, TAIL) for n in range(len(known.links)))
        return list(dict.fromkeys(copy.target_anchor for some in copies for copy in some))

    def source_anchors(self, peer: str, anchor: str) -> frozenset[str]:
        """The anchors here whose pages become pages of the peer's anchor."""
        return frozenset(c.source_anchor for c in self._copies(peer, anchor))

    def _copies(self, peer: str, anchor: str) -> Iterator[RowCopy]:
        known = self._peers[peer]
        for target in range(len(known.links)):
            for area in (PAGES, TAIL):
                for copy in known.pairing.copies(self.own, target, area):
                    if copy.target_anchor == anchor:
                        yield copy

    def write(
        self, peer: str, work: PageWrite, when_ready: Callable[[], bool], on_done: OnDone
    ) -> None:
        """Queue the writes; raises `DestinationError` for pages or slots that do not exist."""
        known = self._peers[peer]
        batches: list[tuple[PeerLink, WriteBatch]] = []
        for target, link in enumerate(known.links):
            copies = known.pairing.copies(self.own, target, work.area)
            runs = RegionRuns.joined(
                expand(copies, work.tables, one.anchor, one.pages, one.slots) for one in work.places
            )
            batches += [(link, batch) for batch in self._batches(runs)]
        job = SendJob(work.room, work.epoch, batches, on_done, when_ready, self._timeout_s)
        self.sender.submit(job)

    def _batches(self, runs: RegionRuns) -> Iterator[WriteBatch]:
        """The runs by kind of memory that they are read from."""
        for kind in dict.fromkeys(self._kinds):
            of_kind = [number for number, each in enumerate(self._kinds) if each == kind]
            rows = np.isin(runs.source_region, of_kind)
            if rows.any():
                source = self._addresses[runs.source_region[rows]] + runs.source[rows]
                target, region = runs.target[rows], runs.target_region[rows]
                yield WriteBatch(source, region, target, runs.bytes[rows], kind)

    def cancel(self, room: str, epoch: int, on_silent: OnSilent) -> None:
        """Write no more for this epoch; `on_silent` says whether no byte comes any more."""
        self.sender.cancel(room, epoch, on_silent)

    def forget(self, room: str, on_forgotten: Callable[[], None] = lambda: None) -> None:
        """The room is over; `on_forgotten` comes after all other calls of the room."""
        self.sender.forget(room, on_forgotten)

    def close(self, timeout_s: float) -> bool:
        closed = self.sender.close(timeout_s)
        for peer in list(self._peers) if closed else ():
            self.drop_peer(peer)
        self._transport.close()
        return closed
