"""Arrivals of the index and transfers of bytes, tied together: begun here, ended here.

This is the one place that lands or fails an arrival, so that what a transfer held goes back in one
way whatever went wrong: no room, a submission that raised, a copy that broke halfway, a rank that
could not follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvtide.index import Arrival, Departure, Index
from kvtide.index import IndexLease as IndexLease
from kvtide.spec import Tier
from kvtide.transfer.strided import Way
from kvtide.transfer.transfers import Transfer, Transfers, TransferState, Verdict

Flight = Transfer[Arrival]


class InFlightTransfers:
    """`ended` counts transfers by direction and end, `moved_bytes` what landed.

    departs     whether what leaves for the host from now on goes on from there
    departures  what landed there since somebody looked, for them to end
    """

    def __init__(self, index: Index, transfers: Transfers[Arrival]) -> None:
        self.departs = False
        self.departures: list[Departure] = []
        self.ended: Counter[tuple[Way, TransferState]] = Counter()
        self.moved_bytes: Counter[Way] = Counter()
        self.moved_pages: Counter[Way] = Counter()
        self._index = index
        self._transfers = transfers
        self._flights: dict[int, Flight] = {}
        self._departing: set[int] = set()

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._transfers)

    @property
    def departing(self) -> bool:
        """Whether anything is in the air that will go on from the host."""
        return bool(self._departing)

    # -- beginning --------------------------------------------------------------------------

    def load(self, lease: IndexLease) -> list[Flight] | None:
        """Begin to bring the lease's prefix to the device; all that it has to wait for.

        That may include flights begun for others. None when there is no room.
        """
        arrival = self._index.copy(lease, Tier.HOST, Tier.DEVICE)
        flight = self._begin(Way.LOAD, lambda: arrival)
        if arrival is None or flight is None:
            return None
        others = [self._flights[other.number] for other in arrival.behind]
        return others if flight.over else [flight, *others]

    def backup(self, lease: IndexLease) -> bool:
        """Begin to copy what the lease's path has on the device and not on the host.

        False if the host has no room, or copies there do not end: each holds pages of the device.
        """
        if self._stuck():
            return False
        begun = self._begin(Way.BACKUP, lambda: self._index.copy(lease, Tier.DEVICE, Tier.HOST))
        return begun is not None

    def demote(self, anchor: str, pages: int) -> int | None:
        """Begin to move victims to the host; how many are on their way, None for no way.

        Zero: those that had a copy were dropped at once, and there is room now.
        """
        if self._stuck():
            return None
        begun = self._begin(
            Way.BACKUP, lambda: self._index.demote(Tier.DEVICE, Tier.HOST, anchor, pages)
        )
        return None if begun is None else begun.pages

    def leaving(self, anchor: str) -> int:
        """Device pages of an anchor that will be free when demotions under way have landed."""
        flights = (
            flight
            for flight in self._transfers
            if flight.holding is not None and flight.holding.leaves_source and not flight.late
        )
        moves = (move for flight in flights for move in flight.moves if move.anchor == anchor)
        return sum(len(move.source_slots) for move in moves)

    def _stuck(self) -> bool:
        """Whether a copy to the host is past its deadline."""
        return any(flight.late and flight.way is Way.BACKUP for flight in self._transfers)

    def _begin(self, way: Way, reserve: Callable[[], Arrival | None]) -> Flight | None:
        flight = self._transfers.plan(way)
        arrival = reserve()
        if arrival is None:
            self._end(flight, None, TransferState.FAILED)
            return None
        if not arrival.parts:
            self._end(flight, arrival, TransferState.LANDED)
            return flight
        self._transfers.reserve(flight, arrival, arrival.moves)
        self._flights[arrival.number] = flight
        if way is Way.BACKUP and self.departs:
            self._departing.add(arrival.number)
        return flight

    def fence(self) -> None:
        """Copies wait for the work queued so far, and for none that is queued later."""
        self._transfers.fence()

    def drop_fence(self, way: Way | None = None) -> None:
        """Copies wait for all work queued when they leave, in one direction or both."""
        self._transfers.drop_fence(way)

    # -- ending -----------------------------------------------------------------------------

    def submit(self, way: Way) -> int:
        """What was begun in this direction leaves; how many flights it were."""
        return self._transfers.submit(way)

    def flying(self, way: Way) -> bool:
        """Whether anything is on its way in this direction."""
        return any(flight.way is way for flight in self._transfers.flying())

    def cancel(self, flight: Flight) -> None:
        """Give up a flight that has not left yet."""
        assert flight.state is TransferState.RESERVED
        self._end(flight, flight.holding, TransferState.FAILED)

    def cancel_pointless(self) -> None:
        """Give up flights that have not left yet, of pages that nobody will read."""
        for flight in list(self._transfers):
            arrival = flight.holding
            if flight.state is TransferState.RESERVED and arrival is not None and arrival.pointless:
                self.cancel(flight)

    def verdicts(self) -> list[int]:
        """How every flight stands on this rank, oldest first."""
        return [self._transfers.verdict(flight) for flight in self._transfers.flying()]

    def settle(self, agreed: Sequence[int]) -> list[tuple[Flight, list[IndexLease]]]:
        """End what is done on every rank, note what is late; each with the leases that waited."""
        news = []
        for flight, verdict in zip(self._transfers.flying(), agreed, strict=False):
            if verdict == Verdict.PENDING or (verdict == Verdict.LATE and flight.late):
                continue
            assert flight.holding is not None
            news.append((flight, list(flight.holding.leases)))
            if verdict == Verdict.LATE:
                flight.late = True
            else:
                landed = verdict == Verdict.LANDED
                self._end(
                    flight, flight.holding, TransferState.LANDED if landed else TransferState.FAILED
                )
        return news

    def overdue(self) -> list[Flight]:
        """Flights that nobody should wait for any more, though their slots are still in use."""
        return [flight for flight in self._transfers if flight.late]

    def _end(self, flight: Flight, arrival: Arrival | None, state: TransferState) -> None:
        """The one place where a transfer ends: it lands, or forfeits all it held."""
        if arrival is not None:
            self._flights.pop(arrival.number, None)
            if state is not TransferState.LANDED:
                self._index.fail(arrival)
            elif arrival.number not in self._departing:
                self._index.land(arrival)
            elif (departure := self._index.land_departing(arrival)) is not None:
                self.departures.append(departure)
            self._departing.discard(arrival.number)
        left = flight.state is TransferState.FLYING
        self._transfers.end(flight, state)
        if left:
            self._count(flight)

    def _count(self, flight: Flight) -> None:
        """Only what was on its way counts: no room, or nothing to move, is not a transfer."""
        self.ended[flight.way, flight.state] += 1
        if flight.state is TransferState.FAILED:
            return
        self.moved_pages[flight.way] += flight.pages
        self.moved_bytes[flight.way] += sum(
            len(move.source_slots) * self._index.memory.at_rest.slot_bytes(move.anchor)
            for move in flight.moves
        )
