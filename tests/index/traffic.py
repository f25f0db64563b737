"""Dense random traffic over one index, from a seed: for tests that need a busy, checked history.

Besides the naive model it keeps the bytes: what a slot holds is the key of the page that was
computed or copied into it, and whether its optional sidecars were. So a page table that points at
another prompt's page is detected, whatever the tree records.

As a program it prints a digest of all events of one run (see test_determinism).
"""

from __future__ import annotations

import hashlib
import random
import sys
from dataclasses import dataclass, field

from kvtide.index import Arrival, Branches, Event, IndexLease, Namespace, Placement
from kvtide.spec import ModelMemory, PageMove, Tier
from kvtide.testing.naive import NaiveIndex
from tests.index.building import build
from tests.index.memories import ALL_MEMORIES, PAGE

NAMESPACES = (Namespace(), Namespace(), Namespace(adapter="a"), Namespace(cache_salt="a"))
WAYS = (
    (Tier.DEVICE, Tier.HOST),
    (Tier.HOST, Tier.DEVICE),
    (Tier.HOST, Tier.STORAGE),
    (Tier.STORAGE, Tier.HOST),
)
Bytes = tuple[bytes, bool]


@dataclass(eq=False)
class Running:
    """A request. `hidden`: no prompt finds what it computes. `held`: quarantined slots it had."""

    lease: IndexLease
    tokens: list[int]
    namespace: Namespace
    hidden: bool = False
    held: set[tuple[str, int]] = field(default_factory=set)


@dataclass(eq=False)
class Flying:
    """An arrival, the bytes it copies, and the pages that no prompt finds when it lands."""

    arrival: Arrival
    copies: list[Bytes]
    hidden: set[bytes] = field(default_factory=set)


@dataclass(eq=False)
class Traffic:
    """`step` does one random thing; `problems` says what does not hold now."""

    memory: ModelMemory
    seed: int
    policy: str = "lru"
    placement: Placement = field(default_factory=Branches)

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.memory.model} {self.policy} {self.seed}")
        options = {"eviction": self.policy, "placement": self.placement}
        self.index = build(self.memory, 16, 12, 8, copy_on_device=self._add_drafts, **options)
        self.naive = NaiveIndex(self.memory)
        self.index.subscribe(self.naive.hear)
        self.running: list[Running] = []
        self.flying: list[Flying] = []
        self.quarantined: dict[str, set[int]] = {pool.name: set() for pool in self.memory.anchors}
        self.seen: list[tuple[list[int], Namespace]] = []
        self.bytes: dict[tuple[Tier, str], dict[int, Bytes]] = {
            (tier, pool.name): {} for tier in Tier for pool in self.memory.anchors
        }

    # -- what happens -----------------------------------------------------------------------

    def step(self) -> str:
        verbs = {
            self.begin: 5, self.go_on: 6, self.finish: 6, self.copy: 4, self.land: 4,
            self.fail: 1, self.demote: 2, self.evict: 1, self.quarantine: 0.5,
            self.begin_scratch: 0.7,
        }  # fmt: skip
        (verb,) = self.chance.choices(list(verbs), list(verbs.values()))
        verb()
        return verb.__name__

    def _prompt(self) -> tuple[list[int], Namespace]:
        tokens, namespace = [], self.chance.choice(NAMESPACES)
        if self.seen and self.chance.random() < 0.8:
            tokens, namespace = self.chance.choice(self.seen[-12:])
            tokens = tokens[: self.chance.randrange(len(tokens) + 1)]
        for _ in range(self.chance.randrange(1, 5)):
            tokens = tokens + [self.chance.randrange(3)] * self.chance.choice((1, PAGE, PAGE))
        return tokens[:40], namespace

    def begin(self) -> None:
        tokens, namespace = self._prompt()
        slowest = self.chance.choice(list(Tier))
        hit = self.index.match(self.index.prompt(tokens, namespace), slowest)
        lease = self.index.pin(hit, self.chance.randrange(3))
        self.running.append(Running(lease, tokens, namespace))
        self.seen.append((tokens, namespace))
        if self.chance.random() < 0.7:
            self._compute(self.running[-1])

    def begin_scratch(self) -> None:
        tokens, _ = self._prompt()
        hit = self.index.match(self.index.scratch(tokens))
        assert hit.matched == 0
        self.running.append(Running(self.index.pin(hit), tokens, NAMESPACES[0], hidden=True))
        self.seen.append((tokens, NAMESPACES[0]))
        self._compute(self.running[-1])

    def quarantine(self) -> None:
        tokens, namespace = self._prompt()
        first = self.naive.stored_keys(tokens, namespace)[:1]
        self._note_quarantined(first)
        expected = self.naive.quarantine(tokens, namespace)
        assert self.index.quarantine(self.index.prompt(tokens, namespace)) == expected

    def _note_quarantined(self, first: list[bytes]) -> None:
        """Slots that no new lease may read from now on, and the leases that read them already."""
        names = [pool.name for pool in self.memory.anchors]
        for node in [n for n in self.index.tree.walk() if not n.hidden]:
            if self.naive.first_of(self.index.tree.page_keys(node)[0].name) in first:
                for name, home in zip(names, self.index.tree.homes, strict=True):
                    slots = node.slots[home]
                    self.quarantined[name].update(() if slots is None else slots.tolist())
        for flying in self.flying:
            flying.hidden |= {key for key, _ in flying.copies if self.naive.first_of(key) in first}
        for running in self.running:
            keys = self.naive.stored_keys(running.tokens, running.namespace)
            if running.lease.boundary and keys[:1] == first and not running.hidden:
                running.hidden = True
            for name in names:
                table = self.index.page_table(running.lease, name).tolist()
                running.held |= {(name, slot) for slot in table}

    def go_on(self) -> None:
        if self.running:
            running = self.chance.choice(self.running)
            if self.chance.random() < 0.4 and len(running.tokens) < 60:
                more = self._known_rest(running) or [self.chance.randrange(3)] * PAGE
                more = more[: self.chance.randrange(1, 2 * PAGE)]
                running.tokens = running.tokens + more
                running.lease.prompt.extend(more)
            self._compute(running)

    def _known_rest(self, running: Running) -> list[int]:
        """How another prompt went on from here, so that two compute the same pages."""
        tokens = running.tokens
        rests = [other[len(tokens) :] for other, _ in self.seen if other[: len(tokens)] == tokens]
        return self.chance.choice([rest for rest in rests if rest] or [[]])

    def _compute(self, running: Running) -> None:
        lease, index, holdback = running.lease, self.index, self.memory.holdback
        growth = self.chance.choice((0, 0, 1))
        if not index.reserve(lease, len(running.tokens), growth=growth):
            return
        if not index.at_home(lease):
            return
        pages = (len(running.tokens) - holdback) // PAGE
        pages = lease.boundary + round(self.chance.choice((0.4, 1)) * (pages - lease.boundary))
        if pages <= lease.boundary:
            return
        keys = self.naive.page_keys(running.tokens, running.namespace)
        without = self.chance.choice(((), ("draft",)))
        for segment in lease.segments:
            for cell, slots in segment.slots.items():
                pool = self.memory.anchors[cell % len(self.memory.anchors)]
                here = keys[segment.start : min(segment.end, pages)]
                self.quarantined[pool.name] -= set(slots.tolist())
                if not running.hidden:
                    self.naive.expect(pool.home, pool.name, here)
                written = zip(slots.tolist(), here, strict=False)
                contents = {s: (key, not without) for s, key in written}
                self.bytes[pool.home, pool.name] |= contents
        index.commit(lease, pages * PAGE + holdback, without)

    def _add_drafts(self, move: PageMove) -> None:
        """Pages that lack a draft get it from a copy of the same page."""
        there = self.bytes[move.target, move.anchor]
        for source, target in zip(
            move.source_slots.tolist(), move.target_slots.tolist(), strict=True
        ):
            key, drafted = self.bytes[move.source, move.anchor][source]
            assert drafted and there[target] == (key, False), f"{move.sidecar} is there already"
            there[target] = (key, True)

    def finish(self) -> None:
        if self.running:
            running = self.running.pop(self.chance.randrange(len(self.running)))
            self.index.release(running.lease)

    def copy(self) -> None:
        if self.running:
            running, way = self.chance.choice(self.running), self._way(WAYS)
            arrival = self.index.copy(running.lease, *way)
            self._fly(arrival)
            if running.hidden and arrival is not None:
                assert way[1] < way[0] or not arrival.parts
                self.flying[-1].hidden = {key for key, _ in self.flying[-1].copies}

    def demote(self) -> None:
        anchor = self.chance.choice(self.memory.anchors).name
        way = self._way((WAYS[0], WAYS[2]))
        self._fly(self.index.demote(*way, anchor, self.chance.randrange(1, 6)))

    def _way(self, ways: tuple[tuple[Tier, Tier], ...]) -> tuple[Tier, Tier]:
        return self.chance.choice(ways)

    def _fly(self, arrival: Arrival | None) -> None:
        if arrival is not None:
            self.flying.append(Flying(arrival, self._sources(arrival)))

    def _sources(self, arrival: Arrival) -> list[Bytes]:
        return [
            self.bytes[move.source, move.anchor][slot]
            for move in arrival.moves
            for slot in move.source_slots.tolist()
        ]

    def land(self) -> None:
        if self.flying:
            flying = self.flying.pop(self.chance.randrange(len(self.flying)))
            arrival = flying.arrival
            for now, was in zip(self._sources(arrival), flying.copies, strict=True):
                assert now in (was, (was[0], True)), "a source was overwritten in flight"
            bytes_moved = iter(flying.copies)
            for move in arrival.moves:
                targets = self.bytes[move.target, move.anchor]
                if move.sidecar is not None:
                    for _ in move.source_slots:
                        next(bytes_moved)
                    self._add_drafts(move)
                    continue
                moved = {slot: next(bytes_moved) for slot in move.target_slots.tolist()}
                targets |= moved
                keys = [key for key, _ in moved.values() if key not in flying.hidden]
                self.naive.expect(move.target, move.anchor, keys)
                if move.target is self.memory.pool(move.anchor).home:
                    self.quarantined[move.anchor] -= moved.keys()
            self.index.land(arrival)

    def fail(self) -> None:
        if self.flying:
            flying = self.flying.pop(self.chance.randrange(len(self.flying)))
            self.index.fail(flying.arrival)

    def evict(self) -> None:
        anchor = self.chance.choice(self.memory.anchors).name
        self.index.evict(self.chance.choice(list(Tier)), anchor, self.chance.randrange(1, 4))

    # -- what must hold ---------------------------------------------------------------------

    def problems(self) -> list[str]:
        return [
            *self.index.validate(),
            *self.naive.end_step(),
            *self._wrong_boundaries(),
            *self._wrong_bytes(),
            *self._wrong_tables(),
        ]

    def _wrong_boundaries(self) -> list[str]:
        wrong = []
        for tokens, namespace in self.seen[-4:]:
            for slowest in Tier:
                hit = self.index.match(self.index.prompt(tokens, namespace), slowest)
                expected = self.naive.boundary(tokens, namespace, slowest)
                if hit.boundary != expected:
                    wrong.append(f"{slowest.name}: resumes at {hit.boundary}, not {expected}")
        return wrong

    def _wrong_bytes(self) -> list[str]:
        """The tree against the bytes, and the events' mirror against the tree."""
        wrong = []
        mirror: dict[tuple[Tier, str], set[bytes]] = {where: set() for where in self.bytes}
        for node in self.index.tree.walk():
            if node.hidden:
                continue  # Its readers are checked in `_wrong_tables`.
            keys = [key.name for key in self.index.tree.page_keys(node)]
            for cell, slots in enumerate(node.slots):
                if slots is not None:
                    tier, anchor = divmod(cell, len(self.memory.anchors))
                    where = Tier(tier), self.memory.anchors[anchor].name
                    mirror[where].update(keys)
                    if [self.bytes[where][slot][0] for slot in slots.tolist()] != keys:
                        wrong.append(f"{where}: slots hold other pages than the tree says")
        if mirror != self.naive.readable:
            wrong.append("a listener to all events believes something else than the tree")
        return wrong

    def _wrong_tables(self) -> list[str]:
        """Where a lease will read: every page must be its own prompt's, drafts if promised."""
        wrong = []
        for running in self.running:
            keys = self.naive.page_keys(running.tokens, running.namespace)
            for pool in self.memory.anchors:
                table = self.index.page_table(running.lease, pool.name)[: running.lease.boundary]
                held = [self.bytes[pool.home, pool.name].get(slot) for slot in table.tolist()]
                known = {slot for name, slot in running.held if name == pool.name}
                if (self.quarantined[pool.name] & set(table.tolist())) - known:
                    wrong.append(f"lease {running.lease.number} came to read a quarantined page")
                for page, (slot, content) in enumerate(zip(table.tolist(), held, strict=True)):
                    if slot >= 0 and (content is None or content[0] != keys[page]):
                        wrong.append(f"lease {running.lease.number} reads a wrong page {page}")
                if any(side.name == "draft" for side in self.memory.group(pool.name)[1:]):
                    drafted = [content is not None and content[1] for content in held]
                    if self.index.carries(running.lease, "draft").tolist() != drafted:
                        wrong.append(f"lease {running.lease.number}: drafts stale or lost")
        return wrong

    def end(self) -> None:
        """Everything is given back; what is left then is evictable."""
        while self.flying:
            self.fail()
        while self.running:
            self.finish()
        for tier in Tier:
            self.index.clear(tier)


def digest(name: str, seed: int, steps: int) -> str:
    """A digest of every event and every slot a run gave out, in order."""
    traffic = Traffic(ALL_MEMORIES[name], seed)
    seen = hashlib.sha256()

    def hear(event: Event) -> None:
        seen.update(f"{event.kind} {event.tier} {event.anchor}".encode())
        seen.update(f"{event.number} {event.slots.tolist()} {event.above}".encode())
        seen.update(event.tokens + event.between + event.after)

    traffic.index.subscribe(hear)
    for _ in range(steps):
        seen.update(traffic.step().encode())
        for running in traffic.running:
            for pool in traffic.memory.anchors:
                seen.update(traffic.index.page_table(running.lease, pool.name).tobytes())
    return seen.hexdigest()


if __name__ == "__main__":
    print(digest(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
