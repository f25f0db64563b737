"""Rotations: a position's turns are its own, and right however far it is."""

from __future__ import annotations

import math

import pytest
import torch

from kvtide.layers.rope import Rope

FAR = torch.randint(0, 1 << 20, (300,), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.cat([torch.arange(300), FAR])


@pytest.mark.parametrize("pairs", [1, 3, 6, 32])
def test_a_position_turns_alike_beside_whatever_others(pairs: int) -> None:
    rope = Rope(0.2 ** torch.arange(pairs, dtype=torch.float32))
    alone = torch.cat([rope(one) for one in POSITIONS.split(1)])
    assert torch.equal(rope(POSITIONS), alone)
    assert torch.equal(rope(POSITIONS.flip(0)).flip(0), alone)


def test_turns_are_those_of_the_angles() -> None:
    frequencies = 0.2 ** torch.arange(3, dtype=torch.float32)
    angles = (POSITIONS[:, None].float() * frequencies).tolist()
    exact = [[[turn(one) for one in row] for turn in (math.cos, math.sin)] for row in angles]
    torch.testing.assert_close(
        Rope(frequencies, 1.5)(POSITIONS), 1.5 * torch.tensor(exact), rtol=2e-7, atol=1e-9
    )
