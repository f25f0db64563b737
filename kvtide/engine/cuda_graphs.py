"""Passes of few tokens, recorded once and played again.

Such a pass is hundreds of launches that take little time each: a recording plays them with one, or
with one a layer. It is for a number of tokens and of sequences, and for sequences up to a length.
What is left of it is filled up with tokens that nobody needs, of sequences without slots, which
write nothing.

There are two kinds. Steps of single tokens have recordings for a number of sequences, which give
logits. All other steps of up to some number of tokens (the rest of a prompt whose prefix was found,
beside those who generate) have recordings for as many sequences as there may be, which give hidden
states. These are cut before every layer: they can be played while a prefix is on its way.

Copies between device and host go on beside it: they are on streams of their own, and pages on
their way are read by no layer that has not waited for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count, takewhile
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from kvtide.engine.graph_capture import GraphCapture, Wait, nothing
from kvtide.engine.page_tables import State, Table
from kvtide.layers import Step
from kvtide.layers.step import Batch, Bounds
from kvtide.models import Model

SHORTEST = 4096
"""The length that the first recordings are for; each next one is for four times as many tokens."""
SIZES = (64, 128, 192, 256, 384, 512, 576, 640, 768, 896, 1024)
"""Tokens of steps that are not single ones. Launching a larger one takes less than computing it."""
PROMPT_TOKENS = 64
"""In a step of n times as many, n sequences may have several: for more, work is divided badly. In
the largest all may, so that every step of no more tokens has a recording."""


class GraphRow(NamedTuple):
    """One sequence's new tokens, how many it has before, and where: `lease` numbers whose pages."""

    tokens: Sequence[int]
    past: int
    lease: int
    state: State
    table: Table


class GraphSize(NamedTuple):
    """Of a pass: tokens in it, of how many sequences, how many of these may have several; and how
    long a sequence may be."""

    tokens: int
    sequences: int
    prompts: int
    length: int

    @property
    def single(self) -> bool:
        return self.prompts == 0

    @property
    def bounds(self) -> Bounds:
        if self.single:
            return Bounds(1, self.length - 1, 0, singles=True)
        # One more has what nobody needs.
        return Bounds(self.tokens, self.length - 1, self.prompts + 1, singles=True)


View = Callable[[str, int], Mapping[str, Tensor]]


def widths(most: int) -> Iterator[int]:
    """For how many single tokens there are recordings."""
    yield from (width for width in (1, 2, 4) if width < most)
    step, width = 8, 8
    while width < most:
        yield width
        step = 8 if width < 64 else 32
        width += step
    yield most


def lengths() -> Iterator[int]:
    """How long sequences may be that there are recordings for."""
    return (SHORTEST * 4**number for number in count())


class StepGraph:
    """A pass of one size, of a kind that has no more than `most` tokens."""

    def __init__(
        self, model: Model, view: View, studio: GraphCapture, size: GraphSize, most: int
    ) -> None:
        memory, self._size, self._studio = model.memory, size, studio
        # What nobody needs of a pass of several tokens is one more sequence.
        self._sequences = size.sequences + (0 if size.single else 1)
        names = [anchor.name for anchor in memory.anchors]
        pages = -(-max(size.length, size.tokens) // memory.page_tokens)
        room = 3 * size.tokens + self._sequences * (3 + len(names) * pages)
        self._mirror = studio.mirror(room)
        self._ours = self._parts(self._mirror.open(), names)
        self._filled: list[tuple[int, State] | None] = [None] * self._sequences
        self._used = 0
        self._fill(())
        self._mirror.send()
        tokens, at, owners, rows, tables = self._parts(self._mirror.there, names)
        self._said = tokens
        # A recording reads what it was made with: nobody else may get that memory.
        self._batch = batch = Batch(rows, owners, tables, size.bounds)

        def forward(wait: Wait) -> Tensor:
            step = Step(tokens.long(), at.long(), (), memory.page_tokens, view, wait, batch)
            hidden = model.forward(step)
            return model.logits(hidden) if size.single else hidden

        self._room = "logits" if size.single else "hidden"
        self._take = studio.record(forward, self._room, most, cut=not size.single)

    def _parts(self, flat: Any, names: Sequence[str]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Tokens, positions, owners, rows, and tables by anchor, in one run of numbers: of numpy
        or of a device."""
        tokens, sequences = self._size.tokens, self._sequences
        each, rest = flat[: 3 * tokens].reshape(3, tokens), flat[3 * tokens :]
        rows = rest[: 3 * sequences].reshape(sequences, 3)
        tables = rest[3 * sequences :].reshape(len(names), sequences, -1)
        return *each, rows, {name: tables[i] for i, name in enumerate(names)}

    @property
    def single(self) -> bool:
        return self._size.single

    def play(self, rows: Sequence[GraphRow], wait: Wait) -> Tensor:
        """What comes of these: logits after each token if all are single, else hidden states; until
        something is played again."""
        self.lay(rows)
        self._mirror.send()
        return self._played(wait)

    def lay(self, rows: Sequence[GraphRow]) -> None:
        """Lay out what is to be played, on the host."""
        assert all(row.past + len(row.tokens) <= self._size.length for row in rows), "too long"
        self._mirror.open()
        self._fill(rows)

    def play_laid(self, tokens: Sequence[int]) -> Tensor:
        """What comes of what was laid out before it was known which its first tokens are."""
        self._ours[0][: len(tokens)] = tokens
        self._mirror.send()
        return self._played(nothing)

    def linger(self) -> None:
        """Wait until most of what was played last is done, if it is not of single tokens."""
        self._take.linger()

    def play_ahead(self, tokens: Tensor, places: Sequence[int]) -> Tensor:
        """The same of tokens that the device alone knows yet, where they are to be found there."""
        said = self._said[: len(places)]
        self._ours[0][: len(places)] = places
        self._mirror.send()
        said.copy_(tokens.index_select(0, said))
        return self._played(nothing)

    def _played(self, wait: Wait) -> Tensor:
        self._take.play(wait)
        return self._studio.left(self._room, self._used)

    def _fill(self, rows: Sequence[GraphRow]) -> None:
        tokens, at, owners, spans, _ = self._ours
        counts = [len(row.tokens) for row in rows]
        ends = np.cumsum(counts, dtype=np.int32)
        self._used = used = int(sum(counts))
        given = len(rows)
        past = np.fromiter((row.past for row in rows), np.int32, given)
        tokens[:used] = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int32, used)
        tokens[used:] = 0
        owners[:used] = np.repeat(np.arange(given, dtype=np.int32), counts)
        spans[:given] = np.stack([ends - counts, ends, past], 1)
        at[:used] = np.arange(used) + np.repeat(past - spans[:given, 0], counts)
        spans[given:] = 0
        left = np.arange(len(tokens) - used)
        if self._size.single:
            owners[used:], at[used:] = used + left, 0
            spans[given:, 0], spans[given:, 1] = used + left, used + left + 1
        elif len(left):
            # One sequence has all of them, and those behind it have none.
            owners[used:], at[used:] = given, left
            spans[given, :2] = (used, len(tokens))
        for number in range(self._sequences):
            self._fill_table(number, rows[number] if number < given else None)

    def _fill_table(self, number: int, row: GraphRow | None) -> None:
        """If it is not there already."""
        wanted = None if row is None else (row.lease, row.state)
        if self._filled[number] == wanted:
            return
        self._filled[number] = wanted
        for name, ours in self._ours[-1].items():
            slots = () if row is None else row.table.get(name, ())
            known = min(len(slots), ours.shape[1])
            ours[number, :known] = slots[:known]
            ours[number, known:] = -1


class StepGraphs:
    """Those of one model, made when they are first needed; for steps of up to `most` sequences and
    `max_step_tokens` tokens."""

    def __init__(
        self, model: Model, view: View, studio: GraphCapture, most: int, max_step_tokens: int
    ) -> None:
        self._model, self._view, self._studio, self._most = model, view, studio, most
        self._widths = sorted(set(widths(most)))
        enough = next((size for size in SIZES if size >= max_step_tokens), SIZES[-1])
        self._tokens = [size for size in SIZES if size <= enough]
        self._made: dict[GraphSize, StepGraph] = {}

    @property
    def max_step_tokens(self) -> int:
        """Steps of more have no recording."""
        return max(self._most, self._tokens[-1])

    def fitting(self, rows: Sequence[GraphRow], loading: bool) -> StepGraph | None:
        """One for such sequences, of which some may be `loading`; None for more than any has."""
        several = sum(len(row.tokens) > 1 for row in rows)
        length = max(row.past + len(row.tokens) for row in rows)
        single = not several and not loading
        for size in self._sizes(single, next(most for most in lengths() if most >= length)):
            fits = len(rows) <= size.sequences and several <= size.prompts
            if fits and sum(len(row.tokens) for row in rows) <= size.tokens:
                return self._of(size)
        return None

    def prepare(self, longest: int) -> None:
        """Make those for sequences of up to so many tokens, so that nobody waits for them later.

        The largest come first: what they take of the shared memory is enough for all.
        """
        shorter = [*takewhile(lambda length: length < longest, lengths())]
        last = next(length for length in lengths() if length >= longest)
        for length in reversed([*shorter, last]):
            for single in (False, True):
                for size in reversed(self._sizes(single, length)):
                    self._of(size)

    def _sizes(self, single: bool, length: int) -> list[GraphSize]:
        if single:
            return [GraphSize(width, width, 0, length) for width in self._widths]
        most, last = self._most, self._tokens[-1]
        prompts = {n: most if n == last else min(most, n // PROMPT_TOKENS) for n in self._tokens}
        return [GraphSize(n, min(most, n), prompts[n], length) for n in self._tokens]

    def _of(self, size: GraphSize) -> StepGraph:
        if size not in self._made:
            most = self._most if size.single else self._tokens[-1]
            made = StepGraph(self._model, self._view, self._studio, size, most)
            self._made[size] = made
        return self._made[size]
