"""Modules that take seconds to import, for test modules that are collected without running."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Deferred:
    """Stands for a module, and imports it when a name of it is first used."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Pytest asks every name of a test module for some of these.
            raise AttributeError(name)
        return getattr(import_module(self._module), name)
