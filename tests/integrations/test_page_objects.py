"""Pages of other engines in a store: whole, their own, or missed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtide.integrations.page_objects import PageObjects, space_of
from kvtide.storage import StoreError
from kvtide.storage.store import LingeringError

SPACE = space_of("engine", "model", {"tp_rank": 0})
DESCRIBED = {"dtype": "bf16", "page_tokens": 64}
PAGE = 1000


def objects(space: bytes = SPACE, url: str = "memory:pages", **options: int) -> PageObjects:
    return PageObjects("engine", url, space, **options)


def pages(count: int, seed: int = 0) -> list[list[memoryview]]:
    """Each of two runs."""
    data = [bytearray((n * 31 + seed + i) % 251 for i in range(PAGE)) for n in range(count)]
    return [[memoryview(one)[:300], memoryview(one)[300:]] for one in data]


def names(count: int) -> list[bytes]:
    return [bytes([n]) * 8 for n in range(count)]


def joined(page: Sequence[memoryview]) -> bytes:
    return b"".join(page)


@pytest.fixture(autouse=True)
def _forget() -> None:
    objects().clear()


def test_what_is_there_is_not_written_again() -> None:
    one = objects()
    pool = one.pool("kv", PAGE, DESCRIBED)
    assert one.add(pool, names(2), pages(2)) == ([False] * 2, [True] * 2)
    assert one.add(pool, names(3), pages(3)) == ([True, True, False], [True] * 3)
    assert one.counts["written"] == 3


def test_news_are_what_was_counted_since_they_were_taken() -> None:
    one = objects()
    pool = one.pool("kv", PAGE, DESCRIBED)
    one.write(pool, names(3), pages(3))
    assert one.take_news() == {"written": 3, "written_bytes": 3 * PAGE}
    one.read(pool, names(4), pages(4))
    assert one.take_news() == {"read": 3, "read_bytes": 3 * PAGE, "missing": 1}
    assert one.take_news() == {}


@pytest.mark.parametrize("batch_bytes", [1, 4096, 1 << 20])
def test_pages_of_several_runs_come_back_whatever_the_batches(batch_bytes: int) -> None:
    one = objects(batch_bytes=batch_bytes)
    pool = one.pool("kv", PAGE, DESCRIBED)
    written, target = pages(7), pages(7, seed=99)
    assert one.exists(pool, names(7)) == [False] * 7
    assert one.write(pool, names(7), written) == [True] * 7
    assert one.exists(pool, names(8)) == [True] * 7 + [False]
    assert one.read(pool, names(7), target) == [True] * 7
    assert list(map(joined, target)) == list(map(joined, written))
    assert one.counts == {"written": 7, "read": 7, "refused": 0, "missing": 0}


@pytest.mark.parametrize(
    ("space", "pool"),
    [
        (space_of("engine", "other", {"tp_rank": 0}), ("kv", PAGE, DESCRIBED)),
        (space_of("engine", "model", {"tp_rank": 1}), ("kv", PAGE, DESCRIBED)),
        (space_of("another", "model", {"tp_rank": 0}), ("kv", PAGE, DESCRIBED)),
        (SPACE, ("mamba", PAGE, DESCRIBED)),
        (SPACE, ("kv", PAGE, {**DESCRIBED, "dtype": "fp16"})),
        (SPACE, ("kv", PAGE, {**DESCRIBED, "page_tokens": 32})),
        (SPACE, ("kv", PAGE + 1, DESCRIBED)),
    ],
)
def test_pages_of_another_model_slice_pool_or_format_are_not_found(space: bytes, pool) -> None:
    writer, reader = objects(), objects(space)
    writer.write(writer.pool("kv", PAGE, DESCRIBED), names(1), pages(1))
    assert reader.exists(reader.pool(*pool), names(1)) == [False]


def test_a_changed_byte_is_a_miss_and_removes_the_page() -> None:
    one = objects()
    pool = one.pool("kv", PAGE, DESCRIBED)
    one.write(pool, names(2), pages(2))
    key = pool.key(names(1)[0])
    damaged = bytearray(one.store._objects[key])
    damaged[17] ^= 1
    one.store._objects[key] = bytes(damaged)
    target = pages(2, seed=7)
    before = joined(target[0])
    assert one.read(pool, names(2), target) == [False, True]
    assert joined(target[0]) == before
    assert one.counts["corrupt"] == 1 and "checksum" in one.last_error
    assert one.exists(pool, names(2)) == [False, True]


def test_a_truncated_page_is_a_miss_is_removed_and_can_be_stored_again() -> None:
    one = objects()
    pool = one.pool("kv", PAGE, DESCRIBED)
    one.write(pool, names(1), pages(1))
    key = pool.key(names(1)[0])
    one.store._objects[key] = one.store._objects[key][:-32]
    target = pages(1, seed=7)
    assert one.read(pool, names(1), target) == [False]
    assert joined(target[0]) == joined(pages(1, seed=7)[0])
    assert one.counts["corrupt"] == 1 and "bytes, not" in one.last_error
    assert one.exists(pool, names(1)) == [False]
    one.write(pool, names(1), pages(1))
    assert one.read(pool, names(1), target) == [True]


def test_the_object_of_another_page_is_not_believed() -> None:
    one = objects()
    pool = one.pool("kv", PAGE, DESCRIBED)
    one.write(pool, names(2), pages(2))
    first, second = (pool.key(name) for name in names(2))
    one.store._objects[first] = one.store._objects[second]
    assert one.read(pool, names(2), pages(2)) == [False, True]


def test_a_store_that_fails_costs_misses_and_is_left_alone(monkeypatch) -> None:
    now = [0.0]
    one = PageObjects("engine", "memory:pages", SPACE, clock=lambda: now[0])
    pool, calls = one.pool("kv", PAGE, DESCRIBED), []

    def fails(*arguments: object) -> None:
        calls.append(arguments)
        raise LingeringError("the server is gone; start it", 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(one.store, "read", fails)
        for _ in range(5):
            assert one.read(pool, names(2), pages(2)) == [False, False]
    assert len(calls) == 3 and one.counts["failed"] == 10
    assert one.last_error == "the server is gone; start it"
    assert one.write(pool, names(1), pages(1)) == [False]
    now[0] = 6.0
    assert one.write(pool, names(1), pages(1)) == [True]


def test_memory_that_a_failed_call_may_write_to_is_not_used_again(monkeypatch) -> None:
    one = objects()
    pool, lent = one.pool("kv", PAGE, DESCRIBED), []
    one.write(pool, names(1), pages(1))
    read = one.store.read

    def lingers(keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        lent.extend(targets)
        if len(lent) == 1:
            raise LingeringError("late", 60.0)
        return read(keys, targets)

    monkeypatch.setattr(one.store, "read", lingers)
    target = pages(1, seed=5)
    assert one.read(pool, names(1), target) == [False]
    assert one.read(pool, names(1), target) == [True]
    lent[0][:] = bytes(len(lent[0]))
    assert joined(target[0]) == joined(pages(1)[0])


def test_the_cap_of_the_store_bounds_what_is_kept(tmp_path: Path) -> None:
    one = objects(url=f"file://{tmp_path}?cap=1MB&floor=0&segment=256KiB")
    pool = one.pool("kv", PAGE, DESCRIBED)
    for number in range(300):
        one.write(pool, [number.to_bytes(8, "little")], pages(1))
    status = one.store.status()
    assert status.all_bytes is not None and 0 < status.all_bytes <= 1_000_000
    one.close()


def test_no_store_is_a_sentence() -> None:
    with pytest.raises(StoreError, match="no such store; use file:"):
        objects(url="files:///nowhere")


def test_lossless_coded_pages_come_back_and_an_altered_one_is_corrupt() -> None:
    one = objects(url="memory:pages?codec=lossless")
    pool = one.pool("kv", PAGE, DESCRIBED)
    written = pages(3)
    assert one.write(pool, names(3), written) == [True] * 3
    inner = one.store.inner._objects
    altered = bytearray(inner[pool.key(names(3)[1])])
    altered[-1] ^= 1
    inner[pool.key(names(3)[1])] = bytes(altered)
    memory = pages(3, seed=9)
    assert one.read(pool, names(3), memory) == [True, False, True]
    assert [joined(memory[n]) for n in (0, 2)] == [joined(written[n]) for n in (0, 2)]
    assert (one.counts["corrupt"], one.counts["missing"]) == (1, 0)
    assert one.exists(pool, names(3)) == [True, False, True]
    one.clear()


def test_a_store_that_rounds_is_refused() -> None:
    with pytest.raises(StoreError, match="codec=fp8 rounds keys and values, and engine does not"):
        objects(url="memory:pages?codec=fp8")
