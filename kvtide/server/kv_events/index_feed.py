"""The index's events on their way to the publisher's process: bounded, in order, packed.

    engine's thread ──event, slice──▶ EventQueue ──take──▶ IndexChanges ──bytes──▶ process

The engine's thread appends a tuple per event and never waits. If the queue overflows, what follows
is passed on only behind the beginning of a new reading of the index. The reading goes on in slices
of half a millisecond between steps, and its slices are queued among the events. So the process gets
every change from a beginning on, or a new beginning (`TreeReading` says what it does until the
reading is complete).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvtide.index import EventKind, Index, TreeReading
from kvtide.index.events import CellName, EventFields, stored_pages
from kvtide.server.kv_events.publisher_counts import PublisherCounts
from kvtide.spec import Tier

QUEUE_EVENTS = 1 << 16
TAKEN_EVENTS = 1024
"""How many events travel together, at the most, beside those of a slice."""
SLICE_S = 0.0005
"""How long the engine's thread reads the index between two steps."""
SLICE_NODES = 8
"""The clock is read after so many nodes."""


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
    namespace: tuple[str, str] | None = None
    between: bytes = b""


class PagesRemoved(NamedTuple):
    cell: int
    slots: bytes


PageChange = PagesStored | PagesRemoved
PackedChange = tuple[Any, ...]
"""A change as a plain tuple. What is bytes there may be an array, until it is written."""


class IndexChanges(NamedTuple):
    """`begins`: what came before does not count. `whole`: after them all that is readable has
    come."""

    begins: bool
    whole: bool
    packed: Sequence[PackedChange]

    def __bool__(self) -> bool:
        return self.begins or self.whole or bool(self.packed)


def unpacked(change: PackedChange) -> PageChange:
    return PagesRemoved(*change) if len(change) == 2 else PagesStored(*change)


def cell_names(anchors: Iterable[str]) -> list[CellName]:
    """All cells of an index, by the number that changes name them with."""
    names = list(anchors)
    return [CellName(tier, anchor) for tier in Tier for anchor in names]


class IndexSlice(NamedTuple):
    """A slice of a reading.

    number    among all slices
    begins    the first of its reading; `last_event` is the number of the last event before it
    complete  the last of its reading
    """

    number: int
    begins: bool
    last_event: int
    complete: bool
    events: Sequence[EventFields]


class EventQueue:
    """See the module. `ask` asks for a call of `read` on the engine's thread.

    counts  of lost and skipped events, and of the times that the index is read anew
    """

    def __init__(
        self,
        anchors: Iterable[str],
        ask: Callable[[], None],
        counts: PublisherCounts,
        max_events: int = QUEUE_EVENTS,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._cells = {name: number for number, name in enumerate(cell_names(anchors))}
        self._ask = ask
        self._counts = counts
        self._clock = clock
        self._queue: deque[EventFields | IndexSlice] = deque(maxlen=max_events)
        self._follows = False
        self._reading: TreeReading | None = None
        self._slices = self._slices_taken = 0
        self._heard: int | None = None
        self._anew, self._asked = True, False

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def reading(self) -> bool:
        """Slices are to come."""
        return self._asked or self._heard is None

    def read(self, index: Index) -> None:
        """Read a slice of the index, at first and after a loss from its beginning, and follow it
        from there on. On the engine's thread."""
        until = self._clock() + SLICE_S
        # The publisher's thread may ask again from here on: that asks for one more slice.
        self._asked, begins = False, self._anew
        if begins:
            self._anew = False
            self._reading = index.read()
        if not self._follows:
            self._follows = True
            index.subscribe_fields(self._queue.append)
        reading, events = self._reading, list[EventFields]()
        assert reading is not None
        while not reading.complete and self._clock() < until:
            events += reading.advance(SLICE_NODES)
        number, last = self._slices + 1, index.last_event
        self._queue.append(IndexSlice(number, begins, last, reading.complete, events))
        self._slices = number  # A slice that is counted is in the queue, or was.

    # -- on the publisher's thread ----------------------------------------------------------

    def take(self) -> IndexChanges:
        """The next changes; none if nothing has happened, or after a loss."""
        changes: list[PackedChange] = []
        begins = whole = False
        slices, present = self._slices, len(self._queue)
        for _ in range(min(present, TAKEN_EVENTS)):
            entry = self._queue.popleft()
            if type(entry) is IndexSlice:
                self._slices_taken = entry.number
                if entry.begins:
                    changes, begins, self._heard = [], True, entry.last_event
                if self._heard is not None:
                    changes += map(self._packed, entry.events)
                    whole = entry.complete
                if self._anew or not entry.complete:
                    self._ask_for_slice()
            elif self._heard is None:
                self._counts.skipped += 1
            elif entry[0] != self._heard + 1:
                self.lose(entry[0] - self._heard - 1)
            else:
                self._heard = entry[0]
                changes.append(self._packed(entry))
        if present <= TAKEN_EVENTS and self._slices_taken < slices:
            self._slices_taken = slices
            self.lose()
        return IndexChanges(begins, whole, changes)

    def lose(self, events: int = 0) -> None:
        """Some events have been lost: nothing is known until the index is read anew."""
        self._counts.dropped += events
        self._heard = None
        if not self._anew:
            self._anew = True
            self._counts.read_anew += 1
            self._ask_for_slice()

    def _ask_for_slice(self) -> None:
        if not self._asked:
            self._asked = True
            self._ask()

    def _packed(self, event: EventFields) -> PackedChange:
        number = self._cells[event[2]]
        if event[1] is EventKind.REMOVED:
            return number, event[4][event[3] :]
        slots, tokens, above, namespace, between = stored_pages(event)
        place = None if above is None else (self._cells[above[0]], above[1])
        return number, slots, tokens, place, namespace and tuple(namespace), between
