"""Which tests and cells of a grid the quick run keeps. `--all` runs everything.

- `@pytest.mark.full` on a test, or in the `marks` of a cell: it runs under `--all` only.
- `@pytest.mark.quick(ways, name=[values])` on a parametrised test: the quick run keeps a covering
  selection of its cells. With one way, every value of every parameter occurs; with two, every pair
  of values that the grid has. Parameters may be restricted to some of their values first.
- `covered(cells, ways)`: the same for a list of cells that a test is parametrised with.
- `everything()`: whether all is run, for tests that try many cases in one function.

The selection depends on the grid alone, so every process of a run selects the same cells. A test
that is named on the command line by its id runs in any case.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

MARKERS = (
    "full: runs under --all only",
    "quick(ways=1, name=values): the quick run keeps cells that cover all values, or all pairs",
)
LEFT_OUT = pytest.StashKey[set[str]]()
"""In the configuration: the ids that the quick selection left out."""

Cell = Mapping[str, object]


def everything() -> bool:
    """Whether this is not the quick run: for tests that are many within one function."""
    return "KVTIDE_TEST_ALL" in os.environ


def covered(cells: Iterable[Sequence[object]], ways: int = 1) -> list[Any]:
    """All cells; those that the quick run needs not are marked."""
    listed = list(cells)
    kept = cover([{str(n): value for n, value in enumerate(cell)} for cell in listed], ways, {})
    return [
        pytest.param(*cell, marks=() if number in kept else pytest.mark.full)
        for number, cell in enumerate(listed)
    ]


def select(items: Sequence[pytest.Item], everything: bool) -> tuple[list[Any], list[Any]]:
    """The items that run, and those that do not."""
    if everything:
        return list(items), []
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full") is None:
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(item) for grid in grids.values() for item in _kept(grid)}
    return [one for one in items if id(one) in kept], [one for one in items if id(one) not in kept]


def _kept(grid: list[pytest.Item]) -> Iterator[pytest.Item]:
    marker = grid[0].get_closest_marker("quick")
    if marker is None:
        return iter(grid)
    cells = [item.callspec.params for item in grid]  # type: ignore[attr-defined]
    return (grid[number] for number in cover(cells, *(marker.args or (1,)), marker.kwargs))


def cover(
    cells: Sequence[Cell], ways: int, values: Mapping[str, Collection[object]]
) -> Collection[int]:
    """The numbers of cells that together have all combinations of so many parameters' values."""
    for name, wanted in values.items():
        unknown = [value for value in wanted if all(cell[name] != value for cell in cells)]
        assert not unknown, f"no cell has {name} = {unknown}"
    has = {
        number: set(combinations(((name, repr(value)) for name, value in cell.items()), ways))
        for number, cell in enumerate(cells)
        if all(cell[name] in wanted for name, wanted in values.items())
    }
    missing, chosen, uses = dict(has), set[int](), Counter[object]()

    def merit(number: int) -> tuple[int, int, int]:
        """Most that is missing; among equals values that were used least, then the first."""
        used = sum(uses[name, repr(value)] for name, value in cells[number].items())
        return len(missing[number]), -used, -number

    while missing:
        best = max(missing, key=merit)
        chosen.add(best)
        uses.update((name, repr(value)) for name, value in cells[best].items())
        missing = {n: left - has[best] for n, left in missing.items() if not left <= has[best]}
    return _without_needless(chosen, has)


def _without_needless(chosen: set[int], has: Mapping[int, set[Any]]) -> Collection[int]:
    """Cells that were chosen early may have nothing that later ones lack."""
    counts = Counter(combination for number in chosen for combination in has[number])
    for number in sorted(chosen):
        if all(counts[combination] > 1 for combination in has[number]):
            chosen.remove(number)
            counts.subtract(has[number])
    return chosen
