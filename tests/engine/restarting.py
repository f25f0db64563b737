"""What the proof of restarting stands on: engines that live one after another over one store.

A `Life` is a `restoring.Stand` whose cache has a store behind it. Nothing is handed from one life
to the next but what the store keeps, and two records of what it should keep, in a `Past`:

- the ledger of what was computed goes on through all lives. So a request in a later life must
  find as much as if the engine had never ended;
- every page that was ever readable on the host, by the index's events. When a life has ended, the
  store holds just these pages; and an admission resumes at the deepest boundary that is valid with
  them and with what the life itself has, by the definition (`testing.naive`).

Which tokens count as storage's is checked against the pages that became readable while a fetch was
adopted. The store's threads are real, and waited for at every poll: what was asked of them by then
is done, so that a run is the same every time.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtide.cache import FetchPatience, Lease, Match, Progress, TieredCache
from kvtide.cache.hardware import formats
from kvtide.index import Import, Prompt
from kvtide.index.events import Event, EventKind
from kvtide.spec import ALL, ModelMemory, Tier
from kvtide.storage import ObjectFormat, Store, open_store
from kvtide.testing.naive import NaiveIndex
from kvtide.transfer.storage_requests import StorageRequest
from tests.engine.restoring import PAGE, Ledger, Stand, WatchedCache, model_of

PATIENT = FetchPatience("wait_complete", min_tokens=1)
REQUESTS_S = 30.0


class Inheritance(Ledger):
    """What was computed in all lives. Of `write_back` nothing must be found in a later one:

    what never had to leave the device was not copied, and a history loses its last pages first, so
    that the store may have the end of a conversation and not its beginning.

    lost  the store lost pages, so that it is not known from here what must be found
    """

    lost = False

    def bounds(self, memory: ModelMemory, writing: str, body: bytes) -> tuple[int, int]:
        minimum, maximum = super().bounds(memory, writing, body)
        return (0 if self.lost or writing == "write_back" else minimum), maximum


@dataclass(slots=True)
class Past:
    """What earlier lives left behind. `stored` has page keys, by anchor."""

    url: str
    ledger: Inheritance = field(default_factory=Inheritance)
    stored: dict[str, set[bytes]] = field(default_factory=dict)

    def lose(self, page: bytes, anchor: str) -> None:
        self.ledger.lost = True
        self.stored[anchor].remove(page)

    def open(self, cache: TieredCache) -> Store:
        return open_store(self.url, cache.storage.space)


def object_key(page: bytes, anchor: str) -> bytes:
    """The key of a stored page, by the definition."""
    return hashlib.sha256(page + anchor.encode()).digest()


def storage_requests(cache: TieredCache) -> Iterator[StorageRequest]:
    """What is with the store, or waits for it to have time."""
    for one in cache.storage._stores:
        for fetch in one.fetches.open:
            yield from (one for one in (fetch.lookup, fetch.reading) if one is not None)
        yield from (store.writing for store in one.storing._at_work)


def await_storage_requests(cache: TieredCache) -> None:
    """Wait until the store has done all that was asked of it."""
    deadline = time.monotonic() + REQUESTS_S
    while any(not (one.quiet or one.stopped) for one in storage_requests(cache)):
        assert time.monotonic() < deadline, "a store that never answers"
        time.sleep(0.0001)


class StoredCache(WatchedCache):
    """A watched cache with a store behind it.

    past     what the lives before left, and to which this one adds
    there    per prompt, how many of its tokens the host and the store had when it came
    brought  per prompt, the pages that became readable when its fetch was adopted
    """

    past: Past

    def attach(self, past: Past) -> None:
        self.past = past
        self.ledger = past.ledger
        for anchor in self.index.anchor_names:
            kept = past.stored.setdefault(anchor, set())
            self.naive.readable[Tier.STORAGE, anchor] = set(kept)
        self.brought: dict[Prompt, set[tuple[str, bytes]]] = {}
        self._adopting: Prompt | None = None
        self.there: dict[Prompt, int] = {}
        self._lasting = NaiveIndex(self.memory, self.storage.space)
        device = {(Tier.DEVICE, anchor): set[bytes]() for anchor in past.stored}
        self._lasting.readable = self.naive.readable | device
        self._adopt, self.index.adopt = self.index.adopt, self._adopted
        self.storage.attach(past.open(self))

    def _adopted(self, arriving: Import, count: int, absent: Collection[Any]) -> None:
        self._adopting = arriving.lease.prompt
        self._adopt(arriving, count, list(absent))
        self._adopting = None

    def _hear(self, event: Event) -> list[bytes]:
        names = super()._hear(event)
        if event.kind is EventKind.STORED and event.tier is Tier.HOST:
            self.past.stored[event.anchor].update(self._stored_keys(names))
            if self._adopting is not None:
                brought = self.brought.setdefault(self._adopting, set())
                brought.update((event.anchor, key) for key in names)
        return names

    def _stored_keys(self, names: list[bytes]) -> list[bytes]:
        """The keys under which a store has these pages."""
        if not self.memory.holdback:
            return names
        tree = self.index.tree
        nodes = (node for node in tree.walk() if not node.hidden)
        keys = {page.name: page.key for node in nodes for page in tree.page_keys(node)}
        return [keys[name] for name in names]

    def poll(self) -> Progress:
        await_storage_requests(self)
        return super().poll()

    def prompt(self, tokens: Any, *args: Any) -> Prompt:
        """A request comes: it will find what the host and the store have by now.

        Only the device drops something here, if it has no copy.
        """
        prompt = super().prompt(tokens, *args)
        self.there[prompt] = PAGE * self._lasting.boundary(_tokens(prompt))
        return prompt

    def reserve(self, match: Match, *args: Any, **more: Any) -> Lease | None:
        """Others may have computed more since it came; a fetch knows only what there was then."""
        now = PAGE * self.naive.boundary(_tokens(match.prompt))
        lease = super().reserve(match, *args, **more)
        if lease is not None and match.slowest is Tier.HOST:
            minimum = self.there.get(match.prompt, 0)
            assert minimum <= lease.cached_tokens <= now, (
                minimum,
                lease.cached_tokens,
                now,
                lease.why,
            )
        return lease

    def _expected(self, match: Match) -> dict[Tier, int]:
        """Of what is on the host, what was brought there for this prompt is storage's."""
        found = Counter(super()._expected(match))
        keys = self.naive.page_keys(_tokens(match.prompt))[: match.tokens // PAGE]
        histories = [pool.name for pool in self.memory.anchors if pool.reuse.reach is ALL]
        if not histories:
            keys, histories = keys[-1:] * len(keys), [self.memory.anchors[0].name]
        there = self.naive.readable[Tier.DEVICE, histories[0]]
        brought = self.brought.get(match.prompt, set())
        stored = sum(key not in there and (histories[0], key) in brought for key in keys)
        found.update({Tier.STORAGE: stored * PAGE, Tier.HOST: -stored * PAGE})
        return {tier: tokens for tier, tokens in found.items() if tokens}


def _tokens(prompt: Prompt) -> list[int]:
    found: list[int] = torch.frombuffer(bytearray(prompt.body), dtype=torch.int32).tolist()
    return found


class Life(Stand):
    """An engine from its start to its end, over what earlier lives stored."""

    cache: StoredCache

    def __init__(self, family: str, past: Past, **options: Any) -> None:
        super().__init__(family, watched=StoredCache, **{"patience": PATIENT, **options})
        self.past = past
        self.cache.attach(past)

    def settle(self) -> None:
        """Do all copies, and all that the store was asked."""
        super().settle()
        while self.cache.storage.at_work:
            self.cache.poll()
            super().settle()

    def end(self) -> None:
        """The life ends in good order, and the store holds just what it should."""
        self.settle()
        tree, stats = self.cache.index.tree, self.cache.storage.stats()
        assert not tree.imports and not tree.departures and stats is not None
        assert (stats.dropped_pages, stats.failed_pages, stats.waiting_pages) == (0, 0, 0)
        super().end()
        assert self.cache.storage.join(5.0), "the store was not closed"
        check_store(self.cache, self.past)


def check_store(cache: TieredCache, past: Past) -> None:
    """A store that is opened anew has the pages of the past, and no others."""
    store = past.open(cache)
    for pool in cache.memory.hot_pools:
        past.stored[pool.name] = departed(cache.memory, past, store, pool.name)
    keys = [object_key(key, anchor) for anchor, pages in past.stored.items() for key in pages]
    assert all(store.exists(keys)), "a page that was on the host is not in the store"
    marks = 1 if keys else 0  # Of the shape that stored them.
    assert store.status().objects == len(keys) + marks, "there are pages that no request computed"
    store.close()


def departed(memory: ModelMemory, past: Past, store: Store, hot: str) -> set[bytes]:
    """The pages of a hot pool that the store has, of those that were on the host.

    They are computed there, and leave with the next backup of their run. So the store has all
    whose other histories were copied to the host, and with `write_through` that is every one.
    """
    there = sorted(past.stored[hot])
    found = store.exists([object_key(page, hot) for page in there])
    kept = {page for page, exists in zip(there, found, strict=True) if exists}
    others = [one.name for one in memory.in_device_pages.anchors if one.reuse.reach is ALL]
    assert others and kept >= set.intersection(*(past.stored[name] for name in others))
    return kept


# -- meddling with what is stored --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """One page of one anchor in a store: to be lost, broken, or forged."""

    store: Store
    format: ObjectFormat
    key: bytes

    def read(self) -> bytearray:
        found = bytearray(self.format.bytes)
        assert self.store.read([self.key], [memoryview(found)]) == [len(found)]
        return found

    def remove(self) -> None:
        assert self.store.remove([self.key]) == 1

    def replace(self, found: bytearray) -> None:
        self.remove()
        assert self.store.write([self.key], [memoryview(found)]) == [True]

    def corrupt(self) -> None:
        """One bit of the payload is another."""
        found = self.read()
        found[self.format.payload_bytes // 2] ^= 0x10
        self.replace(found)

    def forge(self) -> None:
        """A number of the payload is another, and the seal says that it should be."""
        found = self.read()
        found[3] ^= 0x40
        self.format.seal(memoryview(found), self.key)
        self.replace(found)


def stored_page(cache: TieredCache, past: Past, page: bytes, anchor: str) -> Stored:
    one = formats(cache.memory, cache.config)[anchor]
    return Stored(past.open(cache), one, object_key(page, anchor))


__all__ = ["Life", "Past", "Stored", "model_of", "stored_page"]
