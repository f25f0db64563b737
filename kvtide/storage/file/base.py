"""What the parts of one open store share."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvtide.storage.file.counts import StoreCounts
from kvtide.storage.file.file_settings import FileSettings
from kvtide.storage.file.folder import Folder
from kvtide.storage.file.folder_catalog import Catalog
from kvtide.storage.file.writer import Writer
from kvtide.storage.store import StoreError


@dataclass(slots=True)
class Base:
    """`lock` guards the catalog, the writer and `closed`; files are read and written without it."""

    name: str
    folder: Folder
    settings: FileSettings
    catalog: Catalog
    writer: Writer
    counts: StoreCounts
    space: int
    """The number that the catalog has for the store's own space."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    closed: bool = False

    def look(self) -> None:
        """Under the lock: see what others did, or refuse because the store was closed."""
        if self.closed:
            raise StoreError(f"storage {self.name}: it has been closed; open it again")
        self.catalog.refresh()
