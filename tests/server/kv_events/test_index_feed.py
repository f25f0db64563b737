"""Changes reach the publisher's process in order and whole, or are made good by a new beginning."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import count

import pytest

from kvtide.index import Index, Namespace
from kvtide.server.kv_events import index_feed
from kvtide.server.kv_events.index_feed import (
    SLICE_NODES,
    SLICE_S,
    EventQueue,
    PageChange,
    PagesRemoved,
    PagesStored,
    unpacked,
)
from kvtide.server.kv_events.kv_groups import kv_groups
from kvtide.server.kv_events.publisher_counts import PublisherCounts
from kvtide.server.kv_events.publisher_messages import AskedPrompt, Feed
from kvtide.spec import Tier
from tests.index.building import build, compute, keep
from tests.index.memories import ALL_MEMORIES, FULL, PAGE
from tests.index.traffic import Traffic
from tests.server.kv_events.consuming import held
from tests.server.kv_events.tables import Table

TEXT = list(range(4 * PAGE))


class Followed:
    """An index, and its queue. `asked`: how often it was to be read."""

    def __init__(self, max_events: int = 1 << 16) -> None:
        self.index: Index = build(FULL)
        self.asked = 0
        self.counts = PublisherCounts()
        self.queue = EventQueue(["kv"], self._ask, self.counts, max_events)

    def _ask(self) -> None:
        self.asked += 1

    def remember(self, tokens: list[int]) -> None:
        self.index.release(compute(self.index, tokens))

    def taken(self) -> tuple[bool, list[PageChange]]:
        """As the process gets it."""
        changes = Feed.unpacked(Feed(self.queue.take()).packed()).changes
        return changes.begins, [unpacked(change) for change in changes.packed]


def test_nothing_is_followed_before_a_beginning_and_all_after_it() -> None:
    made = Followed()
    made.remember(TEXT[:PAGE])
    assert made.taken() == (False, [])
    made.queue.read(made.index)
    made.remember(TEXT[: 2 * PAGE])
    begins, changes = made.taken()
    assert begins and [type(change) for change in changes] == [PagesStored] * 2
    made.index.clear(Tier.DEVICE)
    begins, changes = made.taken()
    assert not begins and {type(change) for change in changes} == {PagesRemoved}


def test_a_change_names_its_pages_and_the_one_before() -> None:
    made = Followed()
    made.queue.read(made.index)
    made.remember(TEXT[: 2 * PAGE])
    made.remember(TEXT)
    begins, (first, second) = made.taken()
    assert begins and isinstance(first, PagesStored) and isinstance(second, PagesStored)
    assert first.namespace == ("", "") and first.above is None
    slots = memoryview(first.slots).cast("i").tolist()
    assert second.above == (0, slots[-1]) and second.namespace is None
    tokens = memoryview(first.tokens + second.tokens).cast("i").tolist()
    assert tokens == TEXT


def test_a_loss_ends_what_is_passed_on_until_the_index_is_read_anew() -> None:
    made = Followed(max_events=3)
    made.queue.read(made.index)
    assert made.taken() == (True, [])
    for number in range(8):
        made.remember([number] * PAGE)
    assert made.taken() == (False, [])
    assert made.asked == 1 and made.counts.dropped == 5 and made.counts.read_anew == 1
    made.remember([9] * PAGE)
    assert made.taken() == (False, []), "what follows a gap means nothing"
    made.queue.read(made.index)
    begins, changes = made.taken()
    assert begins and len(changes) == 9
    made.remember([10] * PAGE)
    assert len(made.taken()[1]) == 1 and made.asked == 1


def test_a_beginning_replaces_what_was_taken_before_it() -> None:
    made = Followed()
    made.queue.read(made.index)
    made.remember(TEXT[:PAGE])
    made.queue.lose()
    made.remember(TEXT)
    made.queue.read(made.index)
    begins, (change,) = made.taken()
    assert begins and len(change.slots) == 4 * 4, "the pages of the second beginning alone"


def test_a_feed_is_the_same_on_the_other_side() -> None:
    made = Followed()
    made.queue.read(made.index)
    made.remember(TEXT)
    changes = made.queue.take()
    (stored,) = changes.packed
    prompt = AskedPrompt(Namespace("lora", "salt"), b"1234")
    for feed in (Feed(changes), Feed(changes, [prompt], [None])):
        came = Feed.unpacked(feed.packed())
        assert (came.changes.begins, came.changes.whole) == (True, True)
        assert came.changes.packed == [(stored[0], stored[1].tobytes(), *stored[2:])]
        assert [*came.prompts] == [*feed.prompts] and [*came.folders] == [*feed.folders]


# -- reading the index in slices ------------------------------------------------------------------


def big_index(prompts: int) -> Index:
    index = build(FULL, device=3 * prompts)
    for number in range(prompts):
        keep(index, [number, *range(1, 3 * PAGE)])
    return index


def test_a_slice_ends_in_time_whatever_the_index_has() -> None:
    """By a clock that goes on by a third of a slice whenever it is read."""
    index, readings = big_index(300), count()
    queue = EventQueue(
        ["kv"], lambda: None, PublisherCounts(), clock=lambda: next(readings) * SLICE_S / 3
    )
    sizes, whole = [], False
    while not whole:
        queue.read(index)
        _, whole, changes = queue.take()
        sizes.append(len(changes))
    assert sum(sizes) == index.tree.nodes
    assert max(sizes) <= 3 * SLICE_NODES and len(sizes) >= index.tree.nodes // (3 * SLICE_NODES)


def test_no_slice_keeps_the_engine_longer_than_a_fraction_of_the_whole() -> None:
    index = big_index(2500)
    queue = EventQueue(["kv"], lambda: None, PublisherCounts())
    stays, whole = [], False
    while not whole:
        began = time.thread_time()
        queue.read(index)
        stays.append(time.thread_time() - began)
        whole = queue.take().whole
    assert len(stays) > 5 and sorted(stays)[-2] < sum(stays) / 3


class Taking:
    """Traffic over an index, with a queue whose slices are of one node, taken now and then."""

    def __init__(self, name: str, seed: int, max_events: int) -> None:
        self.traffic = Traffic(ALL_MEMORIES[name], seed)
        self.index = self.traffic.index
        self.chance = random.Random(seed)
        self.counts = PublisherCounts()
        self.slices = 0
        self._calls: list[Callable[[], None]] = []
        readings = count()
        self.queue = EventQueue(
            kv_groups(self.index.memory),
            lambda: self._calls.append(self._read),
            self.counts,
            max_events,
            clock=lambda: next(readings) * 2 * SLICE_S / 3,
        )
        self.table = Table(self.index.memory, self.queue)
        self._read()

    def _read(self) -> None:
        self.slices += 1
        self.queue.read(self.index)

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.traffic.step()
            if self._calls and self.chance.random() < 0.7:
                self._calls.pop(0)()
            if self.chance.random() < 0.3:
                self.table.take()

    def settle(self) -> None:
        """Without further changes: take what is queued, and read what is asked for."""
        for _ in range(10_000):
            if self._calls:
                self._calls.pop(0)()
            elif not self.table.take() and not self._calls and not len(self.queue):
                return
        pytest.fail("it does not come to rest")


@pytest.mark.quick(name=["window and state", "v4"])
@pytest.mark.parametrize("name", ["full", "recurrent", "v4", "window", "window and state"])
def test_readings_amid_changes_and_losses_end_with_what_the_index_has(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_feed, "SLICE_NODES", 1)
    met: Counter[str] = Counter()
    for seed in range(4):
        made = Taking(name, seed, max_events=6 if seed % 2 else 1000)
        for _ in range(8):
            made.go(40)
            if seed % 2 == 0:
                made.queue.lose()
                made.go(20)
            made.settle()
            assert made.table.known == held(made.index), f"seed {seed}"
        met += Counter(
            read_anew=made.counts.read_anew, slices=made.slices, dropped=made.counts.dropped
        )
    assert met["read_anew"] >= 16 and met["slices"] > 3 * met["read_anew"] and met["dropped"], met


def test_a_slice_that_the_queue_dropped_is_read_anew() -> None:
    made = Followed(max_events=2)
    made.remember(TEXT)
    made.queue.read(made.index)
    for number in range(2):  # They drop the slice, and follow each other without a gap.
        made.remember([9 + number] * PAGE)
    assert made.taken() == (False, []) and made.asked == 1
    made.queue.read(made.index)
    begins, changes = made.taken()
    assert begins and len(changes) == 3
