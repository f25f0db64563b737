"""Follows the objects of one space from another process: it reads the journals, and writes nothing.

An object is there from its record in a journal to the record of its removal, whatever process wrote
either. A follower that cannot read a journal knows nothing: it raises, and its owner drops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtide.storage.file.file_settings import StoreCounts
from kvtide.storage.file.folder import Folder
from kvtide.storage.file.folder_catalog import Catalog
from kvtide.storage.file.journal import Words, key_words
from kvtide.storage.file.object_table import NONE, ObjectPlaces, ObjectRows
from kvtide.storage.store import KEY_BYTES, StoreError


@dataclass(frozen=True, slots=True)
class FolderSpace:
    """The objects of one space in a folder."""

    root: Path
    space: bytes


class FolderFollower:
    """See the module. Raises `StoreError` or OSError where a journal cannot be read."""

    def __init__(self, followed: FolderSpace) -> None:
        if not followed.root.is_dir():
            raise StoreError(f"storage file://{followed.root}: there is no such folder")
        self._folder = Folder(followed.root)
        self._counts = StoreCounts()
        self._catalog = _NotingCatalog(self._folder, self._counts, followed.space)
        self._load()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """For every key: whether there was an object at the last look."""
        if not keys:
            return []
        catalog = self._catalog
        rows = catalog.table.find(key_words(keys), catalog.followed)
        found: list[bool] = (rows != NONE).tolist()
        return found

    def look(self) -> list[bytes] | None:
        """Keys of objects that may have come or gone since the last look; None: any may have."""
        if not self._catalog.sweep():
            self._load()
            return None
        self._check()
        return self._catalog.take()

    def _load(self) -> None:
        with self._folder.adding():
            self._catalog.load()
        self._check()
        self._catalog.take()

    def _check(self) -> None:
        """The catalog goes on without a journal that it cannot read; removals in it go unseen."""
        if self._counts["journal"]:
            raise StoreError(
                f"storage file://{self._folder.root}: a journal cannot be read; let this user read "
                "all files of the folder"
            )


class _NotingCatalog(Catalog):
    """Notes the keys of one space that are added and dropped. `followed`: its number here."""

    def __init__(self, folder: Folder, counts: StoreCounts, space: bytes) -> None:
        super().__init__(folder, counts)
        self.followed = self.space(space)
        self._noted: list[Words] = []

    def take(self) -> list[bytes]:
        joined = b"".join(keys.tobytes() for keys in self._noted)
        self._noted.clear()
        return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]

    def add(self, keys: Words, at: ObjectPlaces, lengths: NDArray[Any], used: Words) -> None:
        self._noted.append(keys[at.space == self.followed])
        super().add(keys, at, lengths, used)

    def drop(self, rows: ObjectRows) -> None:
        ours = rows[self.table.space[rows] == self.followed]
        self._noted.append(np.array(self.table.key[ours]))
        super().drop(rows)
