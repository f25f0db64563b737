"""In-flight transfers: arrivals of the index and copies of bytes, begun and ended together.

This is the one place that lands or fails an arrival. Whatever goes wrong (no room, a submission
that raised, a copy that broke halfway, a failure on another rank), the transfer gives back what it
held in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvtide.durations import DurationHistogram
from kvtide.index import Arrival, Departure, Index, Prompt
from kvtide.index import IndexLease as IndexLease
from kvtide.spec import Tier
from kvtide.transfer.lane import TransferError
from kvtide.transfer.strided import Way
from kvtide.transfer.transfers import BusyTime, Transfer, Transfers, TransferState, Verdict

ArrivalTransfer = Transfer[Arrival]


class InFlightTransfers:
    """`ended` counts transfers by direction and end, `moved_bytes` what landed.

    moved_pages by direction and pool
    seconds     from a transfer's submission to the poll that lands it, by direction
    departs     whether backups begun from now on are stored after they land
    departures  what landed since the storage tier last took them; the storage tier ends them
    """

    def __init__(self, index: Index, transfers: Transfers[Arrival]) -> None:
        self.departs = False
        self.departures: list[Departure] = []
        self.ended: Counter[tuple[Way, TransferState]] = Counter()
        self.moved_bytes: Counter[Way] = Counter()
        self.moved_pages: Counter[tuple[Way, str]] = Counter()
        self.seconds = {way: DurationHistogram() for way in Way}
        self._index = index
        self._transfers = transfers
        self._by_arrival: dict[int, ArrivalTransfer] = {}
        self._departing: set[int] = set()
        memory = index.memory.at_rest
        self._page_bytes = {
            pool.name: memory.slot_bytes(pool.name)
            if pool.is_anchor
            else pool.page_bytes(memory.page_tokens)
            for pool in memory.pools
        }

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[ArrivalTransfer]:
        return iter(self._transfers)

    @property
    def busy(self) -> Mapping[Way, BusyTime]:
        """By direction, how many transfers are in flight, and for how long any was."""
        return self._transfers.busy

    @property
    def departing(self) -> bool:
        """Whether a backup is in flight that will be stored."""
        return bool(self._departing)

    # -- beginning --------------------------------------------------------------------------

    def load(self, lease: IndexLease) -> list[ArrivalTransfer] | None:
        """Begin to load the lease's prefix; returns all transfers that it has to wait for.

        They may include transfers begun for other leases. None when there is no room.
        """
        arrival = self._index.copy(lease, Tier.HOST, Tier.DEVICE)
        transfer = self._begin(Way.LOAD, lambda: arrival)
        if arrival is None or transfer is None:
            return None
        others = [self._by_arrival[other.number] for other in arrival.behind]
        return others if transfer.over else [transfer, *others]

    def backup(self, lease: IndexLease) -> bool:
        """Begin to copy the lease's pages that are on the device and not on the host.

        False if the host has no room, or if a backup is overdue: each one holds device pages.
        """
        if self._stuck():
            return False
        begun = self._begin(Way.BACKUP, lambda: self._index.copy(lease, Tier.DEVICE, Tier.HOST))
        return begun is not None

    def demote(self, anchor: str, pages: int) -> int | None:
        """Begin to move victims to the host; returns how many pages, None if none can move.

        Zero: the victims had copies below and were dropped at once.
        """
        if self._stuck():
            return None
        begun = self._begin(
            Way.BACKUP, lambda: self._index.demote(Tier.DEVICE, Tier.HOST, anchor, pages)
        )
        if begun is None:
            return None
        return begun.holds.pages if begun.holds is not None else 0

    def supplement(self, prompt: Prompt, max_pages: int) -> bool:
        """Begin to copy sidecars to device pages that lack them; False if the host has none."""
        return self._begin(Way.LOAD, lambda: self._index.supplement(prompt, max_pages)) is not None

    def leaving(self, anchor: str) -> int:
        """Device pages of an anchor that demotions in flight will free when they land."""
        held = (transfer.holds for transfer in self._transfers if not transfer.overdue)
        leaving = (one for one in held if one is not None and one.leaves_source)
        return sum(one.pages for one in leaving if one.moves[0].anchor == anchor)

    def _stuck(self) -> bool:
        """Whether a copy to the host is past its deadline."""
        return any(transfer.overdue and transfer.way is Way.BACKUP for transfer in self._transfers)

    def _begin(self, way: Way, reserve: Callable[[], Arrival | None]) -> ArrivalTransfer | None:
        transfer = self._transfers.plan(way)
        arrival = reserve()
        if arrival is None:
            self._end(transfer, None, TransferState.FAILED)
            return None
        departs = way is Way.BACKUP and self.departs
        if not arrival.moves and not (departs and arrival.computed):
            self._end(transfer, arrival, TransferState.LANDED)
            return transfer
        # Without moves it still waits its turn: behind the work that computes what departs.
        self._transfers.reserve(transfer, arrival, arrival.moves)
        self._by_arrival[arrival.number] = transfer
        if departs:
            self._departing.add(arrival.number)
        return transfer

    def fence(self) -> None:
        """Copies wait for the work queued so far, and for none that is queued later."""
        self._transfers.fence()

    def drop_fence(self, way: Way | None = None) -> None:
        """Copies wait for all work queued when they leave, in one direction or both."""
        self._transfers.drop_fence(way)

    # -- ending -----------------------------------------------------------------------------

    def submit(self, way: Way) -> int:
        """Submit the reserved transfers of this direction; returns how many."""
        return self._transfers.submit(way)

    def any_in_flight(self, way: Way) -> bool:
        """Whether a transfer of this direction is in flight."""
        return any(transfer.way is way for transfer in self._transfers.in_flight())

    def any_open(self, way: Way) -> bool:
        """Whether one is in flight, or leaves with the next submission."""
        return any(transfer.way is way for transfer in self._transfers)

    def cancel(self, transfer: ArrivalTransfer) -> None:
        """Fail a transfer that was not submitted yet."""
        assert transfer.state is TransferState.RESERVED
        self._end(transfer, transfer.holds, TransferState.FAILED)

    def cancel_pointless(self) -> None:
        """Fail transfers that were not submitted yet and whose pages no lease will read."""
        for transfer in list(self._transfers):
            arrival = transfer.holds
            if (
                transfer.state is TransferState.RESERVED
                and arrival is not None
                and arrival.pointless
            ):
                self.cancel(transfer)

    def verdicts(self) -> list[int]:
        """The verdict of this rank on every transfer in flight, oldest first."""
        return [self._transfers.verdict(transfer) for transfer in self._transfers.in_flight()]

    def settle(self, agreed: Sequence[int]) -> list[tuple[ArrivalTransfer, list[IndexLease]]]:
        """End what is done on every rank, note what is late; each with the leases that wait."""
        news = []
        for transfer, verdict in zip(self._transfers.in_flight(), agreed, strict=False):
            if verdict == Verdict.PENDING or (verdict == Verdict.OVERDUE and transfer.overdue):
                continue
            assert transfer.holds is not None
            news.append((transfer, list(transfer.holds.leases)))
            if verdict == Verdict.OVERDUE:
                transfer.overdue = True
            else:
                landed = verdict == Verdict.LANDED
                self._end(
                    transfer,
                    transfer.holds,
                    TransferState.LANDED if landed else TransferState.FAILED,
                )
        return news

    def overdue(self) -> list[ArrivalTransfer]:
        """Transfers past their deadline, whose slots are still in use."""
        return [transfer for transfer in self._transfers if transfer.overdue]

    def _end(
        self, transfer: ArrivalTransfer, arrival: Arrival | None, state: TransferState
    ) -> None:
        """The one place where a transfer ends: it lands, or forfeits all it held."""
        if arrival is not None:
            self._by_arrival.pop(arrival.number, None)
            if state is not TransferState.LANDED:
                self._index.fail(arrival)
            elif arrival.number not in self._departing:
                self._index.land(arrival)
            elif (departure := self._index.land_departing(arrival)) is not None:
                self.departures.append(departure)
            self._departing.discard(arrival.number)
        left = transfer.state is TransferState.IN_FLIGHT
        self._transfers.end(transfer, state)
        if left:
            self._count(transfer)

    def _count(self, transfer: ArrivalTransfer) -> None:
        """Only transfers that were submitted count."""
        self.ended[transfer.way, transfer.state] += 1
        if transfer.state is TransferState.FAILED:
            return
        self.seconds[transfer.way].observe(self._transfers.seconds_in_flight(transfer))
        for move in transfer.moves:
            pool, pages = move.sidecar or move.anchor, len(move.source_slots)
            self.moved_pages[transfer.way, pool] += pages
            self.moved_bytes[transfer.way] += pages * self._page_bytes[pool]


def explained(transfer: ArrivalTransfer) -> TransferError:
    """Why a load failed, or is late."""
    elsewhere = "it missed its deadline" if transfer.overdue else "it failed on another rank"
    return TransferError(f"the prefix could not be loaded: {transfer.error or elsewhere}")
