"""Tasks over pages: every one ends, once, with what was done; the engine is woken."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator

import pytest

from kvtide.integrations.page_objects import PageObjects, PagePool, space_of
from kvtide.integrations.page_tasks import Page, PageTasks
from tests.integrations.stand_ins import EventNotifier

MAX_S = 60.0
SPACE = space_of("engine", "model", {})
Rows = list[bool]


@pytest.fixture
def objects() -> PageObjects:
    return PageObjects("engine", "memory:", SPACE, batch_bytes=2500)


@pytest.fixture
def tasks(objects: PageObjects) -> Iterator[PageTasks[Rows]]:
    one: PageTasks[Rows] = PageTasks("test", 3, objects, EventNotifier())
    yield one
    one.close()


def pages(objects: PageObjects, *sizes: int, moving: bool = True) -> list[Page]:
    """One of each size. Those of a size are of one pool."""
    pools = {size: objects.pool("kv", size, {}) for size in sizes}
    return [
        Page(number, bytes([number]), pools[size], (memoryview(bytearray(size)),) if moving else ())
        for number, size in enumerate(sizes)
    ]


def ended(tasks: PageTasks[Rows], task: int) -> Rows:
    """A task's result, after waiting as engines do."""
    poller = select.poll()
    poller.register(tasks.notifier.fileno(), select.POLLIN)
    assert poller.poll(MAX_S * 1000)
    os.eventfd_read(tasks.notifier.fileno())
    found = tasks.take(task)
    assert found is not None
    return found


def done(pool: PagePool, some: list[Page]) -> list[bool]:
    return [True] * len(some)


def test_a_task_is_cut_by_pool_and_by_staging_memory(
    objects: PageObjects, tasks: PageTasks[Rows]
) -> None:
    parts: list[list[int]] = []

    def work(pool: PagePool, some: list[Page]) -> list[bool]:
        assert all(page.pool is pool for page in some)
        parts.append([page.key for page in some])
        return [page.key % 3 != 0 for page in some]

    task = tasks.submit(pages(objects, 1000, 50, 1000, 1000, 50), work, list)
    assert ended(tasks, task) == [False, True, True, False, True]
    assert sorted(parts) == [[0, 2], [1, 4], [3]]


def test_look_ups_of_a_pool_are_one_part(objects: PageObjects, tasks: PageTasks[Rows]) -> None:
    sizes: list[int] = []

    def work(pool: PagePool, some: list[Page]) -> list[bool]:
        sizes.append(len(some))
        return done(pool, some)

    assert all(ended(tasks, tasks.submit(pages(objects, *[1000] * 9, moving=False), work, list)))
    assert sizes == [9]


def test_a_task_without_pages_ends(objects: PageObjects, tasks: PageTasks[Rows]) -> None:
    assert ended(tasks, tasks.submit([], done, list)) == []


def test_a_result_exists_once_and_after_the_last_part(
    objects: PageObjects, tasks: PageTasks[Rows]
) -> None:
    go = threading.Event()

    def work(pool: PagePool, some: list[Page]) -> list[bool]:
        assert some[0].key or go.wait(MAX_S)
        return done(pool, some)

    task = tasks.submit(pages(objects, 1, 2, 3), work, list)
    assert tasks.take(task) is None and tasks.take_all() == {}
    go.set()
    assert ended(tasks, task) == [True] * 3
    assert tasks.take(task) is None


def test_results_are_taken_all_at_once(objects: PageObjects, tasks: PageTasks[Rows]) -> None:
    numbers = [tasks.submit([], done, list) for _ in range(3)]
    assert tasks.take_all() == {number: [] for number in numbers} and len(set(numbers)) == 3
    assert tasks.take_all() == {}


@pytest.mark.parametrize(
    "work",
    [
        lambda pool, some: 1 / 0,
        lambda pool, some: [True],
        lambda pool, some: [True] * (len(some) + 1),
    ],
)
def test_a_part_that_fails_is_not_there_and_counted(
    objects: PageObjects,
    tasks: PageTasks[Rows],
    work: Callable[[PagePool, list[Page]], list[bool]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails_for_one_pool(pool: PagePool, some: list[Page]) -> list[bool]:
        return work(pool, some) if pool.format.payload_bytes == 50 else done(pool, some)

    task = tasks.submit(pages(objects, 50, 1000, 50), fails_for_one_pool, list)
    assert ended(tasks, task) == [False, True, False]
    assert objects.counts["failed"] == 2
    assert "2 pages are given up" in caplog.text
    assert all(ended(tasks, tasks.submit(pages(objects, 50), done, list)))


def test_pages_that_waited_too_long_are_not_touched(objects: PageObjects) -> None:
    one: PageTasks[Rows] = PageTasks("test", 1, objects, EventNotifier(), max_wait_s=-1.0)
    calls: list[object] = []

    def work(pool: PagePool, some: list[Page]) -> list[bool]:
        calls.append(some)
        return done(pool, some)

    assert ended(one, one.submit(pages(objects, 50, 50), work, list)) == [False, False]
    assert objects.counts["failed"] == 2 and "no thread had time" in objects.last_error
    one.close()
    assert not calls


def test_closing_waits_for_a_part_that_runs_and_drops_the_others(objects: PageObjects) -> None:
    one: PageTasks[Rows] = PageTasks("test", 1, objects, EventNotifier())
    began, go, ran = threading.Event(), threading.Event(), list[int]()

    def work(pool: PagePool, some: list[Page]) -> list[bool]:
        began.set()
        assert go.wait(MAX_S)
        ran.append(some[0].key)
        return done(pool, some)

    one.submit(pages(objects, 1, 2, 3), work, list)
    assert began.wait(MAX_S)
    closing = threading.Thread(target=one.close)
    closing.start()
    while not one._threads._shutdown:
        closing.join(0.001)
    go.set()
    closing.join(MAX_S)
    assert not closing.is_alive() and ran == [0]
