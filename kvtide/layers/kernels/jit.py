"""The decorator of launched kernels: Triton compiles them once per model, not once per step.

Triton specializes on integer arguments (1, a multiple of 16, or neither) and on the alignment of
pointers to 16 bytes. For a model's strides this makes loads fast. Arguments that vary from step to
step (the token count, the width and the address of a page table) would trigger a compilation while
serving, so `kernel` excludes them from specialization.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import triton


def kernel(*varying: str) -> Any:
    """`triton.jit` without specialization on the arguments named here."""

    def made(function: Callable[..., Any]) -> Any:
        unknown = set(varying) - signature(function).parameters.keys()
        assert not unknown, f"{function.__name__} has no {unknown}"
        jit = triton.jit(do_not_specialize=varying, do_not_specialize_on_alignment=varying)
        return jit(function)

    return made
