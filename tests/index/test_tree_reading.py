"""A reading of the tree in slices, and the events meanwhile, give all that is readable."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvtide.index import Event, EventKind, Index
from kvtide.index.events import CellName, EventFields
from tests.index.building import build, compute, keep
from tests.index.memories import ALL_MEMORIES, FULL, PAGE
from tests.index.traffic import Traffic

STEPS = 400
Page = tuple[str, bytes]
"""Whose prompt, and its packed tokens up to the page's end."""


class Listener:
    """Does what `tree_reading` asks of one, and nothing else: a page is known by its whole prompt.

    known    by cell and slot
    skipped  pages behind one that is not known, and removals of such
    """

    def __init__(self) -> None:
        self.known: dict[tuple[CellName, int], Page] = {}
        self.skipped: Counter[str] = Counter()

    def hear(self, event: Event) -> None:
        slots = [(event.cell, slot) for slot in event.slots.tolist()]
        if event.kind is EventKind.REMOVED:
            for slot in slots:
                self.skipped["removals"] += self.known.pop(slot, None) is None
            return
        above = ("", b"")
        if event.above is not None:
            if event.above not in self.known:
                self.skipped["stored"] += 1
                return
            above = self.known[event.above]
        elif event.namespace is not None:
            above = (str(event.namespace), b"")
        name, tokens = above[0], above[1] + event.between
        size = len(event.tokens) // len(slots)
        for number, slot in enumerate(slots):
            tokens += event.tokens[number * size : (number + 1) * size]
            if slot in self.known:
                self.skipped["known"] += 1
                assert self.known[slot] == (name, tokens), "another page than was removed"
            self.known[slot] = name, tokens


class Read:
    """An index whose listener began in the middle, and reads it node by node."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.listener = Listener()
        self._follows = False
        index.subscribe_fields(self._hear)

    def begin(self) -> None:
        self.listener.known.clear()
        self._follows = True
        self.reading = self.index.read()

    def _hear(self, fields: EventFields) -> None:
        if self._follows:
            self.listener.hear(Event(*fields))

    def advance(self, nodes: int) -> None:
        for fields in self.reading.advance(nodes):
            self.listener.hear(Event(*fields))

    def readable(self) -> dict[tuple[CellName, int], Page]:
        """What the tree has, by its own nodes."""
        tree, found = self.index.tree, dict[tuple[CellName, int], Page]()
        names = [CellName(cell.tier, tree.anchor_names[cell.anchor]) for cell in tree.cells]
        for node in tree.walk():
            if node.hidden:
                continue
            path = tree.path(node)
            root: Any = path[0].parent
            tokens = root.name[1] + b"".join(each.tokens for each in path)
            for cell, slots in enumerate(node.slots):
                for page, slot in enumerate([] if slots is None else slots.tolist(), 1):
                    until = (node.depth + page) * tree.page_bytes
                    found[names[cell], slot] = str(root.name[0]), tokens[:until]
        return found


@pytest.mark.quick(name=["full", "recurrent", "v4", "window + full"])
@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
def test_what_was_read_while_the_tree_changed_is_what_it_has(name: str) -> None:
    skipped: Counter[str] = Counter()
    for seed in range(2):
        traffic = Traffic(ALL_MEMORIES[name], seed)
        read = Read(traffic.index)
        read.begin()
        readings = 0
        for _ in range(STEPS):
            traffic.step()
            read.advance(1)
            if read.reading.complete:
                assert read.listener.known == read.readable()
                readings += 1
                read.begin()
        assert readings > 5
        skipped += read.listener.skipped
    assert min(skipped[kind] for kind in ("stored", "known", "removals")) > 10, skipped


def test_no_call_visits_more_nodes_than_it_may() -> None:
    index = build(FULL, device=400)
    for number in range(100):
        keep(index, [number, *[1] * (PAGE - 1), *range(2 * PAGE)])
    reading = index.read()
    events = []
    while not reading.complete:
        events.append(len(reading.advance(7)))
    assert max(events) <= 7 and sum(events) == index.tree.nodes


def test_a_page_that_is_split_or_joined_before_its_visit_is_read() -> None:
    """A pending node gives its first pages to a new node, and pages to the one below it."""
    index = build(ALL_MEMORIES["window"])
    read = Read(index)
    text = list(range(8 * PAGE))
    keep(index, text)
    keep(index, [100, *text])
    read.begin()
    read.advance(1)  # The root: its two prompts are pending.
    other = [*text[: 3 * PAGE], *[7] * (2 * PAGE)]
    keep(index, other)
    lease = compute(index, [*text, *range(50, 50 + 4 * PAGE)])
    index.release(lease)
    index.evict(index.tree.cells[1].tier, "swa", 40)
    while not read.reading.complete:
        read.advance(1)
    assert read.listener.known == read.readable()


def test_a_new_reading_ends_the_one_before() -> None:
    index = build(FULL)
    keep(index, range(8 * PAGE))
    first = index.read()
    first.advance(1)
    second = Read(index)
    second.begin()
    keep(index, [9, *range(8 * PAGE)])
    while not second.reading.complete:
        second.advance(1)
    assert second.listener.known == second.readable()
