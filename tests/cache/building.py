"""A cache over memory that tests can look into, and a model that computes what it should.

What a page holds is a function of its identity: its namespace, the tokens up to its end, the pool
and the layer. So a reader of a page can tell whether it is the right one, byte for byte, wherever
it has been meanwhile. Slots without an owner are full of POISON, from the moment they are free:
reading a page that was given up, or writing into one, does not go unnoticed. Nor does reading a
page that was in quarantine before: slots remember their owners by then.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtide.cache import CacheConfig, Hardware, Lease, Namespace, TieredCache, Tokens
from kvtide.index import DEFAULT_NAMESPACE, Branches, Prompt
from kvtide.index.keys import TOKEN_BYTES, Hidden
from kvtide.index.tree.node import Node
from kvtide.index.tree.presence import SidecarSlots
from kvtide.index.tree.slots import SlotPool
from kvtide.spec import ModelMemory, PoolSpec, Slots, Tier
from kvtide.testing.faults import FaultError, FaultyBackend
from kvtide.testing.hand_run import HandRunLane
from kvtide.tiers import Arrangement, Buffers, Layout
from kvtide.transfer.copy_jobs import Copier, Issuer
from kvtide.transfer.lane import Job, Ticket
from kvtide.transfer.peer.tail_rows import TailRows
from kvtide.transfer.strided import Reference, Way
from tests.cache.memories import FULL, PAGE

POISON = 0xEE
TIERS = (Tier.DEVICE, Tier.HOST)

# -- what a page holds ----------------------------------------------------------------------


def text(number: int, pages: int, extra: int = 1) -> list[int]:
    """A prompt of so many whole pages and a few tokens, unlike that of any other number."""
    return list(range(1000 * number, 1000 * number + pages * PAGE + extra))


@lru_cache(maxsize=1 << 16)
def content(
    namespace: Namespace | Hidden, prefix: bytes, pool: str, layer: int, size: int
) -> bytes:
    """The row that a model computes: of this pool and layer, after exactly these tokens."""
    name = repr((namespace, pool, layer)).encode()
    return hashlib.shake_128(name + prefix).digest(size)


class Rows:
    """The bytes of a tier by pool, layer and slot."""

    def __init__(self, buffers: Buffers) -> None:
        memory = buffers.arrangement.memory
        self._held_bytes = memory.holdback * TOKEN_BYTES
        self._of: dict[tuple[str, int], npt.NDArray[np.uint8]] = {
            (pool.name, layer): buffers.rows(pool.name, layer).numpy()
            for pool in memory.pools
            for layer in pool.layers
        }
        self._anchors = {
            anchor.name: [
                (pool.name, layer) for pool in memory.group(anchor.name) for layer in pool.layers
            ]
            for anchor in memory.anchors
        }

    def holds(self, pool: PoolSpec, layer: int, slot: int, page: PageName) -> bool:
        row = self._of[pool.name, layer][slot]
        return row.tobytes() == content(*self._known_by(pool, page), pool.name, layer, len(row))

    def write(self, pool: PoolSpec, layer: int, slot: int, page: PageName) -> None:
        row = self._of[pool.name, layer][slot]
        row[:] = np.frombuffer(
            content(*self._known_by(pool, page), pool.name, layer, len(row)), np.uint8
        )

    def _known_by(self, pool: PoolSpec, page: PageName) -> PageName:
        """The tokens after a page change nothing but what a draft makes of them."""
        namespace, prefix = page
        drafted = pool.follows is not None and not pool.reuse.required
        return namespace, prefix if drafted else prefix[: len(prefix) - self._held_bytes]

    def poison(self, anchor: str, slots: Slots) -> None:
        for name in self._anchors[anchor]:
            self._of[name][slots] = POISON

    def poisoned(self, anchor: str, slots: Slots) -> bool:
        return all((self._of[name][slots] == POISON).all() for name in self._anchors[anchor])


PageName = tuple[Namespace | Hidden, bytes]
"""Namespace and packed tokens up to the page's end, with the holdback: what a page stands for."""


def page_names(prompt: Prompt, page_tokens: int = PAGE) -> list[PageName]:
    """The identities of a prompt's whole pages."""
    packed, held = prompt.head + prompt.body, prompt.holdback
    whole = max(0, prompt.tokens - held) // page_tokens
    ends = [((page + 1) * page_tokens + held) * TOKEN_BYTES for page in range(whole)]
    return [(prompt.namespace, packed[:end]) for end in ends]


class PoisonedSlots(SlotPool):
    """Slots whose bytes are gone as soon as they are free.

    `quarantined` has those in quarantine, each with the leases (their numbers) that may read it.
    """

    __slots__ = ("_anchor", "_rows", "quarantined")

    def __init__(self, capacity: int, rows: Rows, anchor: str) -> None:
        super().__init__(capacity)
        self._rows = rows
        self._anchor = anchor
        self.quarantined: dict[int, set[int]] = {}

    def free(self, slots: Slots) -> None:
        super().free(slots)
        for slot in slots.tolist():
            self.quarantined.pop(slot, None)
        self._rows.poison(self._anchor, slots)


# -- lanes ----------------------------------------------------------------------------------


class HandLane(HandRunLane):
    """Run by hand, step by step if need be, and broken on demand.

    refusals  so many of the next submissions raise
    """

    def __init__(self) -> None:
        self._raises: set[int] = set()
        self._halves: set[int] = set()
        self._faulty = FaultyBackend(Reference(), raises=self._raises, halves=self._halves)
        super().__init__(self._faulty)
        self.refusals = 0

    def submit(self, job: Job) -> None:
        if self.refusals:
            self.refusals -= 1
            raise FaultError("nothing can be submitted")
        super().submit(job)

    @staticmethod
    def arrived(ticket: Ticket, step: int) -> bool:
        """Whether this step of the job has been done, or never will be."""
        return step < len(ticket._issued)

    def run_halfway(self) -> None:
        """The next job copies half of the pages of its next step, and breaks."""
        self._halves.add(self._faulty.legs)
        self.run()

    def run_raising(self, step: int = 0) -> None:
        """The next job breaks before its coming step of that number."""
        self._raises.add(self._faulty.legs + step)
        self.run()

    def expire(self) -> None:
        """Everything submitted so far is past its deadline from now on."""
        for job in self.jobs:
            job.ticket.deadline = 0.0


# -- the cache ------------------------------------------------------------------------------

Pages = int | Mapping[str, int]


class Rig:
    """A cache over memory of its own, with a model in place of an engine.

    `lanes` are run by hand unless given. Layers arrive in groups of one. `tails`: so many prompts
    can be received from peers at a time.
    """

    def __init__(
        self,
        memory: ModelMemory = FULL,
        *,
        device: Pages = 16,
        host: Pages = 32,
        layouts: tuple[Layout, Layout] = (Layout.LAYER_FIRST, Layout.PAGE_FIRST_DIRECT),
        lanes: Mapping[Way, Issuer] | None = None,
        tails: int = 0,
        **options: Any,
    ) -> None:
        self.memory = memory
        self.hands = {} if lanes else {way: HandLane() for way in Way}
        placement = options.pop("placement", None) or Branches()
        self.buffers = {
            tier: _buffers(memory, _pages(memory, tier, pages), layout)
            for tier, pages, layout in zip(TIERS, (device, host), layouts, strict=True)
        }
        self.rows = {tier: Rows(buffers) for tier, buffers in self.buffers.items()}
        layers = range(memory.end_layer) if memory.part is None else memory.part.layers
        groups = [range(layer, layer + 1) for layer in layers]
        blocks = (self.buffers[Tier.DEVICE], self.buffers[Tier.HOST])
        copier = Copier(*blocks, lanes or self.hands, groups)
        config = CacheConfig(Tokens(PAGE), **{"host_size": Tokens(PAGE), **options})
        self.tails = None
        if tails:
            self.tails = TailRows(memory, tails, self.buffers, pinned=False, shared=False)
            self.tail_rows = Rows(self.tails.buffers)
        hardware = Hardware(*blocks, copier, tails=self.tails)
        self.cache = TieredCache(memory, config, placement=placement, hardware=hardware)
        self._watch_slots()

    def _watch_slots(self) -> None:
        for cell in self.cache.index.tree.cells:
            if cell.tier in TIERS:
                name = self.memory.anchors[cell.anchor].name
                cell.slots = PoisonedSlots(cell.slots.capacity, self.rows[cell.tier], name)

    # -- requests ---------------------------------------------------------------------------

    def begin(
        self,
        tokens: Sequence[int],
        namespace: Namespace = DEFAULT_NAMESPACE,
        slowest: Tier = Tier.HOST,
        **options: Any,
    ) -> Lease | None:
        """Match, reserve, load."""
        match = self.cache.match(self.cache.prompt(tokens, namespace), slowest)
        lease = self.cache.reserve(match, **options)
        if lease is not None:
            self.cache.load(lease)
        return lease

    def started(self, tokens: Sequence[int], **options: Any) -> Lease:
        """Begin where there is room for it."""
        lease = self.begin(tokens, **options)
        assert lease is not None
        return lease

    def compute(
        self, lease: Lease, pages: int | None = None, without: Collection[str] = ()
    ) -> None:
        """The model computes up to so many pages (all whole ones), and they are committed."""
        pages = len(page_names(lease.prompt)) if pages is None else pages
        self.write(lease, lease.committed_pages, pages, without)
        self.cache.commit(lease, pages * PAGE + self.memory.holdback, without)

    def write(self, lease: Lease, first: int, end: int, without: Collection[str] = ()) -> None:
        """Write what the model computes for pages [first, end), where they have slots.

        Pages of hot pools are written where they live, on the host.
        """
        for write in self.writes(lease, first, end, without):
            write()

    def writes(
        self, lease: Lease, first: int, end: int, without: Collection[str] = ()
    ) -> list[Callable[[], None]]:
        """What a step would write, to the slots that the lease has now."""
        names, found = page_names(lease.prompt), []
        for anchor in self.memory.anchors:
            table = self.cache.page_table(lease, anchor.name)
            kept = [(page, int(table[page])) for page in range(first, end) if table[page] >= 0]
            pools = [p for p in self.memory.group(anchor.name) if p.name not in without]
            for pool, layer in ((p, layer) for p in pools for layer in p.layers):
                for page, slot in kept:
                    row = partial(self.rows[anchor.home].write, pool, layer, slot, names[page])
                    found.append(row)
        return found

    def remember(self, tokens: Sequence[int], **options: Any) -> None:
        """Have a prompt's pages on the device, computed and not held."""
        lease = self.started(tokens, **options)
        self.settle()
        self.compute(lease)
        self.cache.release(lease)

    def remember_on_host(self, tokens: Sequence[int]) -> None:
        """Have a prompt's pages on the host only."""
        self.remember(tokens)
        self.settle()
        self.cache.flush(Tier.DEVICE)
        assert self.found(tokens, Tier.DEVICE) == 0

    def found(
        self,
        tokens: Sequence[int],
        slowest: Tier = Tier.HOST,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> int:
        """How many tokens of a prompt are kept."""
        return self.cache.match(self.cache.prompt(tokens, namespace), slowest).tokens

    def quarantine(self, prompt: Prompt) -> int:
        """Quarantine what shares the prompt's first page; from now on its slots are watched."""
        tree, leases = self.cache.index.tree, self.cache._leases.values()
        readers: dict[tuple[int, int], set[int]] = {}
        for lease in leases:
            for cell, anchor in zip(tree.homes, self.memory.anchors, strict=True):
                for slot in self.cache.page_table(lease, anchor.name).tolist():
                    readers.setdefault((cell, slot), set()).add(lease.number)
        for cell, slots in self._branch(prompt):
            pool = tree.cells[cell].slots
            assert isinstance(pool, PoisonedSlots)
            for slot in slots.tolist():
                pool.quarantined[slot] = readers.get((cell, slot), set())
        return self.cache.quarantine(prompt)

    def _branch(self, prompt: Prompt) -> Iterator[tuple[int, Slots]]:
        """All slots, by cell, of pages that share the prompt's first one, and of those coming."""
        tree = self.cache.index.tree
        root = tree.roots.get((prompt.namespace, prompt.head))
        first = prompt.packed[: tree.page_bytes]
        whole = root is not None and len(first) == tree.page_bytes
        tops = [
            top
            for top in (root.children.values() if root is not None and whole else ())
            if (prompt.head + top.tokens).startswith(first)
        ]
        nodes = [node for top in tops for node in (top, *tree.below(top))]
        for node in nodes:
            yield from ((cell, slots) for cell, slots in enumerate(node.slots) if slots is not None)
        for arrival in tree.arrivals.values():
            yield from ((part.cell, part.slots) for part in arrival.parts if part.node in nodes)

    # -- copies -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Do all copies, and those that follow from them."""
        deadline = time.monotonic() + 60
        self.cache.poll()
        while self.cache.stats().in_flight:
            assert time.monotonic() < deadline, "copies that never end"
            for lane in self.hands.values():
                lane.run(len(lane.jobs))
            if not self.hands:
                time.sleep(0.0002)
            self.cache.poll()

    # -- looking ----------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """What does not hold now: in the tree, in readable pages, in slots that are free."""
        return [*self.cache.validate(), *self._spoiled(), *self._disturbed(), *self._misled()]

    def misread(self, lease: Lease, layers: Collection[int] | None = None) -> list[str]:
        """What the model would read wrong of a lease's prefix, or miss of it."""
        return [
            f"lease {lease.number} would read a wrong {pool.name} of page {page}, {layer}"
            for pool, page, slot, name in self._prefix(lease)
            for layer in (pool.layers if layers is None else set(layers) & set(pool.layers))
            if slot < 0 or not self.rows[pool.home].holds(pool, layer, slot, name)
        ]

    def _prefix(self, lease: Lease) -> Iterator[tuple[PoolSpec, int, int, PageName]]:
        """All that may be read of a lease's prefix: pool, page, slot, and the page's identity."""
        boundary, names = lease.committed_pages, page_names(lease.prompt)
        for anchor in self.memory.anchors:
            table = self.cache.page_table(lease, anchor.name)[:boundary].tolist()
            first = self._needed_from(lease, anchor)
            for pool in self.memory.group(anchor.name):
                optional = pool.follows is not None and not pool.reuse.required
                there = self.cache.carries(lease, pool.name) if optional else None
                for page, slot in enumerate(table):
                    if page < first and (slot < 0 or lease.loading):
                        continue  # Not there, or on its way for another lease.
                    if there is None or there[page]:
                        yield pool, page, slot, names[page]

    def _needed_from(self, lease: Lease, anchor: PoolSpec) -> int:
        """From which page on the prefix must be there; windows stay behind as the lease goes on."""
        boundary = lease.committed_pages
        reach = anchor.reuse.reach_pages(PAGE)
        if not anchor.reuse.required:
            return boundary
        if reach is None:
            return 0
        return max(0, boundary - reach) if boundary * PAGE == lease.cached_tokens else boundary

    def _spoiled(self) -> Iterator[str]:
        """Pages that can be found, in either tier, and hold something else than they should."""
        tree = self.cache.index.tree
        pending: list[tuple[Node, Namespace, bytes]] = [
            (child, namespace, head)
            for (namespace, head), root in tree.roots.items()
            for child in root.children.values()
            if not root.hidden
        ]
        while pending:
            node, namespace, above = pending.pop()
            prefix = above + node.tokens
            pending += [(child, namespace, prefix) for child in node.children.values()]
            ends = range(len(above), len(prefix), tree.page_bytes)
            names = [(namespace, prefix[: end + tree.page_bytes]) for end in ends]
            for cell, slots in enumerate(node.slots):
                if slots is not None:
                    yield from self._spoiled_slots(tree.cells[cell].tier, cell, slots, names)

    def _spoiled_slots(
        self, tier: Tier, cell: int, slots: Slots, names: list[PageName]
    ) -> Iterator[str]:
        tree = self.cache.index.tree
        anchor = self.memory.anchors[tree.cells[cell].anchor].name
        for pool in self.memory.group(anchor):
            there = [True] * len(slots)
            if pool.follows is not None and not pool.reuse.required:
                there = tree.presence.of(SidecarSlots(tier, anchor, pool.name, slots)).tolist()
            for slot, name, here in zip(slots.tolist(), names, there, strict=True):
                for layer in pool.layers if here else ():
                    if not self.rows[tier].holds(pool, layer, slot, name):
                        yield f"{tier.name}: slot {slot} has a wrong {pool.name}, layer {layer}"

    def _misled(self) -> Iterator[str]:
        """Leases that came to read a page after it was in quarantine.

        Behind its windows a lease may see pages that were brought for others; it reads none. Nor
        does a lease whose load failed: it is to be released.
        """
        tree = self.cache.index.tree
        homes = [tree.cells[home] for home in tree.homes]
        leases = ((n, lease) for n, lease in self.cache._leases.items() if not lease.failed)
        for number, lease in leases:
            for cell, anchor in zip(homes, self.memory.anchors, strict=True):
                assert isinstance(cell.slots, PoisonedSlots)
                reach = anchor.reuse.reach_pages(PAGE)
                first = 0 if reach is None else max(0, lease.committed_pages - reach)
                for slot in self.cache.page_table(lease, anchor.name)[first:].tolist():
                    if number not in cell.slots.quarantined.get(slot, {number}):
                        yield f"lease {number} came to read slot {slot}, in quarantine"

    def _disturbed(self) -> Iterator[str]:
        for cell in self.cache.index.tree.cells:
            anchor = self.memory.anchors[cell.anchor].name
            free = cell.slots.free_slots()
            if cell.tier in TIERS and not self.rows[cell.tier].poisoned(anchor, free):
                yield f"{cell.tier.name}: something wrote into a free slot of {anchor}"

    # -- the end ----------------------------------------------------------------------------

    def end(self) -> None:
        """Give everything back, and find nothing missing."""
        assert self.problems() == []
        tree = self.cache.index.tree
        for lease in list(self.cache._leases.values()):
            self.cache.release(lease)
        self.cache.sessions.forget_all()
        self.settle()
        assert self.problems() == []
        assert not tree.leases and not tree.arrivals and not self.cache._leases
        assert not tree.imports and not tree.departures and not tree.sidecar_imports
        for count in self.cache.stats().pages.values():
            assert count.free + count.resident == count.capacity
        for tier in TIERS:
            self.cache.flush(tier)
        assert all(count.free == count.capacity for count in self.cache.stats().pages.values())
        assert self.cache.index.hot_rows[0] == 0
        assert tree.nodes == 0 and not tree.roots
        assert self.problems() == []
        self.cache.close()


def _pages(memory: ModelMemory, tier: Tier, pages: Pages) -> dict[str, int]:
    """Slots per anchor; hot pools have none on the device."""
    slots = {a.name: pages if isinstance(pages, int) else pages[a.name] for a in memory.anchors}
    return slots | {pool.name: 0 for pool in memory.hot_pools if tier is Tier.DEVICE}


def _buffers(memory: ModelMemory, slots: Mapping[str, int], layout: Layout) -> Buffers:
    arrangement = Arrangement(memory, slots, layout)
    return Buffers(arrangement, torch.full((arrangement.bytes,), POISON, dtype=torch.uint8))
