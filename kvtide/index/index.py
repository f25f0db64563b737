"""Where everything is, logically: the verbs of the index.

    match ─▶ pin ─▶ [copy ─▶ land | fail] ─▶ reserve ─▶ commit … commit ─▶ release
                                        evict, demote, clear make room; banish forbids
    outline ─▶ pin ─▶ take ─▶ adopt … adopt ─▶ abandon ─▶ forgo      pages from outside

`Index` takes prompts and returns leases; it never sees bytes, time or requests. It is
deterministic: a logical clock, no wall time, no order that depends on hashes. One thread at a time.

No room is `None` or `False`, with nothing promised. Misuse (committing what was not reserved,
releasing what another index leased, pinning a stale hit) is a programmer's error and asserts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.index import index_invariants
from kvtide.index.events import Listener
from kvtide.index.evict.allocation import Allocator
from kvtide.index.evict.policy_registry import DEFAULT_POLICY
from kvtide.index.keys import DEFAULT_NAMESPACE, SCRATCH, Namespace, Prompt, Tokens
from kvtide.index.leases.arrivals import Arrivals
from kvtide.index.leases.imports_exports import ImportsExports, Outline, WantedPages
from kvtide.index.leases.leasing import Leasing
from kvtide.index.leases.quarantine import banish, keys_below
from kvtide.index.match.match import Hit, Matcher, Stop
from kvtide.index.placement.learned_placement import CostBased
from kvtide.index.placement.placement import Placement
from kvtide.index.tree.holds import Arrival, Departure, Import, IndexLease
from kvtide.index.tree.tree import Tree
from kvtide.spec import ModelMemory, Slots, Tier


class Index:
    """See the module. `capacity_pages[tier][anchor]` are the slots; a tier left out has none.

    In a tier that `keeps`, room is never made by dropping the only copy of a page somebody may
    resume from: there is no room then, `missing` says how much, and `demote` makes it.
    """

    def __init__(
        self,
        memory: ModelMemory,
        capacity_pages: Mapping[Tier, Mapping[str, int]],
        *,
        eviction: str = DEFAULT_POLICY,
        placement: Placement | None = None,
        fingerprint: bytes = b"",
        keeps: Collection[Tier] = (),
    ) -> None:
        self.memory = memory
        self.tree = Tree(memory, capacity_pages, eviction, fingerprint)
        kept = (self.tree.cell(tier, number) for tier in keeps for number in self._anchors())
        self._room = Allocator(self.tree, frozenset(kept))
        self._matcher = Matcher(memory, self.tree)
        self._leasing = Leasing(
            memory, self.tree, self._matcher, self._room, placement or CostBased()
        )
        self._moving = Arrivals(self.tree, self._room, self._leasing)
        self._outside = ImportsExports(self.tree, self._room, self._matcher, self._leasing)

    # -- finding ----------------------------------------------------------------------------

    def prompt(self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> Prompt:
        """A request's tokens in the form the index works with; made once per request."""
        return Prompt(tokens, namespace, self.memory.holdback)

    def scratch(self, tokens: Tokens) -> Prompt:
        """A prompt that finds nothing and is found by nobody: for computing it without the cache.

        It is leased like any other. Each lease has its pages to itself, nothing of them is copied
        down, and its release drops them.
        """
        return Prompt(tokens, SCRATCH, self.memory.holdback)

    def match(self, prompt: Prompt, slowest: Tier = Tier.STORAGE) -> Hit:
        """The deepest boundary at which the prompt can resume from these tiers. Changes nothing."""
        return self._matcher.match(prompt, slowest)

    def common(self, prompt: Prompt, other: Prompt, beyond: int = 0) -> int:
        """How many pages of another prompt this one could go on from, if they were all kept.

        0 if these are not more than `beyond`, which is told cheaply.
        """
        return self._matcher.common(prompt, other, beyond)

    def current(self, hit: Hit) -> bool:
        """Whether nothing has changed since the hit was found."""
        return hit.tick == self.tree.tick

    def pages_by_tier(self, hit: Hit) -> dict[Tier, int]:
        """Where the pages up to the hit's boundary would come from."""
        return self._matcher.pages_by_tier(hit)

    def matched_slots(self, hit: Hit, anchor: str) -> Slots:
        """The device slot of every page that the hit matched, resumable there or not; else -1."""
        table = np.full(hit.matched, -1, np.int32)
        cell = self.tree.cell(Tier.DEVICE, self._anchor(anchor))
        for node in hit.nodes:
            if (slots := node.slots[cell]) is not None:
                table[node.depth : node.end] = slots[: hit.matched - node.depth]
        return table

    def why(self, hit: Hit) -> list[Stop]:
        """Per pool, what kept the hit from reaching deeper."""
        return self._matcher.why(hit)

    # -- leasing ----------------------------------------------------------------------------

    def pin(self, hit: Hit, priority: int = 0) -> IndexLease:
        """Lease the hit's prefix: what it needs stays where it is until `release`."""
        return self._leasing.pin(hit, priority)

    def reserve(
        self,
        lease: IndexLease,
        tokens: int,
        checkpoints: Iterable[int] | None = None,
        growth: int = 0,
        running: bool = False,
    ) -> bool:
        """Take device slots for the pages up to `tokens`, in every anchor or in none.

        The placement is asked once, for all of the prompt; `checkpoints` (page boundaries)
        overrides it. `growth` promises as many
        further pages: a later call takes from the promise first, and cannot fail for pools that
        keep the whole history. `running` also keeps what the request itself needs to go on at
        `tokens`: the windows and states before it. Where they are not worth a checkpoint they go
        when the request has gone on, or is released within its prompt (but see `retain`).
        """
        return self._leasing.reserve(lease, tokens, checkpoints, growth, running)

    def shrink(self, lease: IndexLease, tokens: int) -> None:
        """Give back the slots of pages beyond `tokens`; as many stay promised as `growth`."""
        self._leasing.shrink(lease, -(-tokens // self.memory.page_tokens))

    def commit(self, lease: IndexLease, tokens: int, without: Collection[str] = ()) -> None:
        """The tokens up to `tokens` are computed: their full pages become readable.

        The lease then covers them. Pages that somebody else committed meanwhile are shared, and
        the slots taken for them go back: `page_table` says where everything is. `without` names
        optional sidecars (a draft's KV) that were not computed for these pages.
        """
        self._leasing.commit(lease, tokens, without)

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is anything that is kept at some boundaries only."""
        return bool(self.tree.finite_cells)

    def retain(self, lease: IndexLease) -> None:
        """Make a checkpoint of where a running lease stands: somebody will go on from there."""
        self._leasing.retain(lease)

    def release(self, lease: IndexLease) -> None:
        """Give back exactly what the lease holds. A second time is harmless."""
        self._leasing.release(lease)

    def slowest(self, lease: IndexLease) -> Tier:
        """The slowest tier from which the lease's prefix has to come."""
        return self._leasing.slowest(lease)

    def on_device(self, lease: IndexLease) -> bool:
        """Whether all that the lease needs to resume is readable on the device."""
        return self._leasing.on_device(lease)

    def page_table(self, lease: IndexLease, anchor: str) -> Slots:
        """The device slot of every page the lease has, -1 where the anchor keeps none."""
        return self._leasing.page_table(lease, self._anchor(anchor), coming=False)

    def coming_table(self, lease: IndexLease, anchor: str) -> Slots:
        """The page table with the slots of pages on their way to the device.

        For those who wait for the transfer before they read: nothing is there yet.
        """
        return self._leasing.page_table(lease, self._anchor(anchor), coming=True)

    def carries(self, lease: IndexLease, sidecar: str) -> npt.NDArray[np.bool_]:
        """For every page of the lease's prefix on the device: has it this optional sidecar?"""
        anchor = self.memory.pool(sidecar).follows
        assert anchor is not None, f"{sidecar} is no sidecar"
        table = self.page_table(lease, anchor)[: lease.boundary]
        return (table >= 0) & self.tree.presence.of(Tier.DEVICE, anchor, sidecar, table)

    # -- moving between tiers ---------------------------------------------------------------

    def copy(self, lease: IndexLease, source: Tier, target: Tier) -> Arrival | None:
        """Begin a load or fetch (upwards) or a backup or store (downwards) of the lease's path.

        None when the target has no room. An arrival without parts has nothing to move.
        """
        return self._moving.copy(lease, source, target)

    def needs(self, lease: IndexLease, source: Tier, target: Tier) -> dict[str, int]:
        """How many slots of the target such a copy would take, by anchor. Changes nothing."""
        return self._moving.needs(lease, source, target)

    def demote(self, source: Tier, target: Tier, anchor: str, pages: int) -> Arrival | None:
        """Begin to move victims of a full tier down; None when there is none, or no room."""
        return self._moving.demote(source, target, self._anchor(anchor), pages)

    def land(self, arrival: Arrival, departs: bool = False) -> Departure | None:
        """All bytes of the arrival are in place: its pages become readable.

        If it `departs`, its pages stay on the host until `departed`; None if there are none.
        """
        return self._moving.land(arrival, departs)

    def fail(self, arrival: Arrival) -> None:
        """The arrival's bytes will not come: everything it held goes back."""
        self._moving.fail(arrival)

    # -- from and to the outside ------------------------------------------------------------

    def outline(self, prompt: Prompt) -> Outline:
        """Which pages of a prompt the device and the host have. Changes nothing."""
        return self._outside.outline(prompt)

    def take(self, lease: IndexLease, wanted: Sequence[WantedPages]) -> Import | None:
        """Take host slots for pages of the lease's prompt that come from outside, in this order.

        None when there is no room. The import has the lease from now on.
        """
        return self._outside.take(lease, wanted)

    def adopt(self, arriving: Import, count: int, absent: Sequence[Collection[str]]) -> None:
        """The first `count` pages of an import are there, and can be found on the host.

        `absent` names, for each of them, the optional sidecars that did not come with it.
        """
        self._outside.adopt(arriving, count, absent)

    def abandon(self, arriving: Import) -> None:
        """No more of an import is adopted: what it held may go, but for its slots."""
        self._outside.abandon(arriving)

    def forgo(self, arriving: Import) -> None:
        """Nothing writes to an import's slots any more: those that were not adopted go back."""
        self._outside.forgo(arriving)

    def departed(self, departure: Departure) -> None:
        """What departs was written, or given up: the host may drop it."""
        self._outside.departed(departure)

    def prompt_key(self, prompt: Prompt) -> bytes:
        """What the keys of the prompt's pages are chained from (`keys.chain`)."""
        return self.tree.name_key((prompt.namespace, prompt.head))

    # -- making room ------------------------------------------------------------------------

    def evict(self, tier: Tier, anchor: str, pages: int) -> int:
        """Drop at least so many pages if so many are evictable; returns how many it were."""
        self.tree.tick += 1
        return self._room.evict(self.tree.cell(tier, self._anchor(anchor)), pages)

    def clear(self, tier: Tier) -> int:
        """Drop every page of a tier that nobody needs; returns how many it were."""
        everything = 1 << 60
        return sum(self.evict(tier, pool.name, everything) for pool in self.memory.anchors)

    def banish(self, prompt: Prompt) -> int:
        """Let nobody find again what shares the prompt's first page; how many pages it were.

        Counted over tiers and anchors. They are dropped at once, or when the leases and arrivals
        that need them end; leases that stand on them go on, and nobody finds what they commit.
        """
        return banish(self.tree, prompt)

    def keys_below(self, prompt: Prompt) -> list[bytes]:
        """The keys of all pages known that share the prompt's first page."""
        return keys_below(self.tree, prompt)

    # -- looking ----------------------------------------------------------------------------

    def subscribe(self, listener: Listener) -> None:
        """Be told of every page that becomes readable somewhere, or ceases to be."""
        self.tree.listeners.append(listener)

    @property
    def missing(self) -> dict[tuple[Tier, str], int]:
        """What the last refusal lacked: pages by tier and anchor."""
        names, anchors = self.tree.anchor_names, self.tree.anchors
        missing = self._room.missing.items()
        return {(Tier(cell // anchors), names[cell % anchors]): pages for cell, pages in missing}

    def capacity(self, tier: Tier, anchor: str) -> int:
        """All slots of an anchor in a tier."""
        return self.tree.cells[self.tree.cell(tier, self._anchor(anchor))].slots.capacity

    def free_pages(self, tier: Tier, anchor: str) -> int:
        """Slots that are neither taken nor promised."""
        return self.tree.cells[self.tree.cell(tier, self._anchor(anchor))].slots.available

    def resident_pages(self, tier: Tier, anchor: str) -> int:
        return self.tree.cells[self.tree.cell(tier, self._anchor(anchor))].resident_pages

    def validate(self) -> list[str]:
        """Every violation of the invariants, in sentences; empty when all is well."""
        return index_invariants.violations(self.tree)

    def _anchors(self) -> range:
        return range(self.tree.anchors)

    def _anchor(self, name: str) -> int:
        return self.tree.anchor_names.index(name)
