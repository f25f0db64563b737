"""The file store: what it keeps, what it evicts, and what several of them do to one folder."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtide.storage import StoreError, conformance, open_store
from kvtide.storage.file import FileStore
from kvtide.storage.file import file_store as file_store
from kvtide.storage.file.file_io import IoThreads, address
from kvtide.storage.file.journal import RECORD_BYTES
from kvtide.storage.store import MISSING, Store

SPACE, OTHER = b"a" * 32, b"b" * 32
KIB = 1 << 10

Open = Callable[..., FileStore]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens stores on the test's folder, and closes them."""
    stores: list[Store] = []

    def open_it(space: bytes = SPACE, **settings: object) -> Store:
        options = {"cap": "100MB", "floor": "0", "threads": "3", "segment": "1MiB"} | settings
        query = "&".join(f"{name}={value}" for name, value in options.items())
        stores.append(open_store(f"file://{tmp_path}/store?{query}", space))
        return stores[-1]

    yield open_it  # type: ignore[misc]
    for store in stores:
        store.close()


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(store: Store, numbers: list[int], length: int = 8 * KIB) -> list[bool]:
    return store.write([key(n) for n in numbers], [memoryview(body(n, length)) for n in numbers])


def body(number: int, length: int) -> bytes:
    return np.random.Generator(np.random.PCG64(number)).bytes(length)


def got(store: Store, number: int, room: int = 2 << 20) -> bytes | None:
    target = memoryview(bytearray(room))
    (length,) = store.read([key(number)], [target])
    return None if length == MISSING else bytes(target[:length])


def test_it_keeps_the_rules_of_stores(tmp_path: Path) -> None:
    url = f"file://{tmp_path}?cap=1GB&floor=0"
    assert conformance.violations(lambda space: open_store(url, space)) == []


def test_objects_outlive_the_store_that_wrote_them(opened: Open) -> None:
    first = opened()
    lengths = [0, 1, 4095, 4096, 4097, 100_000, (1 << 20) + 1]
    for n, length in enumerate(lengths):
        assert put(first, [n], length) == [True]
    first.close()
    second = opened()
    assert [got(second, n) for n in range(len(lengths))] == [
        body(n, length) for n, length in enumerate(lengths)
    ]
    assert second.status().objects == len(lengths)
    assert second.status().bytes == sum(lengths)
    assert second.status().notes == ()


def test_reopening_many_times_leaves_few_journals(opened: Open, tmp_path: Path) -> None:
    for n in range(30):
        store = opened()
        put(store, [n])
        store.close()
    store = opened()
    assert store.status().objects == 30
    names = [path.suffix for path in (tmp_path / "store/journals").iterdir()]
    assert names.count(".merged") == 1 and len(names) <= 10


def test_aligned_memory_is_not_copied(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    memory = memoryview(mmap.mmap(-1, 1 << 20))
    assert address(memory) % 4096 == 0
    seen: list[int] = []
    write = os.pwritev

    def spy(fd: int, vectors: list[memoryview], offset: int) -> int:
        seen.extend(address(vector) for vector in vectors)
        return write(fd, vectors, offset)

    monkeypatch.setattr(os, "pwritev", spy)
    store.write([key(1), key(2)], [memory[: 64 * KIB], memory[64 * KIB : 128 * KIB]])
    assert seen == [address(memory), address(memory[64 * KIB :])]


# ── cap, floor, order ─────────────────────────────────────────────────────────────────────────


def test_the_longest_unused_goes_first(opened: Open) -> None:
    store = opened(cap=10 * 8 * KIB)
    for n in range(10):
        put(store, [n])
    got(store, 0)
    put(store, [3])
    for n in range(10, 13):
        put(store, [n])
    there = [n for n in range(13) if store.exists([key(n)])[0]]
    assert there == [0, 3, 5, 6, 7, 8, 9, 10, 11, 12]
    assert store.status().notes == ("3 objects evicted for new ones",)


def test_of_one_batch_the_end_goes_first(opened: Open) -> None:
    store = opened(cap=10 * 8 * KIB)
    put(store, list(range(10)))
    put(store, [10, 11])
    assert store.exists([key(n) for n in range(10)]) == [True] * 8 + [False] * 2


def test_of_a_batch_larger_than_the_cap_the_beginning_is_kept(opened: Open) -> None:
    store = opened(cap=10 * 8 * KIB)
    done = put(store, list(range(30)))
    assert done == store.exists([key(n) for n in range(30)])
    assert done[:8] == [True] * 8 and sum(done) == 10


def test_the_cap_holds_over_spaces_and_processes(opened: Open) -> None:
    cap = 100 * 8 * KIB
    one, two = opened(cap=cap), opened(OTHER, cap=cap)
    for n in range(0, 300, 10):
        assert all(put(one, list(range(n, n + 10))))
        assert all(put(two, list(range(n, n + 10))))
        for store in (one, two):
            held = store.status().all_bytes
            assert held is not None and held <= cap
    one.close()
    assert opened(cap=cap).status().all_bytes == two.status().all_bytes


def test_what_is_evicted_is_given_back_to_the_disk(opened: Open, tmp_path: Path) -> None:
    store = opened(cap="2MiB", segment="256KiB")
    for n in range(200):
        put(store, [n], 60 * KIB)
    files = list((tmp_path / "store/segments").iterdir())
    taken = sum(path.stat().st_blocks * 512 for path in files)
    assert taken <= (2 << 20) + (256 << 10)
    assert len(files) <= 12


def test_a_segment_with_holes_keeps_what_lives_in_it(opened: Open, tmp_path: Path) -> None:
    store = opened(segment="64MiB")
    put(store, list(range(100)))
    assert store.remove([key(n) for n in range(0, 100, 2)]) == 50
    assert [got(store, n) is not None for n in range(100)] == [False, True] * 50
    store.close()
    (segment,) = (tmp_path / "store/segments").iterdir()
    assert segment.stat().st_blocks * 512 <= 50 * 8 * KIB + 64 * KIB
    store = opened()
    assert got(store, 1) == body(1, 8 * KIB) and got(store, 0) is None


def test_objects_larger_than_the_cap_are_refused(opened: Open) -> None:
    store = opened(cap="1MiB")
    assert put(store, [1], 2 << 20) == [False]
    assert put(store, [2, 3], 400_000) == [True, True]
    assert store.status().notes == ("1 objects refused because they are larger than the cap",)


def test_an_object_may_be_larger_than_a_segment(opened: Open) -> None:
    store = opened(segment="64KiB")
    assert put(store, [1], 1 << 20) == [True]
    assert got(store, 1) == body(1, 1 << 20)


def test_the_floor_refuses_what_would_go_below_it(opened: Open, tmp_path: Path) -> None:
    store = opened()
    assert put(store, [1]) == [True]
    store.close()
    free = os.statvfs(tmp_path)
    store = opened(floor=free.f_bavail * free.f_frsize * 2)
    assert put(store, [2, 3]) == [False, False]
    # Evicting all there is would not have helped, so nothing was evicted.
    assert store.exists([key(1)]) == [True]
    assert any("above the floor" in note for note in store.status().notes)


def test_recency_survives_a_restart(opened: Open) -> None:
    cap = 10 * 8 * KIB
    store = opened(cap=cap)
    for n in range(10):
        put(store, [n])
    got(store, 0)
    got(store, 1)
    store.close()
    for _ in range(2):
        store = opened(cap=cap)
        store.close()
    store = opened(cap=cap)
    put(store, [20, 21, 22])
    assert store.exists([key(n) for n in range(6)]) == [True, True, False, False, False, True]


def test_uses_are_seen_by_others(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    cap = 10 * 8 * KIB
    one, two = opened(cap=cap), opened(cap=cap)
    for n in range(10):
        put(one, [n])
    got(two, 0)
    two._log_uses()
    put(one, [20])
    assert one.exists([key(0), key(1)]) == [True, False]


# ── several at once ───────────────────────────────────────────────────────────────────────────


def test_what_one_writes_and_removes_others_see(opened: Open) -> None:
    one, two = opened(), opened()
    put(one, [1, 2])
    assert two.exists([key(1), key(2)]) == [True, True]
    assert got(two, 1) == body(1, 8 * KIB)
    assert two.remove([key(1)]) == 1
    assert one.exists([key(1), key(2)]) == [False, True]
    assert got(one, 1) is None


def test_clear_removes_one_space_and_says_what(opened: Open) -> None:
    one, two, other = opened(), opened(), opened(OTHER)
    put(one, [1, 2], 5000)
    put(two, [3], 7000)
    put(other, [1, 2, 3])
    removed = one.clear()
    assert (removed.objects, removed.bytes) == (3, 17000)
    assert two.exists([key(n) for n in (1, 2, 3)]) == [False] * 3
    assert other.exists([key(n) for n in (1, 2, 3)]) == [True] * 3
    assert one.clear().objects == 0


def test_writing_costs_the_same_however_many_segments_there_were(opened: Open) -> None:
    class Many(list[object]):
        def __iter__(self) -> Iterator[object]:
            pytest.fail("every segment there ever was is looked at")

    one, two = opened(cap="4MB"), opened(cap="4MB")
    put(two, [100])
    put(one, list(range(8)), 400 * KIB)
    one._state.catalog.segments = Many(one._state.catalog.segments)  # type: ignore[assignment]
    put(two, [101])
    assert put(one, list(range(10, 18)), 400 * KIB) == [True] * 8, "the others are evicted"
    assert one.remove([key(101), key(17)]) == 2


def test_segments_that_another_deleted_are_let_go_of(opened: Open) -> None:
    one, two = opened(), opened()
    put(one, list(range(8)), 400 * KIB)
    assert all(got(two, n) is not None for n in range(8))
    held = list(two._state.writer.opened._open.values())
    one.clear()
    assert sum(os.fstat(each.fileno()).st_blocks for each in held[:-1]) == 0, "space is not free"
    two._log_uses()
    left = [path for path in two._state.writer.opened._open if not path.exists()]
    assert left == [], "files that are gone are held open"


def test_what_was_removed_with_its_segment_stays_removed_while_its_writer_lives(
    opened: Open,
) -> None:
    writer, remover = opened(segment="32KiB"), opened(segment="32KiB")
    put(writer, [1, 2, 3, 4, 5], 20 * KIB)
    assert remover.clear().objects == 5
    remover.close()
    again = opened(segment="32KiB")
    assert again.exists([key(n) for n in range(1, 6)]) == [False] * 5
    assert again.status().all_bytes == 0, "what is gone takes room"
    assert put(again, [1], 20 * KIB) == [True] and got(writer, 1) == body(1, 20 * KIB)


def test_a_merge_by_another_is_taken_over_without_rereading(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = opened(), opened()
    put(two, [1, 2])
    assert one.exists([key(1)]) == [True]
    two.remove([key(1)])
    two.close()
    monkeypatch.setattr(one._state.catalog, "load", lambda: pytest.fail("everything was read anew"))
    three = opened()
    assert one.exists([key(1), key(2)]) == [False, True]
    put(three, [3])
    assert one.exists([key(3)]) == [True]


def test_a_journal_that_came_and_went_unseen_is_made_up_for(opened: Open) -> None:
    one = opened()
    put(one, [1, 2])
    for _ in range(2):  # Neither of these is seen by `one` before it has been merged.
        two = opened()
        put(two, [3])
        two.remove([key(1), key(3)])
        two.close()
    assert one.exists([key(1), key(2), key(3)]) == [False, True, False]


def test_a_long_journal_is_renewed_and_merged(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "LONGEST_JOURNAL_BYTES", 4096)
    one, two = opened(), opened()
    for round in range(30):
        put(one, [round])
        put(one, [1000])
        one.remove([key(1000)])
    assert 90 * RECORD_BYTES > 4096, "long enough, unless the store has renewed it by itself"
    one._renew()
    assert one._state.writer.journal.bytes < 200
    put(one, [500])
    for store in (one, two, opened()):
        assert store.status().objects == 31
        assert all(store.exists([key(n) for n in [*range(30), 500]]))
        assert not store.exists([key(1000)])[0]


def test_processes_share_a_folder(opened: Open, tmp_path: Path) -> None:
    script = (
        "import sys; from tests.storage.test_file_store import *\n"
        "store = open_store(sys.argv[1], SPACE); first = int(sys.argv[2])\n"
        "for n in range(first, first + 50): assert put(store, [n]) == [True]\n"
        "print('written', flush=True); input()\n"
        "assert all(store.exists([key(n) for n in range(150)])); assert not store.status().notes\n"
        "assert all(got(store, n) == body(n, 8 * KIB) for n in range(150)); store.close()\n"
    )
    url = f"file://{tmp_path}/store?cap=100MB&floor=0"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, url, str(first)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in (0, 50, 100)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
    for process in processes:
        process.communicate("\n", timeout=30)
        assert process.returncode == 0
    store = opened()
    assert store.status().objects == 150 and not store.status().notes


def test_threads_that_write_the_same_keys_leave_one_object_each(opened: Open) -> None:
    store = opened()
    results: list[list[bool]] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        results.append(put(store, list(range(50))))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[True] * 50] * 4
    assert store.status().objects == 50
    assert all(got(store, n) == body(n, 8 * KIB) for n in range(50))


@pytest.mark.full
def test_readers_never_see_what_is_being_removed(opened: Open) -> None:
    """Another store evicts all the time; what is read is whole or missing."""
    cap = 20 * 64 * KIB
    one, two = opened(cap=cap), opened(cap=cap)
    stop = threading.Event()

    def churn() -> None:
        for n in range(400):
            put(one, [n % 60], 64 * KIB)
        stop.set()

    thread = threading.Thread(target=churn)
    thread.start()
    read = 0
    while not stop.is_set():
        for n in range(60):
            found = got(two, n, 64 * KIB)
            assert found is None or found == body(n, 64 * KIB)
            read += found is not None
    thread.join()
    assert read
    assert not [note for note in two.status().notes if "lost" in note]


# ── settings ──────────────────────────────────────────────────────────────────────────────────


def test_defaults_leave_half_of_the_disk_alone(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}", SPACE)
    found = os.statvfs(tmp_path)
    capacity = store.status().capacity_bytes
    assert capacity is not None
    assert capacity <= min(200e9, found.f_bavail * found.f_frsize * 0.51)
    store.close()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("file://host/x", "whole path"),
        ("file:x", "whole path"),
        ("file:///tmp/x?sync=often", "one of always, batch, never"),
        ("file:///tmp/x?size=3", "no setting size"),
        ("file:///proc/nothing/here", "cannot be used"),
    ],
)
def test_bad_urls_are_refused_in_a_sentence(url: str, sentence: str) -> None:
    with pytest.raises(StoreError, match=sentence):
        open_store(url, SPACE)


def test_a_cap_of_nothing_is_refused(opened: Open) -> None:
    with pytest.raises(StoreError, match="holds nothing"):
        opened(cap=0)


@pytest.mark.parametrize("sync", ["always", "batch", "never"])
def test_every_way_of_syncing_keeps_objects(opened: Open, sync: str) -> None:
    store = opened(sync=sync)
    put(store, [1, 2])
    store._sync()
    store.close()
    assert got(opened(), 2) == body(2, 8 * KIB)


def test_always_syncs_bytes_before_the_journal(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(sync="always")
    put(store, [1])
    synced: list[str] = []
    sync = os.fdatasync

    def spy(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).suffix)
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", spy)
    put(store, [2])
    assert [suffix for suffix in synced if suffix] == [".data", ".journal"]


def test_a_closed_store_says_so(opened: Open) -> None:
    store = opened()
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.exists([key(1)])
    with pytest.raises(StoreError, match="closed"):
        put(store, [1])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_thread_that_is_interrupted_waits_only_for_what_others_have_begun(threads: int) -> None:
    workers = IoThreads(threads, "test")
    asker = threading.current_thread()
    interrupted = []

    def run(part: int) -> None:
        if threading.current_thread() is asker:
            raise KeyboardInterrupt
        time.sleep(0.001)  # Or else one of the others does them all.

    def ask() -> None:
        nonlocal asker
        asker = threading.current_thread()
        with pytest.raises(KeyboardInterrupt):
            workers.each(run, 100)
        interrupted.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(5)
    workers.close()
    assert interrupted, "it waits for ever"
