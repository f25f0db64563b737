"""How layers compute: the operations whose order of sums is a choice, chosen once per model.

`Batched` takes all tokens of a step together. `Deterministic` promises that a token's result
depends on nothing but its own history: not on which other sequences are in the step, where the
token stands in it, or how its prompt was cut into steps. Equal means bit-equal, on one machine with
one number of threads. Layers use the same few things and do not know which arithmetic they have:

    linear       deterministic: tiles of a fixed number of rows, the last one padded. A row of such
                 a product does not depend on the other rows or on its place among them, which is
                 verified for every shape of weights; where it fails, tiles have one row.
    rowwise      deterministic: any function of single rows, on all rows at once if functions of
                 that kind are verified not to depend on how many there are, else one by one.
    query_block  deterministic: one query attends at a time, over exactly what it sees.
    order        deterministic: of two orders of the same sums, the one that goes token by token.
    runs_programs  batched, on a CUDA device: `programs` do what is written in torch elsewhere.

What is neither of these (residual sums, products by element, look-ups) is exact per element. Matrix
products outside of `linear` take operands that are `aligned`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers.elementwise import (
    gelu_tanh,
    layer_norm,
    rms_norm,
    sigmoid,
    softplus,
    swish,
    unit_length,
)
from kvtide.layers.rope import Rope

TILE_ROWS = 16
_QUERY_BLOCK = 256
_ALIGNED_BYTES = 64

RowFunction = Callable[[Tensor], Tensor]
Summing = TypeVar("Summing", bound=Callable[..., object])


def aligned(operand: Tensor) -> Tensor:
    """The same, or a copy of it: a matrix product may depend on where its operands begin in memory,
    which for a part of a tensor depends on what stands before it."""
    return operand if operand.data_ptr() % _ALIGNED_BYTES == 0 else operand.clone()


class Arithmetic(ABC):
    """`query_block`: how many queries attend together."""

    query_block: int

    @abstractmethod
    def runs_programs(self, device: torch.device) -> bool:
        """Whether layers leave their work to `programs` there."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Rows of x times the rows of weight."""

    @abstractmethod
    def rowwise(self, function: RowFunction, rows: Tensor) -> Tensor:
        """A function that maps every row by itself, over the first axis."""

    @abstractmethod
    def order(self, together: Summing, by_token: Summing) -> Summing:
        """The one to use of two functions that differ only in the order of their sums."""


class Batched(Arithmetic):
    query_block = _QUERY_BLOCK

    def runs_programs(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight, bias)

    def rowwise(self, function: RowFunction, rows: Tensor) -> Tensor:
        return function(rows)

    def order(self, together: Summing, by_token: Summing) -> Summing:
        return together


class Deterministic(Arithmetic):
    """Verifies at construction what `rowwise` relies on, and each shape of weights when it is
    first seen; `product` is what is verified."""

    query_block = 1

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor] = functional.linear) -> None:
        _settle()
        self._product = product
        self._tile_rows: dict[object, int] = {}
        self._rows_together = _all_rows_stand_alone(torch.get_num_threads())

    def runs_programs(self, device: torch.device) -> bool:
        return False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        tile = self.tile_rows(weight)
        # A copy, so that every tile begins alike and the last one is whole.
        padded = x.new_zeros((-(-len(x) // tile) * tile, x.shape[1]))
        padded[: len(x)] = x
        product = torch.cat([self._product(rows, weight) for rows in padded.split(tile)])[: len(x)]
        return product if bias is None else product + bias

    def tile_rows(self, weight: Tensor) -> int:
        """How many rows a tile has with weights of this shape."""
        kind = (weight.shape, weight.stride(), weight.dtype, weight.device)
        if kind not in self._tile_rows:
            whole = product_rows_stand_alone(self._product, weight, TILE_ROWS)
            self._tile_rows[kind] = TILE_ROWS if whole else 1
        return self._tile_rows[kind]

    def rowwise(self, function: RowFunction, rows: Tensor) -> Tensor:
        if self._rows_together:
            return function(rows)
        return torch.cat([function(row) for row in rows.split(1)])

    def order(self, together: Summing, by_token: Summing) -> Summing:
        return by_token


def choose(deterministic: bool) -> Arithmetic:
    return Deterministic() if deterministic else Batched()


# -- what the machine must do ------------------------------------------------------------------


def _settle() -> None:
    """Where a CPU has no products in half precision, torch takes another library for all others too
    when the first of them fails. It does so here, before anything is computed that must stay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.bfloat16, torch.float16):
            functional.linear(torch.ones(16, 64, dtype=dtype), torch.ones(48, 64, dtype=dtype))


def product_rows_stand_alone(
    product: Callable[[Tensor, Tensor], Tensor], weight: Tensor, rows: int
) -> bool:
    """Whether a row of a product of so many rows is the same wherever it stands, beside whatever.

    Tried with random rows: all of them reversed, and some of them among strangers.
    """
    generator = torch.Generator().manual_seed(rows)

    def some(count: int) -> Tensor:
        drawn = torch.randn(count, weight.shape[1], generator=generator)
        return drawn.to(weight.device, weight.dtype)

    ours = some(rows)
    expected = product(ours, weight)
    if not torch.equal(product(ours.flip(0), weight).flip(0), expected):
        return False
    for trial in range(4):
        row, elsewhere = trial * 5 % rows, (trial * 7 + 3) % rows
        strangers = some(rows)
        strangers[elsewhere] = ours[row]
        if not torch.equal(product(strangers, weight)[elsewhere], expected[row]):
            return False
    return True


def rows_stand_alone(function: RowFunction) -> bool:
    """Whether rows come out the same together as one by one, at widths with and without a rest."""
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


def _turned(rows: Tensor) -> Tensor:
    """A rotation at positions far apart."""
    frequencies = 0.2 ** torch.arange(rows.shape[1] % 7 + 1, dtype=torch.float32)
    return Rope(frequencies)((rows[:, 0].abs() ** 5).long())


_ROW_FUNCTIONS: tuple[RowFunction, ...] = (
    swish,
    sigmoid,
    gelu_tanh,
    softplus,
    _turned,
    _unit_norm,
    unit_length,
    _unit_layer_norm,
    lambda rows: rows.softmax(-1),
)
"""One of every kind that layers use."""
