"""A step's tokens through the model: the only place where requests meet tensors.

A prefix that does not come stops no pass: other ranks would wait for what this one has to add or
to hand on. The pass goes on over whatever lies in the slots, and when it is over the ranks agree
whether it went well everywhere. If not, nothing of it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvtide.cache import Lease, TieredCache, TransferError
from kvtide.engine.scheduler import Share
from kvtide.engine.seat import Seat
from kvtide.layers import Rows, Step
from kvtide.models import Model

Tables = tuple[tuple[int, int, int], Mapping[str, Tensor]]


class Passed:
    """A forward pass that is over. Logits are made of the rows that somebody wants."""

    def __init__(self, runner: Runner, hidden: Tensor, sequences: Sequence[Rows]) -> None:
        self._runner = runner
        self._hidden = hidden
        self._sequences = sequences

    def last(self, numbers: Sequence[int]) -> Tensor:
        """The logits after the last tokens of these shares, a row for each."""
        rows = [self._sequences[number].end - 1 for number in numbers]
        return self._runner.logits(self._hidden[rows])

    def first(self, number: int, count: int) -> Tensor:
        """The logits after each of the first `count` tokens of a share."""
        start = self._sequences[number].start
        return self._runner.logits(self._hidden[start : start + count])


class Loads:
    """Prefixes on their way, as a pass waits for them; `error` if one will not come."""

    def __init__(self, cache: TieredCache, leases: Sequence[Lease]) -> None:
        self.error: TransferError | None = None
        self._cache = cache
        self._leases = leases

    def wait(self, layer: int) -> None:
        """Each layer waits only for its own part."""
        try:
            for lease in self._leases if self.error is None else ():
                self._cache.wait(lease, layer)
        except TransferError as error:
            self.error = error

    def check(self) -> None:
        """Raises on every rank if a load failed on any."""
        if self._leases and not all(self._cache.agreement.common([self.error is None])):
            raise self.error or TransferError("the prefix could not be loaded on another rank")


class Runner:
    """`seat` is where this rank's part of a pass begins and ends."""

    def __init__(self, model: Model, cache: TieredCache, seat: Seat) -> None:
        self._model = model
        self._cache = cache
        self._seat = seat
        self._device = cache.config.torch_device
        self._tables: WeakKeyDictionary[Lease, Tables] = WeakKeyDictionary()
        self._width: int | None = None

    def run(self, shares: Sequence[Share]) -> Passed:
        """Compute the shares in one forward pass; raises `TransferError` if it is of no use."""
        leases = [share.request.held for share in shares if share.request.held.loading]
        loads = Loads(self._cache, leases)
        step = self._step(shares, loads)
        before = None
        if not self._model.memory.is_first_stage:
            before = self._seat.received(self._model.carried(step.tokens))
        hidden = self._model.forward(step, before)
        self._seat.send(hidden)
        loads.check()
        return Passed(self, hidden, step.sequences)

    def logits(self, hidden: Tensor) -> Tensor:
        """The speaker's, on every rank."""
        said = self._model.logits(hidden) if self._seat.speaks else None
        if self._width is None:
            width = torch.tensor([0 if said is None else said.shape[-1]], device=self._device)
            self._width = int(self._seat.spoken(width))
        if said is None:
            said = torch.empty(len(hidden), self._width, device=self._device)
        return self._seat.spoken(said)

    def _step(self, shares: Sequence[Share], loads: Loads) -> Step:
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
        return Step(
            torch.tensor(tokens, device=self._device),
            torch.tensor(positions, device=self._device),
            tuple(sequences),
            self._cache.memory.page_tokens,
            self._cache.view,
            loads.wait,
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
