"""How device programs are compiled: once for a model, and not for every step that looks different.

Triton compiles a program anew where a number is 1, a multiple of 16 or neither, and where an
address is a multiple of 16 or not. For the strides of a model that is what makes loads fast. For
what differs from step to step (how many tokens there are, how wide a page table is, where it lies)
it would have everybody wait for a compiler in the midst of serving.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import triton


def program(*varying: str) -> Any:
    """Decorates what is launched: once compiled, it takes all values of the arguments named."""

    def made(function: Callable[..., Any]) -> Any:
        unknown = set(varying) - signature(function).parameters.keys()
        assert not unknown, f"{function.__name__} has no {unknown}"
        jit = triton.jit(do_not_specialize=varying, do_not_specialize_on_alignment=varying)
        return jit(function)

    return made
