"""The settings of a file store's URL, and what they are when it does not say."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvtide.storage.file.folder import Folder
from kvtide.storage.file.records import BLOCK_BYTES
from kvtide.storage.store import StoreError
from kvtide.storage.url import StoreURL

MAX_CAP_BYTES = 200 * 10**9
CAP_SHARE = 0.5
MAX_FLOOR_BYTES = 10 * 10**9
FLOOR_SHARE = 0.05
THREADS = 8
SEGMENT_SHARE = 16
MIN_SEGMENT_BYTES = 16 << 20
MAX_SEGMENT_BYTES = 1 << 30


class Sync(Enum):
    """When what was written is made to outlive a loss of power; see the package."""

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
        """`used_bytes`: what objects take in the folder as it is opened."""
        room = int((folder.free_bytes() + used_bytes) * CAP_SHARE)
        cap = url.bytes("cap", min(MAX_CAP_BYTES, room))
        if cap < BLOCK_BYTES:
            raise StoreError(f"storage {url}: a cap of {cap} bytes holds nothing; write cap=200GB")
        floor = min(MAX_FLOOR_BYTES, int(folder.size_bytes() * FLOOR_SHARE))
        segment = min(max(cap // SEGMENT_SHARE, MIN_SEGMENT_BYTES), MAX_SEGMENT_BYTES)
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
