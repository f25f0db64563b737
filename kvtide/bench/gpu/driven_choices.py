"""Selections of a given overlap from step to step, in the place of an indexer's own.

The choices of real models change slowly, those of random weights need not. So a benchmark lets
indexers compute their selections, and gives attention others: in every decode step each choice is
replaced with a given probability. All of it is on the device, within the step's CUDA graph, and
once per step for all layers.

Choice c is one of the entries of the c-th part of the context. So choices ascend, as an indexer
gives them, no entry is chosen twice, and a replaced choice is another entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvtide.layers import ForwardPass
from kvtide.layers.backend.ops import Selection

_FACTOR, _STEP = 1664525, 1013904223
"""Of a linear congruential generator with a period of 2³²."""
_LARGEST = 2**31 - 1


class DrivenChoices:
    """For so many layers with an indexer, and batches of up to so many sequences."""

    def __init__(
        self, layers: int, batch: int, count: int, tokens_per_entry: int, device: torch.device
    ) -> None:
        self._count, self._ratio = count, tokens_per_entry
        random = torch.Generator().manual_seed(23)
        shape = (layers, batch, count)

        def numbers(low: int) -> Tensor:
            values = torch.randint(low, _LARGEST, shape, generator=random, dtype=torch.int32)
            return values.to(device)

        self._random, self._selected = numbers(-_LARGEST), numbers(0)
        self._columns = torch.arange(count, dtype=torch.int32, device=device)
        self._threshold = torch.zeros(1, dtype=torch.int32, device=device)
        self._driven = torch.zeros(1, dtype=torch.bool, device=device)

    def keep(self, overlap: float) -> None:
        """From now on a step keeps this part of the choices of the step before."""
        self._threshold.fill_(round((2 * overlap - 1) * _LARGEST))
        self._driven.fill_(True)

    def leave(self) -> None:
        """From now on the indexers' own selections are used."""
        self._driven.fill_(False)

    def of(self, run: ForwardPass, number: int, own: Selection) -> Selection:
        """What attention reads in the layer of this number. Prefills read their own selection."""
        if run.batch.bounds.longest > 1:
            return own
        selected = run.shared(self, lambda: self._next(run))[number]
        if own[0].dtype is not torch.bool:
            return [torch.where(self._driven, selected, own[0])]
        return masks(run, own, selected) if bool(self._driven) else own

    def _next(self, run: ForwardPass) -> Tensor:
        """(layers, tokens, count) entries, -1 beyond those of a sequence."""
        tokens = len(run.positions)
        random, selected = self._random[:, :tokens], self._selected[:, :tokens]
        random.mul_(_FACTOR).add_(_STEP)
        past = run.batch.rows[:, 2].index_select(0, run.batch.owners.long())[:, None] // self._ratio
        # A power of two, so that parts stay while a sequence grows.
        each = torch.exp2(torch.log2((past // self._count).clamp(min=2).float()).floor()).int()
        other = (selected + 1 + ((random >> 3) & 0xFFFFF) % (each - 1)) % each
        selected.copy_(torch.where(random > self._threshold, other, selected % each))
        entries = self._columns * each + selected
        return torch.where(entries < past, entries, -1)


def masks(run: ForwardPass, own: Selection, selected: Tensor) -> Selection:
    """Entries (tokens, count) as the reference takes them: (queries, entries) by sequence."""
    found = []
    for rows, mask in zip(run.sequences, own, strict=True):
        entries = torch.arange(mask.shape[1], device=mask.device)
        found.append((selected[rows.start : rows.end, :, None] == entries).any(1))
    return found


class _DrivenIndexer:
    """Computes a selection, and gives another."""

    def __init__(self, indexer: Any, choices: DrivenChoices, number: int) -> None:
        self._indexer, self._choices, self._number = indexer, choices, number

    def __call__(self, *inputs: Any) -> Selection:
        """The last input is the forward pass."""
        return self._choices.of(inputs[-1], self._number, self._indexer(*inputs))


def attentions_with_indexer(model: Any) -> list[Any]:
    attentions = (layer.attention for layer in model.layers.values())
    return [each for each in attentions if getattr(each, "indexer", None) is not None]


@contextmanager
def driving(model: Any, choices: DrivenChoices) -> Iterator[None]:
    """Steps that are captured or run meanwhile take these choices."""
    attentions = attentions_with_indexer(model)
    own = [attention.indexer for attention in attentions]
    for number, attention in enumerate(attentions):
        attention.indexer = _DrivenIndexer(attention.indexer, choices, number)
    try:
        yield
    finally:
        for attention, indexer in zip(attentions, own, strict=True):
            attention.indexer = indexer
