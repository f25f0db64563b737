"""Pages from outside and pages on their way there, in any order with everything else.

The machine of `test_stateful`, with imports that are adopted in parts, and landings that depart.
Besides what that one checks, every slot is followed: whose page was written to it, with which
optional sidecars. What the tree says must be what was written last.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import Bundle, consumes, invariant, multiple, rule

from kvtide.index import (
    POLICIES,
    Departing,
    Departure,
    EventKind,
    Import,
    Namespace,
    Taken,
    WantedPages,
)
from kvtide.index.keys import PageKey
from kvtide.index.leases.imports_exports import Outline
from kvtide.spec import Tier
from tests import grids
from tests.grids import everything
from tests.index.memories import ALL_MEMORIES, PAGE
from tests.index.test_stateful import (
    LONG,
    NAMESPACES,
    PLACEMENTS,
    IndexMachine,
    prompts,
    without,
)

Written = tuple[bytes, tuple[str, ...]]
"""A page's key, and the optional sidecars that were not written with it."""


def _name(page: Departing) -> bytes:
    return PageKey(page.key, page.after).name


@dataclass(eq=False)
class Coming:
    """An import, with what is written to its slots. `stored`: a store brings it, not a peer."""

    arriving: Import
    pages: list[tuple[WantedPages, Written]]
    stored: bool = True
    adopted: list[Taken] = field(default_factory=list)


class OutsideMachine(IndexMachine):
    leases = IndexMachine.leases
    arrivals = IndexMachine.arrivals
    imports = Bundle("imports")
    departures = Bundle("departures")

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[tuple[Tier, str, int], Written] = {}
        self.coming: list[Coming] = []
        self.leaving: list[Departure] = []
        self.backed_up: list[bytes] | None = None
        self.beside: dict[int, set[tuple[str, bytes]]] = {}
        self.given: set[tuple[str, bytes]] = set()

    # -- what is in the slots ---------------------------------------------------------------

    @rule(held=leases, share=st.sampled_from([0.3, 0.6, 1.0]), without=without)
    def commit(self, held, share, without=()):
        keys, computed = self.keys(held), []
        for segment in held.lease.segments if held.lease.live else ():
            for cell, slots in segment.slots.items():
                pool = self.memory.anchors[cell % len(self.memory.anchors)]
                for page, slot in enumerate(slots.tolist(), segment.start):
                    if page < len(keys):
                        absent = tuple(n for n in self._optional(pool.name) if n in without)
                        self.written[pool.home, pool.name, slot] = keys[page], absent
                        computed.append((page, pool))
        super().commit(held, share, without)
        for page, pool in computed:
            if page < held.lease.boundary and not held.hidden:
                self._doubled(pool.home, pool.name, keys[page])

    def copy_on_device(self, move):
        super().copy_on_device(move)
        self._add([move])

    def _add(self, moves):
        for move in (move for move in moves if move.sidecar):
            for source, target in zip(
                move.source_slots.tolist(), move.target_slots.tolist(), strict=True
            ):
                key, lacks = self.written[move.source, move.anchor, source]
                slot = (move.target, move.anchor, target)
                assert move.sidecar not in lacks and self.written[slot][0] == key
                absent = tuple(name for name in self.written[slot][1] if name != move.sidecar)
                self.written[slot] = key, absent

    def expect_landing(self, flying):
        super().expect_landing(flying)
        self._add(flying.arrival.moves)

    def _flying(self, arrival, hidden):
        whole = arrival.moves if arrival is not None else ()
        for move in (move for move in whole if move.sidecar is None):
            pairs = zip(move.source_slots.tolist(), move.target_slots.tolist(), strict=True)
            for source, target in pairs:
                found = self.written[move.source, move.anchor, source]
                self.written[move.target, move.anchor, target] = found
        if arrival is not None:
            self._note_beside(arrival)
        return super()._flying(arrival, hidden)

    # -- what is computed on the host, and departs with a backup that begins later -----------

    @rule(
        target=arrivals,
        held=leases,
        way=st.sampled_from([(a, b) for a in Tier for b in Tier if abs(a - b) == 1]),
    )
    def copy(self, held, way):
        if held.lease.live:
            self.backed_up = [] if held.hidden else self.keys(held)[: held.lease.boundary]
        return super().copy(held, way)

    def _note_beside(self, arrival):
        """Pages on the backup's path that no store was given since they were computed."""
        keys, self.backed_up = self.backed_up, None
        if keys is None:
            moved = [node for pin in arrival.pins for node in pin.nodes()]
            keys = [key.name for node in moved for key in self.index.tree.page_keys(node)]
        if (arrival.source, arrival.target) == (Tier.DEVICE, Tier.HOST):
            here = {(p.name, key) for p in self.memory.hot_pools for key in keys}
            readable = {(name, key) for name, key in here if self._on_host(name, key)}
            self.beside[arrival.number] = readable - self.given
            self.given |= readable

    def _on_host(self, anchor, key):
        return key in self.naive.readable[Tier.HOST, anchor]

    def heard(self, event, names):
        if event.tier is Tier.HOST and event.kind is EventKind.REMOVED:
            gone = {(event.anchor, key) for key in names}
            self.given -= gone
            for pages in self.beside.values():
                pages -= gone

    @rule(flying=consumes(arrivals))
    def land(self, flying):
        self.given -= self.beside.pop(flying.arrival.number, set())
        super().land(flying)

    @rule(flying=consumes(arrivals))
    def fail(self, flying):
        self.given -= self.beside.pop(flying.arrival.number, set())
        super().fail(flying)

    # -- coming in --------------------------------------------------------------------------

    @rule(
        target=imports,
        tokens=prompts,
        namespace=st.sampled_from((*NAMESPACES[:1] * 3, *NAMESPACES)),
        seed=st.integers(0, 9999),
        share=st.sampled_from([0.4, 1.0]),
    )
    def take(self, tokens, namespace, seed, share):
        """Most of what is missing, in an order in which histories come first, and some doubles."""
        chance, prompt = random.Random(seed), self.index.prompt(tokens, namespace)
        outline = self.index.outline(prompt)
        self._check_outline(outline, tokens, namespace)
        wanted = [
            WantedPages(anchor, page)
            for anchor, held in outline.held.items()
            for page in range(outline.limit)
            if chance.random() < (0.05 if held[page] else share)
        ]
        if chance.random() < 0.3:
            chance.shuffle(wanted)
        lease = self.index.pin(self.index.match(prompt, Tier.HOST))
        arriving = self.index.take(lease, wanted)
        if arriving is None:
            self.index.release(lease)
            return multiple()
        keys = self.naive.page_keys(tokens, namespace)
        pages = []
        for want, taken in zip(wanted, arriving.taken, strict=True):
            absent = tuple(n for n in self._optional(want.anchor) if chance.random() < 0.5)
            self.written[Tier.HOST, want.anchor, taken.slot] = keys[want.page], absent
            pages.append((want, (keys[want.page], absent)))
        self.seen.append((tokens, namespace))
        self.coming.append(Coming(arriving, pages, chance.random() < 0.5))
        return self.coming[-1]

    def _optional(self, anchor: str) -> list[str]:
        return [p.name for p in self.memory.group(anchor) if p.follows and not p.reuse.required]

    def _check_outline(self, outline: Outline, tokens: list[int], namespace: Namespace) -> None:
        keys = self.naive.page_keys(tokens, namespace)
        assert outline.limit == self.index.match(self.index.prompt(tokens, namespace)).limit
        for pool in self.memory.anchors:
            tiers = [self.naive.readable[tier, pool.name] for tier in (Tier.DEVICE, Tier.HOST)]
            held = [any(key in tier for tier in tiers) for key in keys[: outline.limit]]
            assert outline.held[pool.name].tolist() == held

    @rule(coming=imports, share=st.sampled_from([0.0, 0.3, 0.6, 1.0]))
    def adopt(self, coming, share):
        if not coming.arriving.live or not coming.arriving.lease.live:
            return
        count = round(share * len(coming.pages))
        here, coming.pages = coming.pages[:count], coming.pages[count:]
        if not coming.arriving.lease.hidden:
            for want, (key, absent) in here:
                self.naive.expect(Tier.HOST, want.anchor, [key])
                sidecars = frozenset(self._optional(want.anchor)) - {*absent}
                self.naive.bring(Tier.HOST, want.anchor, key, sidecars)
                hot = coming.stored and self.memory.pool(want.anchor).hot
                if hot and not self._on_host(want.anchor, key):
                    self.given.add((want.anchor, key))
                self._doubled(Tier.HOST, want.anchor, key)
        taken, absent = coming.arriving.taken[:count], [absent for _, (_, absent) in here]
        adopt = self.index.adopt if coming.stored else self.index.adopt_from_peer
        adopt(coming.arriving, taken, absent)
        coming.adopted += taken
        assert len(coming.arriving.taken) == len(coming.pages)

    def _doubled(self, tier: Tier, anchor: str, key: bytes) -> None:
        """What a copy brings is there before it: it may be gone again when that lands."""
        for flying in self.flying:
            if flying.arrival.target is tier:
                flying.brings = [
                    (name, [k for k in keys if (name, k) != (anchor, key)])
                    for name, keys in flying.brings
                ]

    @rule(coming=imports)
    def abandon(self, coming):
        """Its slots stay its own; what it guarded does not."""
        if coming.arriving.live:
            self.index.abandon(coming.arriving)
            assert not coming.arriving.lease.live and not coming.arriving.guards

    @invariant()
    def imports_keep_what_they_build_on(self):
        """What the prompt had when they were taken, its last page and what that reaches back to."""
        for coming in self.coming:
            for pin in coming.arriving.guards:
                assert all(node.slots[pin.cell] is not None for node in pin.nodes())

    @rule(coming=consumes(imports))
    def forgo(self, coming):
        self.index.forgo(coming.arriving)
        assert not coming.arriving.live and not coming.arriving.lease.live
        self.coming.remove(coming)

    # -- going out --------------------------------------------------------------------------

    @rule(target=departures, flying=consumes(arrivals))
    def land_and_depart(self, flying):
        if flying.arrival.target is not Tier.HOST:
            self.land(flying)
            return multiple()
        new = []
        for anchor, keys in flying.brings:
            readable = self.naive.readable[Tier.HOST, anchor]
            new += [(anchor, key) for key in keys if key not in readable]
        new += [
            (anchor, key)
            for anchor, key, _ in flying.added
            if key in self.naive.readable[Tier.HOST, anchor]
        ]
        self.expect_landing(flying)
        departure = self.index.land_departing(flying.arrival)
        self.flying.remove(flying)
        left = [(p.anchor, _name(p)) for p in departure.pages] if departure is not None else []
        hot = {page for page in left if self.memory.pool(page[0]).hot}
        assert sorted(page for page in left if page not in hot) == sorted(new)
        assert len(left) == len(new) + len(hot), "no page departs twice"
        # Pages whose neighbours were computed later may depart again: the store knows them.
        assert self.beside.pop(flying.arrival.number, set()) <= hot
        assert all(self._on_host(*page) for page in hot)
        if departure is None:
            return multiple()
        self.leaving.append(departure)
        return departure

    @rule(target=departures, coming=imports)
    def depart_adopted(self, coming):
        """What a peer has brought leaves, as far as it is where it was put."""
        if not coming.arriving.live or not coming.arriving.lease.live:
            return multiple()
        departure = self.index.depart(coming.arriving, coming.adopted)
        mine = {(one.cell % len(self.memory.anchors), one.slot) for one in coming.adopted}
        coming.adopted = []
        if departure is None:
            return multiple()
        names = [pool.name for pool in self.memory.anchors]
        left = [(names.index(page.anchor), page.slot) for page in departure.pages]
        assert len(set(left)) == len(left) and set(left) <= mine
        for page in departure.pages:
            assert self._on_host(page.anchor, _name(page))
            if self.memory.pool(page.anchor).hot:
                self.given.add((page.anchor, _name(page)))
        self.leaving.append(departure)
        return departure

    @rule(departure=consumes(departures))
    def departed(self, departure):
        self.index.departed(departure)
        self.leaving.remove(departure)

    # -- what must always hold --------------------------------------------------------------

    @invariant()
    def slots_hold_what_the_tree_says(self):
        if not hasattr(self, "index"):
            return
        tree = self.index.tree
        for node in (node for node in tree.walk() if not node.hidden):
            keys = [key.name for key in tree.page_keys(node)]
            for cell, slots in enumerate(node.slots):
                if slots is None:
                    continue
                for key, slot in zip(keys, slots.tolist(), strict=True):
                    tier, name = tree.cells[cell].tier, tree.anchor_names[cell % tree.anchors]
                    absent = tree.presence.absent(tier, name, slot)
                    assert self.written[tier, name, slot] == (key, absent)

    @invariant()
    def departures_stay_where_they_are(self):
        """Readable on the host unless hidden, and in the slots from which they are written."""
        for departure in self.leaving:
            for page in departure.pages:
                key, absent = self.written[Tier.HOST, page.anchor, page.slot]
                assert key == _name(page) and {*absent} <= {*page.absent}
            for pin in departure.pins:
                for node in pin.nodes():
                    assert node.slots[pin.cell] is not None
            here = {
                int(s) for pin in departure.pins for n in pin.nodes() for s in n.slots[pin.cell]
            }
            assert {page.slot for page in departure.pages} <= here

    @invariant()
    def imports_own_their_slots(self):
        for coming in self.coming:
            for taken, (want, written) in zip(coming.arriving.taken, coming.pages, strict=True):
                assert self.written[Tier.HOST, want.anchor, taken.slot] == written

    def teardown(self):
        if hasattr(self, "index"):
            for departure in self.leaving:
                self.index.departed(departure)
            for coming in self.coming:
                self.index.forgo(coming.arriving)
            assert not self.index.tree.imports and not self.index.tree.departures
        super().teardown()


TestOutside = OutsideMachine.TestCase
TestOutside.settings = settings(
    max_examples=2000 if LONG else 25 if everything() else 12,
    stateful_step_count=60 if LONG else 40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, *((Phase.shrink,) if LONG else ())),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# -- the same, denser -----------------------------------------------------------------------


class Drive:
    """The machine's rules by a seed, weighted so that every step finds something to work on."""

    def __init__(self, name: str, seed: int) -> None:
        self.chance = chance = random.Random(f"{name} {seed}")
        self.machine = machine = OutsideMachine()
        self.met: Counter[str] = Counter()
        machine.start(
            name,
            chance.choice(sorted(POLICIES)),
            chance.choice(PLACEMENTS),
            chance.randint(8, 18),
            chance.choice((5, 12, 20, 30)),
            chance.choice((0, 12)),
        )

    def step(self) -> None:
        chance, machine = self.chance, self.machine
        verbs = {
            self.compute: 8, self.back_up: 8, self.demote: 6, self.take: 12,
            self.adopt: 10 * bool(machine.coming), self.forgo: 4 * bool(machine.coming),
            self.abandon: 2 * bool(machine.coming),
            self.depart_adopted: 3 * bool(machine.coming),
            self.land: 8 * bool(machine.flying), self.depart: 10 * bool(machine.flying),
            self.fail: bool(machine.flying), self.departed: 5 * bool(machine.leaving),
            self.load: 3, self.release: 6 * bool(machine.held), self.evict: 5,
            self.quarantine: 8 if machine.leaving else 1,
        }  # fmt: skip
        (verb,) = chance.choices(list(verbs), list(verbs.values()))
        verb()
        self._note()
        for check in (
            machine.counts_agree, machine.naive_model_agrees, machine.leases_keep_what_they_need,
            machine.slots_hold_what_the_tree_says, machine.departures_stay_where_they_are,
            machine.sidecars_are_those_that_came, machine.imports_own_their_slots,
            machine.imports_keep_what_they_build_on,
        ):  # fmt: skip
            check()

    def tokens(self) -> list[int]:
        """Few different pages, so that prompts share prefixes and part inside and between pages."""
        chance = self.chance
        chunks = ([1] * PAGE, [1] * PAGE, [2] * PAGE, [1, 1, 2, 2], [1] * (3 * PAGE), [2, 1])
        return [t for _ in range(chance.randint(1, 6)) for t in chance.choice(chunks)]

    def compute(self) -> None:
        without = self.chance.choice(((), (), ("draft", "draft_kv"), ("draft_swa",)))
        namespace = self.chance.choice(NAMESPACES[:2])
        held = self.machine.compute(self.tokens(), namespace, 1.0, without)
        if self.chance.random() < 0.6:
            self.machine.release(held)

    def back_up(self) -> None:
        held = self.machine.match_and_pin(self.tokens(), NAMESPACES[0], Tier.DEVICE, 0)
        self.machine.copy(held, (Tier.DEVICE, Tier.HOST))
        self.machine.release(held)

    def load(self) -> None:
        held = self.machine.match_and_pin(self.tokens(), NAMESPACES[0], Tier.HOST, 0)
        self.machine.copy(held, (Tier.HOST, Tier.DEVICE))
        if self.chance.random() < 0.7:
            self.machine.release(held)

    def demote(self) -> None:
        number = self.chance.randrange(3)
        self.machine.demote((Tier.DEVICE, Tier.HOST), number, self.chance.randint(1, 5))

    def take(self) -> None:
        before = len(self.machine.coming)
        share = self.chance.choice((0.4, 1.0))
        self.machine.take(self.tokens(), NAMESPACES[0], self.chance.randrange(9999), share)
        self.met["no room"] += len(self.machine.coming) == before

    def adopt(self) -> None:
        coming = self.chance.choice(self.machine.coming)
        tree, hidden = self.machine.index.tree, coming.arriving.lease.hidden
        self.met["adopted by none"] += hidden and bool(coming.pages)
        readable = {n: set(self.machine.naive.readable[Tier.HOST, n]) for n in tree.anchor_names}
        for want, (key, _) in coming.pages if not hidden else ():
            self.met["a double" if key in readable[want.anchor] else "new"] += 1
        self.machine.adopt(coming, self.chance.choice((0.3, 0.6, 1.0, 1.0)))

    def abandon(self) -> None:
        self.machine.abandon(self.chance.choice(self.machine.coming))

    def depart_adopted(self) -> None:
        before = len(self.machine.leaving)
        self.machine.depart_adopted(self.chance.choice(self.machine.coming))
        self.met["what a peer brought departs"] += len(self.machine.leaving) > before

    def forgo(self) -> None:
        self.machine.forgo(self.chance.choice(self.machine.coming))

    def land(self) -> None:
        self.machine.land(self.chance.choice(self.machine.flying))

    def depart(self) -> None:
        self.machine.land_and_depart(self.chance.choice(self.machine.flying))

    def fail(self) -> None:
        self.machine.fail(self.chance.choice(self.machine.flying))

    def departed(self) -> None:
        departure = self.chance.choice(self.machine.leaving)
        hidden = {pin.node.hidden for pin in departure.pins}
        self.met["hidden while it departs"] += True in hidden
        self.met["partly hidden"] += len(hidden) == 2
        self.machine.departed(departure)

    def release(self) -> None:
        self.machine.release(self.chance.choice(self.machine.held))

    def evict(self) -> None:
        tier = self.chance.choice((Tier.DEVICE, Tier.HOST, Tier.HOST))
        self.machine.evict(tier, self.chance.randrange(3), self.chance.choice((1, 3, 30)))

    def quarantine(self) -> None:
        self.machine.quarantine(self.tokens(), NAMESPACES[0])

    def _note(self) -> None:
        machine = self.machine
        self.met["departing while others come"] += bool(machine.leaving and machine.coming)
        tree = machine.index.tree
        self.met["a gap"] += any(not n.resident and not n.arriving for n in tree.walk())
        for departure in machine.leaving:
            self.met["a departure was split"] += len(list(departure.pins[-1].nodes())) > 2
        coming = {key for one in machine.coming for _, (key, _) in one.pages}
        flying = {k for f in machine.flying for _, keys in f.brings for k in keys}
        self.met["coming twice"] += bool(coming & flying)


WORTH_MEETING = (
    "no room", "adopted by none", "a double", "new", "hidden while it departs", "partly hidden",
    "departing while others come", "a gap", "a departure was split", "coming twice",
    "what a peer brought departs",
)  # fmt: skip


def test_pages_from_outside_and_pages_that_leave_in_any_order():
    met: Counter[str] = Counter()
    for name, seed in itertools.product(
        sorted(ALL_MEMORIES), range(200 if LONG else 3 if grids.everything() else 1)
    ):
        drive = Drive(name, seed)
        for _ in range(110):
            drive.step()
        drive.machine.teardown()
        met += drive.met
    assert [what for what in WORTH_MEETING if not met[what]] == [], met
