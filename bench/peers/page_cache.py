"""Reads from the disk, not from the system's memory of it."""

from __future__ import annotations

import os
from pathlib import Path


def drop_page_cache(folder: Path) -> None:
    """Have the next read of every file go to the disk. Pages that are not there yet would stay."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
