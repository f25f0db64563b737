"""A step's tokens through the model: the only place where requests meet tensors.

A prefix that does not come stops no pass: other ranks would wait for what this one has to add or
to hand on. The pass goes on over whatever lies in the slots, and when it is over the ranks agree
whether it went well everywhere. If not, nothing of it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtide.cache import Lease, TieredCache, TransferError
from kvtide.engine.cuda_graphs import GraphRow, StepGraph, StepGraphs
from kvtide.engine.graph_capture import Wait, graph_capture, nothing
from kvtide.engine.page_tables import Numbers, PageTables, Table, laid_out, spans
from kvtide.engine.rank_topology import RankTopology
from kvtide.engine.request import Request
from kvtide.engine.scheduler import ScheduledChunk
from kvtide.engine.staging import Staging
from kvtide.layers import Step
from kvtide.models import Model

REHEARSED_PAST = 4096
"""Tokens before a pass that is rehearsed: what it is compiled for depends on nothing further."""


class StepOutput(Protocol):
    """A forward pass that is over, or under way on a device."""

    def last(self, numbers: Sequence[int]) -> Tensor:
        """The logits after the last tokens of these shares, a row for each."""

    def rows(self, number: int, first: int, count: int) -> Tensor:
        """The logits after each of `count` tokens of a share, from its token `first` on."""


class EagerOutput:
    """Logits are made of the rows that somebody wants."""

    def __init__(self, runner: Runner, hidden: Tensor, spans: Numbers) -> None:
        self._runner = runner
        self._hidden = hidden
        self._spans = spans

    def last(self, numbers: Sequence[int]) -> Tensor:
        rows = [int(self._spans[number, 1]) - 1 for number in numbers]
        return self._runner.logits(self._runner.some(self._hidden, rows))

    def rows(self, number: int, first: int, count: int) -> Tensor:
        start = int(self._spans[number, 0]) + first
        return self._runner.logits(self._hidden[start : start + count])


class DecodeOutput:
    """A recorded pass in which every share has one token: there are logits for all, in `places`."""

    def __init__(self, runner: Runner, logits: Tensor, places: Sequence[int]) -> None:
        self._runner = runner
        self._logits = logits
        self._places = places

    def last(self, numbers: Sequence[int]) -> Tensor:
        return self._runner.some(self._logits, [self._places[number] for number in numbers])

    def rows(self, number: int, first: int, count: int) -> Tensor:
        place = self._places[number] + first
        return self._logits[place : place + count]


class Laid(NamedTuple):
    """A pass that is laid out before it is known which tokens the first `unknown` shares have."""

    shares: Sequence[ScheduledChunk]
    unknown: int
    spans: Numbers
    recording: StepGraph


class Begun(NamedTuple):
    """A pass that was begun before that is known, and what it gives."""

    laid: Laid
    given: Tensor

    def places(self, shares: Sequence[ScheduledChunk]) -> list[int] | None:
        """Where in it those are that are left; None if they are others."""
        places = {id(share): place for place, share in enumerate(self.laid.shares)}
        if not all(id(share) in places for share in shares):
            return None
        return [places[id(share)] for share in shares]


class Loads:
    """Prefixes on their way, as a pass waits for them; `error` if one will not come."""

    def __init__(self, cache: TieredCache, leases: Sequence[Lease]) -> None:
        self.error: TransferError | None = None
        self._cache = cache
        self._leases = leases

    @property
    def any(self) -> bool:
        return bool(self._leases)

    def wait(self, layer: int) -> None:
        """Each layer waits only for its own part."""
        try:
            for lease in self._leases if self.error is None else ():
                self._cache.wait(lease, layer)
        except TransferError as error:
            self.error = error

    def check(self) -> None:
        """Raises on every rank if a load failed on any."""
        if self._leases and not all(self._cache.agreement.all_true([self.error is None])):
            raise self.error or TransferError("the prefix could not be loaded on another rank")


class Runner:
    """`topology` is where this rank's part of a pass begins and ends.

    Steps have up to `max_rows` sequences and `max_step_tokens` tokens. Those of few are recorded
    (`recording`), if the model leaves its work to programs and one rank has all of it.
    `passes`: how many were played, of single tokens or several, or computed as they came.
    """

    def __init__(
        self,
        model: Model,
        cache: TieredCache,
        topology: RankTopology,
        max_rows: int,
        max_step_tokens: int,
        staging: Staging,
        records: bool = True,
    ) -> None:
        self._model = model
        self._cache = cache
        self._topology = topology
        self._device = cache.config.torch_device
        self._max_rows, self._max_step_tokens = max_rows, max_step_tokens
        self._tables = PageTables(cache)
        self._staging = staging
        self._width: int | None = None
        self._laid: Laid | None = None
        self._begun: Begun | None = None
        self._latest: StepGraph | None = None
        self.passes: Counter[str] = Counter()
        self._recordings: StepGraphs | None = None
        if records and topology.ranks == 1 and model.uses_kernels:
            where = graph_capture(self._device)
            self._recordings = StepGraphs(model, cache.view, where, max_rows, max_step_tokens)

    @property
    def records(self) -> bool:
        return self._recordings is not None

    def prepare(self, longest: int) -> None:
        """Do beforehand what would keep requests of up to so many tokens waiting."""
        if self._recordings is None:
            return
        self._recordings.prepare(longest)
        page, size = self._cache.memory.page_tokens, self._recordings.max_step_tokens
        most = min(self._max_step_tokens, self._max_rows * longest)
        singles = [1] * (self._max_rows - 1)
        while size < most:
            size = min(most, size + size // 2)
            # As few prompts as there can be of so many tokens, and as many.
            self._rehearse(_divided(size, -(-size // longest)), 0)
            self._rehearse(_divided(size, self._max_rows), 0)
            first = min(size - len(singles), longest)
            if past := min(REHEARSED_PAST, longest - first) // page * page:
                self._rehearse([first, *singles], past)

    def _rehearse(self, counts: Sequence[int], past: int) -> None:
        """A pass of sequences with so many tokens, all after `past` others, which leaves nothing:
        it has programs compiled."""
        page, ends = self._cache.memory.page_tokens, np.cumsum(counts)
        rows = np.stack([ends - counts, ends, np.full(len(counts), past)], 1).astype(np.int32)
        tables = []
        for count in counts:
            slots = np.full(-(-(past + count) // page), -1, np.int32)
            slots[: past // page] = 0
            tables.append({anchor.name: slots for anchor in self._cache.memory.anchors})
        at = np.concatenate([np.arange(past, past + count) for count in counts])
        step = self._laid_out(np.stack([np.zeros_like(at), at]), rows, tables, nothing)
        self.logits(self._model.forward(step)[-1:])

    def run(self, shares: Sequence[ScheduledChunk]) -> StepOutput:
        """Compute the shares in one forward pass; raises `TransferError` if it is of no use."""
        begun, self._begun = self._begun, None
        if begun is not None and (places := begun.places(shares)) is not None:
            return self._given(begun.laid.recording, begun.given, begun.laid.spans[places])
        laid, self._laid = self._laid, None
        if laid is not None and laid.shares is shares:
            self._count(laid.recording)
            said = [share.request.tokens[-1] for share in shares[: laid.unknown]]
            return self._given(laid.recording, laid.recording.play_laid(said), laid.spans)
        leases = [share.request.held for share in shares if share.request.held.loading]
        loads = Loads(self._cache, leases)
        rows = spans(shares)
        if (played := self._played(shares, rows, loads)) is not None:
            return played
        self.passes["computed"] += 1
        self._latest = None
        step = self._step(shares, rows, loads)
        before = None
        if not self._model.memory.is_first_stage:
            before = self._topology.receive_hidden(self._model.carried(step.tokens))
        hidden = self._model.forward(step, before)
        self._topology.send_hidden(hidden)
        loads.check()
        return EagerOutput(self, hidden, rows)

    def linger(self) -> bool:
        """Wait until most of the pass is done that was run last; False where that cannot be told,
        or would be no long time."""
        if self._latest is None or self._latest.single:
            return False
        self._latest.linger()
        return True

    def lay(self, shares: Sequence[ScheduledChunk]) -> None:
        """Lay out the pass of shares of which the first have one token each that is about to be
        known; for when these shares are what is run next."""
        self._laid = None
        if self._recordings is None or not shares:
            return
        rows = [self._row(share) for share in shares]
        recording = self._recordings.fitting(rows, False)
        if recording is not None:
            recording.lay(rows)
            unknown = sum(share.end > share.request.length for share in shares)
            self._laid = Laid(shares, unknown, spans(shares), recording)

    def go_ahead(self, requests: Sequence[Request], tokens: Tensor) -> None:
        """Begin the pass that is laid out: the tokens that it lacks are among these requests',
        which the device alone knows yet. For when those that are left of its shares are what is run
        next."""
        laid, self._laid = self._laid, None
        assert laid is not None, "nothing is laid out"
        self._count(laid.recording)
        places = {request.number: place for place, request in enumerate(requests)}
        where = [places[share.request.number] for share in laid.shares[: laid.unknown]]
        self._begun = Begun(laid, laid.recording.play_ahead(tokens, where))

    @property
    def is_laid(self) -> bool:
        return self._laid is not None

    @property
    def is_ahead(self) -> bool:
        """Whether a pass was begun that nobody has asked for yet."""
        return self._begun is not None

    def has_begun(self, shares: Sequence[ScheduledChunk]) -> bool:
        """Whether it is the pass of these."""
        return self._begun is not None and self._begun.places(shares) is not None

    def _row(self, share: ScheduledChunk) -> GraphRow:
        """With any token for one that is not known yet."""
        (request, end), lease = share, share.request.held
        tokens = request.tokens[request.computed : end] or (0,)
        return GraphRow(tokens, request.computed, lease.inner.number, *self._tables.of(lease))

    def logits(self, hidden: Tensor) -> Tensor:
        """The speaker's, on every rank."""
        said = self._model.logits(hidden) if self._topology.is_logits_rank else None
        if self._width is None:
            width = torch.tensor([0 if said is None else said.shape[-1]], device=self._device)
            self._width = int(self._topology.broadcast_logits(width))
        if said is None:
            said = torch.empty(len(hidden), self._width, device=self._device)
        return self._topology.broadcast_logits(said)

    def some(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """These rows of a tensor, and the tensor itself if they are all of it."""
        everything = len(rows) == len(tensor) and list(rows) == list(range(len(rows)))
        return tensor if everything else tensor.index_select(0, self._staging.indices(rows))

    def _played(
        self, shares: Sequence[ScheduledChunk], spans: Numbers, loads: Loads
    ) -> StepOutput | None:
        """The pass from a recording, if there is one for such shares."""
        if self._recordings is None or spans[-1, 1] > self._recordings.max_step_tokens:
            return None
        rows = [self._row(share) for share in shares]
        recording = self._recordings.fitting(rows, loads.any)
        if recording is None:
            return None
        self._count(recording)
        given = recording.play(rows, loads.wait)
        loads.check()
        return self._given(recording, given, spans)

    def _count(self, recording: StepGraph) -> None:
        self.passes["single" if recording.single else "several"] += 1

    def _given(self, recording: StepGraph, given: Tensor, spans: Numbers) -> StepOutput:
        """By a recording that was played last, for spans of what it was played for."""
        self._latest = recording
        if recording.single:
            return DecodeOutput(self, given, spans[:, 0].tolist())
        return EagerOutput(self, given, spans)

    def _step(self, shares: Sequence[ScheduledChunk], rows: Numbers, loads: Loads) -> Step:
        tables = [self._tables.of(share.request.held)[1] for share in shares]
        new = [share.request.tokens[share.request.computed : share.end] for share in shares]
        at = [np.arange(share.request.computed, share.end) for share in shares]
        both = np.stack([np.concatenate(new), np.concatenate(at)])
        return self._laid_out(both, rows, tables, loads.wait)

    def _laid_out(
        self, both: NDArray[np.int64], rows: Numbers, tables: Sequence[Table], wait: Wait
    ) -> Step:
        """Of tokens and their positions."""
        sequences, batch = laid_out(rows, tables, self._staging)
        tokens, positions = self._staging.to_device(both.astype(np.int32))[0].long()
        page, view = self._cache.memory.page_tokens, self._cache.view
        return Step(tokens, positions, sequences, page, view, wait, batch)


def _divided(total: int, parts: int) -> list[int]:
    """Into numbers that differ by one at the most."""
    return [(total + part) // parts for part in range(parts)]
