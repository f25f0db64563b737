"""Changes reach the publisher's process in order and whole, or are made good by a new beginning."""

from __future__ import annotations

from kvtide.index import Index, Namespace
from kvtide.server.kv_events.index_feed import (
    EventQueue,
    PageChange,
    PagesRemoved,
    PagesStored,
    unpacked,
)
from kvtide.server.kv_events.publisher_counts import PublisherCounts
from kvtide.server.kv_events.publisher_messages import AskedPrompt, Feed
from kvtide.spec import Tier
from tests.index.building import build, compute
from tests.index.memories import FULL, PAGE

TEXT = list(range(4 * PAGE))


class Followed:
    """An index, and its queue. `asked`: how often it was to be read anew."""

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
        changes = self.queue.take()
        return changes.begins, [unpacked(change) for change in changes.packed]


def test_nothing_is_followed_before_a_beginning_and_all_after_it() -> None:
    made = Followed()
    made.remember(TEXT[:PAGE])
    assert made.taken() == (False, [])
    made.queue.begin(made.index)
    made.remember(TEXT[: 2 * PAGE])
    begins, changes = made.taken()
    assert begins and [type(change) for change in changes] == [PagesStored] * 2
    made.index.clear(Tier.DEVICE)
    begins, changes = made.taken()
    assert not begins and {type(change) for change in changes} == {PagesRemoved}


def test_a_change_names_its_pages_and_the_one_before() -> None:
    made = Followed()
    made.queue.begin(made.index)
    made.remember(TEXT[: 2 * PAGE])
    made.remember(TEXT)
    begins, (first, second) = made.taken()
    assert begins and isinstance(first, PagesStored) and isinstance(second, PagesStored)
    assert first.namespace == Namespace() and first.above is None
    slots = memoryview(first.slots).cast("i").tolist()
    assert second.above == (0, slots[-1]) and second.namespace is None
    tokens = memoryview(first.tokens + second.tokens).cast("i").tolist()
    assert tokens == TEXT


def test_a_loss_ends_what_is_passed_on_until_the_index_is_read_anew() -> None:
    made = Followed(max_events=3)
    made.queue.begin(made.index)
    assert made.taken() == (True, [])
    for number in range(8):
        made.remember([number] * PAGE)
    assert made.taken() == (False, [])
    assert made.asked == 1 and made.counts.dropped == 5 and made.counts.read_anew == 1
    made.remember([9] * PAGE)
    assert made.taken() == (False, []), "what follows a gap means nothing"
    made.queue.begin(made.index)
    begins, changes = made.taken()
    assert begins and len(changes) == 9
    made.remember([10] * PAGE)
    assert len(made.taken()[1]) == 1 and made.asked == 1


def test_a_beginning_replaces_what_was_taken_before_it() -> None:
    made = Followed()
    made.queue.begin(made.index)
    made.remember(TEXT[:PAGE])
    made.queue.begin(made.index)
    begins, changes = made.taken()
    assert begins and len(changes) == 1 and made.counts.skipped == 1


def test_a_feed_is_the_same_on_the_other_side() -> None:
    made = Followed()
    made.queue.begin(made.index)
    made.remember(TEXT)
    prompt = AskedPrompt(Namespace("lora", "salt"), b"1234")
    feed = Feed(made.queue.take(), [prompt], [None])
    assert Feed.unpacked(feed.packed()) == feed
