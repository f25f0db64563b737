"""What differs by a bit from one time to the next is noticed, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.layers.kernels.repeating import same_again

NAN = float("nan")


def in_turn(*values: Tensor) -> Tensor:
    """A call that gives one after another, behind something that stays."""
    left = list(values)
    return same_again(lambda: (torch.ones(3), left.pop(0)), len(values) - 1)[1]


def test_of_equal_bits_the_first_are_given() -> None:
    one = torch.tensor([1.0, NAN, -0.0]).bfloat16()
    assert in_turn(one, one.clone(), one.clone()) is one


@pytest.mark.parametrize("other", [[1.0, 0.0], [1.0000001, -0.0], [NAN, -0.0]], ids=str)
def test_a_bit_of_difference_is_noticed(other: list[float]) -> None:
    one = torch.tensor([1.0, -0.0])
    with pytest.raises(AssertionError, match=r"asked 3 times, \d of 8 bytes of result 1"):
        in_turn(one, one.clone(), torch.tensor(other))


def test_what_is_changed_in_place_is_noticed() -> None:
    one = torch.zeros(2)
    with pytest.raises(AssertionError, match="asked 2 times"):
        same_again(lambda: one.add_(1), 1)
