"""One forward pass over a step: the state of its sequences, read and written through page tables.

`Place` says where a layer keeps one kind of state: a pool of the model's declaration, and the
layer. `ForwardPass` is what layers are given beside their input. It works out once per step what
all layers share: where new entries go, and what `shared` is asked for.

What always holds:
- State is written only where a page has a slot, and read only where it has one.
- `keep` and `rounded` return what a later step will read back. Layers compute with that and not
  with what they passed in, so a prompt gives the same result however it is cut into steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers.step import Rows, Step
from kvtide.spec import ALL, Field, ModelMemory, PoolSpec, SpecError

Fields = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one layer keeps one kind of state."""

    pool: PoolSpec
    layer: int

    @classmethod
    def holding(cls, field: str, memory: ModelMemory, layer: int) -> Place:
        """The pool that keeps this field for the layer; the declaration has exactly one."""
        for pool in memory.pools:
            if layer in pool.layers and any(f.name == field for f in pool.entry.fields):
                return cls(pool, layer)
        raise SpecError(f"{memory.model}: layer {layer} has no pool with a field {field}")

    @property
    def anchor(self) -> str:
        return self.pool.follows or self.pool.name

    @property
    def window(self) -> int | None:
        """How many tokens a query sees, itself included; None where it sees all before it."""
        reach = self.pool.reuse.reach
        return None if reach is ALL else reach + 1

    def field(self, name: str) -> Field:
        return next(field for field in self.pool.entry.fields if field.name == name)


class ForwardPass:
    """A step, as layers see it."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._targets: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self._shared: dict[Hashable, Tensor] = {}

    @property
    def sequences(self) -> tuple[Rows, ...]:
        return self.step.sequences

    @property
    def positions(self) -> Tensor:
        return self.step.positions

    def shared(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """What several layers need alike (rotary angles), computed for the first that asks."""
        if key not in self._shared:
            self._shared[key] = compute()
        return self._shared[key]

    # -- entries: one for every token --------------------------------------------------------

    def keep(self, place: Place, entries: Mapping[str, Tensor]) -> Fields:
        """Writes an entry for every token of the step, and returns them as they were written."""
        rows, slots, within = self._target(place.anchor)
        view = self.step.view(place.pool.name, place.layer)
        kept = {name: stored(value, view[name].dtype) for name, value in entries.items()}
        for name, value in kept.items():
            view[name][slots, within] = value[rows]
        return kept

    def entries(self, place: Place, rows: Rows, first: int) -> Fields:
        """What was kept of a sequence's tokens [first, past), in their order."""
        page = self.step.page_tokens
        slots = rows.slots[place.anchor][first // page : -(-rows.past // page)]
        assert bool((slots >= 0).all()), (
            f"pool {place.pool.name}: tokens {first}..{rows.past} are needed and not resident"
        )
        begin = first % page
        span = slice(begin, begin + rows.past - first)
        view = self.step.view(place.pool.name, place.layer)
        pages = {name: field.index_select(0, slots) for name, field in view.items()}
        return {name: field.flatten(0, 1)[span] for name, field in pages.items()}

    def _target(self, anchor: str) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of the step that are kept, and each one's slot and entry."""
        if anchor not in self._targets:
            pages = self.positions // self.step.page_tokens
            slots = torch.cat([s.slots[anchor][pages[s.start : s.end]] for s in self.sequences])
            rows = torch.nonzero(slots >= 0).squeeze(1)
            within = self.positions[rows] % self.step.page_tokens
            self._targets[anchor] = rows, slots[rows], within
        return self._targets[anchor]

    # -- running state: one after the last token -----------------------------------------------

    def recall(self, place: Place, rows: Rows) -> Fields | None:
        """A sequence's running state before the step; None where it has no tokens yet."""
        if rows.past == 0:
            return None
        slot = self._slot(place, rows, rows.past - 1)
        assert slot >= 0, f"pool {place.pool.name}: no state after token {rows.past - 1}"
        view = self.step.view(place.pool.name, place.layer)
        return {name: field[slot, -1] for name, field in view.items()}

    def remember(self, place: Place, rows: Rows, state: Mapping[str, Tensor]) -> None:
        """Writes a sequence's running state after the step, if its last page has a slot."""
        slot = self._slot(place, rows, rows.total - 1)
        if slot < 0:
            return
        view = self.step.view(place.pool.name, place.layer)
        for name, value in state.items():
            view[name][slot, -1] = stored(value, view[name].dtype)

    def rounded(self, place: Place, field: str, value: Tensor) -> Tensor:
        """The value with the precision that the pool keeps of it."""
        view = self.step.view(place.pool.name, place.layer)
        return stored(value, view[field].dtype).to(value.dtype)

    def _slot(self, place: Place, rows: Rows, position: int) -> int:
        return int(rows.slots[place.anchor][position // self.step.page_tokens])


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in a pool's dtype. Eight bits saturate: an infinity would poison a whole page."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        value = value.clamp(-limit, limit)
    return value.to(dtype)
