"""Events: which pages became readable in which tier, and which were removed.

Events are made only while a listener is subscribed, and are cheap: nothing is hashed for them. A
page is named by where it lies, an anchor's slot in a tier, from the event that stores it to the
one that removes it. A listener to all events can compute any key of it: the first event of a page
has its tokens and names the page before it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from kvtide.index.keys import Namespace
from kvtide.spec import Slots, Tier


class EventKind(Enum):
    STORED = "stored"
    REMOVED = "removed"


class CellName(NamedTuple):
    """One anchor in one tier: what slot numbers count in."""

    tier: Tier
    anchor: str


class PackedSizes(NamedTuple):
    """Bytes of packed tokens: of a page, and of the holdback behind it."""

    page_bytes: int
    after_bytes: int


class Event(NamedTuple):
    """Pages that follow each other, of one anchor in one tier.

    The index only puts together what it has; the properties below say what it means. Arrays and
    bytes are not changed later, so that any thread may read them at any time.

    number     counts all events of the index: a listener that misses one can tell
    first      the event is about the pages of the run from this one on
    run_slots, run_tokens    of the whole run; REMOVED events have no tokens
    lead       if `first` is 0: ends with the tokens of the holdback before the run's own
    above_cell, above_slots  where the pages before the run are; None at the beginning
    namespace  at the beginning of a prompt: whose prompt
    between    packed tokens of pages above the run that no tier has
    """

    number: int
    kind: EventKind
    cell: CellName
    first: int
    run_slots: Slots
    run_tokens: bytes = b""
    sizes: PackedSizes = PackedSizes(1, 0)
    lead: bytes = b""
    above_cell: CellName | None = None
    above_slots: Slots | None = None
    namespace: Namespace | None = None
    between: bytes = b""

    @property
    def tier(self) -> Tier:
        return self.cell.tier

    @property
    def anchor(self) -> str:
        return self.cell.anchor

    @property
    def slots(self) -> Slots:
        """Where the pages are, or were."""
        return self.run_slots[self.first :] if self.first else self.run_slots

    @property
    def tokens(self) -> bytes:
        """The packed tokens of the pages, by position: see `keys` for the holdback."""
        page, after = self.sizes
        end = len(self.run_tokens) - after
        if self.first or not after:
            return self.run_tokens[self.first * page - after : end]
        return self.lead[len(self.lead) - after :] + self.run_tokens[:end]

    @property
    def after(self) -> bytes:
        """The tokens of the holdback behind the last page."""
        return self.run_tokens[len(self.run_tokens) - self.sizes.after_bytes :]

    @property
    def above(self) -> tuple[CellName, int] | None:
        """Where the page before them, or before `between`, is; None at the beginning."""
        if self.first:
            return self.cell, self.run_slots.item(self.first - 1)
        if self.above_cell is None or self.above_slots is None:
            return None
        return self.above_cell, self.above_slots.item(-1)


EventFields = tuple[Any, ...]
"""An event as a plain tuple, which costs half as much to make: `Event(*fields)` names its parts."""
Listener = Callable[[Event], None]
FieldsListener = Callable[[EventFields], None]
