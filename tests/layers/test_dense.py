"""Projections in fp32 without GEMMs in fp32; embedding and head over tensor ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvtide.layers import choose
from kvtide.layers.dense import Embedding, Head, Linear, WideLinear
from kvtide.layers.elementwise import split_bf16
from kvtide.layers.tensor_ranks import TensorRanks


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_two_halves_make_the_weight() -> None:
    weight = randn(24, 40, seed=1)
    high, low = split_bf16(weight).float().chunk(2)
    assert ((high + low - weight).abs() <= weight.abs() * 2**-16).all()
    assert not torch.equal(high, weight)


def test_what_was_saved_in_bf16_has_one_half() -> None:
    weight = randn(24, 40, seed=1).bfloat16()
    assert torch.equal(split_bf16(weight.float()), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
def test_the_result_is_that_of_a_matmul_in_fp32(
    dtype: torch.dtype, saved: torch.dtype, device: torch.device
) -> None:
    x, weight = randn(48, 256, seed=1).to(dtype), randn(64, 256, seed=2).to(saved).float()
    wanted = x.double() @ weight.double().T
    found = WideLinear(choose(False, device), weight.to(device), x.dtype)(x.to(device))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=5e-4)


# -- the vocabulary ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OneByOne(TensorRanks):
    """A rank that takes its turn: it sees what the ranks before it brought."""

    brought: list[Tensor] = field(default_factory=list)

    def all_reduce(self, part: Tensor) -> Tensor:
        self.brought.append(part)
        return torch.stack(self.brought).sum(0)

    def all_gather(self, columns: Tensor) -> Tensor:
        self.brought.append(columns)
        return torch.cat(self.brought, dim=-1)


@pytest.mark.parametrize(("tokens", "ranks"), [(211, 2), (12, 4), (13, 4), (5, 4), (2, 3), (1, 2)])
def test_ranks_have_all_tokens_between_them(tokens: int, ranks: int) -> None:
    """Also where the last ones have fewer, or none."""
    shards = [TensorRanks(rank, ranks).vocabulary_shard(tokens) for rank in range(ranks)]
    assert [token for shard in shards for token in shard] == list(range(tokens))
    table, hidden, asked = randn(tokens, 8, seed=1), randn(7, 8, seed=2), torch.arange(tokens)
    ops, sums, columns = choose(False, torch.device("cpu")), list[Tensor](), list[Tensor]()
    for rank, shard in enumerate(shards):
        each = TensorRanks(rank, ranks).vocabulary_rows(tokens)
        weight = torch.zeros(each, 8)
        weight[: len(shard)] = table[shard.start : shard.stop]
        embedding = Embedding(ops.arithmetic, weight, tokens, OneByOne(rank, ranks, brought=sums))
        linear = Linear(ops.arithmetic, weight)
        head = Head(linear, tokens, OneByOne(rank, ranks, brought=columns))
        rows, logits = embedding(asked), head.gathered(head(hidden))
    assert torch.equal(rows, table)
    assert logits.shape == (7, tokens) and logits.is_contiguous()
    torch.testing.assert_close(logits, hidden @ table.T, rtol=0, atol=1e-6)
