"""Transfers: copies between tiers, from planning to their end, and the set of all open ones.

The owner of a transfer decides what it holds and what its end means. Common to all: transfers
reserved since the last submission leave together, a ticket shows how a transfer stands, and no wait
exceeds the transfer's deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Generic, TypeVar

from kvtide.spec import PageMove
from kvtide.transfer.copy_jobs import Copier
from kvtide.transfer.lane import Ticket
from kvtide.transfer.strided import Way
from kvtide.transfer.timeline import DeviceEvent

H = TypeVar("H")


class TransferState(Enum):
    PLANNED = "planned"
    RESERVED = "reserved"
    IN_FLIGHT = "in flight"
    LANDED = "landed"
    FAILED = "failed"


_NEXT = {
    TransferState.PLANNED: {TransferState.RESERVED, TransferState.LANDED, TransferState.FAILED},
    TransferState.RESERVED: {TransferState.IN_FLIGHT, TransferState.FAILED},
    TransferState.IN_FLIGHT: {TransferState.LANDED, TransferState.FAILED},
    TransferState.LANDED: set(),
    TransferState.FAILED: set(),
}


@dataclass(slots=True, eq=False)
class Transfer(Generic[H]):
    """A copy of pages of one or more anchors, and everything it holds until its end.

           ┌──nothing to move───────────────────────────────────────────┐
        PLANNED ──room──▶ RESERVED ──submitted──▶ IN_FLIGHT ──done──▶ LANDED
           └──no room──────────┴───────────an error───┴──────────▶ FAILED

    holds  what the owner recorded for it: slots, pins. One value, so that either end is one call.
    error  why it failed. A failed transfer ends only when it no longer touches memory: until then
           it owns its slots.
    overdue  it missed its deadline, here or on another rank; no lease waits for it
    submitted_at  by the clock of `Transfers`
    """

    number: int
    way: Way
    state: TransferState = TransferState.PLANNED
    holds: H | None = None
    moves: tuple[PageMove, ...] = ()
    ticket: Ticket | None = None
    error: BaseException | None = None
    overdue: bool = False
    submitted_at: float = 0.0

    def to(self, state: TransferState) -> None:
        assert state in _NEXT[self.state], f"a transfer cannot go {self.state} → {state}"
        self.state = state

    @property
    def over(self) -> bool:
        return not _NEXT[self.state]

    @property
    def pages(self) -> int:
        return sum(len(move.source_slots) for move in self.moves)


class Verdict(IntEnum):
    """How a transfer stands. The minimum of the ranks' verdicts applies to all ranks.

    OVERDUE is pending past its deadline: leases stop waiting for it, and its slots are not free.
    """

    OVERDUE = 0
    PENDING = 1
    FAILED = 2
    LANDED = 3


class BusyTime:
    """The time during which anything was open: overlapping work counts once. `open` is now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.open = 0
        self._clock = clock
        self._since = self._before = 0.0

    @property
    def seconds(self) -> float:
        return self._before + (self._clock() - self._since if self.open else 0.0)

    def begin(self) -> None:
        if not self.open:
            self._since = self._clock()
        self.open += 1

    def end(self) -> None:
        assert self.open, "nothing is open"
        self._before, self.open = self.seconds, self.open - 1
        self._since = self._clock()


class Transfers(Generic[H]):
    """All transfers that are not over, in the order in which they were begun.

    `busy`: by direction, how many are in flight, and for how long any was.
    """

    def __init__(
        self, copier: Copier, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._copier = copier
        self._timeout_s = timeout_s
        self._clock = clock
        self.busy = {way: BusyTime(clock) for way in Way}
        self._open: dict[int, Transfer[H]] = {}
        self._numbers = 0
        self._fences: dict[Way, DeviceEvent] = {}

    def __iter__(self) -> Iterator[Transfer[H]]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    def plan(self, way: Way) -> Transfer[H]:
        self._numbers += 1
        transfer: Transfer[H] = Transfer(self._numbers, way)
        self._open[transfer.number] = transfer
        return transfer

    def reserve(self, transfer: Transfer[H], holds: H, moves: tuple[PageMove, ...]) -> None:
        """The transfer has its slots, and leaves with the next submission."""
        transfer.to(TransferState.RESERVED)
        transfer.holds, transfer.moves = holds, moves

    def fence(self) -> None:
        """Copies submitted before `drop_fence` wait for the work queued so far, and no other."""
        self._fences = dict.fromkeys(Way, self._copier.fence(Way.BACKUP))

    def drop_fence(self, way: Way | None = None) -> None:
        """Copies wait for all work queued when they leave, in one direction or both."""
        if way is None:
            self._fences.clear()
        else:
            self._fences.pop(way, None)

    def submit(self, way: Way) -> int:
        """Submit all reserved transfers of this direction as one job; returns how many.

        A submission that raises fails its transfers: their verdict says so.
        """
        leaving = [t for t in self if t.way is way and t.state is TransferState.RESERVED]
        if not leaving:
            return 0
        ticket = error = None
        now = self._clock()
        try:
            moves = [move for transfer in leaving for move in transfer.moves]
            ticket = self._copier.copy(way, moves, self._timeout_s, self._fences.get(way))
        except Exception as raised:
            error = raised
        for transfer in leaving:
            transfer.to(TransferState.IN_FLIGHT)
            self.busy[way].begin()
            transfer.ticket, transfer.error, transfer.submitted_at = ticket, error, now
        return len(leaving)

    def seconds_in_flight(self, transfer: Transfer[H]) -> float:
        """Since the transfer was submitted."""
        return self._clock() - transfer.submitted_at

    def in_flight(self) -> list[Transfer[H]]:
        """Oldest first."""
        return [transfer for transfer in self if transfer.state is TransferState.IN_FLIGHT]

    def verdict(self, transfer: Transfer[H]) -> Verdict:
        ticket = transfer.ticket
        if ticket is None:
            return Verdict.FAILED
        if not ticket.done():
            return Verdict.OVERDUE if self._clock() > ticket.deadline else Verdict.PENDING
        transfer.error = ticket.error
        return Verdict.LANDED if ticket.error is None else Verdict.FAILED

    def end(self, transfer: Transfer[H], state: TransferState) -> None:
        """The transfer has landed or failed: it holds nothing from now on."""
        if transfer.state is TransferState.IN_FLIGHT:
            self.busy[transfer.way].end()
        transfer.to(state)
        transfer.holds = None
        del self._open[transfer.number]
