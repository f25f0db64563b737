"""One forward pass over a step: the state of its sequences, read and written through page tables.

A `Place` names where a layer keeps one kind of state: a pool of the declared memory, and the layer.
Layers get a `ForwardPass` beside their input; `shared` computes once per step what several layers
need. Fields have their logical names, whether the pool packs them or not (`packing`).

What always holds:
- State is written and read only where a page has a slot.
- `Ops.kv_write` and `rounded` return what a later step reads back. Layers compute with that, so
  the result does not depend on the chunks of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvtide.layers.packing import Fields, Packing, at_slots, packing, plain
from kvtide.layers.step import Batch, Rows, Step
from kvtide.spec import ALL, Field, ModelMemory, PoolSpec, SpecError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one layer keeps one kind of state."""

    pool: PoolSpec
    layer: int

    @classmethod
    def holding(cls, field: str, memory: ModelMemory, layer: int) -> Place:
        """The pool that keeps this field for the layer; the declaration has exactly one."""
        for pool in memory.pools:
            if layer in pool.layers and packing(pool.entry).find(field) is not None:
                return cls(pool, layer)
        raise SpecError(f"{memory.model}: layer {layer} has no pool with a field {field}")

    @property
    def anchor(self) -> str:
        return self.pool.follows or self.pool.name

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included; None where it sees all before it."""
        reach = self.pool.reuse.reach
        return None if reach is ALL else reach + 1

    @property
    def packing(self) -> Packing:
        return packing(self.pool.entry)

    def field(self, name: str) -> Field:
        """The logical field: of a packed one, the whole vector, in the dtype of unpacking."""
        field = self.packing.find(name)
        assert field is not None, f"pool {self.pool.name} has no field {name}"
        return field


class ForwardPass:
    """A step, as layers see it.

    left_by_layers  what a layer leaves for the layers after it, such as an indexer's selection
    located         of a hot pool, where each sequence's earlier entries lie in the arena: by entry,
                    -1 where no query selected it. The reference of `Ops.swap_in` fills it.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._shared: dict[Hashable, Any] = {}
        self.left_by_layers: dict[str, list[Tensor]] = {}
        self.located: dict[Place, list[Tensor]] = {}

    @property
    def sequences(self) -> tuple[Rows, ...]:
        return self.step.sequences

    @property
    def positions(self) -> Tensor:
        return self.step.positions

    @property
    def batch(self) -> Batch:
        """The step's sequences as tensors, for kernels."""
        known = self.step.batch
        return known or self.shared(Batch, lambda: Batch.of(self.sequences, self.positions.device))

    def shared(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What several layers need alike (cosines and sines), computed at the first call."""
        if key not in self._shared:
            self._shared[key] = compute()
        found: T = self._shared[key]
        return found

    # -- entries: one for every token, or for every so many ------------------------------------

    def read_entries(self, place: Place, rows: Rows, first: int = 0) -> Fields:
        """The stored entries of a sequence's tokens [first, past), in their order.

        In a pool of one entry for r tokens: the entries that end before `past`. Entries of a hot
        pool that no query selected are zeros.
        """
        pool, per_page = place.pool, self.entries_per_page(place)
        if pool.hot is not None:
            return self._read_located(place, rows, first // pool.tokens_per_entry)
        begin, end = first // pool.tokens_per_entry, rows.past // pool.tokens_per_entry
        pages = range(begin // per_page, -(-end // per_page))
        slots = rows.slots[place.anchor][pages.start : pages.stop]
        assert bool((slots >= 0).all()), (
            f"pool {pool.name}: tokens {first}..{rows.past} are needed and not resident"
        )
        view = self.step.view(pool.name, place.layer)
        span = slice(begin - pages.start * per_page, end - pages.start * per_page)
        found = {}
        for name, field in view.items():
            found[name] = at_slots(field, slots).flatten(0, 1)[span]
        return place.packing.unpack(found)

    def _read_located(self, place: Place, rows: Rows, first: int) -> Fields:
        """As `read_entries` of a hot pool, after its swap-in."""
        number = next(n for n, known in enumerate(self.sequences) if known is rows)
        where = self.located[place][number][first:]
        found_at, per_page = where.clamp(min=0), self.entries_per_page(place)
        found = {}
        for name, field in self.step.view(place.pool.name, place.layer).items():
            values = plain(field)[found_at // per_page, found_at % per_page]
            values[where < 0] = 0
            found[name] = values.view(field.dtype)
        return place.packing.unpack(found)

    def entries_per_page(self, place: Place) -> int:
        return self.step.page_tokens // place.pool.tokens_per_entry

    # -- recurrent state: one after the last token -----------------------------------------------

    def read_state(self, place: Place, rows: Rows) -> Fields | None:
        """A sequence's recurrent state before the step; None where it has no tokens yet."""
        if rows.past == 0:
            return None
        slot = self._slot(place, rows, rows.past - 1)
        assert slot >= 0, f"pool {place.pool.name}: no state after token {rows.past - 1}"
        view = self.step.view(place.pool.name, place.layer)
        return place.packing.unpack({name: field[slot, -1] for name, field in view.items()})

    def write_state(self, place: Place, rows: Rows, state: Mapping[str, Tensor]) -> None:
        """Writes a sequence's recurrent state after the step, if its last page has a slot."""
        slot = self._slot(place, rows, rows.total - 1)
        if slot < 0:
            return
        view = self.step.view(place.pool.name, place.layer)
        for name, value in place.packing.pack(state).items():
            view[name][slot, -1] = value

    def write_page_states(self, place: Place, rows: Rows, states: Mapping[str, Tensor]) -> None:
        """Writes the state after each page that the step completes, where the page has a slot.

        `states` has a row for every such page.
        """
        page = self.step.page_tokens
        slots = rows.slots[place.anchor][rows.past // page : rows.total // page]
        kept = torch.nonzero(slots >= 0).squeeze(1)
        view = self.step.view(place.pool.name, place.layer)
        for name, value in place.packing.pack(states).items():
            view[name][slots[kept], -1] = value[kept]

    def state_slots(self, place: Place) -> tuple[Tensor, Tensor]:
        """For kernels: the slots of each sequence's recurrent state before and after the step.

        (sequences,) int32 each, -1 where there is none.
        """
        key = ("state slots", place.anchor)
        return self.shared(key, lambda: _state_slots(self.batch, place.anchor, self.step))

    def rounded(self, place: Place, field: str, value: Tensor) -> Tensor:
        """The value, rounded as the pool stores it."""
        return place.packing.rounded(field, value)

    def _slot(self, place: Place, rows: Rows, position: int) -> int:
        return int(rows.slots[place.anchor][position // self.step.page_tokens])


def _state_slots(batch: Batch, anchor: str, step: Step) -> tuple[Tensor, Tensor]:
    starts, ends, past = batch.rows.long().unbind(1)
    tables = batch.slots[anchor]
    before = tables.gather(1, (past - 1).clamp(min=0)[:, None] // step.page_tokens).squeeze(1)
    # A sequence without tokens has no slots.
    last = (past + ends - starts - 1).clamp(min=0)[:, None] // step.page_tokens
    return before.masked_fill(past == 0, -1), tables.gather(1, last).squeeze(1)
