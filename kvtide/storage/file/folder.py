"""The folder: its files, and the locks on them.

    lock                   shared to add a journal or a segment, exclusive to merge
    journals/ID.journal    the log of one process, which holds its lock while it lives
    journals/ID.merged     the log of finished processes, merged from their journals
    segments/ID.data       objects; the process that appends to it holds its lock

IDs are random, 16 hex digits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from kvtide.storage.store import StoreError

LOCK_TIMEOUT_S = 30.0
SETTLED_S = 1.0
"""A folder's time of change is coarse: only once it lies this far back does it prove anything."""
_JOURNAL = re.compile(r"[0-9a-f]{16}\.(journal|merged)").fullmatch
_SEGMENT = re.compile(r"[0-9a-f]{16}\.data").fullmatch


class Folder:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.journals = root / "journals"
        self.segments = root / "segments"
        self._listed_at = (0, False)
        try:
            root.mkdir(0o700, parents=True, exist_ok=True)  # Pages reveal prompts.
            for folder in (self.journals, self.segments):
                folder.mkdir(exist_ok=True)
            os.close(os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o666))
        except OSError as error:
            raise self.refusal(error) from error

    def refusal(self, error: OSError) -> StoreError:
        reason = error.strerror or str(error)
        return StoreError(
            f"storage file://{self.root}: cannot be used ({reason}); "
            "give a folder on a local disk that this user may read and write"
        )

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """While files are added, so that no process takes a new one for a left-over."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While finished journals are merged and left-over files are deleted."""
        with self._locked(fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        fd = os.open(self.root / "lock", os.O_RDWR)
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(fd, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StoreError(
                            f"storage file://{self.root}: another process has held its lock for "
                            f"{LOCK_TIMEOUT_S:.0f} s; end that process"
                        ) from None
                    time.sleep(0.002)
            yield
        finally:
            os.close(fd)

    def new_journal(self, suffix: str = ".journal") -> Path:
        return self.journals / f"{secrets.randbits(64):016x}{suffix}"

    def new_segment(self) -> tuple[int, Path]:
        number = secrets.randbits(64)
        return number, self.segment(number)

    def segment(self, number: int) -> Path:
        return self.segments / f"{number:016x}.data"

    def journal_paths(self) -> list[Path]:
        """Every journal there is."""
        self._listed_at = self._changed_at()
        return [self.journals / name for name in os.listdir(self.journals) if _JOURNAL(name)]

    def has_changed(self) -> bool:
        """Whether there may be other journals than when they were last listed."""
        return not self._listed_at[1] or self._changed_at()[0] != self._listed_at[0]

    def segment_ids(self) -> set[int]:
        return {int(name[:16], 16) for name in os.listdir(self.segments) if _SEGMENT(name)}

    def free_bytes(self) -> int:
        """Free space of the file system for this user."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def size_bytes(self) -> int:
        found = os.statvfs(self.root)
        return found.f_blocks * found.f_frsize

    def _changed_at(self) -> tuple[int, bool]:
        changed = os.stat(self.journals).st_mtime_ns
        return changed, time.time_ns() - changed > SETTLED_S * 1e9


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
