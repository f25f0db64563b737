"""CUDA graphs of draft passes: the extension over a step's tokens and all passes behind it.

A verify step gives a request a few new tokens at the most. One graph extends the draft over them
and then drafts K tokens, each sampled on the device from the pass before. The host reads the drafts
once. Graphs are captured for a number of requests, as those of decode steps are.

Drafts are sampled with the noise of the target's tokens, and without penalties. A request that may
have fewer than K drafts takes the first of them; the other passes stay within its slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtide.engine.graphs.graph_capture import GraphCapture, Wait, no_wait
from kvtide.engine.graphs.graph_inputs import GraphInputs, GraphKind, GraphRow, GraphSize
from kvtide.engine.graphs.step_graphs import View, lengths
from kvtide.engine.sampling.sampler import COLUMNS, Limits, sample_columns
from kvtide.engine.speculation.drafter import DraftLimits
from kvtide.engine.staging import Staging
from kvtide.layers import Step
from kvtide.layers.step import Batch, Bounds
from kvtide.models.draft import DraftModel


class DraftGraphSize(NamedTuple):
    """requests  at the most
    rows      tokens of a request that the draft is extended over, at the most
    drafts    of each; 0 for an extension alone
    sampled   some request is sampled at a temperature
    length    of a sequence with its drafts, at the most
    """

    requests: int
    rows: int
    drafts: int
    sampled: bool
    length: int

    @property
    def extension(self) -> GraphSize:
        count, rows = self.requests, self.rows
        if rows == 1:
            return GraphSize(GraphKind.DECODE, count, count, 0, 1, self.length)
        return GraphSize(GraphKind.VERIFY, count * rows, count, count, rows, self.length)


class DraftGraphRow(NamedTuple):
    """A request's new tokens, and the first row of the target's step that they were captured in.

    limit    drafts that there are slots for, at the most
    columns  (drafts, COLUMNS): how each draft is sampled; None if greedily. Behind a verify step
             there are twice as many, since the first ones may be accepted there
    """

    inputs: GraphRow
    source: int
    limit: int = 0
    columns: NDArray[np.float64] | None = None


class DraftGraph:
    """The captured passes of one size.

    captured  the buffer that the target's states are put into before a replay
    """

    def __init__(
        self,
        draft: DraftModel,
        view: View,
        capture: GraphCapture,
        staging: Staging,
        size: DraftGraphSize,
        captured: Tensor,
        max_requests: int,
    ) -> None:
        self._draft, self._view, self._staging = draft, view, staging
        self._size, self._capture = size, capture
        tokens, count = size.extension.tokens, size.requests
        self._captured = captured[:tokens]
        # Numbers have 32 bits, those of columns 64.
        self._wide = 2 * size.drafts * COLUMNS * count if size.sampled else 0
        extra = self._wide + tokens + 4 * count
        self._inputs = inputs = GraphInputs(draft.memory, capture, size.extension, extra)
        inputs.host_extra[:] = 0
        inputs.send()
        self._host_columns, self._host = self._parts(inputs.host_extra, np.float64)
        self._columns, numbers = self._parts(inputs.extra, torch.float64)
        self._sources, self._last, self._ends, self._next, self._passes = numbers
        self._singles = torch.arange(count, dtype=torch.int32, device=captured.device)
        self._numbers = torch.arange(size.drafts, device=captured.device)
        self._output = f"drafts {size.drafts}"
        self._graph = capture.capture(self._forward, self._output, max_requests, per_layer=False)

    def _parts(self, extra: Any, wide: Any) -> tuple[Any, tuple[Any, Any, Any, Any, Any]]:
        """Columns (drafts, COLUMNS, requests), sources by token; by request the last row, the
        entries up to it, the position behind it, and the passes after the first that have a
        slot."""
        size, tokens = self._size, self._size.extension.tokens
        drafts = size.drafts if size.sampled else 0
        columns = extra[: self._wide].view(wide).reshape(drafts, COLUMNS, size.requests)
        rest = extra[self._wide :]
        by_request = rest[tokens:].reshape(4, size.requests)
        return columns, (rest[:tokens], *by_request)

    # -- passes -----------------------------------------------------------------------------

    def _forward(self, wait: Wait) -> Tensor:
        """The drafts, (requests, drafts)."""
        inputs, draft = self._inputs, self._draft
        page = draft.memory.page_tokens
        tokens, positions = inputs.tokens.long(), inputs.positions.long()
        step = Step(tokens, positions, (), page, self._view, no_wait, inputs.batch)
        hidden = draft.forward(step, draft.features(self._captured))
        if not self._size.drafts:
            none: Tensor = tokens[: self._size.requests, None]
            return none
        hidden = hidden.index_select(0, self._last)
        drafts = [self._sampled(hidden, 0)]
        for number in range(1, self._size.drafts):
            hidden = draft.forward(self._single(drafts[-1], number - 1), hidden)
            drafts.append(self._sampled(hidden, number))
        return torch.stack(drafts, 1)

    def _single(self, tokens: Tensor, before: int) -> Step:
        """A pass of one row per request, `before` such passes behind the extension."""
        inputs, size, singles = self._inputs, self._size, self._singles
        # Nothing may be read where there are no slots: passes that no draft is taken from repeat
        # the last of the others. Padding has no entries.
        past = self._ends + self._passes.clamp(max=before)
        rows = torch.stack([singles, singles + 1, past], 1)
        slots = {name: table[: size.requests] for name, table in inputs.batch.slots.items()}
        batch = Batch(rows, singles, slots, Bounds(1, size.length - 1, 0, singles=True))
        positions = (self._next + before).long()
        page = self._draft.memory.page_tokens
        return Step(tokens, positions, (), page, self._view, no_wait, batch)

    def _sampled(self, hidden: Tensor, number: int) -> Tensor:
        """The next draft of each request, as the target's token."""
        logits, vocabulary = self._draft.logits(hidden), self._draft.vocabulary
        if self._size.sampled:
            columns = self._columns[number]
            tokens = sample_columns(logits, columns, vocabulary, self._staging.kernels)
        else:
            tokens = logits.argmax(-1)
        return tokens if vocabulary is None else vocabulary[tokens]

    # -- a replay ---------------------------------------------------------------------------

    def launch(self, rows: Sequence[DraftGraphRow], captured: Tensor) -> Tensor:
        """Replay for these rows, after a step that `captured` these states; valid until the next
        replay."""
        self._write(rows, np.array([len(row.inputs.tokens) for row in rows], np.int32))
        return self._replay(captured, len(rows))

    def launch_ahead(
        self, rows: Sequence[DraftGraphRow], captured: Tensor, sampled: Tensor, accepted: Tensor
    ) -> Tensor:
        """The same before the host knows what a verify step `sampled`: tokens of the rows are
        numbers of these, of which `accepted` ones behind the first count, by row."""
        inputs, given = self._inputs, len(rows)
        self._write(rows, np.ones(given, np.int32))
        tokens = inputs.tokens[: inputs.used]
        tokens.copy_(sampled.index_select(0, tokens))
        for numbers in (self._last, self._ends, self._next):
            numbers[:given] += accepted
        if self._size.sampled:
            self._shift_noise(rows, accepted)
        return self._replay(captured, given)

    def _shift_noise(self, rows: Sequence[DraftGraphRow], accepted: Tensor) -> None:
        """Tokens are sampled with the noise of their number."""
        count, word = self._size.drafts, Limits._fields.index("word")
        words = np.zeros((len(rows), 2 * count))
        for row, columns in zip(words, (each.columns for each in rows), strict=True):
            if columns is not None:
                row[:] = columns[:, word]
        (table,) = self._staging.to_device(words)
        shifted = table.gather(1, accepted.long()[:, None] + self._numbers)
        self._columns[:, word, : len(rows)] = shifted.T

    def _replay(self, captured: Tensor, given: int) -> Tensor:
        used = self._inputs.used
        torch.index_select(captured, 0, self._sources[:used], out=self._captured[:used])
        self._graph.replay(no_wait)
        return self._capture.output(self._output, given)

    def _write(self, rows: Sequence[DraftGraphRow], reach: NDArray[np.int32]) -> None:
        """Write the inputs, and queue their copy to the device. Drafts follow the first so many
        tokens of each row."""
        inputs, (sources, last, ends, following, passes) = self._inputs, self._host
        inputs.open()
        inputs.fill([row.inputs for row in rows])
        counts = np.array([len(row.inputs.tokens) for row in rows], np.int32)
        first, given, used = np.cumsum(counts) - counts, len(rows), inputs.used
        of_rows = np.array([(row.source, row.inputs.past, row.inputs.position) for row in rows])
        sources[:used] = np.arange(used) + np.repeat(of_rows[:, 0] - first, counts)
        last[:given], ends[:given] = first + reach - 1, of_rows[:, 1] + reach
        following[:given] = of_rows[:, 2] + reach
        passes[:given] = [max(row.limit - 2, 0) for row in rows]
        for numbers in (last, ends, following, passes):
            numbers[given:] = 0
        if self._size.sampled:
            self._host_columns[:] = 0
            self._host_columns[:, -1] = 1  # Greedy.
            for number, row in enumerate(rows):
                if row.columns is not None:
                    self._host_columns[:, :, number] = row.columns[: self._size.drafts]
        inputs.send()


class DraftGraphs:
    """The graphs of one draft, captured when first needed."""

    def __init__(
        self,
        draft: DraftModel,
        view: View,
        capture: GraphCapture,
        staging: Staging,
        limits: DraftLimits,
    ) -> None:
        self._draft, self._view, self._capture = draft, view, capture
        self._staging, self._limits = staging, limits
        # Of a verify step all drafts may be accepted, and the token behind them.
        self.max_rows = limits.drafts + 1
        shape = (*limits.hidden.shape[1:-1], limits.hidden.shape[-1] * len(draft.captures))
        self._captured = limits.hidden.new_zeros((self._batches[-1] * self.max_rows, *shape))
        self._graphs: dict[DraftGraphSize, DraftGraph] = {}

    @property
    def _batches(self) -> list[int]:
        """Powers of two: a draft's pass costs little more with padding."""
        limit = self._limits.requests
        return [*takewhile(lambda size: size < limit, (2**power for power in range(32))), limit]

    def fitting(self, rows: Sequence[DraftGraphRow], *, drafting: bool) -> DraftGraph:
        """The smallest graph for these rows, for drafts or an extension alone."""
        max_tokens = max(len(row.inputs.tokens) for row in rows)
        longest = max(row.inputs.past + len(row.inputs.tokens) for row in rows)
        extends = max_tokens == 1 and not drafting
        length = next(n for n in lengths() if n >= longest + self._limits.drafts)
        requests = next(size for size in self._batches if size >= len(rows))
        if extends:
            return self._graph(DraftGraphSize(requests, 1, 0, False, length))
        sampled = any(row.columns is not None for row in rows)
        drafts = self._limits.drafts
        return self._graph(DraftGraphSize(requests, self.max_rows, drafts, sampled, length))

    def capture_all(self, longest: int) -> None:
        """Capture every graph for sequences of up to `longest` tokens, the largest first."""
        last = next(length for length in lengths() if length >= longest + self._limits.drafts)
        shorter = takewhile(lambda length: length < last, lengths())
        for length in reversed([*shorter, last]):
            for requests in reversed(self._batches):
                for size in self._sizes(requests, length):
                    self._graph(size)

    def _sizes(self, requests: int, length: int) -> Iterator[DraftGraphSize]:
        for sampled in (True, False):
            yield DraftGraphSize(requests, self.max_rows, self._limits.drafts, sampled, length)
        yield DraftGraphSize(requests, 1, 0, False, length)

    def _graph(self, size: DraftGraphSize) -> DraftGraph:
        if size not in self._graphs:
            self._graphs[size] = DraftGraph(
                self._draft,
                self._view,
                self._capture,
                self._staging,
                size,
                self._captured,
                self._limits.requests,
            )
        return self._graphs[size]
