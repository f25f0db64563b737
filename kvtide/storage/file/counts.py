"""What went wrong and how often, in sentences for whoever runs the store."""

from __future__ import annotations

import threading
from collections import Counter

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
    "unknown": "journal records skipped because nothing says whose segment they are of",
    "journal": "times that a journal could not be read or written",
    "punch": "ranges that could not be given back to the file system",
    "sync": "times that files could not be made to outlive a loss of power",
    "keeping": "times that the background work failed and was put off",
    "evicted": "objects evicted to make room",
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
