"""The order of sums in torch references: batched, or deterministic to the bit.

`Batched` takes all tokens of a step together. Under `Deterministic`, a token's result depends on
its own history alone: not on other sequences in the step, the token's row in it, or the chunks of
its prompt. Equal means bit-equal, on one machine with one number of threads. References use four
things and do not know which arithmetic they have:

    linear       Deterministic computes tiles of a fixed number of rows, the last one padded. It
                 verifies for every shape of weights that a row does not depend on its tile; where
                 that fails, tiles have one row.
    rowwise      Deterministic applies a function of single rows to all rows at once if it has
                 verified that their number does not matter, else one by one.
    query_block  Deterministic has one query attend at a time, over exactly the keys it sees.
    order        Of two orders of the same sums, Deterministic takes the one token by token.

All other operations (residual sums, elementwise products, look-ups) are exact per element. Matrix
multiplications outside of `linear` take operands that are `aligned`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers.backend.packed_weight import PackedWeight
from kvtide.layers.elementwise import (
    gelu_tanh,
    l2norm,
    layer_norm,
    rms_norm,
    sigmoid,
    softplus,
    swish,
)
from kvtide.layers.rope import Rope

TILE_ROWS = 16
_QUERY_BLOCK = 256
_ALIGNED_BYTES = 64

RowFunction = Callable[[Tensor], Tensor]
Summing = TypeVar("Summing", bound=Callable[..., object])


def aligned(operand: Tensor) -> Tensor:
    """The operand, or an aligned copy: a GEMM may depend on the address of its operands, which for
    a slice depends on what stands before it."""
    return operand if operand.data_ptr() % _ALIGNED_BYTES == 0 else operand.clone()


class Arithmetic(ABC):
    """
    query_block   how many queries attend together
    packed_forms  forms of weights that `packed_linear` multiplies as they are
    """

    query_block: int
    packed_forms: Collection[str] = ()

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Rows of x times the rows of weight."""

    def packed_linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        """As `linear`, of a weight in these forms."""
        raise NotImplementedError

    def unpacked(self, weight: PackedWeight) -> Tensor:
        """The numbers of a weight in these forms, in fp32."""
        raise NotImplementedError

    @abstractmethod
    def rowwise(self, function: RowFunction, rows: Tensor) -> Tensor:
        """A function that maps every row by itself, over the first axis."""

    @abstractmethod
    def order(self, together: Summing, by_token: Summing) -> Summing:
        """The one to use of two functions that differ only in the order of their sums."""


class Batched(Arithmetic):
    query_block = _QUERY_BLOCK

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight, bias)

    def rowwise(self, function: RowFunction, rows: Tensor) -> Tensor:
        return function(rows)

    def order(self, together: Summing, by_token: Summing) -> Summing:
        return together


class Deterministic(Arithmetic):
    """Verifies at construction what `rowwise` relies on, and each shape of weights at its first
    use; `gemm` is the GEMM that it verifies."""

    query_block = 1

    def __init__(self, gemm: Callable[[Tensor, Tensor], Tensor] = functional.linear) -> None:
        _settle()
        self._gemm = gemm
        self._tile_rows: dict[object, int] = {}
        self._rows_together = _all_rows_stand_alone(torch.get_num_threads())

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        tile = self.tile_rows(weight)
        # A copy, so that all tiles are aligned alike and the last one is whole.
        padded = x.new_zeros((-(-len(x) // tile) * tile, x.shape[1]))
        padded[: len(x)] = x
        tiles = [self._gemm(rows, weight) for rows in padded.split(tile)]
        out = (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[: len(x)]
        return out if bias is None else out + bias

    def tile_rows(self, weight: Tensor) -> int:
        """How many rows a tile has with weights of this shape."""
        kind = (weight.shape, weight.stride(), weight.dtype, weight.device)
        if kind not in self._tile_rows:
            whole = gemm_rows_stand_alone(self._gemm, weight, TILE_ROWS)
            self._tile_rows[kind] = TILE_ROWS if whole else 1
        return self._tile_rows[kind]

    def rowwise(self, function: RowFunction, rows: Tensor) -> Tensor:
        if self._rows_together:
            return function(rows)
        return torch.cat([function(row) for row in rows.split(1)])

    def order(self, together: Summing, by_token: Summing) -> Summing:
        return by_token


# -- what is verified on the machine -----------------------------------------------------------


def _settle() -> None:
    """Triggers torch's choice of a GEMM library before the first result that must repeat.

    On a CPU without half-precision GEMMs, torch switches libraries for all dtypes when the first
    one fails.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.bfloat16, torch.float16):
            functional.linear(torch.ones(16, 64, dtype=dtype), torch.ones(48, 64, dtype=dtype))


def gemm_rows_stand_alone(
    gemm: Callable[[Tensor, Tensor], Tensor], weight: Tensor, rows: int
) -> bool:
    """Whether a row of a GEMM of so many rows does not depend on its place and the other rows.

    Tried with random rows: all of them reversed, and some of them among other rows.
    """
    generator = torch.Generator().manual_seed(rows)

    def some(count: int) -> Tensor:
        values = torch.randn(count, weight.shape[1], generator=generator)
        return values.to(weight.device, weight.dtype)

    ours = some(rows)
    expected = gemm(ours, weight)
    if not torch.equal(gemm(ours.flip(0), weight).flip(0), expected):
        return False
    for trial in range(4):
        row, elsewhere = trial * 5 % rows, (trial * 7 + 3) % rows
        strangers = some(rows)
        strangers[elsewhere] = ours[row]
        if not torch.equal(gemm(strangers, weight)[elsewhere], expected[row]):
            return False
    return True


def rows_stand_alone(function: RowFunction) -> bool:
    """Whether rows give the same together as one by one, at widths that divide and that do not."""
    return all(
        torch.equal(function(rows), torch.cat([function(row) for row in rows.split(1)]))
        for rows in _random_rows()
    )


@cache
def _all_rows_stand_alone(threads: int) -> bool:
    """Of every kind of function. A process verifies it once for a number of threads."""
    return all(map(rows_stand_alone, _ROW_FUNCTIONS))


def _random_rows() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for width in (4, 64, 119, 576):
        yield torch.randn(128, width, generator=generator) * 3


def _unit_norm(rows: Tensor) -> Tensor:
    return rms_norm(rows, torch.ones(rows.shape[-1]), 1e-6)


def _unit_layer_norm(rows: Tensor) -> Tensor:
    return layer_norm(rows, torch.ones(rows.shape[-1]), torch.ones(rows.shape[-1]), 1e-6)


def _rotated(rows: Tensor) -> Tensor:
    """A rotation at positions far apart."""
    frequencies = 0.2 ** torch.arange(rows.shape[1] % 7 + 1, dtype=torch.float32)
    return Rope(frequencies)((rows[:, 0].abs() ** 5).long())


_ROW_FUNCTIONS: tuple[RowFunction, ...] = (
    swish,
    sigmoid,
    gelu_tanh,
    softplus,
    _rotated,
    _unit_norm,
    l2norm,
    _unit_layer_norm,
    lambda rows: rows.softmax(-1),
)
"""One of every kind that layers use."""
