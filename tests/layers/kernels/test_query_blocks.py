"""A step's tokens as kernels take them, some neighbours at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvtide.layers.forward import ForwardPass
from kvtide.layers.kernels.query_blocks import prefill_blocks, query_blocks
from kvtide.layers.step import Batch, Bounds, Step

STEPS = {
    "one": [7],
    "prompts": [37, 5, 64],
    "all kinds": [1, 20, 1, 18, 2, 1],
    "some without tokens": [3, 0, 1, 0, 16, 0],
    "many": [1 + 3 * number % 7 for number in range(130)],
}


def cut(
    counts: list[int], tokens: int, within: tuple[int, int], singles: bool
) -> list[tuple[int, int, int]]:
    found, start = [], 0
    for number, count in enumerate(counts):
        low, high = max(start, within[0]), min(start + count, within[1])
        if count > 1 or singles:
            found += [(number, row, min(row + tokens, high)) for row in range(low, high, tokens)]
        start += count
    return found


@pytest.mark.quick(2)
@pytest.mark.parametrize("more", [0, 5])
@pytest.mark.parametrize("singles", [True, False])
@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("partly", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_blocks_are_those_of_the_sequences(
    step: str,
    partly: bool,
    tokens: int,
    singles: bool,
    more: int,
    device: torch.device,
) -> None:
    """`more` prompts could be there than are."""
    counts = STEPS[step]
    ends = torch.tensor(counts).cumsum(0).tolist()
    rows = [(end - count, end, 3) for end, count in zip(ends, counts, strict=True)]
    total = ends[-1]
    part = (total // 4, total // 2 + 1) if partly else None
    bounds = Bounds.of(rows)
    bounds = replace(bounds, prompts=bounds.prompts + more)
    owners = torch.zeros(total, dtype=torch.int32, device=device)
    batch = Batch(torch.tensor(rows, dtype=torch.int32, device=device), owners, {}, bounds)
    run = ForwardPass(Step(owners, owners, (), 16, dict, print, batch))
    divide = query_blocks if singles else prefill_blocks
    found = divide(run, tokens, rows=part)
    wanted = cut(counts, tokens, part or (0, total), singles)
    table = found.table.tolist()
    assert [tuple(one) for one in table[: len(wanted)]] == wanted
    assert all(number == -1 and first >= end for number, first, end in table[len(wanted) :])
    before = [sum(number < one for number, *_ in wanted) for one in range(len(counts))]
    assert found.first_blocks.tolist() == before
    assert divide(run, tokens, rows=part) is found
