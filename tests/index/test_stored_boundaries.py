"""The rule over bitmaps is the rule over the tree, and any first part of an order is of use."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtide.index import WantedPages
from kvtide.index.match.stored_boundaries import deepest, in_order
from kvtide.spec import ModelMemory, Tier
from tests.index.building import build, lease_for
from tests.index.memories import ALL_MEMORIES, PAGE

PAGES = 16


def _bits(memory: ModelMemory, chance: random.Random) -> dict[str, np.ndarray]:
    """Mostly there, or hardly, as differs from pool to pool."""
    shares = {anchor.name: chance.choice((0.5, 0.8, 0.95, 1.0)) for anchor in memory.anchors}
    return {
        name: np.array([chance.random() < share for _ in range(PAGES)])
        for name, share in shares.items()
    }


@pytest.mark.parametrize("name", ALL_MEMORIES)
@pytest.mark.parametrize("seed", range(25))
def test_bitmaps_and_the_tree_allow_the_same_boundary(name: str, seed: int) -> None:
    memory, chance = ALL_MEMORIES[name], random.Random(f"{name} {seed}")
    there = _bits(memory, chance)
    index = build(memory, host=64)
    tokens = list(range(PAGES * PAGE + 1 + memory.holdback))
    wanted = [
        WantedPages(anchor, int(n)) for anchor, bits in there.items() for n in np.flatnonzero(bits)
    ]
    arriving = index.take(lease_for(index, tokens, slowest=Tier.HOST), wanted)
    assert arriving is not None
    index.adopt(arriving, len(wanted), [()] * len(wanted))
    index.forgo(arriving)
    prompt = index.prompt(tokens)
    outline = index.outline(prompt)
    known = index.match(prompt, Tier.HOST).matched
    for anchor, bits in there.items():
        assert outline.held[anchor][:known].tolist() == bits[:known].tolist()
    assert deepest(memory, outline.limit, outline.held) == index.match(prompt, Tier.HOST).boundary


@pytest.mark.parametrize("name", ALL_MEMORIES)
@pytest.mark.parametrize("seed", range(25))
def test_an_order_has_what_its_boundary_needs_once_and_milestones_come_whole(
    name: str, seed: int
) -> None:
    memory, chance = ALL_MEMORIES[name], random.Random(f"{name} {seed}")
    there, held = _bits(memory, chance), _bits(memory, chance)
    there = {anchor: bits | held[anchor] for anchor, bits in there.items()}
    boundary = deepest(memory, PAGES, there)
    runs = in_order(memory, boundary, held, there)
    read = [(anchor, page) for anchor, pages in runs for page in pages.tolist()]
    assert len(read) == len(set(read))
    assert not any(held[anchor][page] or not there[anchor][page] for anchor, page in read)
    now, reached = {anchor: bits.copy() for anchor, bits in held.items()}, [0]
    for anchor, page in read:
        now[anchor][page] = True
        reached.append(deepest(memory, PAGES, now))
    if read:
        assert reached[-1] >= boundary
