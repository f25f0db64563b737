"""The store that a server would use: a folder on this machine, or the one of a URL; its speed.

A folder, and a store of files, are measured in a new folder beside the pages, so that none of them
is dropped for it. Any other store is measured in a space of its own, which is removed again.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import numpy as np

from kvtide.bench import store_speed
from kvtide.bench.codecs import codec_speed
from kvtide.bench.codecs.codec_speed import StoreGain
from kvtide.bench.progress import quietly
from kvtide.bench.store_speed import MemoryBlocks, Ours, StoreCase
from kvtide.server.setup.store_setup import refusing
from kvtide.spec import DType, ModelMemory
from kvtide.storage import StoreError, object_formats, open_store
from kvtide.storage.store import SPACE_BYTES
from kvtide.storage.trial import new_space
from kvtide.storage.url import StoreURL

CODEC = "lossless"
MEASURED_BYTES = 32 << 20
SHORT_S = 0.5
"""A store that takes longer for an eighth of these bytes is judged by that."""
OBJECT_BYTES = 1 << 20
"""The size of a stored object where no model is given."""
TURNS = 2
_SPACE = bytes(SPACE_BYTES)


@dataclass(frozen=True, slots=True)
class JudgedStore:
    """`url` is what `--storage` was given; a folder's has no cap yet."""

    url: str
    named: bool = True

    @classmethod
    def of_folder(cls, folder: Path) -> JudgedStore:
        return cls(f"file://{quote(str(folder.absolute()))}", named=False)

    @property
    def parsed(self) -> StoreURL:
        return StoreURL.parse(self.url)

    @property
    def folder(self) -> Path | None:
        """Of a store of files."""
        parsed = self.parsed
        return Path(parsed.path) if parsed.scheme == "file" else None

    def __str__(self) -> str:
        return f"the disk of {self.folder}" if self.folder is not None else str(self.parsed)

    def with_settings(self, **settings: str | None) -> str:
        """The URL with these settings; None takes one away."""
        parts = urlsplit(self.url)
        known = dict(parse_qsl(parts.query, keep_blank_values=True)) | settings
        kept = {name: value for name, value in known.items() if value is not None}
        return urlunsplit(parts._replace(query=urlencode(kept, safe=":/")))


def store_rates(store: JudgedStore, memory: ModelMemory | None) -> dict[str, float]:
    """Bytes per second of pages of this model, without a codec."""
    size = OBJECT_BYTES
    if memory is not None:
        size = max(one.bytes for one in object_formats(memory.at_rest, _SPACE).values())
        size = min(MEASURED_BYTES, -(-size // store_speed.ALIGN) * store_speed.ALIGN)
    blocks = MemoryBlocks(max(MEASURED_BYTES, size))
    with _tried(store) as url, ExitStack() as opened:
        tried = open_store(url, new_space())
        opened.callback(tried.close)
        opened.callback(tried.clear)
        driver, began = Ours(tried, blocks), time.monotonic()
        for whole in (MEASURED_BYTES // 8, MEASURED_BYTES):
            case = StoreCase("pages", size, max(1, whole // size))
            rows = store_speed.measure(case, [driver], blocks, TURNS, quietly)
            if time.monotonic() > began + SHORT_S:
                break
    return {f"storage_{row.way}": row.gb_s * 1e9 for row in rows}


def codec_gain(store: JudgedStore, memory: ModelMemory, dtype: DType) -> StoreGain:
    """Pages through the store with the lossless codec beside pages without one, in turns.

    Pages hold random numbers of this dtype, normally distributed. They shrink about as computed
    ones do.
    """
    formats = object_formats(memory.at_rest, _SPACE)
    objects = [(one, _random_bytes(one.bytes, dtype)) for one in formats.values()]
    with _tried(store) as url:
        _, gain = codec_speed.in_store(url, objects, MEASURED_BYTES // 2, TURNS, quietly, [CODEC])
    return gain


def _random_bytes(size: int, dtype: DType) -> bytes:
    numbers = np.random.default_rng(0).standard_normal(math.ceil(size / 2), np.float32)
    if dtype is DType.BF16:
        return numbers.view(np.uint16)[1::2].tobytes()[:size]
    return numbers.tobytes()[:size]


@contextmanager
def _tried(store: JudgedStore) -> Iterator[str]:
    """A URL to measure with; no error names the store's password."""
    with refusing(store.url):
        plain = store.with_settings(codec=None, coders=None)
        if store.folder is None:
            yield plain
            return
        with tempfile.TemporaryDirectory(
            dir=existing(store.folder), prefix=".kvtide-doctor-", ignore_cleanup_errors=True
        ) as place:
            query = urlsplit(JudgedStore(plain).with_settings(cap="1GB")).query
            yield f"file://{quote(place)}/store?{query}"


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there and can be written."""
    found = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(found, os.W_OK | os.X_OK):
        raise StoreError(f"{found} cannot be written; name another folder with --folder")
    return found
