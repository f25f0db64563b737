"""Events: which pages became readable in which tier, and which were removed.

Events are made only while a listener is subscribed, and are cheap: nothing is hashed for them. A
page is named by where it lies, an anchor's slot in a tier, from the event that stores it to the
one that removes it. A listener to all events can compute any key of it: the first event of a page
has its tokens and names the page before it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from kvtide.index.keys import Namespace
from kvtide.spec import Slots, Tier


class EventKind(Enum):
    STORED = "stored"
    REMOVED = "removed"


class CellName(NamedTuple):
    """One anchor in one tier: what slot numbers count in."""

    tier: Tier
    anchor: str


class Event(NamedTuple):
    """Pages that follow each other, of one anchor in one tier.

    number     counts all events of the index: a listener that misses one can tell
    slots      where the pages are, or were
    tokens     of a STORED event: their packed tokens, by position
    after      the tokens of the holdback behind the last page
    above      where the page before them, or before `between`, lies; None at the beginning
    namespace  at the beginning of a prompt: whose prompt
    between    packed tokens of pages after `above` that no tier has
    """

    number: int
    kind: EventKind
    cell: CellName
    slots: Slots
    tokens: bytes = b""
    after: bytes = b""
    above: tuple[CellName, int] | None = None
    namespace: Namespace | None = None
    between: bytes = b""

    @property
    def tier(self) -> Tier:
        return self.cell.tier

    @property
    def anchor(self) -> str:
        return self.cell.anchor


Listener = Callable[[Event], None]
