"""What is remembered of uses, and of pages that were evicted."""

from __future__ import annotations

import pytest

from kvtide.index import Index
from kvtide.index.evict import use_history
from kvtide.index.evict.use_history import UseHistory
from kvtide.spec import Tier
from tests.index.building import build, keep
from tests.index.memories import FULL, PAGE, RECURRENT, WINDOW

A, B, C = [1] * PAGE, [2] * PAGE, [3] * PAGE

Counted = list[tuple[int, int]]
"""Hits and pages."""


def _learning(monkeypatch: pytest.MonkeyPatch) -> tuple[Index, UseHistory, Counted]:
    """An index whose tree learns, and the uses again that it counts from now on."""
    index = build(FULL, host=0, storage=0, eviction="lhd")
    history = index.tree.history
    assert history is not None
    reused: Counted = []
    monkeypatch.setattr(
        history.rates,
        "count_reuse",
        lambda hits, last, pages: reused.append((hits, pages)) if pages else None,
    )
    return index, history, reused


def test_pages_found_in_the_cache_count_as_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    index, _, reused = _learning(monkeypatch)
    keep(index, A + B)
    keep(index, A + B + C)
    keep(index, A + B + C)
    assert reused == [(0, 2), (1, 2)]


def test_evicted_pages_that_are_computed_again_count_as_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, history, reused = _learning(monkeypatch)
    keep(index, A + B)
    index.evict(Tier.DEVICE, "kv", 2)
    assert index.tree.nodes == 0 and len(history) == 1
    keep(index, A + B + C)
    assert reused == [(0, 2)] and len(history) == 0
    keep(index, A + B + C)
    assert reused[1:] == [(1, 2)]


def test_branches_evicted_piece_by_piece_are_remembered_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, history, reused = _learning(monkeypatch)
    keep(index, A + B + C)
    for _ in range(3):
        index.evict(Tier.DEVICE, "kv", 1)
        assert len(history) == 1
    keep(index, A + B + C)
    assert reused == [(0, 3)] and len(history) == 0


def test_other_branches_do_not_count_as_those_that_were_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, history, reused = _learning(monkeypatch)
    keep(index, A)
    index.evict(Tier.DEVICE, "kv", 1)
    keep(index, B)
    assert not reused and len(history) == 1


def test_the_oldest_evicted_branches_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use_history, "MIN_GHOSTS", 3)
    index, history, reused = _learning(monkeypatch)
    for first in range(1, 6):
        keep(index, [first] * PAGE)
        index.evict(Tier.DEVICE, "kv", 1)
    assert len(history) == 3
    keep(index, [1] * PAGE)
    assert not reused
    keep(index, [5] * PAGE)
    assert reused == [(0, 1)]


@pytest.mark.parametrize("eviction", ["lru", "slru"])
def test_policies_that_do_not_learn_keep_no_history(eviction: str) -> None:
    assert build(FULL, eviction=eviction).tree.history is None


@pytest.mark.parametrize("memory", [WINDOW, RECURRENT], ids=lambda memory: memory.model)
def test_memories_with_windows_or_states_learn_nothing(memory) -> None:
    assert build(memory, eviction="lhd").tree.history is None
