"""The table of objects: right, small and fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.storage.file.journal import (
    RECORD_BYTES,
    RecordKind,
    Words,
    blank,
    head,
    key_words,
    parsed,
    sealed,
)
from kvtide.storage.file.object_table import NONE, ObjectPlaces, ObjectTable

MILLION = 1_000_000


def places(start: int, count: int, space: int = 0) -> ObjectPlaces:
    at = np.arange(start, start + count)
    return ObjectPlaces(at // 1000, at % 1000, np.full(count, space))


def random_keys(count: int, seed: int = 0) -> Words:
    return np.random.Generator(np.random.PCG64(seed)).integers(
        0, 2**64, (count, 4), dtype=np.uint64
    )


@pytest.fixture(scope="module")
def large() -> ObjectTable:
    table = ObjectTable()
    keys = random_keys(MILLION)
    table.add(keys, places(0, MILLION), np.full(MILLION, 65536), np.arange(MILLION, dtype="u8"))
    return table


def test_an_object_takes_at_most_100_bytes(large: ObjectTable) -> None:
    assert large.nbytes / len(large) <= 100
    grown = ObjectTable()
    for start in range(0, 200_000, 1000):
        keys = random_keys(1000, start)
        grown.add(keys, places(start, 1000), np.ones(1000), np.ones(1000, "u8"))
        if start > 20_000:
            assert grown.nbytes / len(grown) <= 100


def fastest(lookup: Callable[[], list[bool]]) -> float:
    times = []
    for _ in range(10):
        start = time.process_time()
        lookup()
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.parametrize("seed", [0, 1], ids=["present", "missing"])
def test_a_lookup_costs_at_most_4_of_a_dictionary(large: ObjectTable, seed: int) -> None:
    keys = [row.tobytes() for row in random_keys(10_000, seed)]
    dictionary = dict.fromkeys(row.tobytes() for row in random_keys(MILLION))

    def in_table() -> list[bool]:
        return cast("list[bool]", (large.find(key_words(keys), 0) != NONE).tolist())

    def in_dictionary() -> list[bool]:
        return [key in dictionary for key in keys]

    assert in_table() == in_dictionary() == [seed == 0] * len(keys)
    assert fastest(in_table) <= 4 * fastest(in_dictionary)


def test_the_oldest_come_in_order(large: ObjectTable) -> None:
    assert large.oldest(1000).tolist() == list(range(1000))


actions = st.lists(
    st.tuples(st.sampled_from(["add", "drop"]), st.integers(0, 40), st.integers(0, 1)), max_size=80
)


@settings(max_examples=150, deadline=None)
@given(actions)
def test_a_table_is_a_dictionary(steps: list[tuple[str, int, int]]) -> None:
    table, model, next_place = ObjectTable(), dict[tuple[int, int], int](), 0
    for verb, number, space in steps:
        keys = np.full((1, 4), number, np.uint64)
        (row,) = table.find(keys, space).tolist()
        assert (row != NONE) == ((number, space) in model)
        if verb == "add" and row == NONE:
            at = places(next_place, 1, space)
            table.add(keys, at, np.array([next_place]), np.array([1], np.uint64))
            model[number, space] = next_place
            next_place += 1
        elif verb == "drop" and row != NONE:
            assert table.length[row] == model.pop((number, space))
            table.drop(np.array([row]))
    assert len(table) == len(model) == len(table.rows())


def test_rows_of_one_key_at_two_places_are_kept_apart() -> None:
    table, keys = ObjectTable(), np.zeros((1, 4), np.uint64)
    for place in (1, 2):
        table.add(keys, places(place, 1), np.array([place]), np.array([1], np.uint64))
    table.drop(table.find_at(keys, places(1, 1)))
    assert table.length[table.find(keys, 0)].tolist() == [2]
    assert table.find_at(keys, places(1, 1)).tolist() == [NONE]


@given(st.integers(0, RECORD_BYTES * 8 - 1), st.binary(min_size=32, max_size=32))
def test_a_flipped_bit_makes_a_record_bad(bit: int, key: bytes) -> None:
    record = blank(1, RecordKind.PUT)
    record["key"] = np.frombuffer(key, "<u8")
    data = bytearray(sealed(record))
    assert parsed(bytes(data))[1].all()
    data[bit // 8] ^= 1 << bit % 8
    assert not parsed(bytes(data))[1].any()


def test_zeros_are_no_record() -> None:
    assert not parsed(bytes(RECORD_BYTES))[1].any()
    assert parsed(sealed(head()))[1].all()
