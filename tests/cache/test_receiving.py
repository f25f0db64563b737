"""Pages that a peer writes into the host tier: receipts, tails, and slots that stay quarantined.

A `Writer` stands for the peer. What it writes is known by its place, so that a page in the wrong
slot, a slot that is reused too early and a byte that comes too late are found (`Rig.problems`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvtide.cache.receiving import MAX_HOST_FRACTION, Receipt
from kvtide.index import Namespace
from kvtide.spec import ModelMemory, Tier
from tests.cache.building import Rig, page_names, text
from tests.cache.memories import (
    ALL_MEMORIES,
    DRAFTED,
    FULL,
    HOT,
    PAGE,
    RECURRENT,
    THREE,
    V4,
    WINDOW,
)
from tests.cache.stores import begun, opened, settle
from tests.grids import everything

Build = Callable[..., Rig]
LATE = 0x5A


@dataclass
class Writer:
    """The peer of a receipt. `late`: it writes on after it was given up."""

    rig: Rig
    receipt: Receipt
    written: set[int] = field(default_factory=set)

    @property
    def left(self) -> list[int]:
        return [n for n in range(len(self.receipt.places)) if n not in self.receipt.landed]

    def write(self, numbers: Sequence[int], without: Collection[str] = ()) -> None:
        names = page_names(self.receipt.prompt)
        for number in numbers:
            place = self.receipt.places[number]
            for pool in self.rig.memory.group(self.anchor(number)):
                for layer in pool.layers if pool.name not in without else ():
                    self.rig.rows[Tier.HOST].write(pool, layer, place.slot, names[place.page])

    def land(self, numbers: Sequence[int], without: Collection[str] = ()) -> None:
        self.write(numbers, without)
        absent = [tuple(without)] * len(numbers)
        self.rig.cache.receiving.land(self.receipt, numbers, absent)

    def write_late(self) -> None:
        """Bytes that were on their way: to the places that have not landed, and to the tail."""
        for number in self.left:
            place = self.receipt.places[number]
            for pool in self.rig.memory.group(self.anchor(number)):
                for layer in pool.layers:
                    self.rig.buffers[Tier.HOST].rows(pool.name, layer)[place.slot] = LATE
        if self.receipt.tail_row is not None:
            for pool in self.rig.memory.pools:
                for layer in pool.layers:
                    self.rig.tails.buffers.rows(pool.name, layer)[self.receipt.tail_row] = LATE

    def anchor(self, number: int) -> str:
        anchors = self.rig.memory.anchors
        return anchors[self.receipt.places[number].cell % len(anchors)].name


def receive(rig: Rig, tokens: Sequence[int], **options: Namespace) -> Writer:
    receipt = rig.cache.receiving.begin(rig.cache.prompt(tokens, **options))
    assert receipt is not None
    rig.cache.poll()
    assert receipt.ready
    return Writer(rig, receipt)


def received(rig: Rig, tokens: Sequence[int]) -> None:
    """All of a prompt's pages are on the host."""
    writer = receive(rig, tokens)
    writer.land(writer.left)
    rig.cache.receiving.finish(writer.receipt)
    rig.cache.receiving.drop_tail(writer.receipt)


# -- what comes --------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ALL_MEMORIES.values(), ids=ALL_MEMORIES)
def test_pages_land_in_any_order_and_are_found_when_a_resume_is_possible(
    build: Build, memory: ModelMemory
) -> None:
    rig, tokens = build(memory, tails=1), text(1, 6)
    writer = receive(rig, tokens)
    receipt = writer.receipt
    assert receipt.boundary == 6 and receipt.held_tokens == 0
    pages = {anchor.name: set[int]() for anchor in memory.anchors}
    for number, place in enumerate(receipt.places):
        pages[writer.anchor(number)].add(place.page)
    for anchor in memory.anchors:
        reach = anchor.reuse.reach_pages(PAGE)
        first = 0 if reach is None else max(0, 6 - reach)
        assert pages[anchor.name] == set(range(first, 6)), "what the last boundary needs, no more"
    order = writer.left
    random.Random(3).shuffle(order)
    for number in order:
        assert rig.found(tokens) < 6 * PAGE
        writer.land([number])
        assert rig.problems() == []
    assert receipt.complete and rig.found(tokens) == 6 * PAGE
    rig.cache.receiving.finish(receipt)
    rig.cache.receiving.drop_tail(receipt)
    lease = rig.started(tokens)
    rig.settle()
    assert lease.cached_tokens == 6 * PAGE and rig.misread(lease) == []


def test_only_what_is_missing_is_asked_for(build: Build) -> None:
    rig, tokens = build(WINDOW, device=32, host=64, tails=2), text(1, 9)
    rig.remember(tokens[: 5 * PAGE + 1])
    rig.remember_on_host(text(2, 4))
    rig.remember(tokens[: 5 * PAGE + 1])
    writer = receive(rig, tokens)
    kv = [place.page for n, place in enumerate(writer.receipt.places) if writer.anchor(n) == "kv"]
    assert kv == [5, 6, 7, 8] and writer.receipt.held_tokens == 5 * PAGE
    writer.land(writer.left)
    rig.cache.receiving.finish(writer.receipt)
    rig.cache.receiving.drop_tail(writer.receipt)
    assert rig.found(tokens) == 9 * PAGE
    assert rig.cache.receiving.missing_tokens(rig.cache.prompt(tokens)) == 0


def test_pages_that_were_computed_meanwhile_are_doubles(build: Build) -> None:
    rig, tokens = build(tails=1), text(1, 6)
    writer = receive(rig, tokens)
    rig.remember_on_host(tokens)
    writer.land(writer.left)
    assert rig.problems() == []
    rig.cache.receiving.finish(writer.receipt)
    rig.cache.receiving.drop_tail(writer.receipt)
    assert rig.found(tokens) == 6 * PAGE


def test_pages_that_are_quarantined_while_they_come_are_found_by_no_match(build: Build) -> None:
    rig, tokens = build(tails=1), text(1, 6)
    writer = receive(rig, tokens)
    writer.land(writer.left[:3])
    rig.quarantine(rig.cache.prompt(tokens))
    writer.land(writer.left)
    assert rig.found(tokens) == 0 and rig.problems() == []
    rig.cache.receiving.finish(writer.receipt)
    rig.cache.receiving.drop_tail(writer.receipt)


def test_pages_without_a_draft_are_found_without_it(build: Build) -> None:
    rig, tokens = build(DRAFTED, tails=1), text(1, 6, 2)
    writer, drafts = receive(rig, tokens), DRAFTED.draft_sidecars
    half = [n for n in writer.left if writer.receipt.places[n].page % 2]
    writer.land(half, without=drafts)
    writer.land(writer.left)
    rig.cache.receiving.finish(writer.receipt)
    rig.cache.receiving.drop_tail(writer.receipt)
    lease = rig.started(tokens)
    rig.settle()
    for name in drafts:
        carried = rig.cache.carries(lease, name)
        assert not carried[1::2].any() and carried[len(carried) - 2]
    assert rig.problems() == []


def test_namespaces_stay_apart(build: Build) -> None:
    rig, tokens = build(tails=2), text(1, 6)
    writer = receive(rig, tokens, namespace=Namespace("one"))
    other = rig.cache.prompt(tokens, Namespace("another"))
    assert not rig.cache.receiving.brings(writer.receipt, other)
    assert rig.cache.receiving.brings(
        writer.receipt, rig.cache.prompt(tokens[: 4 * PAGE + 1], Namespace("one"))
    )
    writer.land(writer.left)
    assert rig.found(tokens) == 0 and rig.cache.match(other).tokens == 0
    assert rig.found(tokens, namespace=Namespace("one")) == 6 * PAGE
    rig.cache.receiving.finish(writer.receipt)
    rig.cache.receiving.drop_tail(writer.receipt)


@pytest.mark.parametrize("memory", ALL_MEMORIES.values(), ids=ALL_MEMORIES)
def test_a_tail_is_copied_to_the_slots_of_a_lease(build: Build, memory: ModelMemory) -> None:
    rig, tokens = build(memory, tails=3), text(1, 2, 3)
    first, second = receive(rig, text(2, 1)), receive(rig, tokens)
    assert rig.tails is not None
    for writer in (first, second):
        for pool in memory.pools:
            for layer in pool.layers:
                value = layer + 16 * (writer is second)
                rig.tails.buffers.rows(pool.name, layer)[writer.receipt.tail_row] = value
        writer.land(writer.left)
        rig.cache.receiving.finish(writer.receipt)
    lease = rig.started(tokens)
    rig.settle()
    slots = {a.name: int(rig.cache.page_table(lease, a.name)[2]) for a in memory.anchors}
    assert min(slots.values()) >= 0 and rig.cache.receiving.free_tail_rows == 1
    rig.cache.receiving.copy_tail(second.receipt, slots)
    assert second.receipt.tail_row is None and rig.cache.receiving.free_tail_rows == 2
    for anchor in memory.anchors:
        for pool in memory.group(anchor.name):
            for layer in pool.layers:
                copied = rig.buffers[anchor.home].rows(pool.name, layer)[slots[anchor.name]]
                assert (copied == layer + 16).all()
    rig.cache.receiving.drop_tail(second.receipt)
    rig.cache.receiving.drop_tail(first.receipt)
    assert rig.cache.receiving.free_tail_rows == 3


# -- room --------------------------------------------------------------------------------------


def test_no_room_changes_nothing(build: Build) -> None:
    rig = build(host=16, tails=3)
    writers = [receive(rig, text(number, 4)) for number in (1, 2)]
    before = rig.cache.stats().pages
    prompt = rig.cache.prompt(text(3, 4))
    assert rig.cache.receiving.begin(prompt) is None, "half of the host is taken"
    assert rig.cache.receiving.can_ever_fit(prompt), "waiting makes room"
    assert rig.cache.stats().pages == before and rig.cache.receiving.free_tail_rows == 1
    assert len(rig.cache.index.imports) == len(rig.cache.index.leases) == 2
    for writer in writers:
        writer.land(writer.left)
        rig.cache.receiving.finish(writer.receipt)
        rig.cache.receiving.drop_tail(writer.receipt)
    received(rig, text(3, 4))


def test_without_a_free_tail_row_nothing_is_taken(build: Build) -> None:
    rig = build(tails=1)
    writer = receive(rig, text(1, 2))
    assert rig.cache.receiving.begin(rig.cache.prompt(text(2, 2))) is None
    writer.land(writer.left)
    rig.cache.receiving.finish(writer.receipt)
    assert rig.cache.receiving.begin(rig.cache.prompt(text(2, 2))) is None, "the tail is there"
    rig.cache.receiving.drop_tail(writer.receipt)
    received(rig, text(2, 2))


def test_what_a_host_can_never_hold_is_known(build: Build) -> None:
    rig, window = build(host=16, tails=1), build(WINDOW, host={"kv": 40, "swa": 2}, tails=1)
    max_pages = int(16 * MAX_HOST_FRACTION)
    assert rig.cache.receiving.can_ever_fit(rig.cache.prompt(text(1, max_pages)))
    assert not rig.cache.receiving.can_ever_fit(rig.cache.prompt(text(1, max_pages + 1)))
    rig.remember(text(1, 5))
    assert rig.cache.receiving.can_ever_fit(rig.cache.prompt(text(1, max_pages + 5)))
    assert not rig.cache.receiving.can_ever_fit(rig.cache.prompt(text(1, 17)))
    assert not window.cache.receiving.can_ever_fit(window.cache.prompt(text(1, 6))), "its window"
    assert not build(tails=0).cache.receiving.can_ever_fit(rig.cache.prompt(text(1, 1)))


def test_quarantined_slots_make_a_prompt_that_cannot_be_received(build: Build) -> None:
    """A frozen peer may never answer: a prompt does not wait for that."""
    rig = build(host=16, tails=2)
    writer = receive(rig, text(1, 5))
    rig.cache.receiving.abandon(writer.receipt)
    fits = rig.cache.receiving.can_ever_fit
    assert fits(rig.cache.prompt(text(2, 3))) and not fits(rig.cache.prompt(text(2, 4)))
    second = receive(rig, text(3, 2))
    rig.cache.receiving.abandon(second.receipt)
    assert not fits(rig.cache.prompt(text(2, 1))), "no tail row is left"
    rig.cache.receiving.silent(second.receipt)
    rig.cache.receiving.silent(writer.receipt)
    assert fits(rig.cache.prompt(text(2, 8)))


# -- late bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [FULL, THREE, V4, HOT], ids=lambda each: each.model)
def test_slots_of_a_peer_that_may_still_write_are_reused_by_nothing(
    build: Build, memory: ModelMemory
) -> None:
    rig, tokens = build(memory, device=24, host=24, tails=2), text(1, 6)
    writer = receive(rig, tokens)
    writer.land([n for n in writer.left if writer.receipt.places[n].page < 2])
    landed = set(writer.receipt.landed)
    rig.cache.receiving.abandon(writer.receipt)
    row = writer.receipt.tail_row
    slots = {(writer.anchor(n), writer.receipt.places[n].slot) for n in writer.left}
    assert rig.cache.receiving.quarantined_slots == len(slots) > 0
    for number in range(2, 12):
        rig.remember(text(number, 5))
        rig.settle()
        writer.write_late()
        assert rig.problems() == []
    other = receive(rig, text(99, 3))
    assert other.receipt.tail_row != row
    assert not slots & {
        (other.anchor(n), place.slot) for n, place in enumerate(other.receipt.places)
    }
    writer.write_late()
    other.land(other.left)
    assert rig.problems() == [] and writer.receipt.landed == landed
    rig.cache.receiving.finish(other.receipt)
    rig.cache.receiving.drop_tail(other.receipt)
    rig.cache.receiving.silent(writer.receipt)
    assert rig.cache.receiving.free_tail_rows == 2 and not rig.cache.index.imports


def test_what_has_landed_stays_after_the_rest_was_abandoned(build: Build) -> None:
    rig, tokens = build(tails=1), text(1, 6)
    writer = receive(rig, tokens)
    writer.land([0, 1, 2, 5])
    rig.cache.receiving.abandon(writer.receipt)
    assert rig.found(tokens) == 3 * PAGE
    rig.cache.receiving.silent(writer.receipt)
    received(rig, tokens)
    assert rig.found(tokens) == 6 * PAGE


def test_a_slot_is_written_only_when_the_device_is_done_with_it(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build(tails=1)
    done = False
    monkeypatch.setattr(rig.cache.receiving, "_queued", lambda: lambda: done)
    receipt = rig.cache.receiving.begin(rig.cache.prompt(text(1, 2)))
    assert receipt is not None
    rig.cache.poll()
    assert not receipt.ready
    done = True
    rig.cache.poll()
    assert receipt.ready
    rig.cache.receiving.abandon(receipt)
    rig.cache.receiving.silent(receipt)


# -- storage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("abandoned", [False, True], ids=["whole", "in part"])
@pytest.mark.parametrize("memory", [FULL, RECURRENT, HOT], ids=lambda each: each.model)
def test_a_store_gets_what_a_peer_has_written(
    memory: ModelMemory, abandoned: bool, url: str, rigs: list[Rig]
) -> None:
    tokens = text(1, 6)
    rig = opened(rigs, url, memory, tails=1)
    writer = receive(rig, tokens)
    first = [n for n in writer.left if writer.receipt.places[n].page < 4]
    writer.land(first if abandoned else writer.left)
    if abandoned:
        rig.cache.receiving.abandon(writer.receipt)
        rig.cache.receiving.silent(writer.receipt)
    else:
        rig.cache.receiving.finish(writer.receipt)
        rig.cache.receiving.drop_tail(writer.receipt)
    settle(rig)
    assert rig.cache.storage.stats().stored_pages == len(writer.receipt.landed)
    other = opened(rigs, url, memory)
    begun(other, tokens)
    settle(other)
    resumes = 0 if abandoned and memory is RECURRENT else 4 if abandoned else 6
    assert other.found(tokens) == resumes * PAGE and other.problems() == []


# -- anything ----------------------------------------------------------------------------------


class Traffic:
    """Receipts, requests and copies in any order; peers that fall silent late or write too late."""

    def __init__(self, memory: ModelMemory, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.rig = Rig(
            memory, device=chance.choice((24, 40)), host=chance.choice((20, 48)), tails=3
        )
        self.open: list[Writer] = []
        self.quarantined: list[Writer] = []
        self.met: Counter[str] = Counter()

    def tokens(self) -> list[int]:
        """Prompts that share beginnings."""
        chance = self.chance
        root = text(chance.randrange(3), 3, 0)
        return [*root, *text(10 + chance.randrange(4), chance.randrange(5), chance.randrange(1, 4))]

    def step(self) -> None:
        verbs = {
            self.begin: 6, self.land: 12 * bool(self.open), self.abandon: 2 * bool(self.open),
            self.late: 6 * bool(self.quarantined), self.silent: 2 * bool(self.quarantined),
            self.compute: 6, self.load: 4, self.copies: 8, self.evict: 3, self.quarantine: 1,
        }  # fmt: skip
        (verb,) = self.chance.choices(list(verbs), list(verbs.values()))
        verb()
        self.rig.cache.poll()
        for writer in self.quarantined:
            if self.chance.random() < 0.3:
                writer.write_late()
        assert self.rig.problems() == []

    def begin(self) -> None:
        prompt = self.rig.cache.prompt(self.tokens())
        fits = self.rig.cache.receiving.can_ever_fit(prompt)
        receipt = self.rig.cache.receiving.begin(prompt)
        assert fits or receipt is None
        self.met["no room" if receipt is None else "begun"] += 1
        if receipt is not None:
            self.open.append(Writer(self.rig, receipt))

    def land(self) -> None:
        writer = self.chance.choice(self.open)
        left = writer.left
        drafts = self.rig.memory.draft_sidecars
        without = drafts if self.chance.random() < 0.3 else ()
        writer.land(self.chance.sample(left, self.chance.randint(0, len(left))), without)
        if writer.receipt.complete:
            self.met["finished"] += 1
            self.open.remove(writer)
            self.rig.cache.receiving.finish(writer.receipt)
            self.rig.cache.receiving.drop_tail(writer.receipt)

    def abandon(self) -> None:
        writer = self.chance.choice(self.open)
        self.open.remove(writer)
        self.rig.cache.receiving.abandon(writer.receipt)
        self.quarantined.append(writer)

    def late(self) -> None:
        self.met["late bytes"] += 1
        self.chance.choice(self.quarantined).write_late()

    def silent(self) -> None:
        writer = self.chance.choice(self.quarantined)
        self.quarantined.remove(writer)
        self._forget(writer)

    def _forget(self, writer: Writer) -> None:
        """Late bytes are overwritten: a free slot that has any is taken for a disturbed one."""
        for number in writer.left:
            slots = np.array([writer.receipt.places[number].slot], np.int32)
            self.rig.rows[Tier.HOST].poison(writer.anchor(number), slots)
        self.rig.cache.receiving.silent(writer.receipt)

    def compute(self) -> None:
        lease = self.rig.begin(self.tokens())
        if lease is None:
            return
        self.rig.settle()
        assert self.rig.misread(lease) == []
        self.met["found"] += lease.cached_tokens > 0
        self.rig.compute(lease)
        self.rig.cache.release(lease)

    def load(self) -> None:
        lease = self.rig.begin(self.tokens())
        if lease is not None:
            self.met["loads"] += lease.loading
            self.rig.cache.release(lease)

    def copies(self) -> None:
        self.rig.settle()

    def evict(self) -> None:
        self.met["flushed"] += self.rig.cache.flush(self.chance.choice((Tier.DEVICE, Tier.HOST)))

    def quarantine(self) -> None:
        self.rig.quarantine(self.rig.cache.prompt(self.tokens()))

    def end(self) -> None:
        for writer in self.open:
            self.rig.cache.receiving.abandon(writer.receipt)
        for writer in (*self.open, *self.quarantined):
            self._forget(writer)
        self.rig.end()


WORTH_MEETING = ("no room", "begun", "finished", "late bytes", "found", "loads", "flushed")


@pytest.mark.parametrize("memory", ALL_MEMORIES.values(), ids=ALL_MEMORIES)
def test_receipts_in_any_order_with_everything_else(memory: ModelMemory) -> None:
    met: Counter[str] = Counter()
    for seed in range(12 if everything() else 1):
        traffic = Traffic(memory, seed)
        for _ in range(150):
            traffic.step()
        traffic.end()
        met += traffic.met
    worth = WORTH_MEETING if everything() else ("begun", "finished", "late bytes")
    assert [what for what in worth if not met[what]] == [], met
