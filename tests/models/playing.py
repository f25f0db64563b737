"""Plays the engine: pages in scattered slots, and what is let go is poisoned.

Every byte that no page holds is 0xFF, which is NaN in all dtypes of a pool, so a read that goes
anywhere it should not shows in the logits. A `Sequence` keeps only what the declaration says that a
resume needs: pages behind every reach are dropped after each step, and pages that would be
dropped at once are never given a slot.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtide.engine import RankTopology
from kvtide.layers import Rows, Step
from kvtide.models import Model
from kvtide.spec import ALL, PoolSpec
from kvtide.tiers import Arrangement, Buffers, Layout

ALONE = RankTopology()


@dataclass
class Played:
    """A sequence: its tokens, how many are computed, and its pages by anchor."""

    tokens: list[int]
    pages: dict[str, list[int]] = field(default_factory=dict)
    past: int = 0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.past


class Player:
    def __init__(
        self,
        model: Model,
        *,
        slots: int = 96,
        layout: Layout = Layout.LAYER_FIRST,
        topology: RankTopology = ALONE,
    ):
        self.model, self.memory, self.topology = model, model.memory, topology
        counts = {anchor.name: slots for anchor in self.memory.anchors}
        arrangement = Arrangement(self.memory, counts, layout)
        block = torch.full((arrangement.bytes,), 0xFF, dtype=torch.uint8)
        self.buffers = Buffers(arrangement, block)
        order = random.Random(slots)
        self.free = {name: order.sample(range(slots), slots) for name in counts}
        self.shared: set[tuple[str, int]] = set()
        self.waited: list[int] = []

    def begin(self, tokens: Sequence[int]) -> Played:
        return Played(list(tokens), {anchor.name: [] for anchor in self.memory.anchors})

    def fork(self, sequence: Played, tokens: Sequence[int]) -> Played:
        """Another sequence with the same tokens so far, which shares its pages."""
        assert sequence.past % self.memory.page_tokens == 0, "the last page is still written to"
        pages = {name: list(slots) for name, slots in sequence.pages.items()}
        self.shared |= {(name, slot) for name, slots in pages.items() for slot in slots}
        return Played(sequence.tokens[: sequence.past] + list(tokens), pages, sequence.past)

    def prefill(self, tokens: Sequence[int], *chunks: int) -> Tensor:
        """Logits of all tokens, computed in chunks of these sizes, again and again."""
        sequence, logits = self.begin(tokens), []
        while sequence.left:
            count = min(chunks[len(logits) % len(chunks)], sequence.left)
            logits += self.step((sequence, count))
        self.end(sequence)
        return torch.cat(logits)

    def step(self, *batch: tuple[Played, int]) -> list[Tensor]:
        """Computes the next tokens of each sequence; their logits, one tensor a sequence."""
        tokens: list[int] = []
        positions: list[int] = []
        rows = []
        for sequence, count in batch:
            end = sequence.past + count
            slots = self._grown(sequence, end)
            rows.append(Rows(len(tokens), len(tokens) + count, sequence.past, slots))
            tokens += sequence.tokens[sequence.past : end]
            positions += range(sequence.past, end)
        self.waited = []
        page = self.memory.page_tokens
        ids, places = torch.tensor(tokens), torch.tensor(positions)
        logits = self._logits(Step(ids, places, tuple(rows), page, self._view, self._wait))
        assert self.waited == list(self.memory.own_layers)
        for sequence, count in batch:
            sequence.past += count
            self._let_go(sequence)
        return [logits[one.start : one.end] for one in rows]

    def end(self, sequence: Played) -> None:
        for name, pages in sequence.pages.items():
            for number in range(len(pages)):
                self._drop(name, pages, number)

    def held(self, sequence: Played, pool: str, layer: int) -> dict[str, Tensor]:
        """What a pool keeps of a sequence: its pages one after another, whatever is in them."""
        view = self.buffers.view(pool, layer)
        slots = sequence.pages[self.memory.pool(pool).follows or pool]
        return {name: field[torch.tensor(slots)].flatten(0, 1) for name, field in view.items()}

    def _logits(self, step: Step) -> Tensor:
        """What all ranks say together."""
        model, topology = self.model, self.topology
        first = self.memory.is_first_stage
        before = None if first else topology.receive_hidden(model.carried(step.tokens))
        hidden = model.forward(step, before)
        topology.send_hidden(hidden)
        if topology.is_last_stage:
            return topology.broadcast_logits(model.logits(hidden))
        return topology.broadcast_logits(torch.empty(len(hidden), model.vocabulary))

    # -- what a step is given ------------------------------------------------------------------

    def _wait(self, layer: int) -> None:
        self.waited.append(layer)

    def _view(self, pool: str, layer: int) -> Mapping[str, Tensor]:
        assert layer == self.waited[-1], f"layer {layer} did not wait for its state"
        return self.buffers.view(pool, layer)

    def _grown(self, sequence: Played, end: int) -> dict[str, Tensor]:
        """Page tables up to a token, with slots for the pages that will still be needed there."""
        for anchor in self.memory.anchors:
            pages = sequence.pages[anchor.name]
            for number in range(len(pages), -(-end // self.memory.page_tokens)):
                needed = self._needed(anchor, number, end)
                pages.append(self.free[anchor.name].pop() if needed else -1)
        return {name: torch.tensor(pages) for name, pages in sequence.pages.items()}

    def _let_go(self, sequence: Played) -> None:
        for anchor in self.memory.anchors:
            pages = sequence.pages[anchor.name]
            for number in range(len(pages)):
                if not self._needed(anchor, number, sequence.past):
                    self._drop(anchor.name, pages, number)

    def _needed(self, anchor: PoolSpec, number: int, boundary: int) -> bool:
        """Whether a page holds one of the tokens that a resume at the boundary needs."""
        reach = anchor.reuse.reach
        return reach is ALL or (number + 1) * self.memory.page_tokens > boundary - reach

    def _drop(self, name: str, pages: list[int], number: int) -> None:
        slot, pages[number] = pages[number], -1
        if slot < 0 or (name, slot) in self.shared:
            return
        for row in self.buffers.arrangement.rows(name):
            self.buffers.rows(row.pool, row.layer)[slot] = 0xFF
        self.free[name].insert(0, slot)
