"""Which pages the server's own folder has, as its journals record it.

A store knows a page by digests: the keys of its objects. They follow from the page's key and the
names of the ranks' objects, so a page can be looked up once its tokens are known, and not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.storage.file import FolderFollower, FolderSpace
from kvtide.storage.objects import object_key


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A folder, and the suffixes of the keys of those objects that make up a page there."""

    folder: FolderSpace
    suffixes: tuple[bytes, ...]


class FolderPages:
    """Pages by their keys; those that are watched. Raises `StoreError` or OSError where the folder
    cannot be read."""

    def __init__(self, source: FolderSource) -> None:
        self._follower = FolderFollower(source.folder)
        self._suffixes = source.suffixes
        self._watched: dict[bytes, bytes] = {}

    def watch(self, pages: Sequence[bytes]) -> list[bool]:
        """Whether each was there at the last look; later ones tell what has changed."""
        for page in pages:
            self._watched.update(dict.fromkeys(self._objects(page), page))
        return self._there(pages)

    def forget(self, page: bytes) -> None:
        for key in self._objects(page):
            self._watched.pop(key, None)

    def look(self) -> list[tuple[bytes, bool]]:
        """Watched pages that may have come or gone since the last look, and which are there."""
        named = self._follower.look()
        keys = self._watched if named is None else named
        pages = list(dict.fromkeys(self._watched[key] for key in keys if key in self._watched))
        return list(zip(pages, self._there(pages), strict=True))

    def _there(self, pages: Sequence[bytes]) -> list[bool]:
        found = self._follower.has([key for page in pages for key in self._objects(page)])
        parts = len(self._suffixes)
        return [all(found[at : at + parts]) for at in range(0, len(found), parts)]

    def _objects(self, page: bytes) -> list[bytes]:
        return [object_key(page, suffix) for suffix in self._suffixes]
