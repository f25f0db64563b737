"""What is chosen depends on scores, then on the order of entries, and on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvtide.layers.reference.indexer import select, top_k

COUNT = 5


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chosen_one_by_one(
    queries: Tensor, weights: Tensor, keys: Tensor, visible: Tensor
) -> list[list[int]]:
    """By the definition, in Python's numbers."""
    picked = []
    for query, weight, limit in zip(queries, weights, visible.tolist(), strict=True):
        scores = [float((weight * (query @ key).relu()).sum()) for key in keys[:limit]]
        best = sorted(range(limit), key=lambda i: (-scores[i], i))
        picked.append(sorted(best[:COUNT]))
    return picked


def as_lists(chosen: Tensor) -> list[list[int]]:
    return [torch.nonzero(row).squeeze(1).tolist() for row in chosen]


def test_of_equals_the_first_is_taken_and_the_best_comes_first() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert top_k(scores, 3).tolist() == [[1, 3, 2], [0, 1, 2]]
    assert top_k(scores, 9).tolist() == [[1, 3, 2, 4, 0], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("block", [1, 4, 64])
def test_a_query_chooses_the_best_of_what_it_sees(block: int) -> None:
    queries, weights, keys = randn(12, 16, 8), randn(12, 16, seed=1), randn(20, 8, seed=2)
    visible = torch.arange(3, 15)
    chosen = select(queries, weights, keys, visible, COUNT, block)
    assert chosen.shape == (12, 20)
    assert as_lists(chosen) == chosen_one_by_one(queries, weights, keys, visible)


@pytest.mark.parametrize("block", [1, 64])
def test_ties_go_to_the_first_entries(block: int) -> None:
    """Few heads and opposite keys: most scores are exactly zero, and some keys are twins."""
    queries, weights = torch.ones(3, 2, 4), torch.ones(3, 2)
    keys = -torch.ones(30, 4)
    keys[[11, 17, 23, 29]] = 1.0
    chosen = select(queries, weights, keys, torch.tensor([12, 24, 30]), COUNT, block)
    assert as_lists(chosen) == [[0, 1, 2, 3, 11], [0, 1, 11, 17, 23], [0, 11, 17, 23, 29]]


@pytest.mark.parametrize("block", [1, 2, 64])
def test_what_sees_no_more_than_it_may_choose_sees_all_of_it(block: int) -> None:
    queries, weights = randn(4, 2, 4), randn(4, 2, seed=1)
    keys = torch.full((9, 4), torch.nan)
    keys[:COUNT] = randn(COUNT, 4, seed=2)
    chosen = select(queries, weights, keys, torch.tensor([0, 2, 2, COUNT]), COUNT, block)
    assert as_lists(chosen) == [[], [0, 1], [0, 1], list(range(COUNT))]


@pytest.mark.parametrize("block", [1, 64])
def test_what_no_query_sees_does_not_matter(block: int) -> None:
    queries, weights, keys = randn(3, 16, 8), randn(3, 16, seed=1), randn(40, 8, seed=2)
    visible = torch.tensor([18, 19, 20])
    longer = select(queries, weights, keys, visible, COUNT, block)
    keys[20:] = torch.nan
    assert torch.equal(select(queries, weights, keys, visible, COUNT, block), longer)
    assert torch.equal(select(queries, weights, keys[:20], visible, COUNT, block), longer[:, :20])


class Watching(TorchDispatchMode):
    """Where in memory the operands of GEMMs begin, in bytes past the last multiple of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.begin: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.begin += [operand.data_ptr() % 64 for operand in args]
        return func(*args, **(kwargs or {}))


def test_operands_begin_alike_wherever_a_query_stands() -> None:
    """Else a GEMM, and with it a choice, might depend on what stands before."""
    queries, weights, keys = randn(12, 3, 5), randn(12, 3, seed=1), randn(21, 5, seed=2)[1:]
    assert {query.data_ptr() % 64 for query in queries} != {0} and keys.data_ptr() % 64
    with Watching() as watched:
        select(queries, weights, keys, torch.arange(8, 20), COUNT, 1)
    assert watched.begin == [0] * 24


def test_negative_scores_are_chosen_where_nothing_better_is_seen() -> None:
    queries, weights, keys = torch.ones(1, 1, 2), -torch.ones(1, 1), torch.ones(8, 2)
    keys *= torch.arange(1.0, 9.0)[:, None]
    chosen = select(queries, weights, keys, torch.tensor([7]), COUNT, 1)
    assert as_lists(chosen) == [[0, 1, 2, 3, 4]]
