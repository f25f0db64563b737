"""Caches for tests: whatever a test does with one, in the end nothing of it is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtide.spec import ModelMemory
from kvtide.testing.faulty_store import FaultyStore
from tests.cache.building import Rig
from tests.cache.memories import FULL
from tests.cache.stores import new_url, settle


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


@pytest.fixture
def url() -> str:
    """Of a store that is this test's own."""
    return new_url()


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    """Every rig that a test opens: all that must hold holds at its end, and nothing is left."""
    found: list[Rig] = []
    yield found
    for rig in found:
        assert rig.problems() == []
        for one in rig.cache.storage.stores:
            if isinstance(one.link.store, FaultyStore):
                one.link.store.heal()
        rig.cache.storage.detach(5.0)
        settle(rig)
        assert rig.cache.storage.join(5.0)
        rig.cache.poll()
        assert not rig.cache.storage.stores and not rig.cache.unsettled
        rig.end()
