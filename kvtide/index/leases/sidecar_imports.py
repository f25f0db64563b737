"""Supplements: optional sidecars that are brought to pages which are kept without them.

A request that did not speculate leaves pages without a draft's KV; the host, or a store, may have
it. It is copied to the slots that the pages have. Readers of these slots use no sidecar that was
absent when they began. `Arrivals.supplement` brings what the host has to the device; here is what
a store is asked for, and what stays pinned on the host while it is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvtide.index.keys import Hidden, Prompt
from kvtide.index.leases.quarantine import hidden_roots, sweep
from kvtide.index.match.match import Bits, Matcher
from kvtide.index.tree.holds import AnchorNode, LackingPage, SidecarImport
from kvtide.index.tree.presence import SidecarSlots
from kvtide.index.tree.tree import Tree
from kvtide.spec import ModelMemory, Tier


class _Followed(NamedTuple):
    """An anchor with optional sidecars."""

    name: str
    reach: int | None
    sidecars: tuple[str, ...]


class SidecarImports:
    def __init__(self, memory: ModelMemory, tree: Tree, matcher: Matcher) -> None:
        self._tree = tree
        self._matcher = matcher
        self._store = 1
        self._followed = {
            number: _Followed(anchor.name, anchor.reuse.reach_pages(memory.page_tokens), sidecars)
            for number, anchor in enumerate(memory.anchors)
            if (sidecars := memory.optional_sidecars(anchor.name))
        }

    @property
    def open(self) -> Mapping[int, SidecarImport]:
        """Those that still pin host pages, by number."""
        return self._tree.sidecar_imports

    def nodes(self, prompt: Prompt) -> Iterator[AnchorNode]:
        """The nodes that the prompt shares, by anchors that have optional sidecars. Windows that
        end before every reach are left out."""
        if not self._followed or isinstance(prompt.namespace, Hidden):
            return
        hit = self._matcher.match(prompt, Tier.HOST)
        for anchor, (_, reach, _) in self._followed.items():
            start = 0 if reach is None else hit.boundary - reach
            yield from (AnchorNode(node, anchor) for node in hit.nodes if node.end > start)

    def awaited(self, prompt: Prompt) -> bool:
        """Whether pages that the prompt shares, or sidecars of them, are on their way."""
        return any(
            one.node.arriving or any(self._coming(one, name).any() for name in sidecars)
            for one in self.nodes(prompt)
            for sidecars in (self._followed[one.anchor].sidecars,)
        )

    # -- what a store is asked for ----------------------------------------------------------

    def lacking(self, prompt: Prompt) -> list[LackingPage]:
        """The prompt's pages whose sidecars are in neither tier, nor on their way to one, and that
        the store was not asked for in vain."""
        shared = self._shared(prompt)
        return [
            page
            for one in self.nodes(prompt)
            if one.node.sought != self._store
            for page in self._lacking(one)
            if page.page < shared
        ]

    def sought(self, prompt: Prompt, found: Collection[LackingPage]) -> None:
        """Of the prompt's pages the store has sidecars of these alone: nodes of which it has
        nothing are not asked for again."""
        there, shared = {(page.anchor, page.page) for page in found}, self._shared(prompt)
        for one in self.nodes(prompt):
            lacking = {(page.anchor, page.page) for page in self._lacking(one)}
            if lacking and one.node.end <= shared and not lacking & there:
                one.node.sought = self._store

    def ask_anew(self) -> None:
        """Another store is asked from now on."""
        self._store += 1

    def _shared(self, prompt: Prompt) -> int:
        return self._matcher.match(prompt, Tier.HOST).matched

    # -- what it brings ---------------------------------------------------------------------

    def take(self, prompt: Prompt, pages: Sequence[LackingPage]) -> SidecarImport:
        """Pin these host pages of the prompt, to whose slots sidecars are read."""
        tree, wanted = self._tree, defaultdict[str, set[int]](set)
        for page in pages:
            wanted[page.anchor].add(page.page)
        tree.tick += 1
        pins = [
            tree.pins.whole(tree.cell(Tier.HOST, anchor), node)
            for node, anchor in self.nodes(prompt)
            if wanted[tree.anchor_names[anchor]].intersection(range(node.depth, node.end))
        ]
        tree.presence.expect(_slots(pages, [page.sidecars for page in pages]))
        arriving = SidecarImport(tree.next_number(), pages, pins)
        tree.sidecar_imports[arriving.number] = arriving
        return arriving

    def land(self, arriving: SidecarImport, came: Sequence[Collection[str]]) -> None:
        """The read is over: of each page, these sidecars have come."""
        tree, pages = self._tree, arriving.pages
        assert arriving.live and tree.sidecar_imports.pop(arriving.number) is arriving
        arriving.live = False
        tree.tick += 1
        tree.presence.forgo(_slots(pages, [page.sidecars for page in pages]))
        tree.presence.add(_slots(pages, came))
        hidden = hidden_roots(pin.node for pin in arriving.pins)
        for pin in arriving.pins:
            for node in pin.nodes():
                # What the device got meanwhile was not copied to slots that awaited it.
                if node.resident >> pin.cell - tree.anchors & 1:
                    tree.presence.note_ahead(node)
            tree.pins.unpin(pin)
        sweep(tree, hidden)

    # -- looking at a node ------------------------------------------------------------------

    def _lacking(self, one: AnchorNode) -> Iterator[LackingPage]:
        (node, anchor), (name, _, sidecars) = one, self._followed[one.anchor]
        host = self._tree.cells[self._tree.cell(Tier.HOST, anchor)]
        if not node.resident & host.anchor_bits:
            return
        kept = np.stack([self._there(one, each) | self._coming(one, each) for each in sidecars])
        slots = node.slots[self._tree.cell(Tier.HOST, anchor)]
        for number in np.flatnonzero(~kept.all(0)).tolist():
            has = dict(zip(sidecars, kept[:, number].tolist(), strict=True))
            lacks = tuple(each for each in sidecars if not has[each])
            slot = None if slots is None else int(slots[number])
            yield LackingPage(name, node.depth + number, slot, lacks)

    def _there(self, one: AnchorNode, sidecar: str) -> Bits:
        """Of which pages of a node the device or the host has a sidecar."""
        return self._in_either(one, sidecar, self._tree.presence.of)

    def _coming(self, one: AnchorNode, sidecar: str) -> Bits:
        """Of which pages of a node a sidecar is on its way."""
        return self._in_either(one, sidecar, self._tree.presence.coming)

    def _in_either(
        self, one: AnchorNode, sidecar: str, look: Callable[[SidecarSlots], Bits]
    ) -> Bits:
        node, anchor = one
        found = np.zeros(node.pages, bool)
        for tier in (Tier.DEVICE, Tier.HOST):
            slots = node.slots[self._tree.cell(tier, anchor)]
            if slots is not None:
                found |= look(SidecarSlots(tier, self._followed[anchor].name, sidecar, slots))
        return found


def _slots(
    pages: Sequence[LackingPage], sidecars: Sequence[Collection[str]]
) -> Iterator[SidecarSlots]:
    """These sidecars of the pages, in their host slots."""
    slots = defaultdict[tuple[str, str], list[int]](list)
    for page, names in zip(pages, sidecars, strict=True):
        assert page.slot is not None, "sidecars are read to pages that the host has"
        for name in names:
            slots[page.anchor, name].append(page.slot)
    for (anchor, name), some in slots.items():
        yield SidecarSlots(Tier.HOST, anchor, name, np.array(some, np.int32))
