"""Everything at once, with stores that come and go and go wrong.

The traffic of `test_concurrency`, with fetches that are stopped, overtaken or in quarantine, stores
that are attached, replaced and detached at any moment, shared with another cache or not, and whose
calls raise, hang, linger or bring wrong bytes. After every step all counts of the tree balance, and
every page that can be found, on either tier, is right byte by byte.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import pytest

from kvtide.cache import FetchPatience, Match, Namespace, Supplement
from kvtide.cache.fetching import Fetch
from kvtide.index import Prompt
from kvtide.index.keys import TOKEN_BYTES, Hidden
from kvtide.spec import ModelMemory
from kvtide.storage import open_store
from kvtide.testing.faulty_store import Draw, Fault, FaultyStore
from tests.cache.building import TIERS, PageName, page_names
from tests.cache.memories import ALL_MEMORIES, PAGE
from tests.cache.stores import new_url
from tests.cache.test_concurrency import LONG, WRITE_POLICIES, Traffic

PATIENCE = (
    FetchPatience("wait_complete", min_tokens=1),
    FetchPatience("timeout", base_s=0.01, per_1k_s=0.0, min_tokens=PAGE),
)
RANDOM_FAULTS = [fault for fault in Fault if fault is not Fault.BLOCK]


class StoredTraffic(Traffic):
    """One of the caches that share `urls`. `others`: what all of them committed."""

    def __init__(
        self,
        memory: ModelMemory,
        write_policy: str,
        seed: int,
        urls: tuple[str, ...],
        others: set[PageName] | None = None,
    ) -> None:
        super().__init__(memory, write_policy, seed)
        self.urls = urls
        self.others = others
        self.fetches: list[Fetch] = []
        self.supplements: list[Supplement] = []
        self.stores: list[FaultyStore] = []
        self.met: Counter[str] = Counter()
        self.loose: set[PageName] = set()
        self._quarantine, self.rig.quarantine = self.rig.quarantine, self._watched
        self.attach()

    def options(self) -> dict[str, Any]:
        host = self.chance.choice((1, 8, 20, 40, 40))
        return {"patience": self.chance.choice(PATIENCE), "host": host}

    def verbs(self) -> dict[Callable[[], None], float]:
        blocked = any(store.waiting for store in self.stores)
        return {
            **super().verbs(),
            self.fetch: 16, self.nap: 12, self.poll: 20, self.stop: 1.5 * bool(self.fetches),
            self.attach: 0.5, self.detach: 0.2, self.block: 1, self.unblock: 4 * blocked,
            self.spoil: 0.6, self.write_late: 2, self.remember: 10, self.forget_pages: 10,
            self.quarantine: 0.8, self.supplement: 8, self.stop_supplement: 1,
            self.recompute: 4,
        }  # fmt: skip

    # -- storage ----------------------------------------------------------------------------

    def fetch(self) -> None:
        prompt = super()._prompt()
        if self.chance.random() < 0.6:
            prompt = self.cache.prompt(self.document, prompt.namespace)
        fetch = self.cache.storage.fetch(prompt, self.chance.choice((0.0, 1.0, 1e-9)))
        if fetch is not None:
            self.fetches.append(fetch)

    def supplement(self) -> None:
        """Of the last document, or of what a request reads."""
        prompts = [running.lease.prompt for running in self.running]
        prompt = self.chance.choice([*prompts, self.cache.prompt(self.document)])
        self.supplements.append(self.cache.supplements.begin(prompt))

    def stop_supplement(self) -> None:
        if self.supplements:
            self.supplements.pop(self.chance.randrange(len(self.supplements))).stop()

    def _prompt(self) -> Prompt:
        """Often one that was fetched, or is being fetched right now."""
        fetches = [fetch for fetch in self.fetches if fetch.over or self.chance.random() < 0.1]
        if not fetches or self.chance.random() < 0.3:
            return super()._prompt()
        fetch = self.chance.choice(fetches)
        self.fetches.remove(fetch)
        return fetch.prompt

    def _judge(self, match: Match) -> None:
        """Others have stored what they committed. A store has one object for a page, whatever the
        token behind it, which a draft's pages alone depend on."""
        known = self.committed | (self.loose if self.others is None else self.others)
        stored = {self._stored_as(name) for name in known}
        names = {name for name in page_names(match.prompt) if self._stored_as(name) in stored}
        self.committed |= names
        super()._judge(match)

    def _stored_as(self, page: PageName) -> PageName:
        namespace, packed = page
        return namespace, packed[: len(packed) - TOKEN_BYTES * self.cache.memory.holdback]

    def _watched(self, prompt: Prompt) -> int:
        """Quarantine; what neither the prompt has nor a tier knows of the branch, a store keeps."""
        if isinstance(prompt.namespace, Hidden):
            return self._quarantine(prompt)
        known = {page.key for page in self.cache.index.keys_below(prompt)}
        known |= set(self._keys(prompt))
        gone = [name for name in self.committed if self._keys(name)[:1] == self._keys(prompt)[:1]]
        self.loose |= set(gone)
        self.loose -= {name for name in self.loose if self._keys(name)[-1] in known}
        return self._quarantine(prompt)

    def _keys(self, page: PageName | Prompt) -> list[bytes]:
        """The keys of all pages of a prompt, or of those up to a page."""
        if not isinstance(page, Prompt):
            namespace, packed = page
            assert isinstance(namespace, Namespace)
            page = self.cache.prompt(packed, namespace)
        return [key for key, _ in self.cache.index.page_keys(page)]

    def _committed(self, running) -> None:
        pending = list(running.pending)
        super()._committed(running)
        if self.others is not None and not running.hidden:
            self.others.update(pending)

    def remember(self) -> None:
        """A request computes a whole document, and it has the time to be stored."""
        self.document = self.chance.choice(self.documents)
        self._remember()

    def recompute(self) -> None:
        """One that uses no draft computes what a store may have with it."""
        self.forget_pages()
        optional = [p.name for p in self.rig.memory.pools if p.follows and not p.reuse.required]
        self._remember(optional)

    def _remember(self, without: Collection[str] = ()) -> None:
        while self.running:
            self.finish()
        lease = self.rig.begin(self.document)
        if lease is None:
            return
        self.rig.settle()
        if not lease.failed:
            self.rig.compute(lease, without=without)
            names = page_names(lease.prompt)
            self.committed.update(names)
            if self.others is not None:
                self.others.update(names)
        self.cache.release(lease)
        self.rig.settle()
        self.nap()

    def forget_pages(self) -> None:
        """Only the store has them from now on."""
        for tier in TIERS:
            self.cache.flush(tier)

    def stop(self) -> None:
        self.chance.choice(self.fetches).stop()

    def attach(self) -> None:
        url = self.chance.choice(self.urls)
        draw = Draw(self.chance.random(), 0.0, RANDOM_FAULTS)
        inner = open_store(url, self.cache.storage.space)
        self.stores.append(FaultyStore(inner, draw, slow_s=0.001, lingers_s=0.02))
        self.cache.storage.attach(self.stores[-1])
        self.cache.storage.stores[-1].link._batch_bytes = self.chance.choice((1, 500, 1 << 20))
        draw.fraction = self.chance.choice((0.0, 0.1, 0.1, 0.3))
        self.stores[-1].next("read", *self.chance.sample((Fault.SHORT, Fault.FLIP, Fault.SLOW), 1))

    def detach(self) -> None:
        self.cache.storage.detach(self.chance.choice((0.0, 0.01, 5.0)))

    def block(self) -> None:
        call = self.chance.choice(("exists", "read", "read", "write", "remove"))
        wrong = (Fault.SHORT, Fault.FLIP) if call == "read" else ()
        self.chance.choice(self.stores).next(call, self.chance.choice((Fault.BLOCK, *wrong)))

    def unblock(self) -> None:
        for store in self.stores:
            store.release()

    def spoil(self) -> None:
        """Something happens to an object in the store."""
        objects = self.stores[-1]._store._objects
        for key in self.chance.sample(sorted(objects), min(len(objects), 2)):
            content = objects.get(key, b"?")
            at = self.chance.randrange(len(content))
            objects[key] = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    def write_late(self) -> None:
        self.chance.choice(self.stores).write_late(0xDD)

    def nap(self) -> None:
        time.sleep(self.chance.choice((0.0002, 0.0002, 0.002)))

    # -- what is met ------------------------------------------------------------------------

    def step(self) -> str:
        verb = super().step()
        for fetch in self.fetches:
            self.met[fetch.stage.name if not fetch.over else fetch.outcome] += 1
        storage, tree = self.cache.storage, self.cache.index.tree
        self.met["two stores"] += len(storage.stores) > 1
        self.met["departures"] += bool(tree.departures)
        for one in storage.stores:
            self.met[one.state.value] += 1
            self.met["held by a call"] += sum(1 for _ in one.fetches.leaving)
            self.met["removals"] += len(one.removals)
        return verb

    def end(self) -> None:
        for store in self.stores:
            store.heal()
        for one in self.cache.storage.stores:
            stats = one.stats()
            self.met.update(stored=stats.stored_pages, dropped=stats.dropped_pages)
            self.met.update(failed=stats.failed_pages, supplements=stats.supplements)
        self.met["supplements loaded"] += self.cache.stats().moved_pool_pages.get(
            ("load", "draft"), 0
        )
        self.cache.storage.detach(5.0)
        deadline = time.monotonic() + 60
        while self.cache.unsettled:
            assert time.monotonic() < deadline, "storage does not come to rest"
            self.nap()
            self.rig.settle()
            assert self.rig.problems() == []
        assert not self.cache.storage.stores
        assert all(store.calls["close"] == 1 for store in self.stores)
        for store in self.stores:
            self.met.update(fault.name for (_, fault), n in store.met.items() for _ in range(n))
        super().end()


def play(traffics: list[StoredTraffic], steps: int, seed: int) -> Counter[str]:
    chance, done = random.Random(seed), []
    for _ in range(steps):
        traffic = chance.choice(traffics)
        done.append(traffic.step())
        assert traffic.problems() == [], done[-12:]
    for traffic in traffics:
        traffic.end()
    return sum((traffic.met for traffic in traffics), Counter())


SEEDS = range(30 if LONG else 1)
CASES = [(name, policy) for name in ALL_MEMORIES for policy in WRITE_POLICIES[:3]]


@pytest.mark.quick
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "policy"), CASES)
def test_everything_in_any_order_with_a_store_of_its_own(name: str, policy: str, seed: int) -> None:
    """What is in quarantine never comes back: no other cache could have stored it."""
    urls = (new_url(),)
    play([StoredTraffic(ALL_MEMORIES[name], policy, seed, urls)], 300, seed)


@pytest.mark.quick(name=["full", "v4_drafted", "window_and_state"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALL_MEMORIES)
def test_everything_in_any_order_with_stores_that_caches_share(name: str, seed: int) -> None:
    urls, others = (new_url(), new_url()), set[PageName]()
    traffics = [
        StoredTraffic(ALL_MEMORIES[name], policy, seed, urls, others)
        for policy in ("write_through", "write_back")
    ]
    play(traffics, 400, seed)


WORTH_MEETING = (
    "LOOKING", "BEHIND", "READING", "fetched", "partly", "late", "nothing", "failed", "declined",
    "no_room", "discarded", "two stores", "departures", "attached", "leaving", "closing",
    "held by a call", "removals", "stored", "dropped", "failed", *(fault.name for fault in Fault),
)  # fmt: skip


@pytest.mark.full
def test_the_traffic_meets_what_it_is_about() -> None:
    """What is met depends on threads, too: so it plays on until it has met everything."""
    met: Counter[str] = Counter()
    missing = list(WORTH_MEETING)
    for seed in range(100):
        memory = ALL_MEMORIES[("full", "window", "recurrent")[seed % 3]]
        urls = (new_url(),)
        met += play([StoredTraffic(memory, "write_through", seed, urls)], 400, seed)
        missing = [what for what in WORTH_MEETING if not met[what]]
        if not missing:
            break
    assert missing == [], met
