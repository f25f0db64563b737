"""The rule of reuse over pages that are not in the tree: what a store may bring.

`match` walks nodes, and what a store holds is in none. Here the same rule is asked of bitmaps: a
boundary is valid if every required pool has what it reaches back over. A test holds the two against
each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtide.spec import ModelMemory

MILESTONES = 4
"""Pages come a quarter of the way at a time, each with all that its boundary needs."""

Bits = npt.NDArray[np.bool_]
"""For every page of a prompt: is it there?"""
Pages = npt.NDArray[np.intp]
"""Numbers of pages, of one anchor."""


def deepest(memory: ModelMemory, limit: int, there: Mapping[str, Bits]) -> int:
    """The deepest boundary up to `limit` that is valid with these pages."""
    valid = np.ones(limit + 1, bool)
    for pool in memory.anchors:
        if not pool.reuse.required:
            continue
        gaps = np.concatenate(([0], np.cumsum(~there[pool.name][:limit])))
        reach = pool.reuse.reach_pages(memory.page_tokens)
        if reach is None:
            valid &= gaps == 0
        else:
            before = gaps[np.maximum(np.arange(limit + 1) - reach, 0)]
            valid &= gaps == before
    return int(np.flatnonzero(valid)[-1])


def in_order(
    memory: ModelMemory, boundary: int, held: Mapping[str, Bits], there: Mapping[str, Bits]
) -> list[tuple[str, Pages]]:
    """What is to be read for a boundary: milestone by milestone, each with all that it needs."""
    steps = (boundary * n // MILESTONES for n in range(1, MILESTONES + 1))
    stones = sorted({deepest(memory, step, there) for step in steps} - {0})
    left = {pool.name: ~held[pool.name] & there[pool.name] for pool in memory.anchors}
    runs: list[tuple[str, Pages]] = []
    for stone in stones:
        for pool in memory.anchors:
            reach = pool.reuse.reach_pages(memory.page_tokens)
            start = 0 if reach is None else max(0, stone - reach)
            runs.append((pool.name, start + np.flatnonzero(left[pool.name][start:stone])))
            left[pool.name][start:stone] = False
    return runs
