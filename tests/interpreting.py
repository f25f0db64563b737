"""Triton's interpreter in half the time: without repeated work.

- The interpreter checks every sum and product for numbers beyond 32 bits. The quick run does
  without; `--all` checks.
- The interpreter replaces all of `triton.language` whenever a kernel calls a function. Once per
  module and launch is enough.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction


def quicken(*, checks_overflow: bool) -> None:
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=checks_overflow)
    launch, replaced = GridExecutor.__call__, interpreter._patch_lang
    known: set[int] = set()

    def launched(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        known.clear()
        return launch(self, *args, **kwargs)

    def called(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in known:
            replaced(self.fn)
            known.add(module)
        return self.rewrite()(*args, **kwargs)

    GridExecutor.__call__ = launched
    InterpretedFunction.__call__ = called
