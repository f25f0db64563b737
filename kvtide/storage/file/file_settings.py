"""What an operator sets and sees: the settings of a file store's URL, and its failure counters."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvtide.storage.file.folder import Folder
from kvtide.storage.file.segments import BLOCK_BYTES
from kvtide.storage.store import StoreError
from kvtide.storage.url import StoreURL

# ── settings ──────────────────────────────────────────────────────────────────────────────────────

MAX_CAP_BYTES = 200 * 10**9
CAP_FRACTION = 0.5
MAX_FLOOR_BYTES = 10 * 10**9
FLOOR_FRACTION = 0.05
THREADS = 8
SEGMENT_DIVISOR = 16
MIN_SEGMENT_BYTES = 16 << 20
MAX_SEGMENT_BYTES = 1 << 30


class Sync(Enum):
    """When writes are flushed to the disk; see the package."""

    ALWAYS = "always"
    BATCH = "batch"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class FileSettings:
    cap_bytes: int
    floor_bytes: int
    threads: int
    sync: Sync
    segment_bytes: int

    @classmethod
    def of(cls, url: StoreURL, folder: Folder, used_bytes: int) -> FileSettings:
        """`used_bytes`: the size of the folder's objects as it is opened."""
        usable = int((folder.free_bytes() + used_bytes) * CAP_FRACTION)
        cap = url.bytes("cap", min(MAX_CAP_BYTES, usable))
        if cap < BLOCK_BYTES:
            raise StoreError(f"storage {url}: a cap of {cap} bytes holds nothing; write cap=200GB")
        floor = min(MAX_FLOOR_BYTES, int(folder.size_bytes() * FLOOR_FRACTION))
        segment = min(max(cap // SEGMENT_DIVISOR, MIN_SEGMENT_BYTES), MAX_SEGMENT_BYTES)
        segment = max(url.bytes("segment", segment) // BLOCK_BYTES, 1) * BLOCK_BYTES
        return cls(
            cap, url.bytes("floor", floor), url.count("threads", THREADS), _sync(url), segment
        )


def folder_of(url: StoreURL) -> Path:
    url.only("cap", "floor", "threads", "sync", "segment")
    if url.host or not url.path.startswith("/"):
        raise StoreError(f"storage {url}: give the whole path of a folder, like file:///var/kvtide")
    _sync(url)
    return Path(url.path)


def _sync(url: StoreURL) -> Sync:
    text = url.settings.get("sync", Sync.BATCH.value)
    try:
        return Sync(text)
    except ValueError:
        known = ", ".join(each.value for each in Sync)
        raise StoreError(f"storage {url}: sync={text} is unknown; it is one of {known}") from None


# ── counters ──────────────────────────────────────────────────────────────────────────────────────

SENTENCES = {
    "full": "objects refused because the disk is full",
    "floor": "objects refused to keep the file system's free space above the floor",
    "large": "objects refused because they are larger than the cap",
    "write": "objects that could not be written",
    "read": "objects that could not be read",
    "short": "objects lost because their file was cut short",
    "hole": "objects lost because their bytes were gone",
    "gone": "objects lost because their file was deleted or may not be read",
    "corrupt": "journal records skipped because they were damaged",
    "unknown": "journal records skipped because no record names the space of their segment",
    "journal": "times that a journal could not be read or written",
    "punch": "ranges that could not be given back to the file system",
    "sync": "times that files could not be made to outlive a loss of power",
    "keeping": "times that the background work failed and was retried later",
    "evicted": "objects evicted for new ones",
}


class StoreCounts:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, what: str, count: int = 1, error: BaseException | None = None) -> None:
        assert what in SENTENCES
        if count:
            with self._lock:
                self._counts[what] += count
                if error is not None and str(error):
                    self._last[what] = str(error)

    def __getitem__(self, what: str) -> int:
        return self._counts[what]

    def sentences(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(
                f"{self._counts[what]} {sentence}"
                + (f" (last: {self._last[what]})" if what in self._last else "")
                for what, sentence in SENTENCES.items()
                if self._counts[what]
            )
