"""The one copy primitive: pieces × pages, in legs.

A *piece* is a run of bytes that repeats from slot to slot at a fixed stride, in the source and in
the target (`tiers.layout`). `Strided` says: copy these pieces for these slots. Every backend does
exactly that, in every layout; they differ only in how.

A table's pieces are sorted into legs: what must be there first is copied first.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.spec import Tier
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.layout import Piece

Addresses = npt.NDArray[np.int64]


class Way(Enum):
    """The two directions of the link between device and host."""

    LOAD = (Tier.HOST, Tier.DEVICE)
    BACKUP = (Tier.DEVICE, Tier.HOST)

    @property
    def source(self) -> Tier:
        return self.value[0]

    @property
    def target(self) -> Tier:
        return self.value[1]


@dataclass(frozen=True, slots=True, eq=False)
class PieceTable:
    """The pieces of one kind of copy, with addresses. Made once, used for every such copy.

    legs       the pieces of leg s are those from `legs[s]` up to `legs[s + 1]`
    word_bytes  divides every address and length that the table can give
    fills_slots  nothing lies between a piece in one slot and the same piece in the next
    """

    way: Way
    source: Addresses
    source_stride: Addresses
    target: Addresses
    target_stride: Addresses
    bytes: Addresses
    legs: tuple[int, ...]
    word_bytes: int
    fills_slots: bool

    @classmethod
    def of(
        cls, way: Way, source: Buffers, target: Buffers, legs: Sequence[Sequence[Piece]]
    ) -> PieceTable:
        pieces = [piece for leg in legs for piece in leg]

        def column(name: str) -> Addresses:
            return np.array([getattr(piece, name) for piece in pieces], np.int64)

        return cls(
            way,
            column("source_offset") + source.address,
            column("source_stride"),
            column("target_offset") + target.address,
            column("target_stride"),
            column("bytes"),
            (0, *np.cumsum([len(leg) for leg in legs]).tolist()),
            math.gcd(16, *(piece.bytes for piece in pieces)),
            all(p.bytes == p.source_stride == p.target_stride for p in pieces),
        )

    def __len__(self) -> int:
        return len(self.bytes)

    def pick(self, chosen: npt.NDArray[np.bool_]) -> PieceTable:
        """The table of these pieces only, in the same legs."""
        kept = np.concatenate(([0], np.cumsum(chosen)))
        return PieceTable(
            self.way,
            self.source[chosen],
            self.source_stride[chosen],
            self.target[chosen],
            self.target_stride[chosen],
            self.bytes[chosen],
            tuple(int(kept[bound]) for bound in self.legs),
            self.word_bytes,
            self.fills_slots,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Strided:
    """Copy the table's pieces from slot `source_index[i]` to slot `target_index[i]`, for all i."""

    table: PieceTable
    source_index: Addresses
    target_index: Addresses

    @property
    def bytes(self) -> int:
        return int(self.table.bytes.sum()) * len(self.source_index)


class Runs(NamedTuple):
    """Plain copies: so many bytes from each source address to the target address.

    Those of leg s are the ones from `legs[s]` up to `legs[s + 1]`.
    """

    source: Addresses
    target: Addresses
    bytes: Addresses
    legs: tuple[int, ...]


def runs(works: Sequence[Strided], legs: int) -> Runs:
    """The works as plain copies, leg by leg."""
    parts = [_runs(work) for work in works]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        nothing = np.empty(0, np.int64)
        return Runs(nothing, nothing, nothing, (0,) * (legs + 1))
    counts = np.array([np.diff(part.legs) for part in parts])
    leg = np.concatenate([np.repeat(np.arange(legs), count) for count in counts])
    order = np.argsort(leg, kind="stable")
    return Runs(
        np.concatenate([part.source for part in parts])[order],
        np.concatenate([part.target for part in parts])[order],
        np.concatenate([part.bytes for part in parts])[order],
        (0, *np.cumsum(counts.sum(0)).tolist()),
    )


def _runs(work: Strided) -> Runs:
    """Slots that follow each other on both sides become one run, where pieces fill their slots."""
    table, sources, targets = work.table, work.source_index, work.target_index
    sizes = table.bytes[:, None]
    if table.fills_slots and len(sources):
        follows = (np.diff(sources) == 1) & (np.diff(targets) == 1)
        starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
        sizes = sizes * np.diff(starts, append=len(sources))
        sources, targets = sources[starts], targets[starts]
    source = table.source[:, None] + table.source_stride[:, None] * sources
    target = table.target[:, None] + table.target_stride[:, None] * targets
    return Runs(
        source.ravel(),
        target.ravel(),
        np.broadcast_to(sizes, source.shape).ravel(),
        tuple(bound * len(sources) for bound in table.legs),
    )


class Reference:
    """The CPU's backend, and what the others must equal: plain memory copies, one after another, on
    the calling thread. The interpreter is free meanwhile."""

    name = "reference"

    def issue(self, works: Sequence[Strided], legs: int) -> Iterator[None]:
        source, target, sizes, bounds = runs(works, legs)
        copies = list(zip(target.tolist(), source.tolist(), sizes.tolist(), strict=True))
        for start, end in pairwise(bounds):
            for copy in copies[start:end]:
                ctypes.memmove(*copy)
            yield
