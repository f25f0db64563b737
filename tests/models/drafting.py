"""Plays the engine for a draft beside its target: one set of pages, and forward passes of each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers import Rows, Step
from kvtide.models.draft import CapturedStates, DraftModel
from kvtide.models.model import Decoder
from kvtide.tiers import Layout
from tests.models.playing import Played, Player


class Capturing:
    """A target that keeps what enters some of its layers, of every step."""

    def __init__(self, target: Decoder, layers: tuple[int, ...]) -> None:
        self.target, self.layers = target, layers
        self.memory, self.vocabulary = target.memory, target.vocabulary
        self.max_positions, self.uses_kernels = target.max_positions, target.uses_kernels
        self.joined: list[Tensor] = []

    def forward(
        self, step: Step, before: Tensor | None = None, captured: CapturedStates | None = None
    ) -> Tensor:
        captured = CapturedStates(self.layers)
        hidden = self.target.forward(step, before, captured)
        self.joined.append(captured.joined)
        return hidden

    def carried(self, tokens: Tensor) -> Tensor:
        return self.target.carried(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden)


@dataclass(frozen=True, slots=True)
class DraftChunk:
    """Rows of a draft's pass, from position `first` of a sequence on.

    tokens  the one after each position
    absent  numbers of pages before the first position that have no entries of the draft
    """

    sequence: Played
    first: int
    tokens: list[int]
    features: Tensor
    absent: Collection[int] = ()


class DraftPlayer(Player):
    def __init__(
        self, target: Decoder, draft: DraftModel, *, layout: Layout = Layout.LAYER_FIRST
    ) -> None:
        self.capturing = Capturing(target, draft.captures)
        super().__init__(self.capturing, layout=layout)
        self.draft = draft

    def features(self, *batch: tuple[Played, int]) -> list[Tensor]:
        """The target's next tokens of each sequence: the draft's features of them."""
        counts = [len(each) for each in self.step(*batch)]
        return list(self.draft.features(self.capturing.joined.pop()).split(counts))

    def draft_pass(self, *chunks: DraftChunk) -> list[Tensor]:
        """One pass of the draft: the hidden states of its rows, one tensor a chunk."""
        page, start, rows = self.memory.page_tokens, 0, []
        for chunk in chunks:
            tables = self._grown(chunk.sequence, chunk.first + len(chunk.tokens))
            present = [i for i in range(len(tables["kv"])) if i not in chunk.absent]
            slots = {name: table[present] for name, table in tables.items()}
            past = chunk.first - page * len(chunk.absent)
            rows.append(Rows(start, start := start + len(chunk.tokens), past, slots))
        positions = [range(one.first, one.first + len(one.tokens)) for one in chunks]
        self.waited = []
        step = Step(
            torch.tensor([token for one in chunks for token in one.tokens]),
            torch.tensor([position for each in positions for position in each]),
            tuple(rows),
            page,
            self._view,
            self._wait,
        )
        hidden = self.draft.forward(step, torch.cat([one.features for one in chunks]))
        assert self.waited == list(range(self.memory.layers, self.memory.end_layer))
        return [hidden[one.start : one.end] for one in rows]

    def forget(self, sequence: Played, page: int) -> None:
        """Nothing of the draft is in this page: a read of it shows."""
        for pool in self.memory.draft_sidecars:
            for layer in self.memory.pool(pool).layers:
                self.buffers.rows(pool, layer)[sequence.pages["kv"][page]] = 0xFF
