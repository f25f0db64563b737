"""Compressed streams: one entry for every block of tokens, a mean weighted by gates.

    entry = Σ softmax over the block (gate + position) ⊙ value        channel by channel

The mean is taken token by token, with three numbers a channel under way: the highest gate so far
(`peak`), and the weights' and the weighted values' sums relative to it (`total`, `mixed`). So a
block may be open between steps at that price, and its entry does not depend on how it was cut.
Blocks stand side by side in the arithmetic: a step takes as many operations as a block has tokens.

Where blocks overlap, a token has two halves of channels: one for the mean of its own block, one
for that of the next. The next block's mean then begins with what this one has put into it.

Where means lie. The open block's is read and written as a running state. Pages hold whole blocks,
so at a page's end only the next block's share is left, and every page that a step completes gets
its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers.blueprint import Blueprint
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.packing import Fields
from kvtide.layers.rope import Rope, rotate_neighbours
from kvtide.layers.step import Rows


class Mean(NamedTuple):
    """Weighted means under way, one a block: (blocks, channels) each."""

    peak: Tensor
    total: Tensor
    mixed: Tensor

    @classmethod
    def nothing(cls, blocks: int, like: Tensor) -> Mean:
        shape = (blocks, like.shape[-1])
        zeros = like.new_zeros(shape)
        return cls(like.new_full(shape, -torch.inf), zeros, zeros)

    def taken(self, values: Tensor, gates: Tensor, there: Tensor) -> Mean:
        """With one more token in each block in which one is `there`."""
        peak = torch.maximum(self.peak, gates)
        before, now = torch.exp(self.peak - peak), torch.exp(gates - peak)
        after = Mean(peak, self.total * before + now, self.mixed * before + now * values)
        return Mean(*(torch.where(there, a, b) for a, b in zip(after, self, strict=True)))

    @property
    def value(self) -> Tensor:
        return self.mixed / self.total

    def fields(self, block: int) -> Fields:
        return {name: part[block] for name, part in zip(self._fields, self, strict=True)}

    def shifted(self, nothing: Mean) -> Mean:
        """Every block with what the one before it has; the first with nothing."""
        pairs = zip(nothing, self, strict=True)
        return Mean(*(torch.cat([none[:1], part[:-1]]) for none, part in pairs))

    def begun_with(self, kept: Fields) -> Mean:
        """With what was kept of the first block."""
        parts = zip(self, (kept[name] for name in self._fields), strict=True)
        return Mean(*(torch.cat([first[None], part[1:]]) for part, first in parts))


@dataclass(frozen=True, slots=True)
class Blocks:
    """One sequence's new tokens by block: values and gates (blocks, tokens of a block, channels).

    `there` says which of them are new; the first and the last block may be so in part.
    """

    values: Tensor
    gates: Tensor
    there: Tensor

    @classmethod
    def of(cls, rows: Rows, ratio: int, values: Tensor, gates: Tensor) -> Blocks:
        before, after = rows.past % ratio, -rows.total % ratio

        def filled(x: Tensor) -> Tensor:
            return functional.pad(x, (0, 0, before, after)).reshape(-1, ratio, x.shape[1])

        there = filled(torch.ones(len(values), 1, device=values.device)).bool()
        return cls(filled(values), filled(gates), there)

    def __len__(self) -> int:
        return len(self.values)

    def half(self, channels: slice) -> Blocks:
        return Blocks(self.values[..., channels], self.gates[..., channels], self.there)

    def mean(self, begun: Mean) -> Mean:
        """Every block's, from what it has begun with."""
        for token, anywhere in enumerate(self.there.any(0).flatten().tolist()):
            if anywhere:
                there = self.there[:, token]
                begun = begun.taken(self.values[:, token], self.gates[:, token], there)
        return begun


class Compressor:
    """A stream's values and gates, and the means of its blocks as they close.

    own    the mean of the block that the next token belongs to
    share  what that block has put into the next one's mean so far, where blocks overlap
    """

    def __init__(self, blueprint: Blueprint, layer: int, pool: str, rope: Rope) -> None:
        self.arithmetic = blueprint.arithmetic
        self.rope = rope
        self.entries = blueprint.pool(pool, layer)
        self.ratio = self.entries.pool.tokens_per_entry
        self.dtype = blueprint.dtype
        self._field = self.entries.packing.parts[0].logical.name
        self.position = blueprint.tensor("ape", torch.float32)
        self.norm = blueprint.norm("norm")
        within = blueprint.pool(f"{pool}_open", layer)
        self.width = within.field("mixed").shape[0]
        self.overlaps = self.position.shape[1] == 2 * self.width
        self.own = blueprint.pool(f"{pool}_state", layer) if self.overlaps else within
        self.share = within if self.overlaps else None

    @staticmethod
    def weight(blueprint: Blueprint) -> Tensor:
        """What tokens are multiplied by to give values and gates, side by side.

        In fp32 whatever the model computes in, as the lab does: so is what they are added up in.
        """
        names = ("wkv.weight", "wgate.weight")
        return torch.cat([blueprint.tensor(name, torch.float32) for name in names])

    def __call__(self, products: Tensor, run: ForwardPass) -> list[Tensor]:
        """Every sequence's entries, those of earlier steps and those that this one closes.

        products  (tokens, values and gates), in fp32: tokens by `weight`
        """
        values, gates = products.chunk(2, dim=-1)
        gates = gates + self.position[run.positions % self.ratio]
        closed = []
        for rows in run.sequences:
            new = slice(rows.start, rows.end)
            blocks = Blocks.of(rows, self.ratio, values[new], gates[new])
            means = self._means(blocks, rows, run)
            closed.append(means.value[: rows.total // self.ratio - rows.past // self.ratio])
        kept = self._kept(torch.cat(closed).to(self.dtype), run)
        parts = kept.split([len(part) for part in closed])
        name = self._field
        return [
            torch.cat([run.entries(self.entries, rows)[name], new])
            for rows, new in zip(run.sequences, parts, strict=True)
        ]

    def write(self, products: Tensor, run: ForwardPass) -> None:
        """The same by program: entries and means go to their pages, where others read them."""
        from kvtide.layers.kernels.compressor import CompressedStream, compress

        turns = run.shared((self.rope, self.ratio), lambda: self.rope(self._begins(run.positions)))
        norm = (self.norm.weight, self.norm.eps)
        stream = CompressedStream(self.entries, self.own, self.share, self.position, norm)
        compress(run, stream, products, turns, self.dtype)

    def _begins(self, positions: Tensor) -> Tensor:
        """Where the block of each token begins."""
        return positions // self.ratio * self.ratio

    def _kept(self, means: Tensor, run: ForwardPass) -> Tensor:
        """Entries as they are kept: normed, and turned to where their block begins."""
        numbers = [torch.arange(s.past // self.ratio, s.total // self.ratio) for s in run.sequences]
        positions = torch.cat(numbers).to(means.device) * self.ratio
        if len(means):
            turns = self.arithmetic.rowwise(self.rope, positions)
            means = rotate_neighbours(self.norm(means), turns)
        return run.keep(self.entries, {self._field: means})[self._field]

    def _means(self, blocks: Blocks, rows: Rows, run: ForwardPass) -> Mean:
        """The mean of every block that has a new token; what is left goes to the pools."""
        nothing = Mean.nothing(len(blocks), self.position[:, : self.width])
        is_open = rows.past % self.ratio > 0
        if self.share is None:
            begun = self._recalled(self.own, nothing, rows, run) if is_open else nothing
            means = blocks.mean(begun)
            if rows.total % self.ratio:
                run.remember(self.own, rows, means.fields(-1))
            return means
        begun = self._recalled(self.share, nothing, rows, run) if is_open else nothing
        shares = blocks.half(slice(0, self.width)).mean(begun)
        begun = self._recalled(self.own, shares.shifted(nothing), rows, run)
        means = blocks.half(slice(self.width, None)).mean(begun)
        self._remember(shares, means, rows, run)
        return means

    @staticmethod
    def _recalled(place: Place, means: Mean, rows: Rows, run: ForwardPass) -> Mean:
        kept = run.recall(place, rows)
        return means if kept is None else means.begun_with(kept)

    def _remember(self, shares: Mean, means: Mean, rows: Rows, run: ForwardPass) -> None:
        """After the step's last token, and after each page that it completes."""
        assert self.share is not None
        per_page = run.step.page_tokens // self.ratio
        first = rows.past // self.ratio
        ends = torch.arange(first // per_page, rows.total // self.ratio // per_page) + 1
        at = (ends * per_page - 1 - first).to(shares.peak.device)
        run.remember_pages(self.own, rows, {n: v[at] for n, v in shares._asdict().items()})
        if rows.total % self.ratio:
            run.remember(self.own, rows, means.fields(-1))
            run.remember(self.share, rows, shares.fields(-1))
        elif rows.total % run.step.page_tokens:
            run.remember(self.own, rows, shares.fields(-1))
