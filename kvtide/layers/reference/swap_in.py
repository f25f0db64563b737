"""Swap-in: the entries that a step's queries selected, from host pages to hot slots.

The torch reference; `plan` says which selected entries are hot, which miss, and which
slots are given up for them. Entries are copied as bytes.

What always holds:
- No slot that holds a selected entry is given up; of the others, the least recently used ones are.
- An entry is in one hot slot at most, and its bytes there are those on the host.
- The host is not read for an entry that is hot. Where all entries fit in the hot row, none is
  given up, so the host is read once for each.
- All new entries are on the host when the operation ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.step import HOT_ROWS, HotPool, Rows, host_table


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """The hot slots of one layer and row after a step, and how they come to hold what they do.

    held, used  (slots,): the entry of every slot and the clock of its last use, -1 for none
    hits        selected entries that are on the device already: hot, or new
    misses      selected entries that are read from the host, and `slots` of theirs
    new         new entries that become hot, and `new_slots` of theirs
    """

    held: Tensor
    used: Tensor
    hits: int
    misses: Tensor
    slots: Tensor
    new: Tensor
    new_slots: Tensor


def plan(
    held: Tensor, used: Tensor, selected: Tensor, past: int, total: int, clock: int
) -> SwapPlan:
    """The swap-in of a sequence with entries [past, total) in the step.

    `selected` are the choices of all its queries, in any order, with repeats and -1; they fit the
    slots. Slots of entries from `past` on are emptied first: their tokens were rejected.
    """
    held, used = _without_rejected(held, used, past)
    wanted = torch.unique(selected[selected >= 0]).to(held.dtype)
    new = torch.arange(past, total, dtype=held.dtype, device=held.device)
    assert len(wanted) <= len(held) and bool((wanted < total).all())
    hot = torch.isin(held, wanted) & (held >= 0)
    used[hot] = clock
    misses = wanted[(wanted < past) & ~torch.isin(wanted, held)]
    is_wanted = torch.isin(new, wanted)
    incoming = torch.cat([misses, new[is_wanted], new[~is_wanted]])
    # A stable sort: of slots used at the same time, the first ones come first.
    free = torch.nonzero(~hot).squeeze(1)
    free = free[torch.sort(used[free], stable=True).indices][: len(incoming)]
    incoming = incoming[: len(free)]
    held[free], used[free] = incoming, clock
    count = len(misses)
    return SwapPlan(
        *(held, used, len(wanted) - count),
        *(misses, free[:count], incoming[count:], free[count:]),
    )


def plan_gathered(
    held: Tensor, used: Tensor, selected: Tensor, past: int, total: int, clock: int
) -> SwapPlan:
    """What becomes hot of a sequence that reads its whole context elsewhere.

    That is its new entries, at most as many as there are slots. Where all entries fit, those that
    are selected and not hot become hot too (`misses`).
    """
    held, used = _without_rejected(held, used, past)
    wanted = torch.unique(selected[selected < past]).to(held.dtype)
    hot = torch.isin(held, wanted)
    used[hot] = clock
    fits = total <= len(held)
    misses = wanted[~torch.isin(wanted, held)] if fits else wanted[:0]
    first = max(past, total - len(held))
    new = torch.arange(first, total, dtype=held.dtype, device=held.device)
    free = torch.sort(used, stable=True).indices[: len(misses) + len(new)]
    held[free], used[free] = torch.cat([misses, new]), clock
    count = len(misses)
    return SwapPlan(held, used, int(hot.sum()), misses, free[:count], new, free[count:])


def _without_rejected(held: Tensor, used: Tensor, past: int) -> tuple[Tensor, Tensor]:
    held, used = held.clone(), used.clone()
    stale = (held >= past) | (held < 0)
    held[stale], used[stale] = -1, -1
    return held, used


def swap_in(run: ForwardPass, place: Place, masks: Sequence[Tensor]) -> None:
    """Makes what queries selected readable, and writes the step's new entries to the host.

    Masks are (queries, entries) by sequence. `run.located[place]` gets, for every sequence, where
    each earlier entry lies among the entries of the arena, -1 if no query selected it.
    """
    located = []
    for rows, mask in zip(run.sequences, masks, strict=True):
        row = int(rows.slots[HOT_ROWS][0])
        if row < 0:
            past = rows.past // place.pool.tokens_per_entry
            located.append(torch.full((past,), -1, device=mask.device))
            continue
        pages = _Pages(run.step.hot[place.pool.name], place, rows, row)
        selected = torch.nonzero(mask.any(0)).squeeze(1)
        located.append(pages.gather(selected) if pages.gathered else pages.swap(selected))
        pages.write_out()
    run.located[place] = located


class _Pages:
    """The entries of one sequence and layer: in its hot row, in the step's pages and on the host.

    Places in the arena and on the host are numbers of entries, page by page.
    """

    def __init__(self, hot: HotPool, place: Place, rows: Rows, row: int) -> None:
        each, layer = place.pool.tokens_per_entry, hot.number(place.layer)
        self.hot, self.layer = hot, layer
        self.past, self.total = rows.past // each, rows.total // each
        self.step_table = rows.slots[place.anchor]
        self.host_table = rows.slots[host_table(place.anchor)]
        self.held, self.used = hot.held[layer, row], hot.used[layer, row]
        self.first_slot = (layer * hot.rows + row) * hot.row_pages * hot.page_entries
        self.arena, self.host = (
            _by_entry(pages, hot.page_entries, place.pool.entry.bytes)
            for pages in (hot.pages, hot.host_rows(place.layer))
        )
        self.new = torch.arange(self.past, self.total, device=self.step_table.device)

    @property
    def gathered(self) -> bool:
        """Whether the step has pages for the whole context."""
        return int(self.step_table[0]) >= self.hot.first_gather

    def swap(self, selected: Tensor) -> Tensor:
        """Reads what is selected and not hot into the hot row; where earlier entries lie."""
        hot = self.hot
        found = plan(self.held, self.used, selected, self.past, self.total, int(hot.clock))
        self.held.copy_(found.held)
        self.used.copy_(found.used)
        hot.counts[self.layer, :2] += hot.counts.new_tensor([found.hits, len(found.misses)])
        self._load(found.misses.long(), self.first_slot + found.slots)
        self._keep(found.new.long(), found.new_slots)
        slots = torch.nonzero(torch.isin(found.held, selected)).squeeze(1)
        entries = found.held[slots].long()
        earlier = entries < self.past
        return self._located(entries[earlier], self.first_slot + slots[earlier])

    def gather(self, selected: Tensor) -> Tensor:
        """Brings what is selected to the step's pages, from hot slots or else from the host."""
        earlier = selected[selected < self.past]
        where, slots = self._of(earlier, self.step_table), self._hot_slots(earlier)
        cold = slots < 0
        self.arena[self._at(where[~cold])] = self.arena[self._at(self.first_slot + slots[~cold])]
        self._load(earlier[cold], where[cold])
        counts = [int((~cold).sum()), 0, int(cold.sum())]
        self.hot.counts[self.layer] += self.hot.counts.new_tensor(counts)
        found = plan_gathered(
            self.held, self.used, earlier, self.past, self.total, int(self.hot.clock)
        )
        self.held.copy_(found.held)
        self.used.copy_(found.used)
        self._keep(found.misses.long(), found.slots)
        self._keep(found.new.long(), found.new_slots)
        return self._located(earlier, where)

    def _hot_slots(self, entries: Tensor) -> Tensor:
        """Of earlier entries, -1 where they are not hot."""
        held = torch.nonzero((self.held >= 0) & (self.held < self.past)).squeeze(1)
        return self._located(self.held[held].long(), held)[entries]

    def write_out(self) -> None:
        """The step's new entries to their host pages."""
        values = self.arena[self._at(self._of(self.new, self.step_table))]
        targets = self._of(self.new, self.host_table).to(self.host.device)
        self.host[self._at(targets)] = values.to(self.host.device)

    def _load(self, entries: Tensor, targets: Tensor) -> None:
        """Entries from the host to places in the arena."""
        sources = self._of(entries, self.host_table).to(self.host.device)
        self.arena[self._at(targets)] = self.host[self._at(sources)].to(self.arena.device)

    def _keep(self, entries: Tensor, slots: Tensor) -> None:
        """Entries from the step's pages to hot slots."""
        values = self.arena[self._at(self._of(entries, self.step_table))]
        self.arena[self._at(self.first_slot + slots)] = values

    def _of(self, entries: Tensor, table: Tensor) -> Tensor:
        """Places of entries by a page table."""
        size = self.hot.page_entries
        pages = table[entries // size]
        assert bool((pages >= 0).all()), "an entry of a hot pool has no page"
        return pages * size + entries % size

    def _at(self, places: Tensor) -> tuple[Tensor, Tensor]:
        return places // self.hot.page_entries, places % self.hot.page_entries

    def _located(self, entries: Tensor, places: Tensor) -> Tensor:
        where = torch.full((self.past,), -1, device=places.device)
        where[entries] = places
        return where


def _by_entry(pages: Tensor, page_entries: int, entry_bytes: int) -> Tensor:
    """Bytes of pages as (pages, entries, bytes of an entry)."""
    entries: Tensor = pages[:, : page_entries * entry_bytes].unflatten(1, (page_entries, -1))
    return entries
