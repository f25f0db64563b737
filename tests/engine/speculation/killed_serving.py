"""A process that serves over a folder, and kills itself when it stores a certain draft page.

    python -m tests.engine.speculation.killed_serving FOLDER MOMENT PAGE

MOMENT  `before`: the page's target object is stored, its draft object not begun
        `within`: the bytes of its draft object are written, and not yet entered in the journal
PAGE    counts draft objects in the order in which they are stored
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtide.cache.hardware import formats
from kvtide.storage import Store
from kvtide.storage.file.appends import Putter
from tests.engine.speculation.lookup_pair import LookupServer, walks

PROMPTS = [one.prompt for one in walks(3, seed=12)]


def die(*_: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


class KillingStore:
    """Writes object by object, up to the chosen draft's."""

    def __init__(self, store: Store, moment: str, page: int) -> None:
        self._store, self._moment, self._left = store, moment, page
        self.draft_bytes = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[bool]:
        done: list[bool] = []
        for key, source in zip(keys, sources, strict=True):
            if len(source) == self.draft_bytes:
                self._stored_draft()
            done += self._store.write([key], [source])
        return done

    def _stored_draft(self) -> None:
        self._left -= 1
        if self._left < 0 and self._moment == "before":
            die()
        elif self._left < 0:
            Putter._commit = die  # type: ignore[method-assign]


def main(folder: str, moment: str, page: str) -> None:
    stores: list[KillingStore] = []

    def wrap(store: Store) -> Any:
        stores.append(KillingStore(store, moment, int(page)))
        return stores[0]

    server = LookupServer(Path(folder), wrap=wrap)
    sizes = {
        one.pool: one.bytes for one in formats(server.cache.memory, server.cache.config).values()
    }
    assert len(set(sizes.values())) == len(sizes), "objects are distinguished by their size"
    stores[0].draft_bytes = sizes["draft"]
    server.serve(PROMPTS)
    server.settle()


if __name__ == "__main__":
    main(*sys.argv[1:])
