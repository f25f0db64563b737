"""Triton's interpreter for tests: a fraction of the time in quick runs, more checks under `--all`.

- The interpreter replaces all of `triton.language` whenever a kernel calls a function. Once per
  module and launch is enough.
- It builds the shape and the type of every value anew. They are few, and no kernel changes them.
- Under `--all` it checks every sum and product for numbers beyond 32 bits, and every load and
  store for addresses outside the kernel's tensors: on a GPU these fault, or read what is not
  theirs; on a CPU they mostly pass unseen. Kernels that are given addresses are not checked.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache as cached
from typing import Any

import numpy as np
import triton.language as tl
from torch import Tensor
from triton._utils import validate_block_shape
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor


def quicken(*, checks: bool) -> None:
    """`checks`: for overflow and for addresses."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=checks)
    memory = CheckedMemory(interpreter._interpreter)
    if checks:
        interpreter._interpreter = memory
    launch, replaced = GridExecutor.__call__, interpreter._patch_lang
    known: set[int] = set()

    def launched(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        known.clear()
        tensors = [] if takes_addresses(self.fn) else [*args, *kwargs.values()]
        memory.allow(self.fn.__name__, tensors)
        return launch(self, *args, **kwargs)

    def called(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in known:
            replaced(self.fn)
            known.add(module)
        return self.rewrite()(*args, **kwargs)

    GridExecutor.__call__ = launched
    InterpretedFunction.__call__ = called
    remember_types()


def remember_types() -> None:
    """Shapes of values and of types, and the types of numpy, are built once."""
    as_numpy = interpreter._get_np_dtype

    @cached
    def of_type(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        shape = tl.tuple(sizes)
        return shape, validate_block_shape(shape), str(shape)

    @cached
    def of_value(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def new_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple(int(getattr(size, "value", size)) for size in shape)
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel, written = of_type(sizes)
        self.name = f"<{written}, {element_ty}>"

    def new_value(self: tl.tensor, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_value(tuple(type.shape.values) if type.is_block() else ())

    numbers = cached(as_numpy)

    def in_numpy(type: Any) -> np.dtype[Any]:
        scalar = type.scalar
        return as_numpy(scalar) if isinstance(scalar, tl.pointer_type) else numbers(scalar)

    tl.block_type.__init__ = new_type
    tl.tensor.__init__ = new_value
    interpreter._get_np_dtype = in_numpy


class CheckedMemory:
    """The interpreter's memory, of which a kernel sees the tensors that it was given."""

    def __init__(self, memory: Any) -> None:
        self._memory, self._kernel = memory, ""
        self._spans: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def allow(self, kernel: str, arguments: list[Any]) -> None:
        self._kernel, self._spans = kernel, list(_spans(arguments))

    def load(self, pointers: Any, mask: Any, *rest: Any) -> Any:
        self._check("loads from", pointers, mask)
        return self._memory.load(pointers, mask, *rest)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        self._check("stores to", pointers, mask)
        return self._memory.store(pointers, values, mask)

    def _check(self, what: str, pointers: Any, mask: Any) -> None:
        if not self._spans:
            return  # The kernel was given addresses.
        used = np.asarray(pointers)[np.asarray(mask, bool)].astype(np.int64)
        inside = np.zeros(used.shape, bool)
        for first, end in self._spans:
            inside |= (used >= first) & (used < end)
        if not inside.all():
            address = int(used[~inside][0])
            bytes_off, number = min(
                (max(first - address, address + 1 - end), n)
                for n, (first, end) in enumerate(self._spans)
            )
            raise AssertionError(
                f"{self._kernel} {what} {int((~inside).sum())} addresses outside its tensors, the "
                f"first {bytes_off} bytes off tensor {number} of {len(self._spans)}"
            )


def takes_addresses(kernel: Callable[..., None]) -> bool:
    """The kernel, or a function of its module that it may call, makes pointers out of integers."""
    own = vars(sys.modules[kernel.__module__]).values()
    functions = [each.fn for each in own if isinstance(each, InterpretedFunction)]
    return any("pointer_type" in function.__code__.co_names for function in functions)


def _spans(arguments: list[Any]) -> Iterator[tuple[int, int]]:
    """First address and end of the memory of every tensor."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            memory = argument.untyped_storage()
            yield memory.data_ptr(), memory.data_ptr() + memory.nbytes()
        elif isinstance(argument, TensorDescriptor):
            yield from _spans([argument.base])
        elif isinstance(argument, tuple):
            yield from _spans(list(argument))
