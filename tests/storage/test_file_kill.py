"""Processes killed at any moment lose nothing that was acknowledged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.storage.file.appends import Putter
from tests.storage import kill_loop
from tests.storage.test_file_faults import data, opened
from tests.storage.test_file_store import KIB, body, got, key, put

KILLS = int(os.environ.get("KVTIDE_TEST_KILLS", "15"))


def test_kills_lose_nothing_acknowledged_and_tear_nothing(tmp_path: Path) -> None:
    """In a process of its own, because it forks."""
    command = [sys.executable, "-m", "tests.storage.kill_loop", "--kills", str(KILLS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30 + 3 * KILLS)
    assert ran.returncode == 0, ran.stdout + ran.stderr


LIARS = {
    "acknowledges before the record is written": (
        "from kvtide.storage.file.writer import Writer\n"
        "commit = Writer.commit\n"
        "def lie(self, places, keys, lengths, stamps):\n"
        "    append = self.journal.append\n"
        "    self.journal.append = lambda records: None\n"
        "    try: commit(self, places, keys, lengths, stamps)\n"
        "    finally: del self.journal.append\n"
        "Writer.commit = lie\n"
    ),
    "writes the record before the bytes": (
        "from kvtide.storage.file.file_io import Mover\n"
        "Mover.write = lambda self, ranges: [None] * len(ranges)\n"
    ),
}


@pytest.mark.parametrize("lie", LIARS)
def test_the_loop_finds_a_store_that_lies(lie: str) -> None:
    script = (
        LIARS[lie] + "import sys; from tests.storage import kill_loop\n"
        "sys.argv = ['', '--kills', '6', '--seed', '1']; sys.exit(kill_loop.main())\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and "violations" in ran.stdout, ran.stdout + ran.stderr


def test_content_follows_from_the_key() -> None:
    assert kill_loop.content(b"k" * 32) == kill_loop.content(b"k" * 32)
    assert kill_loop.content(b"k" * 32) != kill_loop.content(b"l" * 32)


def test_a_segment_finished_while_another_opens_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last objects are committed, and its lock given back, after the opener has read journals
    and before it clears away."""
    from kvtide.storage.file import recovery

    living = opened(tmp_path)
    put(living, [1])
    living._state.writer.renew_journal()  # So that the segment's record is in a finished journal.
    clear_away = recovery._clear_away

    def late(*arguments: object) -> None:
        put(living, [2])
        living._state.writer._retire()
        clear_away(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery, "_clear_away", late)
    other = opened(tmp_path)
    assert len(data(tmp_path)) == 1
    for store in (living, other):
        assert [got(store, n) for n in (1, 2)] == [body(n, 8 * KIB) for n in (1, 2)]
        assert not store.status().notes
        store.close()


def test_a_write_that_is_interrupted_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Putter, "_commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            put(store, [1])
    assert put(store, [2]) == [True] and store.exists([key(1)]) == [False]
    store.close()
