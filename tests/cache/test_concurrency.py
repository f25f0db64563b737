"""Everything at once, at random, against bytes that must be right and a tree that must balance.

`Traffic` does one random thing per step: requests that begin, compute in chunks, generate and are
aborted at any moment; copies that end in any order between the directions, layer by layer, or
fail in every way; sessions, prefetches, flushes. After every step all counts of the tree balance,
every readable page holds what its tokens say, every free slot is untouched, and what a lease was
promised can be read. What `match` promises was committed before, in the same namespace, and not
quarantined since; of pages in quarantine no lease reads more than it did by then.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvtide.cache import Lease, Match, Namespace, TransferError
from kvtide.index import POLICIES, Branches, CostBased, EveryPages, LastPage, Prompt
from kvtide.index.keys import TOKEN_BYTES, Hidden, pack
from kvtide.spec import ModelMemory, Tier
from kvtide.testing.faults import FaultError
from kvtide.tiers import Layout
from kvtide.transfer.lane import Lane
from kvtide.transfer.strided import Reference, Strided, Way
from kvtide.transfer.timeline import HostTimeline
from kvtide.transfer.transfers import TransferState
from tests.cache.building import HandLane, PageName, Rig, page_names, text
from tests.cache.memories import ALL_MEMORIES, PAGE, every_memory

LONG = bool(os.environ.get("KVTIDE_LONG_TESTS"))
NAMESPACES = (*[Namespace()] * 8, Namespace(adapter="a"), Namespace(cache_salt="a"))
PLACEMENTS = (LastPage, Branches, lambda: EveryPages(2), CostBased)
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back", "none")
DOCUMENTS = 5
MAX_TOKENS = 30
MAX_RUNNING = 3


@dataclass(eq=False)
class Running:
    """A request. `computed`: the pages its model has written; `pending`: not committed yet.

    `hidden`: no request finds what it commits, since it is scratch, or its prefix in quarantine.
    """

    lease: Lease
    computed: int
    pending: list[PageName] = field(default_factory=list)
    reported: bool = False
    hidden: bool = False


class Traffic:
    """`step` does one random thing; `problems` says what does not hold now."""

    def __init__(self, memory: ModelMemory, write_policy: str, seed: int) -> None:
        self.chance = chance = random.Random(f"{memory.model} {write_policy} {seed}")
        options = {
            "device": chance.choice((10, 14, 18)),
            "host": chance.choice((0, 10, 20, 30, 30, 30, 30)),
            "layouts": (chance.choice(list(Layout)), chance.choice(list(Layout))),
            "lanes": self.lanes(),
            "placement": chance.choice(PLACEMENTS)(),
            "write_policy": write_policy,
            "eviction": chance.choice(list(POLICIES)),
            "headroom": chance.choice((0.0, 0.1, 0.3)),
            "session_share": 1.0,
        }
        self.rig = Rig(memory, **options | self.options())
        self.cache = self.rig.cache
        self.flushes = 0.5 if write_policy == "write_back" else 6
        self.running: list[Running] = []
        self.committed: set[PageName] = set()
        self.documents: list[list[int]] = []
        for _ in range(DOCUMENTS):
            self.documents.append(self._document())
        self.document = self.documents[0]

    def lanes(self) -> dict[Way, Lane] | None:
        """Run by hand."""

    def options(self) -> dict[str, Any]:
        """What else the rig is made with."""
        return {}

    def verbs(self) -> dict[Callable[[], None], float]:
        """What may happen now, and how often."""
        jobs = sum(len(lane.jobs) for lane in self.rig.hands.values())
        return {
            self.begin: 16, self.go_on: 20 * bool(self.running), self.finish: 4, self.load: 2,
            self.poll: 12 if self.cache.stats().in_flight else 1, self.copy: 16 * bool(jobs),
            self.break_copy: 1.5 * bool(jobs), self.expire: bool(jobs), self.refuse: 0.4,
            self.prefetch: 2, self.keep: 1, self.forget: 2, self.flush: self.flushes,
            self.quarantine: 3 if any(r.lease.loading for r in self.running) else 0.8,
        }  # fmt: skip

    def step(self) -> str:
        verbs = self.verbs()
        (verb,) = self.chance.choices(list(verbs), list(verbs.values()))
        verb()
        return verb.__name__

    # -- requests ---------------------------------------------------------------------------

    def _document(self) -> list[int]:
        """Tokens that begin like those of another document, up to some point."""
        chance, tokens = self.chance, []
        if self.documents:
            tokens = chance.choice(self.documents)[: chance.randrange(MAX_TOKENS)]
        return tokens + [chance.randrange(9) for _ in range(MAX_TOKENS - len(tokens))]

    def _prompt(self) -> Prompt:
        """The beginning of a document, often of the last one, and a few tokens that may be new."""
        chance = self.chance
        if chance.random() < 0.6:
            self.document = chance.choice(self.documents)
        tokens = self.document[: chance.randrange(1, MAX_TOKENS)]
        tokens += [chance.randrange(2)] * chance.choice((0, 1, PAGE))
        return self.cache.prompt(tokens[:MAX_TOKENS], chance.choice(NAMESPACES))

    def begin(self) -> None:
        if len(self.running) == MAX_RUNNING:
            self.finish()
        chance, prompt = self.chance, self._prompt()
        scratch = chance.random() < 0.1
        if scratch:
            prompt = self.cache.scratch(prompt.head + prompt.body)
        match = self.cache.match(prompt, chance.choice((Tier.DEVICE, Tier.HOST, Tier.HOST)))
        self._judge(match)
        tokens = chance.choice((None, None, chance.randrange(1, prompt.tokens + 1)))
        growth, priority = chance.choice((0, 0, 2)), chance.randrange(3)
        lease = self.cache.reserve(match, tokens, growth, priority)
        if lease is None:
            return
        self._judge(self.cache.match(prompt, Tier.DEVICE))
        assert set(page_names(prompt)[: lease.committed_pages]) <= self.committed
        self.running.append(Running(lease, lease.committed_pages, hidden=scratch))
        if chance.random() < 0.7:
            self.cache.load(lease)

    def _judge(self, match: Match) -> None:
        """Nothing is promised that was not committed, and a token is left to compute."""
        pages, rest = divmod(match.tokens, PAGE)
        assert not rest and match.tokens < match.prompt.tokens
        assert set(page_names(match.prompt)[:pages]) <= self.committed
        assert sum(match.by_tier.values()) == match.tokens

    def go_on(self) -> None:
        """Generate, grow, compute a chunk and commit it; or there is nothing more to do."""
        chance, running = self.chance, self.chance.choice(self.running)
        lease = running.lease
        if chance.random() < 0.4 and lease.prompt.tokens < MAX_TOKENS:
            lease.append(self._more(lease)[: chance.randrange(1, 2 * PAGE)])
        if not self.cache.grow(lease, lease.prompt.tokens, chance.choice((0, 0, 1))):
            return
        left = min(lease.reserved_pages, len(page_names(lease.prompt))) - running.computed
        if left > 0 and not lease.failed:
            self._commit(running, running.computed + round(chance.choice((0.5, 1, 1)) * left))
        elif chance.random() < 0.5:
            self._release(running)

    def _more(self, lease: Lease) -> list[int]:
        """What the model says: often the rest of a document, which others have computed too."""
        chance, tokens = self.chance, lease.prompt.head + lease.prompt.body
        packed = [pack(document) for document in self.documents]
        rests = [rest[len(tokens) :] for rest in packed if rest.startswith(tokens)]
        if rests and chance.random() < 0.7:
            return np.frombuffer(chance.choice(rests), np.int32).tolist()
        return [chance.randrange(3)] * (2 * PAGE)

    def _commit(self, running: Running, pages: int) -> None:
        lease, names = running.lease, page_names(running.lease.prompt)
        optional = [p.name for p in self.rig.memory.pools if p.follows and not p.reuse.required]
        without = self.chance.choice(((), tuple(optional)))
        self.rig.write(lease, running.computed, pages, without)
        running.pending += names[running.computed : pages]
        running.computed = pages
        waits = lease.loading
        self.cache.commit(lease, pages * PAGE + self.rig.memory.holdback, without)
        if not waits:
            self._committed(running)

    def _committed(self, running: Running) -> None:
        if not running.hidden:
            self.committed.update(running.pending)
        running.pending = []
        assert running.lease.committed_pages == running.computed

    def finish(self) -> None:
        """At any moment: done, aborted while loading, failed."""
        if self.running:
            self._release(self.chance.choice(self.running))

    def _release(self, running: Running) -> None:
        self.running.remove(running)
        self.cache.release(running.lease)
        self.cache.release(running.lease)

    def load(self) -> None:
        if self.running:
            self.cache.load(self.chance.choice(self.running).lease)

    # -- beside requests --------------------------------------------------------------------

    def poll(self) -> None:
        progress = self.cache.poll()
        known = {running.lease.number: running for running in self.running}
        for lease in (*progress.landed, *progress.failed):
            running = known[lease.number]
            assert not running.reported, "the end of a lease's load is reported once"
            running.reported = True
            assert not lease.loading and not lease.pending
        for lease in progress.landed:
            assert not lease.failed
            self._committed(known[lease.number])
        for lease in progress.failed:
            assert lease.failed

    def prefetch(self) -> None:
        free = self._device_counts("resident")
        self.cache.prefetch(self._prompt())
        assert self._device_counts("resident") == free, "a prefetch evicted something"

    def _device_counts(self, what: str) -> dict[str, int]:
        pages = self.cache.stats().pages.items()
        return {name: getattr(n, what) for (tier, name), n in pages if tier is Tier.DEVICE}

    def keep(self) -> None:
        self.cache.sessions.keep(
            self.chance.choice("abc"), self._prompt(), self.chance.randrange(3)
        )

    def forget(self) -> None:
        self.cache.sessions.forget(self.chance.choice("abc"))

    def quarantine(self) -> None:
        """Often of what a lease reads, best of all while it is being loaded."""
        prompts = [self._prompt(), *(running.lease.prompt for running in self.running)]
        loading = [running.lease.prompt for running in self.running if running.lease.loading]
        prompt = self.chance.choice(loading or prompts)
        first = _first((prompt.namespace, prompt.packed))
        pages = self.rig.quarantine(prompt)
        gone = {name for name in self.committed if _first(name) == first}
        assert gone or not pages
        self.committed -= gone
        for running in self.running:
            names = page_names(running.lease.prompt)[: running.lease.committed_pages]
            running.hidden = running.hidden or (bool(names) and _first(names[0]) == first)
        assert self.cache.match(prompt).tokens == 0

    def flush(self) -> None:
        """Pages leave; most often all of the device's, after all leases have gone."""
        tier = self.chance.choice((*[Tier.DEVICE] * 11, Tier.HOST))
        while self.running and tier is Tier.DEVICE and self.chance.random() < 0.9:
            self.finish()
        self.cache.flush(tier)

    # -- copies -----------------------------------------------------------------------------

    def shared(self) -> bool:
        """Whether two requests wait for the same copy."""
        awaited = Counter(t for r in self.running for t in r.lease.transfers if r.lease.loading)
        return any(count > 1 for count in awaited.values())

    def _lane(self) -> HandLane:
        """One that has something to do, if there is any."""
        lanes = list(self.rig.hands.values())
        return self.chance.choice([lane for lane in lanes if lane.jobs] or lanes)

    def copy(self) -> None:
        """The next jobs of a direction, the last one perhaps in part."""
        lane = self._lane()
        lane.run(self.chance.choice((0, 1, 1, 3)))
        if lane.jobs:
            lane.run_legs(self.chance.randrange(lane.jobs[0].legs + 1))

    def break_copy(self) -> None:
        lane = self._lane()
        self.chance.choice((lane.run_halfway, lane.run_raising, lambda: lane.run_raising(2)))()

    def refuse(self) -> None:
        self._lane().refusals = 1

    def expire(self) -> None:
        self._lane().expire()

    # -- what must hold ---------------------------------------------------------------------

    def problems(self) -> list[str]:
        found = self.rig.problems()
        for lease in (running.lease for running in self.running):
            there = self.there(lease)
            if self._broken(lease):
                found += [p for layer in there for p in self._goes_on(lease, layer)]
            else:
                found += self.rig.misread(lease, there)
                for layer in there:
                    self.cache.wait(lease, layer)
        return found

    def there(self, lease: Lease) -> list[int]:
        """The layers of a lease's prefix that have arrived, as far as the lanes know."""
        copier, lane = self.cache.hardware.copier, self.rig.hands[Way.LOAD]
        tickets = [t.ticket for t in lease.transfers if not t.over]
        return [
            layer
            for group in copier.groups
            for layer in group
            if all(t is not None and lane.arrived(t, copier.leg_of(layer)) for t in tickets)
        ]

    @staticmethod
    def _broken(lease: Lease) -> bool:
        """Whether a load went wrong, reported or not."""
        tickets = [t.ticket for t in lease.transfers if t.ticket is not None]
        return lease.failed or any(ticket.error for ticket in tickets)

    def _goes_on(self, lease: Lease, layer: int) -> list[str]:
        try:
            self.cache.wait(lease, layer)
        except TransferError:
            return []
        return [f"layer {layer} of a failed load was waited for, and nothing raised"]

    def end(self) -> None:
        while self.running:
            self.finish()
        self.rig.end()


def _first(name: PageName) -> PageName:
    """The first page's own tokens, of all prompts that have this page."""
    return name[0], name[1][: PAGE * TOKEN_BYTES]


class Jittery:
    """The reference, on a machine that stutters and where copies sometimes break."""

    name = "jittery"

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._backend = Reference()

    def issue(self, works: Sequence[Strided], steps: int) -> Iterator[None]:
        for _ in self._backend.issue(works, steps):
            time.sleep(self._chance.choice((0, 0, 0.0001, 0.001)))
            fate = self._chance.random()
            if fate < 0.02:
                raise FaultError("it breaks") if fate > 0.004 else SystemExit("it ends the thread")
            yield


class ThreadedTraffic(Traffic):
    """The same requests, over lanes with threads of their own."""

    def lanes(self) -> dict[Way, Lane]:
        return {way: Lane(way.name, HostTimeline(), Jittery(self.chance)) for way in Way}

    def verbs(self) -> dict[Callable[[], None], float]:
        by_hand = (self.copy, self.break_copy, self.refuse, self.expire)
        verbs = {verb: weight for verb, weight in super().verbs().items() if verb not in by_hand}
        return {**verbs, self.nap: 4}

    def nap(self) -> None:
        time.sleep(0.001)

    def there(self, lease: Lease) -> list[int]:
        """All layers, after having waited for each; none of a load that fails or has not left."""
        if any(transfer.state is TransferState.RESERVED for transfer in lease.transfers):
            return []
        layers = [layer for group in self.cache.hardware.copier.groups for layer in group]
        try:
            for layer in layers:
                self.cache.wait(lease, layer)
        except TransferError:
            assert self._broken(lease)
            return []
        return layers


CASES = [
    (name, policy, seed)
    for seed in range(20 if LONG else 1)
    for name in ALL_MEMORIES
    for policy in WRITE_POLICIES
]
every_case = pytest.mark.parametrize(("name", "policy", "seed"), CASES)


def play(traffic: Traffic, steps: int) -> None:
    done = []
    for _ in range(steps):
        done.append(traffic.step())
        assert traffic.problems() == [], done[-12:]
    traffic.end()


@pytest.mark.quick
@every_case
def test_everything_in_any_order_keeps_tree_and_bytes_right(name, policy, seed):
    play(Traffic(ALL_MEMORIES[name], policy, seed), 500 if LONG else 200)


@pytest.mark.quick
@every_case
def test_everything_beside_real_threads_keeps_tree_and_bytes_right(name, policy, seed):
    play(ThreadedTraffic(ALL_MEMORIES[name], policy, seed), 300 if LONG else 60)


WORTH_MEETING = (
    "a commit pending", "two wait for one", "late", "load landed", "load failed",
    "backup landed", "backup failed", "refused", "skipped", "DEVICE", "HOST",
    "no prompt with these tokens was kept", "pages were given up", "pages are still arriving",
    "no checkpoint was kept further on", "scratch", "read in quarantine", "in flight in quarantine",
    "committed in quarantine", "loading in quarantine",
)  # fmt: skip


def hidden_things(traffic: Traffic) -> Counter[str]:
    """What of scratch and quarantine can be seen now."""
    met: Counter[str] = Counter()
    for running in (running for running in traffic.running if running.hidden):
        kind = "scratch" if isinstance(running.lease.prompt.namespace, Hidden) else "quarantine"
        met[kind if kind == "scratch" else "read in quarantine"] += running.computed > 0
        met["loading in quarantine"] += running.lease.loading
        commits = running.lease.committed_pages * PAGE > running.lease.cached_tokens
        met["committed in quarantine"] += kind == "quarantine" and commits
    for arrival in traffic.cache.index.arrivals.values():
        met["in flight in quarantine"] += arrival.pointless
    return met


def test_the_traffic_meets_what_it_is_about():
    """Else the tests above could pass because nothing happened in them."""
    met: Counter[str] = Counter()
    pairs = (("window", "write_through"), ("v4_drafted", "write_back"))
    for (name, policy), seed in itertools.product(pairs, range(8)):
        traffic = Traffic(ALL_MEMORIES[name], policy, seed)
        for _ in range(400):
            traffic.step()
            met["a commit pending"] += any(running.pending for running in traffic.running)
            met["two wait for one"] += traffic.shared()
            met["late"] += traffic.cache.stats().overdue
            met.update(hidden_things(traffic))
        stats = traffic.cache.stats()
        met.update({f"{way} {end}": n for (way, end), n in stats.transfers.items()})
        met.update({tier.name: n for tier, n in stats.cached_tokens.items()})
        met.update({"refused": stats.refused, "skipped": stats.skipped_backups})
        for (_, reason), count in stats.misses.items():
            met[reason] += count
        traffic.end()
    assert [what for what in WORTH_MEETING if met[what] < 5] == [], met


# -- two requests that need the same pages --------------------------------------------------


def test_two_requests_for_the_same_pages_share_one_copy(build):
    rig = build()
    rig.remember_on_host(text(1, 4))
    first, second = rig.started(text(1, 4)), rig.started(text(1, 6))
    assert first.transfers == second.transfers
    assert first.loading and second.loading
    rig.hands[Way.LOAD].run()
    assert set(rig.cache.poll().landed) == {first, second}
    assert rig.cache.stats().moved_pages["load"] == 4
    assert rig.misread(first) == [] and rig.misread(second) == []


def test_requests_reserved_since_the_last_load_leave_together(build):
    rig = build()
    for number in (1, 2):
        rig.remember_on_host(text(number, 3))
    leases = [rig.cache.reserve(rig.cache.match(rig.cache.prompt(text(n, 3)))) for n in (1, 2)]
    rig.cache.load(leases[0])
    assert len(rig.hands[Way.LOAD].jobs) == 1
    rig.hands[Way.LOAD].run()
    assert set(rig.cache.poll().landed) == set(leases)


@every_memory
def test_a_request_that_needs_more_waits_for_both_copies(build, memory):
    rig = build(memory, placement=EveryPages(1))
    rig.remember_on_host(text(1, 6))
    first, second = rig.started(text(1, 3)), rig.started(text(1, 6))
    assert len(second.transfers) == 2 or memory is ALL_MEMORIES["window_only"]
    lane = rig.hands[Way.LOAD]
    lane.run()
    assert rig.cache.poll().landed == (first,)
    assert second.loading and rig.misread(first) == []
    lane.run()
    assert rig.cache.poll().landed == (second,)
    assert rig.misread(second) == []


@pytest.mark.parametrize("steps", [0, 2])
@every_memory
def test_a_request_that_shares_a_load_keeps_its_pages_when_the_first_has_gone(build, memory, steps):
    rig = build(memory)
    rig.remember_on_host(text(1, 4))
    first, second = rig.started(text(1, 4)), rig.started(text(1, 4))
    rig.hands[Way.LOAD].run_legs(min(steps, len(rig.cache.hardware.copier.groups) - 1))
    rig.cache.release(first)
    rig.hands[Way.LOAD].run()
    assert rig.cache.poll().landed == (second,)
    rig.cache.flush(Tier.DEVICE)
    while rig.begin(text(2, 1)) is not None:
        pass
    assert rig.misread(second) == []


def test_pages_that_both_have_left_can_go(build):
    rig = build()
    rig.remember_on_host(text(1, 4))
    for lease in (rig.started(text(1, 4)), rig.started(text(1, 4))):
        rig.cache.release(lease)
    rig.settle()
    assert rig.cache.flush(Tier.DEVICE) == 4


@every_memory
def test_pages_that_another_computed_meanwhile_stay_for_waiting_requests(build, memory):
    rig = build(memory)
    rig.remember_on_host(text(1, 4))
    waiting = rig.started(text(1, 4))
    other = rig.started(text(1, 4), slowest=Tier.DEVICE)
    rig.compute(other)
    rig.cache.release(other)
    rig.cache.flush(Tier.DEVICE)
    assert rig.problems() == []
    rig.hands[Way.LOAD].run()
    assert rig.cache.poll().landed == (waiting,)
    assert rig.problems() == [] and rig.misread(waiting) == []
