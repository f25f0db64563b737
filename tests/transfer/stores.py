"""A host and a store with a link between them, for tests that look at every byte of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvtide.spec import ALL, DType, Entry, Field, ModelMemory, PoolSpec, Reuse
from kvtide.storage import object_formats, open_store
from kvtide.storage.objects import DIRECT_BYTES
from kvtide.testing.faulty_store import FaultyStore
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.layout import Arrangement, Layout
from kvtide.transfer.host_pages import tails
from kvtide.transfer.storage_requests import SoughtPage, StoredPage
from kvtide.transfer.store_link import StoreLink

SPACE = bytes(range(32))
GUARD = 4096
GUARD_BYTE = 0xA5


def _pool(name: str, layers: tuple[int, ...], size: int, reach: object = ALL, **more: Any):
    required = more.pop("required", True)
    entry = Entry((Field("x", (size,), DType.UINT8),))
    return PoolSpec(name, layers, entry, reuse=Reuse(reach, None, required), **more)


LARGE = ModelMemory(
    "large",
    16,
    (
        _pool("kv", (0, 2), 2048),
        _pool("index", (2,), 16, follows="kv"),
        _pool("draft", (3,), 64, follows="kv", required=False),
        _pool("swa", (1,), 16, 20),
    ),
    layers=4,
)
"""A history whose pages go to a store as they lie, and windows that are too small for that."""
assert LARGE.slot_bytes("kv") >= DIRECT_BYTES > LARGE.slot_bytes("swa")

SMALL = ModelMemory("small", 4, (_pool("kv", (0, 1, 2), 16),), layers=3)


class Clock:
    """Time that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """`slots` host pages per anchor, full of bytes that tell them apart, between guard bands."""

    def __init__(
        self,
        memory: ModelMemory = SMALL,
        layout: Layout = Layout.PAGE_FIRST_DIRECT,
        slots: int = 16,
        store: Any = None,
        **options: Any,
    ) -> None:
        self.formats = object_formats(memory, SPACE)
        count = {anchor.name: slots for anchor in memory.anchors}
        arrangement = Arrangement(memory, count, layout, tails(self.formats))
        self.whole = torch.full((arrangement.bytes + 2 * GUARD,), GUARD_BYTE, dtype=torch.uint8)
        self.host = Buffers(arrangement, self.whole[GUARD : GUARD + arrangement.bytes])
        self.memory, self.slots = memory, slots
        self.store = store or FaultyStore(open_store("memory:", SPACE))
        self.clock = options.setdefault("clock", Clock())
        self.link = StoreLink(self.store, self.formats, self.host, **options)

    # -- pages ------------------------------------------------------------------------------

    def pages(self, count: int, first_slot: int = 0, anchor: str = "kv") -> list[StoredPage]:
        """Pages number 0 … of an anchor, in slots from `first_slot` on."""
        return [StoredPage(anchor, key(n), first_slot + n) for n in range(count)]

    def fill(self, pages: Sequence[StoredPage], seed: int = 0) -> list[bytes]:
        """Give the pages contents of their own; what they are, in canonical order."""
        rng = np.random.default_rng(seed)
        for page in pages:
            for row in self.host.arrangement.rows(page.anchor):
                data = torch.from_numpy(rng.integers(0, 255, row.bytes, np.uint8))
                self.host.rows(row.pool, row.layer)[page.slot] = data
        return self.contents(pages)

    def contents(self, pages: Sequence[StoredPage]) -> list[bytes]:
        return [
            self.host.pages(page.anchor, np.array([page.slot], np.int32)).numpy().tobytes()
            for page in pages
        ]

    def stored(self, pages: Sequence[StoredPage], seed: int = 0) -> list[bytes]:
        """Fill pages, store them, and wipe the host; what they were."""
        found = self.fill(pages, seed)
        writing = self.link.write(pages, 60.0)
        until(lambda: writing.quiet)
        assert writing.count == len(pages)
        self.wipe()
        return found

    def wipe(self) -> None:
        self.host.data.fill_(GUARD_BYTE)

    def sought(self, pages: Sequence[StoredPage]) -> list[SoughtPage]:
        return [SoughtPage(page.anchor, page.key) for page in pages]

    def keys(self, pages: Sequence[StoredPage]) -> list[bytes]:
        return [self.formats[page.anchor].key(page.key) for page in pages]

    # -- the end ----------------------------------------------------------------------------

    def guarded(self) -> bool:
        """Whether nothing is written outside the host's block."""
        bands = (self.whole[:GUARD], self.whole[GUARD + self.host.data.numel() :])
        return all(bool((band == GUARD_BYTE).all()) for band in bands)

    def close(self) -> None:
        if isinstance(self.store, FaultyStore):
            self.store.heal()
        assert self.link.close(5.0) and self.guarded()


def key(number: int) -> bytes:
    """The key of a page."""
    return number.to_bytes(4, "little") * 8


def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.0005)
