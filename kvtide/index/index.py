"""Where everything is, logically: the verbs of the index.

    match ─▶ pin ─▶ [copy ─▶ land | fail] ─▶ reserve ─▶ commit … commit ─▶ release
                                        evict, demote, clear free slots; quarantine hides
    outline ─▶ pin ─▶ take ─▶ adopt … adopt ─▶ abandon ─▶ forgo      pages from a store

`Index` takes prompts and returns leases; it never sees bytes, time or requests. It is
deterministic: a logical clock, no wall time, no order that depends on hashes. One thread at a time.

No room is `None` or `False`, with nothing promised. Misuse (committing what was not reserved,
releasing what another index leased, pinning a stale hit) is a programmer's error and asserts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.index import index_invariants
from kvtide.index.events import Event, EventListener, FieldsListener
from kvtide.index.evict.allocation import Allocator
from kvtide.index.evict.policies import DEFAULT_POLICY
from kvtide.index.keys import (
    DEFAULT_NAMESPACE,
    SCRATCH,
    Namespace,
    PageKey,
    Prompt,
    TokenSequence,
    page_keys,
)
from kvtide.index.leases.arrivals import Arrivals
from kvtide.index.leases.commits import Commits
from kvtide.index.leases.imports_exports import ImportsExports, Outline, WantedPages
from kvtide.index.leases.lease_slots import arriving_table, page_table
from kvtide.index.leases.leasing import Leasing
from kvtide.index.leases.quarantine import keys_below, quarantine
from kvtide.index.leases.sidecar_imports import SidecarImports
from kvtide.index.match.match import Hit, Matcher, Stop
from kvtide.index.placement.learned_placement import CostBased
from kvtide.index.placement.placement import Placement
from kvtide.index.tree.event_source import EventSource
from kvtide.index.tree.holds import Arrival, Departure, Import, IndexLease, Taken
from kvtide.index.tree.presence import SidecarSlots
from kvtide.index.tree.tree import Tree
from kvtide.index.tree.tree_reading import TreeReading
from kvtide.index.tree.tree_survey import Standing, TreeBranch, TreeSurvey
from kvtide.spec import ModelMemory, PageMove, Slots, Tier


class Index:
    """See the module. `capacity_pages[tier][anchor]` are the slots; a tier left out has none.

    A tier in `keeps` never evicts the only copy of a page that a resume may need. An allocation
    fails instead: `missing` names what it lacked, and `demote` moves pages down to free it.
    `fingerprint` is what all page keys begin with: it stands for the model. `sidecars`: what pages
    lack, and a store may have. `copy_on_device` copies a sidecar between device slots, at once.
    `hot_rows` are the leases that may hold slots at once where a memory has hot pools.
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
        copy_on_device: Callable[[PageMove], None] = lambda move: None,
        hot_rows: int = 0,
    ) -> None:
        self.memory = memory
        self.fingerprint = fingerprint
        self.tree = Tree(memory, capacity_pages, eviction, fingerprint, hot_rows)
        kept = (self.tree.cell(tier, number) for tier in keeps for number in self._anchors())
        self._allocator = Allocator(self.tree, frozenset(kept))
        self._matcher = Matcher(memory, self.tree)
        chosen = placement or CostBased()
        self._leasing = Leasing(memory, self.tree, self._allocator, chosen)
        self._commits = Commits(memory, self.tree, self._matcher, self._leasing, copy_on_device)
        self._arrivals = Arrivals(self.tree, self._allocator, self._leasing)
        self._imports_exports = ImportsExports(
            self.tree, self._allocator, self._matcher, self._leasing
        )
        self.sidecars = SidecarImports(memory, self.tree, self._matcher)

    # -- finding ----------------------------------------------------------------------------

    def prompt(self, tokens: TokenSequence, namespace: Namespace = DEFAULT_NAMESPACE) -> Prompt:
        """A request's tokens in the form the index works with; made once per request."""
        return Prompt(tokens, namespace, self.memory.holdback)

    def scratch(self, tokens: TokenSequence) -> Prompt:
        """A prompt that finds nothing and that no match finds: for computing without the cache.

        It is leased like any other. Each lease has pages of its own, none of them is copied down,
        and its release drops them.
        """
        return Prompt(tokens, SCRATCH, self.memory.holdback)

    def match(self, prompt: Prompt, slowest: Tier = Tier.STORAGE) -> Hit:
        """The deepest boundary at which the prompt can resume from these tiers. Changes nothing."""
        return self._matcher.match(prompt, slowest)

    def shared_pages(self, prompt: Prompt, other: Prompt, beyond: int = 0) -> int:
        """How many pages this prompt shares with another one, and could resume after.

        0 if not more than `beyond`, which is cheap to find out.
        """
        return self._matcher.shared_pages(prompt, other, beyond)

    def current(self, hit: Hit) -> bool:
        """Whether nothing has changed since the hit was found."""
        return hit.tick == self.tree.tick

    def pages_by_tier(self, hit: Hit) -> dict[Tier, int]:
        """How many pages up to the hit's boundary each tier would give."""
        return self._matcher.pages_by_tier(hit)

    def matched_slots(self, hit: Hit, anchor: str) -> Slots:
        """The slot at home of every page that the hit matched, resumable there or not; else -1."""
        table = np.full(hit.matched, -1, np.int32)
        cell = self.tree.homes[self._anchor(anchor)]
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

    def reserve(self, lease: IndexLease, tokens: int, growth: int = 0) -> bool:
        """Take slots for the pages up to `tokens` in every anchor's home tier, or in none.

        The placement chooses checkpoints once, for all of the prompt. `growth` promises as many
        further pages: a later call takes from the promise first, and cannot fail for pools that
        keep the whole history.
        """
        return self._leasing.reserve(lease, tokens, growth)

    def reserve_with(
        self, lease: IndexLease, tokens: int, checkpoints: Iterable[int], growth: int = 0
    ) -> bool:
        """Like `reserve`, with these checkpoints (page boundaries) in place of the placement's."""
        return self._leasing.reserve_with(lease, tokens, checkpoints, growth)

    def advance(self, lease: IndexLease, tokens: int, growth: int = 0) -> bool:
        """Like `reserve`, for a request that computes its tokens step by step.

        Also keeps the windows and states before `tokens`, from which the next step continues.
        Those not worth a checkpoint go when the request has moved on, or is released within its
        prompt (but see `retain`).
        """
        return self._leasing.advance(lease, tokens, growth)

    def advance_without_checkpoints(self, lease: IndexLease, tokens: int, growth: int = 0) -> bool:
        """Like `advance`, where the checkpoints of the placement do not fit."""
        return self._leasing.advance_without_checkpoints(lease, tokens, growth)

    def shrink(self, lease: IndexLease, tokens: int) -> None:
        """Give back the slots of pages beyond `tokens`; as many stay promised as `growth`."""
        self._leasing.shrink(lease, -(-tokens // self.memory.page_tokens))

    def commit(self, lease: IndexLease, tokens: int, without: Collection[str] = ()) -> None:
        """The tokens up to `tokens` are computed: their full pages become readable.

        The lease then covers them. Pages that another lease committed meanwhile are shared, and
        the slots taken for them go back: `page_table` has the slots in use. `without` names
        optional sidecars (a draft's KV) that were not written for these pages. Shared pages that
        lack sidecars get those that the lease wrote (`copy_on_device`).
        """
        self._commits.commit(lease, tokens, without)

    @property
    def has_checkpoints(self) -> bool:
        """Whether a pool keeps pages at some boundaries only."""
        return bool(self.tree.finite_cells)

    def retain(self, lease: IndexLease) -> None:
        """Keep a checkpoint at a running lease's boundary: a next prompt resumes there."""
        self._leasing.retain(lease)

    def release(self, lease: IndexLease) -> None:
        """Give back exactly what the lease holds. A second time is harmless."""
        self._leasing.release(lease)

    def slowest(self, lease: IndexLease) -> Tier:
        """The slowest tier from which the lease's prefix has to come."""
        return self._leasing.slowest(lease)

    def at_home(self, lease: IndexLease) -> bool:
        """Whether all that the lease needs to resume can be read where a forward pass reads it."""
        return self._leasing.at_home(lease)

    def page_table(self, lease: IndexLease, anchor: str) -> Slots:
        """The slot of every page the lease has, -1 where the anchor keeps none.

        In the anchor's home tier: on the device, of hot pools on the host.
        """
        return page_table(self.tree, lease, self._anchor(anchor))

    def arriving_table(self, lease: IndexLease, anchor: str) -> Slots:
        """The page table, with the slots of pages that are arriving on the device as well.

        For a caller that waits for the transfer before it reads.
        """
        return arriving_table(self.tree, lease, self._anchor(anchor))

    def carries(self, lease: IndexLease, sidecar: str) -> npt.NDArray[np.bool_]:
        """For every page of the prefix: whether the device has this optional sidecar of it."""
        anchor = self.memory.pool(sidecar).follows
        assert anchor is not None, f"{sidecar} is no sidecar"
        table = self.page_table(lease, anchor)[: lease.boundary]
        where = SidecarSlots(Tier.DEVICE, anchor, sidecar, table)
        return (table >= 0) & self.tree.presence.of(where)

    @property
    def sidecars_version(self) -> int:
        """Changes when pages that may be leased get optional sidecars."""
        return self.tree.presence.version

    # -- moving between tiers ---------------------------------------------------------------

    def copy(self, lease: IndexLease, source: Tier, target: Tier) -> Arrival | None:
        """Begin a load or fetch (upwards) or a backup or store (downwards) of the lease's path.

        None when the target has no room. An arrival without moves has nothing to move.
        """
        return self._arrivals.copy(lease, source, target)

    def needs(self, lease: IndexLease, source: Tier, target: Tier) -> dict[str, int]:
        """How many slots of the target such a copy would take, by anchor. Changes nothing."""
        return self._arrivals.needs(lease, source, target)

    def demote(self, source: Tier, target: Tier, anchor: str, pages: int) -> Arrival | None:
        """Begin to move victims of a full tier down; None when there is none, or no room."""
        return self._arrivals.demote(source, target, self._anchor(anchor), pages)

    def land(self, arrival: Arrival) -> None:
        """All bytes of the arrival are in place: its pages become readable."""
        self._arrivals.land(arrival)

    def land_departing(self, arrival: Arrival) -> Departure | None:
        """Like `land`, and the new pages stay on the host until `departed`; None without any.

        Pages of hot pools, computed on the host before the arrival began, depart with them.
        """
        return self._arrivals.land_departing(arrival)

    def fail(self, arrival: Arrival) -> None:
        """The arrival's copy failed: everything it held goes back."""
        self._arrivals.fail(arrival)

    # -- imports and exports ----------------------------------------------------------------

    def outline(self, prompt: Prompt) -> Outline:
        """Which pages of a prompt the device and the host have. Changes nothing."""
        return self._imports_exports.outline(prompt)

    def take(self, lease: IndexLease, wanted: Sequence[WantedPages]) -> Import | None:
        """Take host slots for pages of the lease's prompt that a store or a peer brings.

        None when there is no room. The import owns the lease from now on.
        """
        return self._imports_exports.take(lease, wanted)

    def adopt(
        self, arriving: Import, here: Sequence[Taken], absent: Sequence[Collection[str]]
    ) -> None:
        """These pages of an import have come from a store, in any order: matches find them on the
        host.

        `absent` names, for each of them, the optional sidecars that it lacks.
        """
        self._imports_exports.adopt(arriving, here, absent)

    def adopt_from_peer(
        self, arriving: Import, here: Sequence[Taken], absent: Sequence[Collection[str]]
    ) -> None:
        """The same of pages that are in no store."""
        self._imports_exports.adopt_from_peer(arriving, here, absent)

    def depart(self, arriving: Import, adopted: Sequence[Taken]) -> Departure | None:
        """Pages of an import that came from a peer stay on the host until `departed`; None if none
        of them is there."""
        return self._imports_exports.depart(arriving, adopted)

    def abandon(self, arriving: Import) -> None:
        """Adopt no more of an import: everything it held but its slots goes back."""
        self._imports_exports.abandon(arriving)

    def forgo(self, arriving: Import) -> None:
        """Nothing writes to an import's slots any longer: those not adopted go back."""
        self._imports_exports.forgo(arriving)

    def departed(self, departure: Departure) -> None:
        """A departure was written, or dropped: its host pages are unpinned."""
        self._imports_exports.departed(departure)

    def supplement(self, prompt: Prompt, max_pages: int) -> Arrival | None:
        """Begin to copy optional sidecars that the host has to pages that the device has without
        them, of the prompt's prefix; None if there are none."""
        return self._arrivals.supplement(self.sidecars.nodes(prompt), max_pages)

    def page_keys(self, prompt: Prompt, pages: int | None = None) -> Iterator[PageKey]:
        """The keys of the prompt's whole pages, or of its first `pages`, computed as asked for."""
        size, after = self.tree.page_bytes, self.tree.after_bytes
        tokens = prompt.packed if pages is None else prompt.packed[: pages * size + after]
        return page_keys(self.tree.keys.of_namespace(prompt.namespace), tokens, size, after)

    # -- freeing slots ----------------------------------------------------------------------

    def evict(self, tier: Tier, anchor: str, pages: int) -> int:
        """Drop at least so many pages if so many are evictable; returns how many."""
        self.tree.tick += 1
        return self._allocator.evict(self.tree.cell(tier, self._anchor(anchor)), pages)

    def clear(self, tier: Tier) -> int:
        """Drop every page of a tier that is not pinned; returns how many."""
        everything = 1 << 60
        return sum(self.evict(tier, pool.name, everything) for pool in self.memory.anchors)

    def quarantine(self, prompt: Prompt) -> int:
        """Hide all pages behind the prompt's first page from every match; returns how many.

        Counted over tiers and anchors. They are dropped at once, or when the leases and arrivals
        that pin them end. Leases on them continue, and no match finds what they commit.
        """
        return quarantine(self.tree, prompt)

    def keys_below(self, prompt: Prompt) -> list[PageKey]:
        """The keys of all pages known that share the prompt's first page."""
        return keys_below(self.tree, prompt)

    # -- looking ----------------------------------------------------------------------------

    def subscribe(self, listener: EventListener) -> None:
        """Call the listener for every page that becomes readable in a tier, or is removed."""
        self.subscribe_fields(lambda fields: listener(Event(*fields)))

    def subscribe_fields(self, listener: FieldsListener) -> None:
        """The same for a listener that only queues events: it gets them as plain tuples."""
        self.tree.events.subscribe(listener)

    def read(self) -> TreeReading:
        """All pages that are readable, as events of being stored, a few nodes at a time: for a
        listener that begins, or has missed events. Ends the reading before it."""
        return self.tree.read()

    @property
    def last_event(self) -> int:
        """The number of the last event; 0 if there was none."""
        return self.tree.events.number

    @property
    def event_source(self) -> EventSource:
        """Makes the events: for benchmarks, which time it."""
        return self.tree.events

    @property
    def tick(self) -> int:
        """The logical clock: it advances with every change."""
        return self.tree.tick

    @property
    def page_bytes(self) -> int:
        """The size of one page's tokens in `Prompt.body`."""
        return self.tree.page_bytes

    @property
    def anchor_names(self) -> Sequence[str]:
        return self.tree.anchor_names

    @property
    def leases(self) -> Mapping[int, IndexLease]:
        """The leases that are not released, by number."""
        return self.tree.leases

    @property
    def arrivals(self) -> Mapping[int, Arrival]:
        """The arrivals that have neither landed nor failed, by number."""
        return self.tree.arrivals

    @property
    def imports(self) -> Mapping[int, Import]:
        """The imports that still own slots, by number."""
        return self.tree.imports

    @property
    def departures(self) -> Mapping[int, Departure]:
        """The departures that still pin host pages, by number."""
        return self.tree.departures

    @property
    def missing(self) -> dict[tuple[Tier, str], int]:
        """What the last refusal lacked: pages by tier and anchor."""
        names, anchors = self.tree.anchor_names, self.tree.anchors
        missing = self._allocator.missing.items()
        return {(Tier(cell // anchors), names[cell % anchors]): pages for cell, pages in missing}

    @property
    def has_row(self) -> bool:
        """Whether a further lease may run: a row of the hot pools is free, or there are none."""
        return not self.memory.hot_pools or self.tree.hot_rows.available > 0

    @property
    def hot_rows(self) -> tuple[int, int]:
        """Buffers in the hot pools: those that leases have, and all."""
        rows = self.tree.hot_rows
        return rows.capacity - rows.available, rows.capacity

    def capacity(self, tier: Tier, anchor: str) -> int:
        """All slots of an anchor in a tier."""
        return self.tree.cells[self.tree.cell(tier, self._anchor(anchor))].slots.capacity

    def free_pages(self, tier: Tier, anchor: str) -> int:
        """Slots that are neither taken nor promised."""
        return self.tree.cells[self.tree.cell(tier, self._anchor(anchor))].slots.available

    def resident_pages(self, tier: Tier, anchor: str) -> int:
        return self.tree.cells[self.tree.cell(tier, self._anchor(anchor))].resident_pages

    def unevictable_pages(self, tier: Tier, anchor: str) -> int:
        """Resident pages that are pinned."""
        return self.tree.cells[self.tree.cell(tier, self._anchor(anchor))].pinned_pages

    def evicted_pages(self, tier: Tier, anchor: str) -> int:
        """Pages that were dropped so far, to make room or by `clear`."""
        return self.tree.cells[self.tree.cell(tier, self._anchor(anchor))].evicted_pages

    def pinned_pages(self, leases: Iterable[IndexLease]) -> dict[tuple[Tier, str], int]:
        """Pages that these leases pin, by tier and anchor; a page that several pin counts once."""
        names, anchors = self.tree.anchor_names, self.tree.anchors
        pins = (pin for lease in leases for pin in lease.pins)
        nodes = {(pin.cell, id(node)): node.pages for pin in pins for node in pin.nodes()}
        pages: Counter[tuple[Tier, str]] = Counter()
        for (cell, _), count in nodes.items():
            pages[Tier(cell // anchors), names[cell % anchors]] += count
        return dict(pages)

    def importing_pages(self, anchor: str) -> int:
        """Host slots of an anchor that imports took and that are not adopted yet."""
        cell = self.tree.cell(Tier.HOST, self._anchor(anchor))
        taken = (one for arriving in self.imports.values() for one in arriving.taken)
        return sum(one.cell == cell for one in taken)

    def survey(self, standing: Standing = dict) -> TreeSurvey:
        """The tree in outline, with what stands at its nodes, a few nodes at a time."""
        return TreeSurvey(self.tree, self._matcher.counted, standing)

    def last_page_key(self, branch: TreeBranch) -> bytes | None:
        """The key of the run's last page; None if its node has left the tree, or is hidden."""
        node = branch.node
        if node is None or node.parent is None or node.hidden:
            return None
        return self.tree.key(node)

    @property
    def counted_anchor(self) -> str:
        """The anchor whose pages count for a prompt, and in a survey."""
        return self.tree.anchor_names[self._matcher.counted]

    def validate(self) -> list[str]:
        """Every violation of the invariants, in sentences; empty when all is well."""
        return index_invariants.violations(self.tree)

    def _anchors(self) -> range:
        return range(self.tree.anchors)

    def _anchor(self, name: str) -> int:
        return self.tree.anchor_names.index(name)
