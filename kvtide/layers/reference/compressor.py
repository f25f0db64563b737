"""Compressed streams: one entry for every block of tokens, a mean weighted by gates.

    entry = Σ softmax over the block (gate + position) ⊙ value        channel by channel

The mean is an online softmax, token by token, with three numbers a channel: the highest gate so
far (`peak`), and the sums of weights and of weighted values relative to it (`total`, `mixed`). A
block stays open between steps at that price, and its entry does not depend on the chunks of the
prompt. The blocks of a step are computed side by side.

Where blocks overlap, a token has two halves of channels: one for the mean of its own block, one
for that of the next. The next block's mean begins with the sums of this one.

The open block's mean is a recurrent state. Pages hold whole blocks, so a page's end has only the
sums for the next block; the step writes them for every page that it completes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import CompressedStream
from kvtide.layers.elementwise import rms_norm
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.packing import Fields
from kvtide.layers.reference.kv_write import kv_write
from kvtide.layers.rope import rotate_interleaved
from kvtide.layers.step import Rows


class Mean(NamedTuple):
    """Unfinished weighted means, one a block: (blocks, channels) each."""

    peak: Tensor
    total: Tensor
    mixed: Tensor

    @classmethod
    def nothing(cls, blocks: int, like: Tensor) -> Mean:
        shape = (blocks, like.shape[-1])
        zeros = like.new_zeros(shape)
        return cls(like.new_full(shape, -torch.inf), zeros, zeros)

    def taken(self, values: Tensor, gates: Tensor, there: Tensor) -> Mean:
        """After one more token in each block that has one (`there`)."""
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
        """Every block with the sums of the block before it; the first with none."""
        pairs = zip(nothing, self, strict=True)
        return Mean(*(torch.cat([none[:1], part[:-1]]) for none, part in pairs))

    def begun_with(self, kept: Fields) -> Mean:
        """With stored sums for the first block."""
        parts = zip(self, (kept[name] for name in self._fields), strict=True)
        return Mean(*(torch.cat([first[None], part[1:]]) for part, first in parts))


@dataclass(frozen=True, slots=True)
class Blocks:
    """One sequence's new tokens by block: values and gates (blocks, tokens of a block, channels).

    `there` is true for new tokens; the first and the last block may have others.
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
        """The mean of every block, from the sums that it begins with."""
        for token, anywhere in enumerate(self.there.any(0).flatten().tolist()):
            if anywhere:
                there = self.there[:, token]
                begun = begun.taken(self.values[:, token], self.gates[:, token], there)
        return begun


def compress(
    arithmetic: Arithmetic, run: ForwardPass, stream: CompressedStream, values_gates: Tensor
) -> list[Tensor]:
    """Writes the entries that the step closes, and gives every sequence's, as they read back."""
    values, gates = values_gates.chunk(2, dim=-1)
    gates = gates + stream.position[run.positions % stream.ratio]
    closed = []
    for rows in run.sequences:
        new = slice(rows.start, rows.end)
        blocks = Blocks.of(rows, stream.ratio, values[new], gates[new])
        means = _means(run, stream, blocks, rows)
        closed.append(means.value[: rows.total // stream.ratio - rows.past // stream.ratio])
    name = stream.entries.packing.parts[0].logical.name
    entries = _normed_and_rotated(arithmetic, run, stream, torch.cat(closed).to(stream.dtype))
    kept = kv_write(run, stream.entries, {name: entries})[name]
    return list(kept.split([len(part) for part in closed]))


def all_entries(run: ForwardPass, stream: CompressedStream, rows: Rows, closed: Tensor) -> Tensor:
    """A sequence's entries, those of earlier steps and those that this one closes."""
    name = stream.entries.packing.parts[0].logical.name
    return torch.cat([run.read_entries(stream.entries, rows)[name], closed])


def _normed_and_rotated(
    arithmetic: Arithmetic, run: ForwardPass, stream: CompressedStream, means: Tensor
) -> Tensor:
    """Entries as they are written: rotated to where their block begins."""
    if not len(means):
        return means
    numbers = [torch.arange(s.past // stream.ratio, s.total // stream.ratio) for s in run.sequences]
    positions = torch.cat(numbers).to(means.device) * stream.ratio
    cos_sin = arithmetic.rowwise(stream.rope, positions)
    normed = arithmetic.rowwise(lambda rows: rms_norm(rows, *stream.norm), means)
    return rotate_interleaved(normed, cos_sin)


def _means(run: ForwardPass, stream: CompressedStream, blocks: Blocks, rows: Rows) -> Mean:
    """The mean of every block that has a new token; open ones are written to the pools."""
    nothing = Mean.nothing(len(blocks), stream.position[:, : stream.width])
    is_open = rows.past % stream.ratio > 0
    if stream.overlap is None:
        begun = _recalled(stream.own, nothing, rows, run) if is_open else nothing
        means = blocks.mean(begun)
        if rows.total % stream.ratio:
            run.write_state(stream.own, rows, means.fields(-1))
        return means
    begun = _recalled(stream.overlap, nothing, rows, run) if is_open else nothing
    overlap_means = blocks.half(slice(0, stream.width)).mean(begun)
    begun = _recalled(stream.own, overlap_means.shifted(nothing), rows, run)
    means = blocks.half(slice(stream.width, None)).mean(begun)
    _remember(run, stream, overlap_means, means, rows)
    return means


def _recalled(place: Place, means: Mean, rows: Rows, run: ForwardPass) -> Mean:
    kept = run.read_state(place, rows)
    return means if kept is None else means.begun_with(kept)


def _remember(
    run: ForwardPass, stream: CompressedStream, overlap_means: Mean, means: Mean, rows: Rows
) -> None:
    """After the step's last token, and after each page that it completes."""
    assert stream.overlap is not None
    per_page = run.step.page_tokens // stream.ratio
    first = rows.past // stream.ratio
    ends = torch.arange(first // per_page, rows.total // stream.ratio // per_page) + 1
    at = (ends * per_page - 1 - first).to(overlap_means.peak.device)
    run.write_page_states(stream.own, rows, {n: v[at] for n, v in overlap_means._asdict().items()})
    if rows.total % stream.ratio:
        run.write_state(stream.own, rows, means.fields(-1))
        run.write_state(stream.overlap, rows, overlap_means.fields(-1))
    elif rows.total % run.step.page_tokens:
        run.write_state(stream.own, rows, overlap_means.fields(-1))
