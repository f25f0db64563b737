"""A step's tokens through the model: the only place where requests meet tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvtide.cache import Lease, TieredCache
from kvtide.engine.scheduler import Share
from kvtide.layers import Rows, Step
from kvtide.models import Model

Tables = tuple[tuple[int, int, int], Mapping[str, Tensor]]


class Passed:
    """A forward pass that is over. Logits are made of the rows that somebody wants."""

    def __init__(self, model: Model, hidden: Tensor, sequences: Sequence[Rows]) -> None:
        self._model = model
        self._hidden = hidden
        self._sequences = sequences

    def last(self, numbers: Sequence[int]) -> Tensor:
        """The logits after the last tokens of these shares, a row for each."""
        rows = [self._sequences[number].end - 1 for number in numbers]
        return self._model.logits(self._hidden[rows])

    def first(self, number: int, count: int) -> Tensor:
        """The logits after each of the first `count` tokens of a share."""
        start = self._sequences[number].start
        return self._model.logits(self._hidden[start : start + count])


class Runner:
    def __init__(self, model: Model, cache: TieredCache) -> None:
        self._model = model
        self._cache = cache
        self._device = cache.config.torch_device
        self._tables: WeakKeyDictionary[Lease, Tables] = WeakKeyDictionary()

    def run(self, shares: Sequence[Share]) -> Passed:
        """Compute the shares in one forward pass.

        Each layer waits only for its own part of the prefixes that are being loaded; raises
        `TransferError` when one will not come.
        """
        step = self._step(shares)
        return Passed(self._model, self._model.forward(step), step.sequences)

    def _step(self, shares: Sequence[Share]) -> Step:
        tokens: list[int] = []
        positions: list[int] = []
        sequences = []
        for request, end in shares:
            new = request.tokens[request.computed : end]
            slots = self._slots(request.held)
            start = len(tokens)
            sequences.append(Rows(start, start + len(new), request.computed, slots))
            tokens += new
            positions += range(request.computed, end)
        loading = [share.request.held for share in shares if share.request.held.loading]
        return Step(
            torch.tensor(tokens, device=self._device),
            torch.tensor(positions, device=self._device),
            tuple(sequences),
            self._cache.memory.page_tokens,
            self._cache.view,
            lambda layer: self._wait(loading, layer),
        )

    def _slots(self, lease: Lease) -> Mapping[str, Tensor]:
        """The lease's page tables on the device, made again when it grew, committed or landed."""
        inner = lease.inner
        coming = sum(not t.over for t in lease.transfers) if lease.transfers else 0
        state = (inner.boundary, inner.reserved, coming)
        known = self._tables.get(lease)
        if known is None or known[0] != state:
            tables = {
                anchor.name: torch.from_numpy(
                    self._cache.page_table(lease, anchor.name).astype("int64")
                ).to(self._device)
                for anchor in self._cache.memory.anchors
            }
            known = self._tables[lease] = (state, tables)
        return known[1]

    def _wait(self, loading: Sequence[Lease], layer: int) -> None:
        for lease in loading:
            self._cache.wait(lease, layer)
