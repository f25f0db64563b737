"""Selections of a given overlap from token to token, in the place of an indexer's own.

The choices of real models change slowly, those of random weights need not. So a benchmark lets
indexers compute their selections, and gives attention others: a token has most choices of the token
before it, and a given part of them anew. All of it is on the device, within the step's CUDA graph,
and once per step for all layers.

Choice c is one of the entries of the c-th part of the context. So choices ascend, as an indexer
gives them, and no entry is chosen twice. A choice changes at regular distances, another one at
other tokens, and is another entry of its part then. It depends on sequence and position alone: a
prefill selects what decode steps would have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvtide.layers import ForwardPass
from kvtide.layers.backend.ops import Selection

_LARGEST = 2**31 - 1
OWN = "own"
"""In the place of an overlap: the indexers' own choices."""
OverlapFraction = float | str


class DrivenChoices:
    """For so many layers with an indexer, and steps of up to so many sequences."""

    def __init__(
        self, layers: int, sequences: int, count: int, tokens_per_entry: int, device: torch.device
    ) -> None:
        self._count, self._ratio, self._sequences = count, tokens_per_entry, sequences
        random = torch.Generator().manual_seed(23)
        shape = (layers, sequences, count)

        def numbers() -> Tensor:
            return torch.randint(_LARGEST, shape, generator=random, dtype=torch.int32).to(device)

        self._first, self._stride = numbers(), numbers()
        self._phase = torch.rand(shape, generator=random).to(device)
        self._columns = torch.arange(count, dtype=torch.int32, device=device)
        self._changes = torch.zeros(1, device=device)
        self._driven = torch.zeros(1, dtype=torch.bool, device=device)

    def keep(self, overlap: OverlapFraction) -> None:
        """From now on a token has this part of the choices of the one before, or its own."""
        self._driven.fill_(overlap != OWN)
        if isinstance(overlap, float):
            self._changes.fill_(1 - overlap)

    def of(self, run: ForwardPass, number: int, own: Selection) -> Selection:
        """What attention reads in the layer of this number."""
        if own[0].dtype is not torch.bool:
            selected = run.shared(self, lambda: self._of_step(run))[number]
            return [torch.where(self._driven, selected, own[0])]
        if not bool(self._driven):
            return own
        return masks(run, own, run.shared(self, lambda: self._of_step(run))[number])

    def _of_step(self, run: ForwardPass) -> Tensor:
        """(layers, tokens, count) entries, -1 beyond those that a token may see."""
        owners = run.batch.owners.long() % self._sequences
        first, stride, phase = (
            each.index_select(1, owners) for each in (self._first, self._stride, self._phase)
        )
        at = run.positions[:, None]
        visible = (at // self._ratio).int()
        size = _rounded((visible // self._count).clamp(min=1))
        changes = (phase + at * self._changes).floor().int()
        other = 1 + stride % (size - 1).clamp(min=1)
        entries = self._columns * size + (first % size + changes % size * other) % size
        return torch.where(entries < visible, entries, -1)


def _rounded(sizes: Tensor) -> Tensor:
    """To three binary digits, so that parts stay while a sequence grows."""
    digits = (torch.log2(sizes.float()).floor().int() - 2).clamp(min=0)
    return (sizes >> digits) << digits


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
