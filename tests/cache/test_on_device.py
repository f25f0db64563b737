"""The whole path on the device under test: real memory, real backend, the model's own stream.

On a GPU the model is far behind the thread that runs it. These tests keep it behind on purpose:
what is copied, and when, must go by the order of the calls and not by when they happen to be done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from kvtide.cache import Bytes, CacheConfig, EveryPages, Lease, Ratio, Tier, TieredCache
from kvtide.spec import ModelMemory, catalog
from kvtide.spec.sizing import bytes_for
from kvtide.tiers import Layout
from kvtide.transfer.backends import CELLS

PAGES = 12
MODELS = ("qwen3-8b", "gemma-3-27b", "qwen3-next-80b", "deepseek-v3.2", "deepseek-v4-flash")


def small(name: str) -> ModelMemory:
    """Two layers of every pool of a real model, numbered as they are there."""
    memory = catalog.resolve(name)
    return replace(memory, pools=tuple(replace(p, layers=p.layers[:2]) for p in memory.pools))


def cells(kind: str) -> list[tuple[str, Layout]]:
    found = [
        (name, layout) for (k, name), layouts in CELLS.items() if k == kind for layout in layouts
    ]
    return sorted(found, key=str)


class Model:
    """Writes and reads pages as a model does: through views, on its own stream, without waiting."""

    def __init__(self, memory: ModelMemory, device: torch.device, backend: str, layout: Layout):
        page = memory.page_tokens
        config = CacheConfig(
            Bytes(bytes_for(memory, PAGES, page)),
            host_size=Ratio(3),
            device=str(device),
            backend=backend,
            host_layout=layout,
            tokens_per_checkpoint=page,
        )
        self.memory, self.device = memory, device
        self.cache = TieredCache(memory, config, placement=EveryPages(1))

    def tokens(self, number: int, pages: int) -> list[int]:
        start = number * 1_000_000
        return list(range(start, start + pages * self.memory.page_tokens + 1))

    def lease(self, number: int, pages: int) -> Lease:
        """Waits for the backups of others, whose pages cannot go before they are copied."""
        cache = self.cache
        prompt = cache.prompt(self.tokens(number, pages))
        lease = cache.reserve(cache.match(prompt))
        if lease is None:
            assert cache.drain(10)
            lease = cache.reserve(cache.match(prompt))
        assert lease is not None
        cache.load(lease)
        return lease

    def serve(self, number: int, pages: int) -> None:
        """Compute what is not found, behind a model that is busy, and let go of it at once."""
        lease = self.lease(number, pages)
        first = lease.cached_tokens // self.memory.page_tokens
        self.fall_behind()
        for pool, layer in self.rows():
            self.cache.wait(lease, layer)
            table = self.slots(lease, pool)
            rows = self.cache.hardware.device.rows(pool, layer)
            rows[table[first:pages]] = self.expected(number, pool, layer, pages)[first:]
        self.cache.commit(lease, pages * self.memory.page_tokens + self.memory.holdback)
        self.cache.poll()
        self.cache.release(lease)

    def read(self, lease: Lease, pages: int) -> dict[tuple[str, int], torch.Tensor]:
        """What the layers see, each as soon as it may look."""
        found = {}
        for pool, layer in sorted(self.rows(), key=lambda row: row[1]):
            self.cache.wait(lease, layer)
            table = self.slots(lease, pool)[self.needed(pool, pages)]
            found[pool, layer] = self.cache.hardware.device.rows(pool, layer)[table]
        return found

    def needed(self, pool: str, pages: int) -> slice:
        """The pages that a resume after `pages` pages reads: as far back as the anchor reaches."""
        anchor = self.memory.pool(self.memory.pool(pool).follows or pool)
        reach = anchor.reuse.reach_pages(self.memory.page_tokens)
        return slice(0 if reach is None else max(0, pages - reach), pages)

    def rows(self) -> Iterator[tuple[str, int]]:
        """All but the unfinished part of a page, which no copy brings back."""
        return ((p.name, layer) for p in self.memory.at_rest.pools for layer in p.layers)

    def slots(self, lease: Lease, pool: str) -> torch.Tensor:
        return torch.from_numpy(self.cache.page_table(lease, pool)).long().to(self.device)

    def expected(self, number: int, pool: str, layer: int, pages: int) -> torch.Tensor:
        size = self.memory.pool(pool).row_bytes(self.memory.page_tokens)
        return _content(number, pool, layer, size)[:pages].to(self.device)

    def fall_behind(self) -> None:
        if self.device.type == "cuda":
            torch.cuda._sleep(20_000_000)

    def wrong(
        self, number: int, pages: int, found: dict[tuple[str, int], torch.Tensor]
    ) -> list[tuple[str, int]]:
        """The rows that do not hold what was written."""
        return [
            (pool, layer)
            for (pool, layer), seen in found.items()
            if not torch.equal(
                seen, self.expected(number, pool, layer, pages)[self.needed(pool, pages)]
            )
        ]


@cache
def _content(number: int, pool: str, layer: int, size: int) -> torch.Tensor:
    order = np.random.default_rng([number, layer, *pool.encode()])
    return torch.from_numpy(order.integers(0, 256, (PAGES, size), np.uint8))


# On a CPU other tests of this folder do the same.
pytestmark = pytest.mark.full


@pytest.fixture(params=MODELS)
def memory(request: pytest.FixtureRequest) -> ModelMemory:
    return small(request.param)


def test_pages_come_back_as_they_were_written_in_every_cell(memory, device) -> None:
    for backend, layout in cells(device.type):
        model = Model(memory, device, backend, layout)
        for number in range(4):
            model.serve(number, 5)
        for number in (0, 1, 2, 3, 1, 0):
            lease = model.lease(number, 5)
            assert lease.cached_tokens == 5 * memory.page_tokens
            assert model.wrong(number, 5, model.read(lease, 5)) == [], (backend, layout)
            model.cache.release(lease)
            model.cache.poll()
        assert model.cache.drain(10) and model.cache.validate() == []
        stats = model.cache.stats()
        assert stats.moved_bytes["load"] > 0 and stats.transfers.keys() == {
            ("load", "landed"),
            ("backup", "landed"),
        }
        model.cache.close()


def test_a_load_leaves_alone_what_queued_work_still_reads(memory, device) -> None:
    model = Model(memory, device, CacheConfig(Bytes(1), device=str(device)).backend_name,
                  Layout.PAGE_FIRST_DIRECT)  # fmt: skip
    for number in range(2):
        model.serve(number, 8)
        assert model.cache.drain(10)
        model.cache.flush(Tier.DEVICE)
    lease = model.lease(0, 8)
    model.fall_behind()
    seen = model.read(lease, 8)
    model.cache.release(lease)
    assert model.cache.drain(10)
    assert model.cache.flush(Tier.DEVICE)
    other = model.lease(1, 8)
    assert model.wrong(1, 8, model.read(other, 8)) == []
    assert model.wrong(0, 8, seen) == []
    model.cache.release(other)
    model.cache.close()
