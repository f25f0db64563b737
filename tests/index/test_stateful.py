"""Every verb in any order, every kind of memory, small capacities, against the naive model."""

from __future__ import annotations

import os
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvtide.index import (
    POLICIES,
    Arrival,
    Branches,
    CostBased,
    EveryPages,
    Index,
    IndexLease,
    LastPage,
    Namespace,
)
from kvtide.spec import ALL, Tier
from kvtide.testing.naive import NaiveIndex
from tests import grids
from tests.index.memories import ALL_MEMORIES, PAGE

LONG = bool(os.environ.get("KVTIDE_LONG_TESTS"))
NAMESPACES = (Namespace(), Namespace(adapter="a"), Namespace(cache_salt="a"))
PLACEMENTS = (LastPage, Branches, lambda: EveryPages(3), CostBased)


@dataclass(eq=False)
class Held:
    """A lease with what the test knows about it. `hidden`: it computes what no prompt finds."""

    lease: IndexLease
    tokens: list[int]
    namespace: Namespace
    found: int
    hidden: bool = False


@dataclass(eq=False)
class Flying:
    """An arrival, and what should be readable when it lands: anchor and keys of each part.

    carried  the optional sidecars of these pages
    added    those that it brings to pages that are there
    """

    arrival: Arrival
    brings: list[tuple[str, list[bytes]]]
    carried: dict[tuple[str, bytes], frozenset[str]]
    added: list[tuple[str, bytes, frozenset[str]]]


# Prompts are made of few pages, so that they share prefixes and part inside and between pages.
_chunk = st.sampled_from([[1] * PAGE, [2] * PAGE, [1, 1, 2, 2], [1] * (3 * PAGE), [2, 1]])
prompts = st.lists(_chunk, min_size=1, max_size=7).map(
    lambda chunks: [t for c in chunks for t in c]
)
capacities = st.integers(4, 14)
without = st.sampled_from([(), (), ("draft",), ("draft", "draft_kv"), ("draft_swa",)])


class IndexMachine(RuleBasedStateMachine):
    leases = Bundle("leases")
    arrivals = Bundle("arrivals")

    @initialize(
        name=st.sampled_from(sorted(ALL_MEMORIES)),
        eviction=st.sampled_from(sorted(POLICIES)),
        placement=st.sampled_from(PLACEMENTS),
        device=capacities,
        host=st.integers(0, 20),
        storage=st.integers(0, 30),
    )
    def start(self, name, eviction, placement, device, host, storage):
        memory = ALL_MEMORIES[name]
        slots = {Tier.DEVICE: device, Tier.HOST: host, Tier.STORAGE: storage}
        self.memory = memory
        self.placement = placement
        self.index = Index(
            memory,
            {tier: {pool.name: n for pool in memory.anchors} for tier, n in slots.items()},
            eviction=eviction,
            placement=placement(),
            fingerprint=b"model",
            copy_on_device=lambda move: self.copy_on_device(move),
            hot_rows=3,
        )
        self.naive = NaiveIndex(memory, b"model")
        self.index.subscribe(lambda event: self.heard(event, self.naive.hear(event)))
        self.held: list[Held] = []
        self.flying: list[Flying] = []
        self.seen: list[tuple[list[int], Namespace]] = []

    def heard(self, event, names):
        """For machines that follow events."""

    # -- helpers ----------------------------------------------------------------------------

    def keys(self, held: Held) -> list[bytes]:
        return self.naive.page_keys(held.tokens, held.namespace)

    # -- verbs ------------------------------------------------------------------------------

    @rule(
        target=leases,
        tokens=prompts,
        namespace=st.sampled_from(NAMESPACES),
        slowest=st.sampled_from(list(Tier)),
        priority=st.integers(0, 2),
    )
    def match_and_pin(self, tokens, namespace, slowest, priority):
        prompt = self.index.prompt(tokens, namespace)
        hit = self.index.match(prompt, slowest)
        assert hit.boundary == self.naive.boundary(tokens, namespace, slowest)
        stops = self.index.why(hit)
        assert bool(stops) == (hit.boundary < hit.limit)
        held = Held(self.index.pin(hit, priority), tokens, namespace, hit.boundary)
        self.held.append(held)
        self.seen.append((tokens, namespace))
        return held

    @rule(target=leases, tokens=prompts, share=st.sampled_from([0.3, 0.6, 1.0]))
    def compute_scratch(self, tokens, share):
        hit = self.index.match(self.index.scratch(tokens))
        assert hit.boundary == hit.matched == 0
        held = Held(self.index.pin(hit), tokens, NAMESPACES[0], 0, hidden=True)
        self.held.append(held)
        self.seen.append((tokens, NAMESPACES[0]))
        self.reserve(held)
        self.commit(held, share)
        assert self.index.match(held.lease.prompt).matched == 0
        return held

    @rule(tokens=prompts, namespace=st.sampled_from((*NAMESPACES[:1] * 3, *NAMESPACES)))
    def quarantine(self, tokens, namespace):
        first = self.naive.stored_keys(tokens, namespace)[:1]
        expected = self.naive.quarantine(tokens, namespace)
        assert self.index.quarantine(self.index.prompt(tokens, namespace)) == expected
        for held in self.held:
            mine = self.naive.stored_keys(held.tokens, held.namespace)[:1]
            if held.lease.boundary and mine == first:
                held.hidden = True
        for flying in self.flying:
            flying.brings = [
                (anchor, [key for key in keys if self.naive.first_of(key) not in first])
                for anchor, keys in flying.brings
            ]

    @rule(held=leases)
    def quarantine_what_is_held(self, held):
        self.quarantine(held.tokens, held.namespace)

    @rule(target=leases, held=leases, priority=st.integers(0, 2))
    def match_the_same_again(self, held, priority):
        return self.match_and_pin(held.tokens, held.namespace, Tier.STORAGE, priority)

    @rule(
        target=leases,
        tokens=prompts,
        namespace=st.sampled_from((*NAMESPACES[:1] * 3, *NAMESPACES)),
        share=st.sampled_from([0.3, 0.6, 1.0]),
        without=without,
    )
    def compute(self, tokens, namespace, share, without=()):
        """The usual course in one step, so that a run of steps has something to work on."""
        held = self.match_and_pin(tokens, namespace, Tier.DEVICE, 0)
        self.reserve(held)
        self.commit(held, share, without)
        return held

    @rule(tokens=prompts, share=st.sampled_from([0.6, 1.0]))
    def compute_and_release(self, tokens, share):
        self.release(self.compute(tokens, NAMESPACES[0], share))

    @rule(held=leases, share=st.sampled_from([0.3, 0.6, 1.0]))
    def go_on(self, held, share):
        if held.lease.live:
            self.reserve(held)
            self.commit(held, share)

    @rule(held=leases)
    def reserve(self, held):
        if held.lease.live:
            before = held.lease.reserved
            if not self.index.reserve(held.lease, len(held.tokens)):
                assert held.lease.reserved == before

    @rule(held=leases, growth=st.integers(1, 4))
    def reserve_with_growth(self, held, growth):
        if held.lease.live:
            self.index.reserve(held.lease, len(held.tokens), growth=growth)

    @rule(held=leases, more=prompts)
    def generate(self, held, more):
        if held.lease.live and len(held.tokens) < 60:
            held.tokens = held.tokens + more
            held.lease.prompt.extend(more)
            self.seen.append((held.tokens, held.namespace))

    @rule(held=leases, share=st.sampled_from([0.3, 0.6, 1.0]), without=without)
    def commit(self, held, share, without=()):
        lease, page, holdback = held.lease, self.memory.page_tokens, self.memory.holdback
        if not lease.live:
            return
        if not self.index.at_home(lease):
            assert lease.boundary == held.found, "what was committed can be read"
            return
        pages = min(lease.reserved, (len(held.tokens) - holdback) // page)
        upto = lease.boundary + round(share * (pages - lease.boundary))
        if upto <= lease.boundary:
            return
        keys = self.keys(held)
        for segment in lease.segments if not held.hidden else ():
            for cell in segment.slots:
                pages_in = range(segment.start, min(segment.end, upto))
                pool = self.memory.anchors[cell % len(self.memory.anchors)]
                self.naive.expect(pool.home, pool.name, [keys[p] for p in pages_in])
                sidecars = frozenset(self.memory.optional_sidecars(pool.name)) - {*without}
                for number in pages_in:
                    self.naive.bring(pool.home, pool.name, keys[number], sidecars, add=True)
        self.index.commit(lease, upto * page + holdback, without)
        assert lease.boundary == upto
        for pool in self.memory.anchors:
            table = self.index.page_table(lease, pool.name)
            if pool.reuse.reach_pages(page) is None and pool.reuse.required:
                assert (table >= 0).all()

    def copy_on_device(self, move):
        assert move.source is move.target is Tier.DEVICE and move.sidecar

    @rule(held=consumes(leases))
    def release(self, held):
        self.index.release(held.lease)
        self.held = [other for other in self.held if other is not held]

    @rule(
        target=arrivals,
        held=leases,
        way=st.sampled_from(
            [
                (Tier.DEVICE, Tier.HOST),
                (Tier.HOST, Tier.DEVICE),
                (Tier.HOST, Tier.STORAGE),
                (Tier.STORAGE, Tier.HOST),
            ]
        ),
    )
    def copy(self, held, way):
        if not held.lease.live:
            return multiple()
        arrival = self.index.copy(held.lease, *way)
        if held.hidden and way[1] > way[0]:
            assert arrival is not None and not arrival.parts
        return self._flying(arrival, held.hidden)

    @rule(
        target=arrivals,
        way=st.sampled_from([(Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.STORAGE)]),
        number=st.integers(0, 2),
        pages=st.integers(1, 5),
    )
    def demote(self, way, number, pages):
        anchors = self.memory.anchors
        arrival = self.index.demote(*way, anchors[number % len(anchors)].name, pages)
        return self._flying(arrival, hidden=False)

    def _flying(self, arrival, hidden):
        if arrival is None:
            return multiple()
        for move in arrival.moves:
            assert len(move.source_slots) == len(move.target_slots) > 0
        brings, carried = [], {}
        for part in arrival.parts if not hidden else ():
            anchor = self.memory.anchors[part.cell % len(self.memory.anchors)].name
            brings.append((anchor, self._path_keys(part.node)[part.start : part.end]))
            for key in brings[-1][1]:
                carried[anchor, key] = self.naive.carried[(arrival.source, anchor), key]
        self.flying.append(Flying(arrival, brings, carried, self._additions(arrival)))
        return self.flying[-1]

    def _additions(self, arrival):
        """What a backup adds: the pages by key, each with sidecars that only the device has."""
        added = []
        for part in arrival.additions:
            anchor = self.memory.anchors[part.cell % len(self.memory.anchors)].name
            for key in self._path_keys(part.node)[part.start : part.end]:
                there, here = (
                    self.naive.carried[(tier, anchor), key] for tier in (Tier.HOST, Tier.DEVICE)
                )
                if more := here - there:
                    added.append((anchor, key, more))
        count = sum(len(move.target_slots) for move in arrival.moves if move.sidecar)
        assert count == sum(len(more) for _, _, more in added)
        return added

    @rule(flying=consumes(arrivals))
    def land(self, flying):
        self.expect_landing(flying)
        self.index.land(flying.arrival)
        self.flying.remove(flying)

    def expect_landing(self, flying):
        for anchor, keys in flying.brings:
            self.naive.expect(flying.arrival.target, anchor, keys)
            for key in keys:
                self.naive.bring(flying.arrival.target, anchor, key, flying.carried[anchor, key])
        for anchor, key, more in flying.added:
            if key in self.naive.readable[Tier.HOST, anchor]:
                self.naive.bring(Tier.HOST, anchor, key, more, add=True)

    def _path_keys(self, node):
        keys = []
        while node.parent is not None:
            keys = [key.name for key in self.index.tree.page_keys(node)] + keys
            node = node.parent
        return keys

    @rule(flying=consumes(arrivals))
    def fail(self, flying):
        self.index.fail(flying.arrival)
        self.flying.remove(flying)

    @rule(tier=st.sampled_from(list(Tier)), number=st.integers(0, 2), pages=st.integers(1, 6))
    def evict(self, tier, number, pages):
        anchors = self.memory.anchors
        name = anchors[number % len(anchors)].name
        before = self.index.resident_pages(tier, name)
        dropped = self.index.evict(tier, name, pages)
        assert self.index.resident_pages(tier, name) == before - dropped

    @rule(tier=st.sampled_from(list(Tier)), really=st.sampled_from([False] * 7 + [True]))
    def clear(self, tier, really):
        if really:
            self.index.clear(tier)

    # -- what must always hold --------------------------------------------------------------

    @invariant()
    def counts_agree(self):
        assert self.index.validate() == []

    @invariant()
    def naive_model_agrees(self):
        assert self.naive.end_step() == []
        for tokens, namespace in self.seen[-6:]:
            for slowest in Tier:
                hit = self.index.match(self.index.prompt(tokens, namespace), slowest)
                assert hit.boundary == self.naive.boundary(tokens, namespace, slowest)

    @invariant()
    def sidecars_are_those_that_came(self):
        """Of every page that is readable, in every tier: neither stale nor lost."""
        tree = self.index.tree
        for node in tree.walk() if tree.presence.needed else ():
            for cell, slots in enumerate(node.slots if not node.hidden else ()):
                if slots is None:
                    continue
                where = tree.cells[cell].tier, tree.anchor_names[cell % tree.anchors]
                optional = {*self.memory.optional_sidecars(where[1])}
                for key, slot in zip(tree.page_keys(node), slots.tolist(), strict=True):
                    absent = tree.presence.absent(*where, slot)
                    assert self.naive.carried[where, key.name] == optional - {*absent}

    @invariant()
    def leases_keep_what_they_need(self):
        """Until it computes, all of its boundary; then the histories, and what it reserved."""
        for held in self.held:
            keys, boundary = self.keys(held), held.lease.boundary
            if held.hidden:
                self._keeps_its_path(held.lease)
                continue
            if boundary == held.found:
                assert self.naive.valid(keys, boundary)
            for pool in self.memory.anchors:
                if pool.reuse.required and pool.reuse.reach is ALL:
                    readable = [self.naive.readable[tier, pool.name] for tier in Tier]
                    assert all(any(key in tier for tier in readable) for key in keys[:boundary])

    def _keeps_its_path(self, lease):
        """No event tells of hidden pages: look whether the histories are there."""
        for number, pool in enumerate(self.memory.anchors):
            if pool.reuse.required and pool.reuse.reach is ALL:
                cells = [self.index.tree.cell(tier, number) for tier in Tier]
                for node in self.index.tree.path(lease.node):
                    assert any(node.slots[cell] is not None for cell in cells)

    def teardown(self):
        if not hasattr(self, "index"):
            return
        for flying in self.flying:
            self.index.fail(flying.arrival)
        for held in self.held:
            self.index.release(held.lease)
            self.index.release(held.lease)
        for tier in Tier:
            self.index.clear(tier)
        assert self.index.validate() == []
        assert self.index.tree.nodes == 0 and not self.index.tree.roots


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(
    max_examples=2000 if LONG else 120 if grids.everything() else 40,
    stateful_step_count=60 if LONG else 40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, *((Phase.shrink,) if LONG else ())),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
