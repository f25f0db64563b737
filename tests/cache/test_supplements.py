"""Pages that are kept without a draft get it from the host and from storage, and no request waits.

`Rig` compares every byte: a page that counts as drafted has the draft of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide.cache import Lease
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Reuse, Tier, with_draft
from kvtide.storage import Store, open_store
from kvtide.testing.faulty_store import Fault
from kvtide.transfer.strided import Way
from tests.cache.building import Rig, text
from tests.cache.memories import DRAFTED, PAGE, WINDOW
from tests.cache.stores import attach, begun, faulty, keys_of, opened, settle, stored, until

PAGES = 6
TOKENS = text(1, PAGES)
Rigs = list[Rig]

_DRAFT_WINDOW = PoolSpec(
    "kv", (0,), Entry((Field("x", (6,), DType.UINT8),)), reuse=Reuse(2 * PAGE - 1)
)
WINDOW_DRAFTED = with_draft(WINDOW, ModelMemory("draft", PAGE, (_DRAFT_WINDOW,), layers=1))
"""Whose draft follows the windows."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store?cap=64MB&floor=0"


@pytest.fixture
def rigs() -> Iterator[Rigs]:
    made: Rigs = []
    yield made
    for rig in made:
        rig.end()


def server(
    rigs: Rigs, url: str, memory: ModelMemory = DRAFTED, draft: bytes = b"d", **more: Any
) -> Rig:
    """The server before it has ended: its store is closed."""
    for rig in rigs:
        rig.end()
    rigs.clear()
    return opened(rigs, url, memory, draft_fingerprint=draft, **more)


def computed(rig: Rig, tokens: list[int] = TOKENS, without: tuple[str, ...] = ("draft",)) -> None:
    """Have a prompt on the device, whatever the host has of it."""
    lease = rig.started(tokens, slowest=Tier.DEVICE)
    assert lease.cached_tokens == 0
    rig.compute(lease, without=without)
    rig.cache.release(lease)
    settle(rig)


def restarted(rigs: Rigs, url: str, memory: ModelMemory = DRAFTED, **more: Any) -> Rig:
    """A server whose store has a prompt with its draft, and whose device and host have it
    without."""
    stored(server(rigs, url, memory), TOKENS)
    rig = server(rigs, url, memory, **more)
    computed(rig)
    assert not any(carried(rig))
    return rig


def supplemented(rig: Rig, tokens: list[int] = TOKENS) -> None:
    rig.cache.supplements.begin(rig.cache.prompt(tokens))
    settle(rig)


def carried(rig: Rig, tokens: list[int] = TOKENS) -> list[bool]:
    """Which pages the device has with a draft. All bytes that a request would read are compared."""
    lease = rig.started(tokens)
    rig.settle()
    found = _carried(rig, lease)
    assert rig.misread(lease) == [] and rig.problems() == []
    rig.cache.release(lease)
    settle(rig)
    return found


def _carried(rig: Rig, lease: Lease) -> list[bool]:
    return rig.cache.carries(lease, "draft").tolist()


def from_host(rig: Rig) -> int:
    return rig.cache.stats().moved_pool_pages.get(("load", "draft"), 0)


def from_storage(rig: Rig) -> int:
    stats = rig.cache.stats().storage
    assert stats is not None
    return stats.supplements


# -- where it comes from ----------------------------------------------------------------------


def test_the_host_gives_the_device_what_it_lacks(rigs: Rigs, url: str) -> None:
    rig = server(rigs, url)
    stored(rig, TOKENS)
    rig.cache.flush(Tier.DEVICE)
    computed(rig)
    assert not any(carried(rig)), "the host's copy is not used by itself"
    supplemented(rig)
    assert all(carried(rig)) and (from_host(rig), from_storage(rig)) == (PAGES, 0)


def test_storage_gives_the_host_and_the_device_what_they_lack(rigs: Rigs, url: str) -> None:
    rig = restarted(rigs, url)
    supplemented(rig)
    assert all(carried(rig)) and (from_host(rig), from_storage(rig)) == (PAGES, PAGES)
    rig.cache.flush(Tier.DEVICE)
    assert all(carried(rig)), "from the host"


def test_windows_get_what_a_resume_may_read(rigs: Rigs, url: str) -> None:
    rig = restarted(rigs, url, WINDOW_DRAFTED)
    supplemented(rig)
    lease = rig.started(TOKENS)
    there = rig.cache.page_table(lease, "swa")[:PAGES] >= 0
    assert there.any() and not there.all() and _carried(rig, lease) == there.tolist()
    assert rig.misread(lease) == [] and from_host(rig) == there.sum()
    rig.cache.release(lease)


def test_pages_of_the_host_alone_are_loaded_with_what_came_before(rigs: Rigs, url: str) -> None:
    rig = restarted(rigs, url)
    rig.cache.flush(Tier.DEVICE)
    supplemented(rig)
    assert from_storage(rig) == PAGES and all(carried(rig)) and from_host(rig) == 0


def test_what_comes_while_a_page_is_loaded_follows_it(rigs: Rigs, url: str) -> None:
    rig = restarted(rigs, url)
    rig.cache.flush(Tier.DEVICE)
    lease = rig.started(TOKENS)
    rig.cache.supplements.begin(lease.prompt)
    until(lambda: bool(rig.cache.poll()) and from_storage(rig) == PAGES)
    assert lease.loading, "its copy is run by hand, and was not"
    settle(rig)
    assert all(_carried(rig, lease)) and from_host(rig) == PAGES and rig.misread(lease) == []
    rig.cache.release(lease)


def test_what_ranks_of_another_shape_stored_counts(rigs: Rigs, url: str) -> None:
    for rank in range(2):
        memory = list(DRAFTED.stages(2))[rank]
        stored(server(rigs, url, memory), TOKENS)
    rig = server(rigs, url)
    computed(rig)
    supplemented(rig)
    assert all(carried(rig)) and from_storage(rig) == PAGES


# -- what does not come -----------------------------------------------------------------------


def test_what_another_draft_wrote_is_asked_for_once(rigs: Rigs, url: str) -> None:
    stored(server(rigs, url), TOKENS)
    rig = server(rigs, url, draft=b"other")
    computed(rig)
    asked = [faulty(rig).calls["exists"]]
    for _ in range(3):
        supplemented(rig)
        asked.append(faulty(rig).calls["exists"])
    assert not any(carried(rig)) and from_storage(rig) == 0
    assert asked[0] < asked[1] == asked[2] == asked[3]


def test_another_store_is_asked_anew(rigs: Rigs, url: str, tmp_path: Path) -> None:
    stored(server(rigs, url), TOKENS)
    rig = server(rigs, f"file://{tmp_path}/empty?cap=64MB&floor=0")
    computed(rig)
    supplemented(rig)
    assert not any(carried(rig))
    attach(rig, url)
    supplemented(rig)
    assert all(carried(rig)) and from_storage(rig) == PAGES


def test_a_look_up_that_takes_too_long_is_given_up(rigs: Rigs, url: str) -> None:
    rig = restarted(rigs, url, transfer_timeout_s=0.05)
    faulty(rig).next("exists", Fault.BLOCK)
    rig.cache.supplements.begin(rig.cache.prompt(TOKENS))
    until(lambda: bool(rig.cache.poll()) and not len(rig.cache.supplements))
    assert faulty(rig).waiting == 1 and not rig.cache.storage.at_work
    faulty(rig).release()
    settle(rig)
    assert not any(carried(rig))


def test_a_store_that_fails_is_asked_again(rigs: Rigs, url: str) -> None:
    rig = restarted(rigs, url)
    for call in ("exists", "read"):
        faulty(rig).next(call, Fault.RAISE)
        supplemented(rig)
        assert not any(carried(rig)) and from_storage(rig) == 0
    supplemented(rig)
    assert all(carried(rig))


@pytest.mark.parametrize("how", ["lost", "corrupt"])
def test_an_object_that_is_lost_or_corrupt_costs_its_page_alone(
    how: str, rigs: Rigs, url: str
) -> None:
    rig = restarted(rigs, url)
    key = keys_of(rig, TOKENS, "draft")[2]
    if how == "corrupt":
        _overwrite(rig, url, key)
    else:
        _open(rig, url).remove([key])
    supplemented(rig)
    assert carried(rig) == [page != 2 for page in range(PAGES)]


def _open(rig: Rig, url: str) -> Store:
    return open_store(url, rig.cache.storage.space)


def _overwrite(rig: Rig, url: str, key: bytes) -> None:
    store = _open(rig, url)
    size = 4096
    store.remove([key])
    assert store.write([key], [memoryview(bytearray(size))]) == [True]
    store.close()


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_pages_that_only_the_device_has_are_left_as_they_are(
    policy: str, rigs: Rigs, url: str
) -> None:
    stored(server(rigs, url), TOKENS)
    rig = server(rigs, url, write_policy=policy)
    computed(rig)
    rig.cache.flush(Tier.HOST)
    supplemented(rig)
    assert not any(carried(rig)) and from_storage(rig) == 0


def test_a_stopped_supplement_copies_no_more(rigs: Rigs, url: str) -> None:
    rig = restarted(rigs, url)
    supplement = rig.cache.supplements.begin(rig.cache.prompt(TOKENS))
    supplement.stop()
    settle(rig)
    assert from_storage(rig) == PAGES and from_host(rig) == 0, "what was asked for comes"
    assert len(rig.cache.supplements) == 0


# -- nothing waits for it ---------------------------------------------------------------------


def test_a_request_is_served_while_the_store_does_not_answer(rigs: Rigs, url: str) -> None:
    rig = restarted(rigs, url)
    faulty(rig).next("read", Fault.BLOCK)
    rig.cache.supplements.begin(rig.cache.prompt(TOKENS))
    until(lambda: bool(rig.cache.poll()) and faulty(rig).waiting == 1)
    lease = rig.started(TOKENS)
    assert not lease.loading and lease.cached_tokens == PAGES * PAGE
    assert not any(_carried(rig, lease)) and rig.misread(lease) == []
    rig.cache.release(lease)
    for tier in (Tier.DEVICE, Tier.HOST):
        rig.cache.flush(tier)
    assert rig.cache.stats().pages[Tier.HOST, "kv"].resident == PAGES, "it is read to"
    faulty(rig).release()
    settle(rig)
    computed(rig)
    supplemented(rig)
    assert all(carried(rig)) and from_storage(rig) == PAGES


def test_other_prompts_are_fetched_while_it_is_read(rigs: Rigs, url: str) -> None:
    stored(server(rigs, url), text(2, PAGES))
    rig = restarted(rigs, url)
    faulty(rig).next("read", Fault.BLOCK)
    rig.cache.supplements.begin(rig.cache.prompt(TOKENS))
    until(lambda: bool(rig.cache.poll()) and faulty(rig).waiting == 1)
    fetch = begun(rig, text(2, PAGES))
    until(lambda: bool(rig.cache.poll()) and fetch.over)
    assert fetch.outcome == "fetched" and faulty(rig).waiting == 1
    faulty(rig).release()
    settle(rig)
    assert all(carried(rig))


def test_a_copy_waits_for_loads_and_is_never_part_of_one(rigs: Rigs, url: str) -> None:
    rig = restarted(rigs, url)
    rig.remember_on_host(text(2, 3))
    computed(rig)
    lane, loading = rig.hands[Way.LOAD], rig.started(text(2, 3))
    rig.cache.supplements.begin(rig.cache.prompt(TOKENS))
    until(lambda: bool(rig.cache.poll()) and from_storage(rig) == PAGES)
    assert len(lane.jobs) == 1 and loading.loading
    lane.run(1)
    rig.cache.poll()
    assert not loading.loading and len(lane.jobs) == 1, "the supplement's copy"
    rig.cache.release(loading)
    rig.cache.flush(Tier.DEVICE)
    behind = rig.started(text(2, 3))
    assert len(lane.jobs) == 2 and len(behind.transfers) == 1
    settle(rig)
    rig.cache.release(behind)
    assert all(carried(rig))


def test_every_prompt_has_its_turn(rigs: Rigs, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.cache.supplements.supplements.MAX_LOOKS", 1)
    rig = server(rigs, url)
    every = [text(number, 2) for number in range(1, 5)]
    for tokens in every:
        stored(rig, tokens)
    rig.cache.flush(Tier.DEVICE)
    for tokens in every:
        computed(rig, tokens)
    loading = rig.started(text(9, 1))
    for tokens in every:
        rig.cache.supplements.begin(rig.cache.prompt(tokens))
    rig.cache.release(loading)
    settle(rig)
    assert all(all(carried(rig, tokens)) for tokens in every)


def test_a_copy_brings_little_at_a_time(
    rigs: Rigs, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * DRAFTED.pool("draft").page_bytes(PAGE)
    monkeypatch.setattr("kvtide.cache.supplements.supplements.MAX_COPY_BYTES", size)
    rig = restarted(rigs, url)
    rig.cache.supplements.begin(rig.cache.prompt(TOKENS))
    until(lambda: bool(rig.cache.poll()) and from_storage(rig) == PAGES)
    counts = []
    while rig.hands[Way.LOAD].jobs:
        rig.hands[Way.LOAD].run(1)
        rig.cache.poll()
        counts.append(from_host(rig))
    assert counts == [2, 4, 6] and all(carried(rig))


# -- what ends in between ---------------------------------------------------------------------


def test_a_copy_that_fails_leaves_the_pages_as_they_were(rigs: Rigs, url: str) -> None:
    rig = restarted(rigs, url)
    rig.cache.supplements.begin(rig.cache.prompt(TOKENS))
    until(lambda: bool(rig.cache.poll()) and from_storage(rig) == PAGES)
    rig.hands[Way.LOAD].run_raising()
    rig.cache.poll()
    assert from_host(rig) == 0 and rig.problems() == []
    settle(rig)
    assert all(carried(rig)), "it is tried again"


def test_a_prefix_in_quarantine_gets_nothing(rigs: Rigs, url: str) -> None:
    rig = restarted(rigs, url)
    faulty(rig).next("read", Fault.BLOCK)
    rig.cache.supplements.begin(rig.cache.prompt(TOKENS))
    until(lambda: bool(rig.cache.poll()) and faulty(rig).waiting == 1)
    rig.quarantine(rig.cache.prompt(TOKENS))
    assert rig.problems() == []
    faulty(rig).release()
    settle(rig)
    assert from_storage(rig) == 0 and rig.found(TOKENS) == 0


def test_a_store_is_left_when_its_calls_have_returned(rigs: Rigs, url: str) -> None:
    rig = restarted(rigs, url)
    store = faulty(rig)
    store.next("read", Fault.BLOCK)
    rig.cache.supplements.begin(rig.cache.prompt(TOKENS))
    until(lambda: bool(rig.cache.poll()) and store.waiting == 1)
    rig.cache.storage.detach(0.0)
    rig.cache.poll()
    stats = rig.cache.storage.stats()
    assert stats is not None and stats.state == "leaving"
    store.release()
    until(lambda: bool(rig.cache.poll()) and rig.cache.storage.stats() is None)
    assert not rig.cache.index.sidecars.open and rig.problems() == []
