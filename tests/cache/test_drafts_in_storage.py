"""A store's target pages are found whatever the draft is; a draft's pages by its own server alone.

Caches follow each other over one folder, as servers do that are started again with another draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide.cache.hardware import formats, space
from kvtide.spec import ModelMemory, Tier, with_draft
from kvtide.storage import Store, open_store
from kvtide.testing.faulty_store import Fault
from tests.cache.building import Rig, text
from tests.cache.memories import DRAFTED, FULL, PAGE, V4, V4_DRAFTED, WINDOW
from tests.cache.stores import faulty, fetched, in_store, keys_of, opened, settle, stored

PAGES = 6
OTHER_SHAPE = with_draft(WINDOW, FULL)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store?cap=64MB&floor=0"


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.end()


def server(
    rigs: list[Rig], url: str, memory: ModelMemory = DRAFTED, draft: bytes = b"d", **more: Any
) -> Rig:
    """The server before it has ended: its store is closed."""
    for rig in rigs:
        rig.end()
    rigs.clear()
    return opened(rigs, url, memory, draft_fingerprint=draft, **more)


def drafts(rig: Rig, tokens: list[int]) -> list[bool]:
    """Fetch a prompt: which of its pages carry a draft. All bytes are read."""
    assert fetched(rig, tokens).outcome == "fetched"
    lease = rig.started(tokens)
    rig.settle()
    pages = (len(tokens) - 1) // PAGE
    assert lease.committed_pages == pages and rig.misread(lease) == []
    carried = [False] * pages
    if "draft" in {pool.name for pool in rig.memory.pools}:
        carried = rig.cache.carries(lease, "draft").tolist()
    rig.cache.release(lease)
    assert rig.problems() == []
    return carried


@pytest.mark.parametrize("memory", [DRAFTED, V4_DRAFTED], ids=["drafted", "v4_drafted"])
def test_the_same_draft_finds_target_and_draft(rigs, url, memory) -> None:
    stored(server(rigs, url, memory), text(1, PAGES))
    tokens = text(1, PAGES)
    rig = server(rigs, url, memory)
    assert fetched(rig, tokens).outcome == "fetched"
    lease = rig.started(tokens)
    rig.settle()
    there = rig.cache.page_table(lease, memory.pool("draft").follows or "")[:PAGES] >= 0
    assert there.any() and (rig.cache.carries(lease, "draft") == there).all()
    assert rig.misread(lease) == []
    rig.cache.release(lease)


@pytest.mark.parametrize(
    ("filled", "asked"),
    [
        pytest.param((DRAFTED, b"d"), (WINDOW, b""), id="with, then without"),
        pytest.param((WINDOW, b""), (DRAFTED, b"d"), id="without, then with"),
        pytest.param((DRAFTED, b"d"), (DRAFTED, b"e"), id="other weights"),
        pytest.param((DRAFTED, b"d"), (OTHER_SHAPE, b"d"), id="other shape"),
    ],
)
def test_another_draft_finds_the_target_alone(rigs, url, filled, asked) -> None:
    first = server(rigs, url, *filled)
    stored(first, text(1, PAGES))
    again = server(rigs, url, *asked)
    assert again.cache.storage.space == first.cache.storage.space
    assert drafts(again, text(1, PAGES)) == [False] * PAGES
    counts = again.cache.storage.stats().objects
    assert not counts.get("corrupt") and not counts.get("missing")


def test_the_drafts_of_two_servers_lie_side_by_side(rigs, url) -> None:
    for draft in (b"d", b"e"):
        rig = server(rigs, url, draft=draft)
        stored(rig, text(1, PAGES))
    counts = rig.cache.storage.stats().objects
    assert counts["known"] > 0 and counts["written"] == PAGES, "the target's are there"
    for draft in (b"d", b"e"):
        assert drafts(server(rigs, url, draft=draft), text(1, PAGES)) == [True] * PAGES


def test_another_token_after_a_page_finds_that_page_without_its_draft(rigs, url) -> None:
    stored(server(rigs, url), text(1, PAGES))
    other = [*text(1, PAGES, 0), 7, 7, 7]
    assert drafts(server(rigs, url), other) == [True] * (PAGES - 1) + [False]
    assert drafts(server(rigs, url), text(1, PAGES)) == [True] * PAGES


def test_a_prompt_of_whole_pages_is_found_after_any_token(rigs, url) -> None:
    """Filled without a draft: its last page was stored before the token after it was known."""
    rig = server(rigs, url, WINDOW, b"")
    stored(rig, text(1, PAGES, 0))
    assert all(in_store(rig, url, text(1, PAGES, 0)))
    assert drafts(server(rigs, url), text(1, PAGES)) == [False] * PAGES


def _spoil(rig: Rig, url: str, key: bytes, how: str) -> None:
    store: Store = open_store(url, rig.cache.storage.space)
    store.remove([key])
    if how != "removed":
        one = formats(rig.memory, rig.cache.config)["draft"]
        body = bytearray(one.bytes - (16 if how == "short" else 0))
        assert store.write([key], [memoryview(body)]) == [True]
    store.close()


@pytest.mark.parametrize("how", ["removed", "zeros", "short"])
def test_a_draft_that_is_lost_or_corrupt_costs_no_target_page(rigs, url, how) -> None:
    first = server(rigs, url)
    stored(first, text(1, PAGES))
    lost = keys_of(first, text(1, PAGES), "draft")[2]
    again = server(rigs, url)
    _spoil(again, url, lost, how)
    assert drafts(again, text(1, PAGES)) == [True, True, False, True, True, True]
    counts = again.cache.storage.stats().objects
    assert counts.get("corrupt", 0) == (how != "removed") and not counts.get("missing")
    assert counts.get("draftless", 0) == (how == "removed")
    assert not in_store(again, url, text(1, PAGES), "draft")[2], "it is removed"


def test_a_corrupt_target_page_is_not_found_and_its_draft_changes_nothing(rigs, url) -> None:
    first = server(rigs, url)
    stored(first, text(1, PAGES))
    key = keys_of(first, text(1, PAGES))[3]
    again = server(rigs, url)
    store: Store = open_store(url, again.cache.storage.space)
    store.remove([key])
    fetch = fetched(again, text(1, PAGES))
    assert fetch.over and again.found(text(1, PAGES)) < 4 * PAGE
    assert again.problems() == []
    store.close()


def test_a_server_that_ends_between_the_two_objects_leaves_the_target(rigs, url) -> None:
    """The draft's objects are refused, as by a process that is killed before it writes them."""
    rig = server(rigs, url)
    store = faulty(rig)
    draft = set(keys_of(rig, text(1, PAGES), "draft"))
    inner = store._store

    class Dying:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def write(self, keys: list[bytes], sources: list[memoryview]) -> list[bool]:
            kept = [n for n, key in enumerate(keys) if key not in draft]
            done = inner.write([keys[n] for n in kept], [sources[n] for n in kept])
            result = [False] * len(keys)
            for number, there in zip(kept, done, strict=True):
                result[number] = there
            return result

    store._store = Dying()  # type: ignore[assignment]
    stored(rig, text(1, PAGES))
    assert rig.cache.storage.stats().objects["refused"] == PAGES
    assert all(in_store(rig, url, text(1, PAGES)))
    assert not any(in_store(rig, url, text(1, PAGES), "draft"))
    assert drafts(server(rigs, url), text(1, PAGES)) == [False] * PAGES


def test_a_store_that_fails_in_between_is_tried_with_the_next_write(rigs, url) -> None:
    rig = server(rigs, url)
    faulty(rig).next("write", Fault.RAISE)
    stored(rig, text(1, PAGES))
    rig.cache.flush(Tier.DEVICE)
    rig.cache.flush(Tier.HOST)
    stored(rig, text(1, PAGES))
    assert drafts(server(rigs, url), text(1, PAGES)) == [True] * PAGES


def test_a_quarantined_prefix_takes_its_drafts_along(rigs, url) -> None:
    rig = server(rigs, url)
    other = [*text(1, PAGES, 0), 7, 7]
    for tokens in (text(1, PAGES), other, text(2, PAGES)):
        stored(rig, tokens)
    assert all(in_store(rig, url, other, "draft"))
    rig.quarantine(rig.cache.prompt(text(1, PAGES)))
    settle(rig)
    for tokens in (text(1, PAGES), other):
        for pool in ("kv", "swa", "draft"):
            assert not any(in_store(rig, url, tokens, pool))
    assert all(in_store(rig, url, text(2, PAGES), "draft"))


def test_a_first_page_is_quarantined_whatever_comes_after_it(rigs, url) -> None:
    rig = server(rigs, url)
    other = [*text(1, 1, 0), 7, *text(3, 3)]
    for tokens in (text(1, PAGES), other):
        stored(rig, tokens)
    rig.quarantine(rig.cache.prompt(text(1, PAGES)))
    assert rig.cache.storage.fetch(rig.cache.prompt(other)) is None, "until it is removed"
    settle(rig)
    assert rig.found(other) == rig.found(text(1, PAGES)) == 0
    assert not any(in_store(rig, url, other))


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_draft_that_comes_later_is_added_in_every_tier(rigs, url, policy) -> None:
    options = {"write_policy": policy}
    rig = server(rigs, url, **options)
    tokens = text(1, PAGES, 2)
    late = rig.started(tokens, slowest=Tier.DEVICE)
    lease = rig.started(tokens)
    rig.compute(lease, without=("draft",))
    rig.cache.release(lease)
    rig.cache.release(rig.started(tokens))  # For the selective policy: it is found once more.
    if policy == "write_back":
        rig.cache._in_flight.demote("kv", 2 * PAGES)
        rig.cache._in_flight.demote("swa", 2 * PAGES)
        _reload(rig, tokens)
    settle(rig)
    assert rig.found(tokens, Tier.DEVICE) == PAGES * PAGE
    rig.compute(late)
    assert rig.cache.carries(late, "draft").all() and rig.misread(late) == []
    rig.cache.release(late)
    rig.cache.release(rig.started(tokens))
    while policy == "write_back" and rig.cache._in_flight.demote("kv", 2 * PAGES):
        rig.settle()
    settle(rig)
    rig.cache.flush(Tier.DEVICE)
    lease = rig.started(tokens)
    rig.settle()
    assert rig.cache.carries(lease, "draft").all(), "from the host"
    rig.cache.release(lease)
    written = rig.cache.storage.stats().objects["written"]
    assert all(in_store(rig, url, tokens, "draft")[:PAGES])
    again = server(rigs, url, **options)
    assert drafts(again, tokens) == [True] * PAGES
    assert written == len(_objects(again, url, tokens)), "no object was written twice"


def _reload(rig: Rig, tokens: list[int]) -> None:
    rig.settle()
    lease = rig.started(tokens)
    rig.settle()
    rig.cache.release(lease)


def _objects(rig: Rig, url: str, tokens: list[int]) -> list[bytes]:
    """The keys of a prompt's objects that the store has."""
    return [
        key
        for pool in ("kv", "swa", "draft")
        for key, there in zip(
            keys_of(rig, tokens, pool), in_store(rig, url, tokens, pool), strict=True
        )
        if there
    ]


def test_spaces_are_those_of_the_target(rigs, url) -> None:
    rig = server(rigs, url)
    config = rig.cache.config
    for drafted, plain in ((DRAFTED, WINDOW), (V4_DRAFTED, V4)):
        assert space(drafted, config) == space(plain, config)
        for ranks in (1, 2):
            pairs = zip(drafted.stages(ranks), plain.stages(ranks), strict=True)
            assert all(space(a, config) == space(b, config) for a, b in pairs)
    assert space(WINDOW, config) != space(V4, config)
