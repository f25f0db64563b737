"""The quick run's selection covers what it promises, and everything else is under --all."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest

from tests.grids import cover, covered, select

GRID = [dict(zip("abc", cell, strict=True)) for cell in product(range(5), range(3), range(2))]


def had(cells: list[dict[str, int]], ways: int) -> set[object]:
    return {combination for cell in cells for combination in combinations(cell.items(), ways)}


@pytest.mark.parametrize("ways", [1, 2, 3])
def test_all_combinations_of_so_many_values_occur(ways: int) -> None:
    chosen = [GRID[number] for number in cover(GRID, ways, {})]
    assert had(chosen, ways) == had(GRID, ways)


@pytest.mark.parametrize(("ways", "cells"), [(1, 5), (2, 15), (3, 30)])
def test_no_more_cells_are_chosen_than_the_largest_parameters_need(ways: int, cells: int) -> None:
    assert len(cover(GRID, ways, {})) == cells


def test_values_take_turns() -> None:
    used = Counter(GRID[number]["b"] for number in cover(GRID, 1, {}))
    assert max(used.values()) - min(used.values()) <= 1


def test_parameters_are_restricted_to_values() -> None:
    chosen = [GRID[number] for number in cover(GRID, 1, {"a": [1, 3]})]
    assert {cell["a"] for cell in chosen} == {1, 3}
    assert {cell["b"] for cell in chosen} == {0, 1, 2}


def test_a_value_that_no_cell_has_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"no cell has a = \[7\]"):
        cover(GRID, 1, {"a": [1, 7]})


def test_an_uneven_grid_is_covered_as_far_as_it_goes() -> None:
    cells = [{"name": "x", "extra": 0}, {"name": "x", "extra": 1}, {"name": "y", "extra": 0}]
    assert cover(cells, 1, {}) == {1, 2}


def test_other_cells_of_a_list_are_marked_and_none_is_lost() -> None:
    cells = list(product("abc", range(3)))
    listed = covered(cells)
    assert [param.values for param in listed] == cells
    quick = [param.values for param in listed if not param.marks]
    assert len(quick) == 3
    assert {mark.name for param in listed for mark in param.marks} == {"full"}


class Item:
    """As much of a test as `select` looks at."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid = nodeid
        self._marks = {mark.name: mark.mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marks.get(name)


def test_marked_tests_run_under_all_only() -> None:
    plain, marked = items = [Item("a"), Item("b", pytest.mark.full)]
    assert select(items, everything=False) == ([plain], [marked])
    assert select(items, everything=True) == (items, [])
