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
        return self.run_slots[self.first :]

    @property
    def tokens(self) -> bytes:
        """The packed tokens of the pages, by position: see `keys` for the holdback."""
        return stored_pages(self)[1]

    @property
    def after(self) -> bytes:
        """The tokens of the holdback behind the last page."""
        return self.run_tokens[len(self.run_tokens) - self.sizes.after_bytes :]

    @property
    def above(self) -> tuple[CellName, int] | None:
        """Where the page before them, or before `between`, is; None at the beginning."""
        return stored_pages(self)[2]


EventFields = tuple[Any, ...]
"""An event as a plain tuple, which costs half as much to make: `Event(*fields)` names its parts."""
EventListener = Callable[[Event], None]
FieldsListener = Callable[[EventFields], None]


def stored_pages(
    event: EventFields,
) -> tuple[Slots, bytes, tuple[CellName, int] | None, Namespace | None, bytes]:
    """Of an event of being stored: `Event.slots`, `tokens`, `above`, `namespace`, `between`.

    A listener of fields calls it for every event, so it does what the properties do at once.
    """
    _, _, cell, first, slots, tokens, (page, after), lead, above, beside, *beginning = event
    end = len(tokens) - after
    if first:
        before = (cell, slots.item(first - 1))
        return slots[first:], tokens[first * page - after : end], before, None, b""
    if after:
        tokens = lead[len(lead) - after :] + tokens[:end]
    place = None if above is None else (above, beside.item(-1))
    namespace, between = beginning or (None, b"")
    return slots, tokens, place, namespace, between
