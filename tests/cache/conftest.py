"""Caches for tests: whatever a test does with one, in the end nothing of it is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtide.spec import ModelMemory
from tests.cache.building import Rig
from tests.cache.memories import FULL


@pytest.fixture
def build() -> Iterator[Callable[..., Rig]]:
    """Makes rigs, and takes them apart after the test."""
    rigs: list[Rig] = []

    def make(memory: ModelMemory = FULL, **options: Any) -> Rig:
        rigs.append(Rig(memory, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.end()
