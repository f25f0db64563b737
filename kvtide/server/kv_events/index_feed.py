"""The index's events on their way to the publisher's process: bounded, in order, packed.

    engine's thread ──event──▶ EventQueue ──take──▶ IndexChanges ──pickled──▶ publisher's process

The engine's thread appends a tuple and never waits. If the queue overflows, nothing that follows is
passed on until the index has been read anew. So the process gets every change from a beginning on,
or a new beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvtide.index import Event, EventKind, Index, Namespace
from kvtide.index.events import CellName, EventFields
from kvtide.server.kv_events.publisher_counts import PublisherCounts
from kvtide.spec import Tier

QUEUE_EVENTS = 1 << 16
TAKEN_EVENTS = 256
"""How many events travel together, at the most."""


class PagesStored(NamedTuple):
    """Pages that follow each other became readable.

    cell       number of anchor and tier (`cell_names`)
    slots      packed int32
    tokens     packed, of all pages
    above      cell and slot of the page before them, or before `between`; None at the beginning
    namespace  at the beginning of a prompt: whose prompt
    between    packed tokens of pages above that no tier has
    """

    cell: int
    slots: bytes
    tokens: bytes
    above: tuple[int, int] | None = None
    namespace: Namespace | None = None
    between: bytes = b""


class PagesRemoved(NamedTuple):
    cell: int
    slots: bytes


PageChange = PagesStored | PagesRemoved
PackedChange = tuple[Any, ...]
"""A change as a plain tuple, which is pickled in half the time."""


class IndexChanges(NamedTuple):
    """`begins`: they begin with all that is readable, and what came before does not count."""

    begins: bool
    packed: Sequence[PackedChange]

    def __bool__(self) -> bool:
        return self.begins or bool(self.packed)


def unpacked(change: PackedChange) -> PageChange:
    return PagesRemoved(*change) if len(change) == 2 else PagesStored(*change)


def cell_names(anchors: Iterable[str]) -> list[CellName]:
    """All cells of an index, by the number that changes name them with."""
    names = list(anchors)
    return [CellName(tier, anchor) for tier in Tier for anchor in names]


class Beginning(NamedTuple):
    """What is readable in the index, and the number of its last event."""

    number: int
    events: Sequence[Event]


class EventQueue:
    """See the module. `read_anew` asks for a call of `begin` on the engine's thread.

    counts  of lost and skipped events, and of the times that the index is read anew
    """

    def __init__(
        self,
        anchors: Iterable[str],
        read_anew: Callable[[], None],
        counts: PublisherCounts,
        max_events: int = QUEUE_EVENTS,
    ) -> None:
        self._numbers = {name: number for number, name in enumerate(cell_names(anchors))}
        self._read_anew = read_anew
        self._counts = counts
        self._queue: deque[EventFields] = deque(maxlen=max_events)
        self._beginnings: deque[Beginning] = deque(maxlen=1)
        self._follows = False
        self._heard: int | None = None
        self._asked = False

    def __len__(self) -> int:
        return len(self._queue)

    def begin(self, index: Index) -> None:
        """Hand over what is readable, and follow the index from here on. On the engine's thread."""
        if not self._follows:
            self._follows = True
            index.subscribe_fields(self._queue.append)
        self._beginnings.append(Beginning(index.last_event, list(index.readable())))

    # -- on the publisher's thread ----------------------------------------------------------

    def take(self) -> IndexChanges:
        """The next changes; none if nothing has happened, or after a loss."""
        changes: list[PackedChange] = []
        begins = False
        for _ in range(min(len(self._queue), TAKEN_EVENTS)):
            event = Event(*self._queue.popleft())
            # An event that comes after a beginning is queued after it is set.
            if self._beginnings:
                changes, begins = self._begun(), True
            if self._heard is None or event.number <= self._heard:
                self._counts.skipped += 1
            elif event.number != self._heard + 1:
                self.lose(event.number - self._heard - 1)
            else:
                self._heard = event.number
                changes.append(self._packed(event))
        if self._beginnings:
            changes, begins = self._begun(), True
        return IndexChanges(begins, changes)

    def lose(self, events: int = 0) -> None:
        """Some events have been lost: nothing is known until the index is read anew."""
        self._counts.dropped += events
        self._heard = None
        if not self._asked:
            self._asked = True
            self._counts.read_anew += 1
            self._read_anew()

    def _begun(self) -> list[PackedChange]:
        beginning = self._beginnings.popleft()
        self._heard, self._asked = beginning.number, False
        return [self._packed(event) for event in beginning.events]

    def _packed(self, event: Event) -> PackedChange:
        cell, slots = self._numbers[event.cell], event.slots.tobytes()
        if event.kind is EventKind.REMOVED:
            return cell, slots
        above = event.above
        place = (self._numbers[above[0]], above[1]) if above is not None else None
        return cell, slots, event.tokens, place, event.namespace, event.between
