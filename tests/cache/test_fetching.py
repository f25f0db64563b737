"""What a fetch brings, where it counts, and what it does when pages turn out not to be there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvtide.cache import FetchPatience
from kvtide.cache.fetching import MAX_OPEN, Stage
from kvtide.index import WantedPages
from kvtide.spec import Tier
from kvtide.storage import Store, StoreError, open_store
from kvtide.storage.memory_store import _SHARED
from kvtide.transfer.storage_requests import Reading
from kvtide.transfer.store_link import StoreLink
from tests.cache.building import Rig, text
from tests.cache.gated import Gated
from tests.cache.memories import DRAFTED, FULL, PAGE, RECURRENT
from tests.cache.stores import (
    MARKS,
    WAIT,
    attach,
    fetched,
    keys_of,
    opened,
    settle,
    stored,
    until,
)


def test_a_history_that_was_on_the_host_is_not_storage_s_when_its_state_comes_from_there(
    url: str, rigs: list[Rig]
) -> None:
    stored(opened(rigs, url, RECURRENT), text(1, 8))
    again = opened(rigs, url, RECURRENT)
    fetched(again, text(1, 8))
    again.cache.index.evict(Tier.HOST, "state", 64)
    assert again.found(text(1, 8)) == 0
    prompt = again.cache.prompt(text(1, 8))
    again.cache.storage.fetch(prompt)
    settle(again)
    assert again.cache.match(prompt).by_tier == {Tier.HOST: 8 * PAGE}


def gated(
    rigs: list[Rig], url: str, calls: tuple[str, ...] = ("read",), **options: Any
) -> tuple[Rig, Gated]:
    rig = Rig(FULL, **{"host": 64, "device": 32, "patience": WAIT, **options})
    store = Gated(open_store(url, rig.cache.storage.space), calls)
    rig.cache.storage.attach(store)
    rigs.append(rig)
    return rig, store


def with_a_branch(rigs: list[Rig], url: str) -> tuple[Rig, list[int]]:
    """Prompts 1 and 3 are stored, and a branch of the first, which is returned."""
    rig, branch = opened(rigs, url), [*text(1, 4, 0), *text(2, 4)]
    for tokens in (text(1, 8), branch, text(3, 8)):
        stored(rig, tokens)
    return rig, branch


def left_in(rig: Rig, url: str) -> Store:
    """The store when it has done all that it was asked, removals too."""
    settle(rig)
    asked = rig.cache.storage.ask(lambda one: None)
    assert asked is not None
    asked.result(10.0)
    return open_store(url, rig.cache.storage.space)


def taken(rig: Rig) -> int:
    """Host slots that fetches have."""
    return sum(len(one.taken) for one in rig.cache.index.imports.values())


def test_fetches_that_no_request_waits_for_count_among_those_that_share_half_of_the_host(
    url: str, rigs: list[Rig]
) -> None:
    first = opened(rigs, url)
    for number in range(3):
        stored(first, text(number, 20))
    again, store = gated(rigs, url)
    for number in range(3):
        fetch = again.cache.storage.fetch(again.cache.prompt(text(number, 20)))
        assert fetch is not None
        while fetch.stage is Stage.LOOKING:
            again.cache.poll()
        while fetch.stage is Stage.READING and store.asked["read"] <= number:
            time.sleep(0.001)
        fetch.stop()
        again.cache.poll()
        assert fetch.over and taken(again) <= 32, "more than half of the host"
    assert taken(again) == 32
    store.gate.set()
    settle(again)
    assert taken(again) == 0


def test_what_is_being_written_does_not_outlive_its_quarantine(
    url: str, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages go to the store in batches; the second must not come after they were removed."""
    monkeypatch.setitem(StoreLink.__init__.__kwdefaults__, "batch_bytes", 1)
    rig, store = gated(rigs, url, ("write",))
    rig.remember(text(1, 8))
    rig.settle()
    while not store.asked["write"]:
        time.sleep(0.001)
    rig.quarantine(rig.cache.prompt(text(1, 8)))
    store.gate.set()
    assert left_in(rig, url).status().objects == MARKS


def test_what_is_in_line_for_the_store_does_not_outlive_its_quarantine(
    url: str, rigs: list[Rig]
) -> None:
    rig, store = gated(rigs, url, ("write",))
    for number in (2, 3, 1):
        rig.remember(text(number, 8))
        rig.settle()
    rig.quarantine(rig.cache.prompt(text(1, 8)))
    store.gate.set()
    objects = left_in(rig, url)
    assert all(objects.exists(keys_of(rig, text(3, 8))))
    assert not any(objects.exists(keys_of(rig, text(1, 8))))


def test_of_pages_that_leave_the_device_together_only_those_in_quarantine_are_not_stored(
    url: str, rigs: list[Rig]
) -> None:
    rig, store = gated(rigs, url, ("write",), write_policy="write_back", headroom=0.0)
    for numbers in ((2,), (3,), (4, 1)):
        for number in numbers:
            rig.remember(text(number, 8))
        assert rig.cache._in_flight.demote("kv", 8 * len(numbers)) == 8 * len(numbers)
        rig.settle()
    rig.quarantine(rig.cache.prompt(text(1, 8)))
    store.gate.set()
    objects = left_in(rig, url)
    assert all(objects.exists(keys_of(rig, text(4, 8))))
    assert not any(objects.exists(keys_of(rig, text(1, 8))))


def test_what_comes_while_it_is_quarantined_is_not_found(url: str, rigs: list[Rig]) -> None:
    stored(opened(rigs, url), text(1, 8))
    again, store = gated(rigs, url)
    prompt = again.cache.prompt(text(1, 8))
    fetch = again.cache.storage.fetch(prompt)
    assert fetch is not None
    while not store.asked["read"]:
        again.cache.poll()
    again.quarantine(prompt)
    store.gate.set()
    settle(again)
    assert fetch.outcome == "discarded" and again.found(text(1, 8)) == 0
    assert taken(again) == 0


@pytest.mark.parametrize("state", ["leaving", "closing", "gone"])
def test_a_store_that_was_detached_is_rid_of_what_was_quarantined_meanwhile(
    state: str, url: str, rigs: list[Rig]
) -> None:
    rig = opened(rigs, url)
    stored(rig, text(1, 8))
    stored(rig, text(2, 8))
    storage = rig.cache.storage
    storage.detach(5.0)
    if state != "leaving":
        settle(rig)
    if state == "gone":
        until(lambda: rig.cache.poll() is not None and storage.stats() is None)
    rig.quarantine(rig.cache.prompt(text(1, 8)))
    attach(rig, url)
    assert storage.fetch(rig.cache.prompt(text(1, 8))) is None, "it is being removed"
    settle(rig)
    assert fetched(rig, text(1, 8)).outcome == "nothing" and rig.found(text(1, 8)) == 0
    assert not any(left_in(rig, url).exists(keys_of(rig, text(1, 8))))
    rig.cache.flush(Tier.DEVICE)
    rig.cache.flush(Tier.HOST)
    attach(rig, url)
    assert fetched(rig, text(2, 8)).outcome == "fetched"


def test_quarantines_without_a_store_are_one_removal_for_every_first_page(
    url: str, rigs: list[Rig]
) -> None:
    rig, branch = with_a_branch(rigs, url)
    rig.cache.storage.detach(5.0)
    settle(rig)
    for tokens in (text(1, 8), branch, text(3, 8), text(1, 0, 2), text(1, 8)):
        rig.quarantine(rig.cache.prompt(tokens))
    assert len(rig.cache.storage._unremoved) == 2
    attach(rig, url)
    assert len(rig.cache.storage.stores[-1].removals) == 2
    objects = left_in(rig, url)
    assert objects.status().objects == MARKS


def test_branches_that_are_known_leave_the_store_with_what_they_share(
    url: str, rigs: list[Rig]
) -> None:
    rig, branch = with_a_branch(rigs, url)
    rig.quarantine(rig.cache.prompt(text(1, 8)))
    objects = left_in(rig, url)
    assert all(objects.exists(keys_of(rig, text(3, 8))))
    assert not any(objects.exists(keys_of(rig, text(1, 8)) + keys_of(rig, branch)))


def test_what_other_engines_stored_of_a_prompt_leaves_the_store_with_it(
    url: str, rigs: list[Rig]
) -> None:
    stored(opened(rigs, url), text(1, 12))
    rig = opened(rigs, url)
    stored(rig, text(1, 4))
    rig.quarantine(rig.cache.prompt(text(1, 12)))
    objects = left_in(rig, url)
    assert not any(objects.exists(keys_of(rig, text(1, 12))))


def test_sidecars_that_were_not_computed_are_not_there_after_a_fetch(
    url: str, rigs: list[Rig]
) -> None:
    first = opened(rigs, url, DRAFTED)
    lease = first.started(text(1, 8))
    first.compute(lease, 4)
    first.compute(lease, without=["draft"])
    first.cache.release(lease)
    settle(first)
    again = opened(rigs, url, DRAFTED)
    fetched(again, text(1, 8))
    lease = again.started(text(1, 8))
    again.settle()
    assert again.cache.carries(lease, "draft").tolist() == [True] * 4 + [False] * 4
    assert again.misread(lease) == []
    again.cache.release(lease)


def test_a_store_that_is_too_slow_is_not_waited_for_with_half_of_the_host(
    url: str, rigs: list[Rig]
) -> None:
    rig, store = gated(rigs, url, ("write",))
    for number in range(6):
        rig.remember(text(number, 10))
        rig.settle()
        stats = rig.cache.storage.stats()
        assert stats is not None and stats.waiting_pages <= 32
    assert stats.dropped_pages == 30, "those that came first, but for those with the store"
    store.gate.set()
    settle(rig)
    stats = rig.cache.storage.stats()
    assert stats is not None and (stats.stored_pages, stats.waiting_pages) == (30, 0)
    objects = open_store(url, rig.cache.storage.space)
    whole = [number for number in range(6) if all(objects.exists(keys_of(rig, text(number, 10))))]
    assert whole == [0, 1, 5]


def test_what_is_hardly_worth_it_is_not_asked_for(url: str, rigs: list[Rig]) -> None:
    patience = FetchPatience("wait_complete", min_tokens=4 * PAGE)
    rig = opened(rigs, url, patience=patience)
    assert rig.cache.storage.fetch(rig.cache.prompt(text(1, 3))) is None
    assert rig.cache.storage.fetch(rig.cache.prompt(text(1, 4))) is not None
    assert rig.cache.storage.fetch(rig.cache.scratch(text(1, 8))) is None
    settle(rig)
    stored(rig, text(1, 8))
    assert rig.cache.storage.fetch(rig.cache.prompt([*text(1, 8, 0), *text(2, 3)])) is None


def test_a_corrupt_page_that_cannot_be_removed_costs_no_other(
    url: str, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(rigs, url)
    stored(first, text(1, 8))
    again, store = gated(rigs, url, ())
    (key,) = keys_of(again, text(1, 8))[5:6]
    objects = _SHARED[url.partition(":")[2], again.cache.storage.space]
    objects[key] = bytes(reversed(objects[key]))
    monkeypatch.setattr(store, "remove", _refuse)
    fetched(again, text(1, 8))
    assert again.found(text(1, 8)) == 5 * PAGE


def test_a_store_that_fails_to_read_is_not_asked_again(
    url: str, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(opened(rigs, url), text(1, 8))
    again, store = gated(rigs, url, ())
    monkeypatch.setattr(store, "read", lambda keys, targets: _refuse(keys))
    fetch = fetched(again, text(1, 8))
    assert (fetch.outcome, fetch.tokens, store.asked["exists"]) == ("failed", 0, 1)


def _refuse(keys: Sequence[bytes]) -> int:
    raise StoreError("nothing is removed here")


def test_a_read_that_ends_while_it_is_looked_at_has_brought_everything(
    url: str, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(opened(rigs, url), text(1, 8))
    again, store = gated(rigs, url)
    fetch = again.cache.storage.fetch(again.cache.prompt(text(1, 8)))
    assert fetch is not None
    until(lambda: bool(again.cache.poll()) and store.asked["read"] > 0)
    whether_over = Reading.over.fget
    assert whether_over is not None

    def over(reading: Reading) -> bool:
        store.gate.set()
        until(lambda: bool(whether_over(reading)))
        return True

    monkeypatch.setattr(Reading, "over", property(over))
    settle(again)
    assert (fetch.outcome, fetch.looks) == ("fetched", 1)


def test_a_fetch_that_is_over_keeps_nothing_that_grows_with_its_prompt(
    url: str, rigs: list[Rig]
) -> None:
    stored(opened(rigs, url), text(1, 8))
    again, store = gated(rigs, url)
    first, behind = (again.cache.storage.fetch(again.cache.prompt(text(1, 8))) for _ in range(2))
    assert first is not None and behind is not None
    until(lambda: bool(again.cache.poll()) and behind.stage is Stage.BEHIND)
    behind.stop()
    again.cache.poll()
    store.gate.set()
    settle(again)
    for fetch in (first, behind):
        assert fetch.over
        kept = (fetch.lookup, fetch.leader, fetch.reading, fetch.order)
        assert kept == (None,) * 4 and not fetch.keys and not fetch.asked


@pytest.mark.parametrize("alike", [True, False])
def test_a_prompt_that_is_not_stored_waits_for_no_other(
    url: str, rigs: list[Rig], alike: bool
) -> None:
    many = range(1, MAX_OPEN + 5)
    first = opened(rigs, url)
    for number in many:
        stored(first, text(number, 1))
    again, store = gated(rigs, url, host=80)
    for number in many:
        again.cache.storage.fetch(again.cache.prompt(text(1 if alike else number, 1)))
    until(lambda: bool(again.cache.poll()) and store.asked["exists"] == len(many))
    cold = again.cache.storage.fetch(again.cache.prompt(text(90, 4)))
    assert cold is not None
    until(lambda: bool(again.cache.poll()) and cold.over)
    assert cold.outcome == "nothing"
    store.gate.set()
    settle(again)


def test_what_the_device_has_is_not_fetched(url: str, rigs: list[Rig]) -> None:
    stored(opened(rigs, url), text(1, 8))
    again = opened(rigs, url, write_policy="write_back")
    again.remember(text(1, 3))
    prompt = again.cache.prompt(text(1, 8))
    again.cache.storage.fetch(prompt)
    settle(again)
    stats = again.cache.storage.stats()
    assert stats is not None and stats.fetched_pages == 5
    assert again.cache.match(prompt).by_tier == {Tier.DEVICE: 3 * PAGE, Tier.STORAGE: 5 * PAGE}


@pytest.mark.parametrize("landed", [True, False])
def test_what_was_computed_while_it_was_fetched_is_not_there_twice(
    landed: bool, url: str, rigs: list[Rig]
) -> None:
    """Also where its copy to the host is in flight when the fetch is adopted."""
    stored(opened(rigs, url), text(1, 8))
    again, store = gated(rigs, url)
    fetch = again.cache.storage.fetch(again.cache.prompt(text(1, 8)))
    assert fetch is not None
    while not store.asked["read"]:
        again.cache.poll()
    again.remember(text(1, 8))
    if landed:
        again.settle()
    store.gate.set()
    while not fetch.over:
        again.cache.poll()
    assert again.problems() == []
    store.clear()
    settle(again)
    assert again.problems() == []
    assert landed or store.status().objects == 0, "what landed there a second time was stored"
    assert again.cache.index.resident_pages(Tier.HOST, "kv") == 8
    assert again.cache.index.free_pages(Tier.HOST, "kv") == 64 - 8


def test_what_follows_on_pages_in_quarantine_is_not_adopted() -> None:
    rig = Rig(FULL, host=16, device=16)
    rig.remember(text(1, 4))
    rig.settle()
    index, prompt = rig.cache.index, rig.cache.prompt(text(1, 8))
    lease = index.pin(index.match(prompt, Tier.HOST))
    arriving = index.take(lease, [WantedPages("kv", page) for page in range(4, 8)])
    assert arriving is not None
    rig.quarantine(prompt)
    index.adopt(arriving, arriving.taken[:4], [()] * 4)
    index.forgo(arriving)
    assert rig.found(text(1, 8)) == 0 and index.free_pages(Tier.HOST, "kv") == 16
    rig.end()


def test_half_an_object_is_not_taken_for_the_whole_one_that_was_read_before(
    url: str, rigs: list[Rig]
) -> None:
    stored(opened(rigs, url), text(1, 1))
    again = opened(rigs, url)
    fetched(again, text(1, 1))
    again.cache.flush(Tier.HOST)
    objects = _SHARED[url.partition(":")[2], again.cache.storage.space]
    (key,) = keys_of(again, text(1, 1))
    objects[key] = objects[key][:40]
    fetched(again, text(1, 1))
    stats = again.cache.storage.stats()
    assert again.found(text(1, 1)) == 0 and stats is not None and stats.objects["corrupt"] == 1
    assert key not in objects, "what is corrupt is removed"


def test_what_the_store_has_is_not_written_again(url: str, rigs: list[Rig]) -> None:
    stored(opened(rigs, url), text(1, 8))
    again, store = gated(rigs, url, ())
    stored(again, text(1, 8))
    stats = again.cache.storage.stats()
    assert stats is not None and stats.stored_pages == stats.objects["known"] == 8
    assert store.asked["write"] == 0
