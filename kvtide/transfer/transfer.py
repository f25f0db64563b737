"""One copy between tiers, from the wish to its end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from kvtide.spec import PageMove
from kvtide.transfer.lane import Ticket
from kvtide.transfer.strided import Way

H = TypeVar("H")


class TransferState(Enum):
    PLANNED = "planned"
    RESERVED = "reserved"
    FLYING = "flying"
    LANDED = "landed"
    FAILED = "failed"


_NEXT = {
    TransferState.PLANNED: {TransferState.RESERVED, TransferState.LANDED, TransferState.FAILED},
    TransferState.RESERVED: {TransferState.FLYING, TransferState.FAILED},
    TransferState.FLYING: {TransferState.LANDED, TransferState.FAILED},
    TransferState.LANDED: set(),
    TransferState.FAILED: set(),
}


@dataclass(slots=True, eq=False)
class Transfer(Generic[H]):
    """Pages of one or more anchors on their way, and everything they hold until they are there.

           ┌──nothing to move────────────────────────────────────────┐
        PLANNED ──room──▶ RESERVED ──submitted──▶ FLYING ──done──▶ LANDED
           └──no room──────────┴─────────gone wrong──┴───────────▶ FAILED

    holding  what the owner of the books recorded for it: slots, pins. One thing, so that the end
             of a transfer, either end, is one call.
    error    why it failed. A transfer that failed on the way is over only when nothing of it
             touches memory any more: until then its slots belong to nobody else.
    late     it missed its deadline, here or on another rank, and nobody waits for it any more
    """

    number: int
    way: Way
    state: TransferState = TransferState.PLANNED
    holding: H | None = None
    moves: tuple[PageMove, ...] = ()
    ticket: Ticket | None = None
    error: BaseException | None = None
    late: bool = False

    def to(self, state: TransferState) -> None:
        assert state in _NEXT[self.state], f"a transfer cannot go {self.state} → {state}"
        self.state = state

    @property
    def over(self) -> bool:
        return not _NEXT[self.state]

    @property
    def pages(self) -> int:
        return sum(len(move.source_slots) for move in self.moves)
