"""Reading a config: numbers in all their spellings, and sentences for what is none."""

from __future__ import annotations

import math

import pytest

from kvtide.spec import SpecError
from kvtide.spec.config import Config


def config(**values: object) -> Config:
    return Config("tiny", values)


def test_a_number_may_be_whole_or_infinite() -> None:
    assert config(a=3).number("a") == 3.0
    assert config(b=0.5).number("a", "b") == 0.5
    assert config(a={"__float__": "Infinity"}).number("a") == math.inf
    assert config(a=None).number("a", default=2.0) == 2.0


@pytest.mark.parametrize("value", ["1", True, [1.0], None])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(SpecError, match=r"tiny: `a` is .*; use a number"):
        config(a=value).number("a")


def test_numbers_come_as_many_as_there_are_defaults() -> None:
    assert config(a=[1, {"__float__": "Infinity"}]).numbers("a", 0.0, 1.0) == (1.0, math.inf)
    assert config().numbers("a", 0.0, 1.0) == (0.0, 1.0)
    for odd in ([1.0], [1.0, 2.0, 3.0], [1.0, "x"]):
        with pytest.raises(SpecError, match="use a list of 2 numbers"):
            config(a=odd).numbers("a", 0.0, 1.0)
