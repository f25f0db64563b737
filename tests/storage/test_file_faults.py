"""The file store on disks that are full, folders that are damaged, files that are gone."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtide.storage import StoreError, open_store
from kvtide.storage.file import FileStore, segments
from kvtide.storage.file.journal import RECORD, RECORD_BYTES, VERSION, RecordKind, head, sealed
from kvtide.storage.store import Store
from tests.storage.test_file_store import KIB, OTHER, SPACE, body, got, key, put


def opened(folder: Path, space: bytes = SPACE, **settings: object) -> FileStore:
    options = {"cap": "100MB", "floor": "0", "threads": "3", "segment": "1MiB"} | settings
    query = "&".join(f"{name}={value}" for name, value in options.items())
    store = open_store(f"file://{folder}?{query}", space)
    assert isinstance(store, FileStore)
    return store


def notes(store: Store, what: str) -> list[str]:
    return [note for note in store.status().notes if what in note]


def journals(folder: Path) -> list[Path]:
    return sorted((folder / "journals").iterdir())


def data(folder: Path) -> list[Path]:
    return sorted((folder / "segments").iterdir())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, f"this test needs to mount a tmpfs, as root: {made.stderr}"
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


# ── full disks ────────────────────────────────────────────────────────────────────────────────


def test_a_full_disk_refuses_objects_and_keeps_those_it_has(small_disk: Path) -> None:
    store = opened(small_disk / "store", cap="1GB")
    assert all(put(store, [1, 2, 3], 100 * KIB))
    fill(small_disk / "other")
    assert put(store, [10, 11], 3000 * KIB) == [False, False]
    assert got(store, 1) == body(1, 100 * KIB)
    assert notes(store, "refused")
    (small_disk / "other").unlink()
    assert put(store, [20], 100 * KIB) == [True]
    store.close()
    again = opened(small_disk / "store", cap="1GB")
    assert got(again, 3) == body(3, 100 * KIB) and got(again, 20) == body(20, 100 * KIB)
    again.close()


def test_a_store_that_fills_the_disk_evicts_its_own(small_disk: Path) -> None:
    store = opened(small_disk / "store", cap="1GB")
    for n in range(40):
        assert put(store, [n], 500 * KIB) == [True]
    assert got(store, 39) == body(39, 500 * KIB)
    assert notes(store, "evicted")
    store.close()


def test_a_floor_holds_while_a_store_fills_the_disk(small_disk: Path) -> None:
    store = opened(small_disk / "store", cap="1GB", floor="3MiB")
    for n in range(40):
        put(store, [n], 300 * KIB)
        free = os.statvfs(small_disk)
        assert free.f_bavail * free.f_frsize >= (3 << 20) - (300 << 10)
    assert got(store, 39) == body(39, 300 * KIB)
    store.close()


def test_a_disk_that_fills_while_writing_refuses_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    put(store, [1])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert put(store, [2, 3]) == [False, False]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)  # The journal's.
        assert put(store, [4]) == [False]
        with pytest.raises(StoreError):
            store.remove([key(1)])
    assert put(store, [5]) == [True]
    assert store.exists([key(n) for n in range(1, 6)]) == [True, False, False, False, True]
    assert notes(store, "3 objects refused because the disk is full (last: [Errno 28]")
    store.close()
    again = opened(tmp_path)
    assert again.status().objects == 2 and not again.status().notes
    again.close()


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while free := os.statvfs(path).f_bavail:
            file.write(bytes(min(free, 16) * 4096))


# ── things one may not do ─────────────────────────────────────────────────────────────────────

UNPRIVILEGED = (
    "from tests.storage.test_file_faults import *\n"
    "import kvtide.storage.file.file_store, numpy.ma, numpy.random; os.setgid(65534); "
    "os.setuid(65534)\n"
    "folder = Path(sys.argv[1])\n"
)


def run_unprivileged(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a user without root's rights."""
    assert os.getuid() == 0, "this test needs to become another user, as root"
    command = [sys.executable, "-c", UNPRIVILEGED + script, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that anyone may enter; those of pytest are the user's own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_folder_one_may_not_write_is_refused_in_a_sentence(public: Path) -> None:
    opened(public / "store").close()
    ran = run_unprivileged("opened(folder)", public / "store")
    assert "StoreError: storage file://" in ran.stderr, ran.stderr
    assert "cannot be used (Permission denied)" in ran.stderr


def test_segments_one_may_not_read_are_misses(public: Path) -> None:
    folder = public / "store"
    store = opened(folder)
    put(store, [1, 2])
    store.close()
    for each in [folder, *folder.rglob("*")]:
        os.chown(each, 65534, 65534)
    for each in data(folder):
        os.chown(each, 0, 0)
        each.chmod(0o600)
    script = (
        "store = opened(folder)\n"
        "assert got(store, 1) is None and not store.exists([key(1)])[0]\n"
        "assert notes(store, 'file was deleted or may not be read'), store.status()\n"
        "assert put(store, [1, 7]) == [True, True]\n"
        "assert got(store, 7) == body(7, 8 * KIB); store.close(); print('well')\n"
    )
    ran = run_unprivileged(script, folder)
    assert ran.stdout == "well\n", ran.stderr
    again = opened(folder)
    assert got(again, 2) == body(2, 8 * KIB)
    again.close()


def test_a_read_only_disk_is_refused_in_a_sentence(small_disk: Path) -> None:
    opened(small_disk / "store").close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="Read-only file system"):
        opened(small_disk / "store")


# ── files that are gone or damaged ────────────────────────────────────────────────────────────


def test_a_deleted_segment_is_a_miss(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, [1, 2])
    store.close()
    store = opened(tmp_path)
    for path in data(tmp_path):
        path.unlink()
    assert got(store, 1) is None
    assert notes(store, "1 objects lost because their file was deleted")
    assert put(store, [1]) == [True] and got(store, 1) == body(1, 8 * KIB)
    store.close()


def test_a_segment_deleted_while_it_is_appended_to_is_left(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, [1])
    for path in data(tmp_path):
        path.unlink()
    assert put(store, [2]) == [True]
    store.close()
    again = opened(tmp_path)
    assert got(again, 2) == body(2, 8 * KIB) and got(again, 1) is None
    again.close()


def test_what_was_written_into_a_deleted_segment_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    put(store, [1])
    write = os.pwritev

    def delete_then_write(*arguments: object) -> int:
        for path in data(tmp_path):
            path.unlink()
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", delete_then_write)
    assert put(store, [2]) == [False]
    assert notes(store, "1 objects that could not be written")
    store.close()


def test_a_deleted_journal_loses_only_what_it_spoke_of(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, [1])
    store.close()
    store = opened(tmp_path)
    put(store, [2])
    for path in journals(tmp_path):
        if path.suffix == ".journal":
            path.unlink()
    assert put(store, [3]) == [True]
    assert notes(store, "a journal could not be read or written")
    store.close()
    again = opened(tmp_path)
    assert again.exists([key(n) for n in (1, 2, 3)]) == [True, False, True]
    assert got(again, 3) == body(3, 8 * KIB)
    again.close()


def test_a_folder_removed_under_a_store_is_an_error_not_a_crash(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    put(store, [1])
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(StoreError, match="cannot be used"):
        put(store, [2])
    assert store.exists([key(2)]) == [False]
    assert got(store, 5) is None
    assert notes(store, "a journal could not be read or written")
    store.close()


def test_a_truncated_segment_is_a_miss_and_forgotten(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for n in range(4):
        put(store, [n])
    store.close()
    (segment,) = data(tmp_path)
    os.truncate(segment, 2 * 8 * KIB + 4096)
    for _ in range(2):
        store = opened(tmp_path)
        found = [got(store, n) is not None for n in range(4)]
        assert found == [True, True, False, False]
        store.close()
    assert not opened_notes(tmp_path)


def opened_notes(folder: Path) -> tuple[str, ...]:
    store = opened(folder)
    store.close()
    return store._state.counts.sentences()


def test_a_short_read_is_a_miss_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    put(store, [1, 2])
    read = os.preadv
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, vectors, offset: min(100, read(fd, vectors, offset)))
        assert got(store, 1) is None
    assert notes(store, "1 objects lost because their file was cut short")
    assert got(store, 2) == body(2, 8 * KIB)
    store.close()


def test_reads_and_writes_that_stop_half_way_are_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    read, write = os.preadv, os.pwritev

    def some(move: object) -> object:
        return lambda fd, vectors, offset: move(fd, [vectors[0][:4096]], offset)

    monkeypatch.setattr(os, "preadv", some(read))
    monkeypatch.setattr(os, "pwritev", some(write))
    put(store, [1], 100_000)
    assert got(store, 1) == body(1, 100_000)
    store.close()


def test_an_error_of_the_disk_is_a_miss_and_the_threads_live_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    put(store, list(range(20)), 300 * KIB)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    targets = [memoryview(bytearray(300 * KIB)) for _ in range(20)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        assert store.read([key(n) for n in range(20)], targets) == [-1] * 20
    assert notes(store, "20 objects that could not be read")
    assert store.read([key(n) for n in range(20)], targets) == [300 * KIB] * 20
    assert store._workers.alive() == 2
    store.close()


def test_a_punched_object_is_never_served(tmp_path: Path) -> None:
    """A removal whose record was lost must not make zeros of an object."""
    store = opened(tmp_path)
    put(store, [1, 2, 3])
    (segment,) = data(tmp_path)
    fd = os.open(segment, os.O_RDWR)
    segments.punch(fd, 8 * KIB, 4096)
    os.close(fd)
    assert [got(store, n) is not None for n in (1, 2, 3)] == [True, False, True]
    assert notes(store, "1 objects lost because their bytes were gone")
    assert store.exists([key(2)]) == [False]
    store.close()


def test_a_file_system_without_direct_io_works_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.open

    def refuse(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    store = opened(tmp_path)
    put(store, [1], 100_001)
    assert got(store, 1) == body(1, 100_001)
    assert notes(store, "refuses direct I/O")
    store.close()


# ── damaged journals ──────────────────────────────────────────────────────────────────────────


def written(folder: Path) -> Path:
    """A folder with one journal, of six objects and a removal, whose process ended."""
    store = opened(folder)
    for n in range(6):
        put(store, [n])
    store.remove([key(0)])
    store.close()
    (journal,) = journals(folder)
    return journal


def expected(records: int) -> list[bool]:
    """What is there when only so many records are: head, segment, six puts, a removal."""
    return [records >= n + 3 and (n > 0 or records < 9) for n in range(6)]


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where syncing costs nothing, if there is one."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else tmp_path))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.full)])
def test_a_journal_may_be_torn_at_every_byte(step: int, in_memory: Path) -> None:
    """Seven bytes apart, and so at every place within a record."""
    tmp_path, journal = in_memory, written(in_memory / "store")
    whole = journal.read_bytes()
    assert len(whole) == 9 * RECORD_BYTES
    for size in range(0, len(whole) + 1, step):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        (tmp_path / "copy/journals" / journal.name).write_bytes(whole[:size])
        store = opened(tmp_path / "copy", threads=1)
        assert store.exists([key(n) for n in range(6)]) == expected(size // RECORD_BYTES)
        if size % 16 == 0:
            found = [got(store, n, 8 * KIB) for n in range(1, 6)]
            assert all(each in (None, body(n, 8 * KIB)) for n, each in enumerate(found, 1))
            assert put(store, [9]) == [True]
        store.close()


@pytest.mark.parametrize("record", range(9))
def test_a_damaged_record_harms_only_itself(tmp_path: Path, record: int) -> None:
    journal = written(tmp_path)
    damaged = bytearray(journal.read_bytes())
    damaged[record * RECORD_BYTES + 20] ^= 0x40
    journal.write_bytes(damaged)
    store = opened(tmp_path)
    there = store.exists([key(n) for n in range(6)])
    expected = {0: [False, True, True, True, True, True], 1: [False] * 6, 8: [True] * 6}
    lost = [n > 0 and n + 2 != record for n in range(6)]
    assert there == expected.get(record, lost)
    assert notes(store, "1 journal records skipped because they were damaged")
    # Where the removal was lost its object is seen again, but its bytes are gone.
    assert got(store, 0) is None
    assert [got(store, n) is not None for n in range(1, 6)] == there[1:]
    store.close()


def test_garbage_in_the_journals_folder_is_survived(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "journals" / "00000000000000aa.journal").write_bytes(os.urandom(10_000))
    (tmp_path / "journals" / "00000000000000ab.merged").write_bytes(os.urandom(10_000))
    (tmp_path / "journals" / "00000000000000ac.tmp").write_bytes(os.urandom(10_000))
    (tmp_path / "journals" / "read me").write_bytes(b"hello")
    (tmp_path / "journals" / "zz.journal").write_bytes(b"hello")
    (tmp_path / "segments" / "mine.data").write_bytes(b"hello")
    store = opened(tmp_path)
    assert store.exists([key(n) for n in range(6)]) == expected(9)
    assert notes(store, "damaged")
    store.close()


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    journal = written(tmp_path)
    records = np.frombuffer(journal.read_bytes(), RECORD).copy()
    records[0] = head()[0]
    records["length"][0] = VERSION + 1
    journal.write_bytes(sealed(records))
    with pytest.raises(StoreError, match="another version of kvtide"):
        opened(tmp_path)


def test_a_crash_between_merging_and_deleting_brings_nothing_back(tmp_path: Path) -> None:
    """The puts are in one old journal, the removals in another, which alone is deleted."""
    folder = tmp_path / "store"
    one, two = opened(folder), opened(folder)
    put(one, [1, 2])
    two.remove([key(1)])
    one.close()
    two.close()
    old = {path: path.read_bytes() for path in journals(folder)}
    opened(folder).close()
    for path, was in old.items():
        if (np.frombuffer(was, RECORD)["kind"] == RecordKind.PUT).any():
            path.write_bytes(was)
    living = opened(folder)
    assert living.exists([key(1), key(2)]) == [False, True]
    for path, was in old.items():
        path.write_bytes(was)
    assert living.exists([key(1), key(2)]) == [False, True]
    living.close()


def test_a_process_that_died_leaves_no_blocks_behind(tmp_path: Path) -> None:
    """Written and not committed, removed and not punched, allocated ahead: all given back."""
    script = (
        "from tests.storage.test_file_faults import *\n"
        "import signal; store = opened(Path(sys.argv[1]), segment='16MiB')\n"
        "put(store, list(range(10)))\n"
        "store._state.writer.take(1 << 20, 16 << 20, 0); put(store, [10])\n"
        "store._state.writer.punch = lambda holes: None; store.remove([key(5)])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60)
    assert ran.returncode == -9
    assert sum(path.stat().st_blocks for path in data(tmp_path)) * 512 > 10 << 20
    store = opened(tmp_path)
    assert sum(path.stat().st_blocks for path in data(tmp_path)) * 512 == 10 * 8 * KIB
    assert store.status().objects == 10
    store.close()


def test_left_over_segments_are_deleted_unless_someone_uses_them(tmp_path: Path) -> None:
    living = opened(tmp_path, OTHER)
    put(living, [1])
    (tmp_path / "segments" / "0123456789abcdef.data").write_bytes(bytes(100_000))
    opened(tmp_path).close()
    assert len(data(tmp_path)) == 1
    assert got(living, 1) == body(1, 8 * KIB)
    living.close()


@pytest.mark.full
def test_opening_a_million_objects_takes_less_than_2_s(tmp_path: Path) -> None:
    from kvtide.storage.file.journal import blank, segment_of

    count, per_segment = 1_000_000, 10_000
    opened(tmp_path).close()
    parts = [head()]
    for n in range(count // per_segment):
        path = tmp_path / "segments" / f"{n + 1:016x}.data"
        path.touch()
        os.truncate(path, per_segment * 4096)
        parts.append(segment_of(n + 1, SPACE))
    puts = blank(count, RecordKind.PUT)
    puts["segment"] = np.arange(count) // per_segment + 1
    puts["block"], puts["length"] = np.arange(count) % per_segment, 4096
    puts["key"] = np.random.Generator(np.random.PCG64(1)).integers(0, 2**63, (count, 4))
    puts["stamp"] = np.arange(count)
    for path in journals(tmp_path):
        path.unlink()
    target = tmp_path / "journals" / "0000000000000001.journal"
    target.write_bytes(b"".join(sealed(part) for part in [*parts, puts]))
    times = []
    for _ in range(2):  # The first merges, the second finds it merged.
        start = time.process_time()
        store = opened(tmp_path, cap="100GB")
        times.append(time.process_time() - start)
        assert store.status().objects == count
        store.close()
    assert min(times) < 2, times
