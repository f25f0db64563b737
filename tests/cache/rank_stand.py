"""A rank under test: a cache on its slice of a memory, whose copies are slow or break on demand.

All ranks make the same calls. What each writes into its pages is its own, so that bytes that come
back from the wrong rank, page, pool or layer are seen.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvtide.cache import (
    CacheConfig,
    Hardware,
    Lease,
    Ranks,
    Ratio,
    Tier,
    TieredCache,
    Tokens,
    TransferError,
)
from kvtide.cache.storage_tier import AttachmentState
from kvtide.index import Placement, Prompt
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Reuse
from kvtide.testing.faults import FaultyBackend
from kvtide.transfer.copy_jobs import Copier
from kvtide.transfer.lane import Lane
from kvtide.transfer.strided import Reference, Way
from kvtide.transfer.timeline import HostTimeline
from tests import worlds

PAGE = 4

_KV = Entry(tuple(Field(name, (4, 2), DType.FP32, sharded=True) for name in ("k", "v")))
_KEYS = Entry((Field("key", (3,), DType.BF16),))
_WINDOW = Reuse(reach=2 * PAGE - 1)

WHOLE = ModelMemory(
    "whole",
    PAGE,
    (
        PoolSpec("kv", (0, 2), _KV),
        PoolSpec("index", (2,), _KEYS, follows="kv"),
        PoolSpec("swa", (1, 3), _KV, reuse=_WINDOW),
    ),
    layers=4,
)
STAGED = ModelMemory(
    "staged",
    PAGE,
    (PoolSpec("kv", (0, 2, 3), _KV), PoolSpec("swa", (1,), _KV, reuse=_WINDOW)),
    layers=4,
)
"""In two stages the second one begins at layer 2, and its windows have no layer at all."""

CONFIG = CacheConfig(Tokens(24 * PAGE), host_size=Ratio(3), tokens_per_checkpoint=2 * PAGE)


class World(worlds.World):
    """Whose ranks have slices of the memories above."""

    def tensor_slice(self) -> ModelMemory:
        return WHOLE.slice(tensor_rank=self.rank, tensor_ranks=self.ranks)

    def stage(self) -> ModelMemory:
        """Two pipeline stages; with four ranks, of two tensor ranks each."""
        tensor_ranks = self.ranks // 2
        stage, tensor_rank = divmod(self.rank, tensor_ranks)
        return list(STAGED.stages(2, tensor_rank, tensor_ranks))[stage]


class Counted(Ranks):
    """Counts exchanges."""

    calls = 0

    def all_min(self, values: Sequence[int], clock: int = 0) -> list[int]:
        self.calls += 1
        return super().all_min(values, clock)


class Stand:
    """A cache on this rank's slice. It knows which bytes every page should have."""

    def __init__(
        self,
        world: World,
        memory: ModelMemory,
        agreement: Ranks | None = None,
        placement: Placement | None = None,
        **config: Any,
    ) -> None:
        self.world = world
        self.memory = memory
        agreement = agreement or Ranks()
        settings = replace(CONFIG, **config)
        hardware = Hardware.open(memory, settings, agreement)
        hardware.copier.close(1.0)
        self._broken: dict[Way, tuple[set[int], set[int]]] = {way: (set(), set()) for way in Way}
        self._backends = {way: FaultyBackend(Reference(), *self._broken[way]) for way in Way}
        lanes = {way: Lane(way.name, HostTimeline(), self._backends[way]) for way in Way}
        assert memory.part is not None
        layers = [range(layer, layer + 1) for layer in memory.part.layers]
        copier = Copier(hardware.device, hardware.host, lanes, layers)
        self.cache = TieredCache(
            memory,
            settings,
            agreement=agreement,
            placement=placement,
            hardware=replace(hardware, copier=copier),
        )
        self.prompts: list[Prompt] = []
        self.leases: list[Lease] = []
        self._written: dict[Lease, int] = {}

    # -- what happens to this rank's copies -------------------------------------------------

    def hold(self, way: Way) -> None:
        self._backends[way].hold.clear()

    def let_go(self) -> None:
        for backend in self._backends.values():
            backend.hold.set()

    def break_next(self, way: Way, halfway: bool = False) -> None:
        """The next step that way raises, before it copied anything or after half of it."""
        self._broken[way][halfway].add(self._backends[way].legs)

    def copied(self, lease: Lease) -> bool:
        """Wait until this rank's own load is over; whether it went well."""
        assert self.memory.part is not None
        try:
            for layer in self.memory.part.layers:
                self.cache.wait(lease, layer)
        except TransferError:
            return False
        return True

    def idle_lanes(self) -> None:
        """Wait until this rank's copies are over. Changes nothing in the tree."""
        deadline = time.monotonic() + 60
        while any(one.ticket and not one.ticket.done() for one in self.cache._in_flight):
            assert time.monotonic() < deadline, "copies do not end"
            time.sleep(0.001)

    # -- requests ---------------------------------------------------------------------------

    def prompt(self, tokens: Sequence[int]) -> Prompt:
        self.prompts.append(self.cache.prompt(tokens))
        return self.prompts[-1]

    def lease(self, prompt: Prompt, growth: int = 0) -> Lease | None:
        lease = self.cache.reserve(self.cache.match(prompt), growth_pages=growth)
        if lease is not None:
            self.leases.append(lease)
            self._written[lease] = lease.cached_tokens // PAGE
        return lease

    def leased(self, prompt: Prompt) -> Lease:
        lease = self.lease(prompt)
        assert lease is not None, "there should be room"
        return lease

    def compute(self, lease: Lease, upto: int, without: Collection[str] = ()) -> None:
        """Write the pages up to a token as a model would, and commit them."""
        pages = max(self._written[lease], (upto - self.memory.holdback) // PAGE)
        for page in range(self._written[lease], pages):
            for pool, layer, slot in self._rows(lease, page):
                if pool not in without:
                    self._row(pool, layer, slot).copy_(self._expected(lease, pool, layer, page))
        self._written[lease] = pages
        self.cache.commit(lease, upto, without)

    @property
    def optional(self) -> tuple[str, ...]:
        """The sidecars that a page may lack."""
        return tuple(p.name for p in self.memory.pools if p.follows and not p.reuse.required)

    def release(self, lease: Lease) -> None:
        self.cache.release(lease)
        self.leases.remove(lease)
        del self._written[lease]

    def keep(self, tokens: Sequence[int]) -> Prompt:
        """Compute a prompt to its end; its pages are on their way to the host afterwards."""
        prompt = self.prompt(tokens)
        lease = self.leased(prompt)
        self.compute(lease, prompt.tokens)
        self.release(lease)
        return prompt

    def keep_on_host(self, tokens: Sequence[int]) -> Prompt:
        prompt = self.keep(tokens)
        assert self.cache.drain(10.0)
        self.cache.flush(Tier.DEVICE)
        assert self.cache.match(prompt).by_tier == {Tier.HOST: (prompt.tokens - 1) // PAGE * PAGE}
        return prompt

    # -- what is there ----------------------------------------------------------------------

    def check(self, lease: Lease) -> None:
        """All bytes of the lease's prefix are those that were computed for these tokens."""
        carried = {name: self.cache.carries(lease, name) for name in self.optional}
        for page in range(lease.committed_pages):
            for pool, layer, slot in self._rows(lease, page):
                if pool not in carried or carried[pool][page]:
                    expected = self._expected(lease, pool, layer, page)
                    assert torch.equal(self._row(pool, layer, slot), expected), (page, pool, layer)

    def tree(self) -> dict[str, object]:
        """All in which ranks must not differ."""
        cache = self.cache
        anchors = [anchor.name for anchor in self.memory.anchors]
        matches = [cache.match(prompt) for prompt in self.prompts[-12:]]
        return {
            "clock": cache.index.tick,
            "pages": {(tier.name, name): n for (tier, name), n in cache.stats().pages.items()},
            "in flight": cache.stats().in_flight,
            "tables": [
                [cache.page_table(lease, name).tolist() for name in anchors]
                for lease in self.leases
            ],
            "leases": [(lease.loading, lease.failed) for lease in self.leases],
            "drafted": [[cache.carries(lease, name).tolist() for name in self.optional]
                        for lease in self.leases],
            "supplements": len(cache.supplements),
            "matches": [(m.tokens, sorted((t.name, n) for t, n in m.by_tier.items()))
                        for m in matches],
            **self._storage(),
            "why": [[str(stop) for stop in cache.why(match.prompt)] for match in matches],
        }  # fmt: skip

    def _storage(self) -> dict[str, object]:
        """Keys are each rank's own; and when a store is closed, each finds in its own time."""
        tree = self.cache.index.tree
        stores = [
            one for one in self.cache.storage.stores if one.state is not AttachmentState.CLOSING
        ]
        return {
            "imports": [one.taken for one in tree.imports.values()],
            "departures": [[(page.anchor, page.slot, page.absent) for page in one.pages]
                           for one in tree.departures.values()],
            "fetches": [[(fetch.stage, fetch.tokens) for fetch in one.fetches.open]
                        for one in stores],
            "leaving": [len(list(one.fetches.leaving)) for one in stores],
            "removals": [len(one.removals) for one in stores],
            "sidecars": [one.pages for one in tree.sidecar_imports.values()],
            "dropped": [one.storing.dropped for one in stores],
        }  # fmt: skip

    def agree(self) -> None:
        assert self.cache.validate() == []
        self.world.same(self.tree())

    def resident(self, tier: Tier) -> int:
        return sum(n.resident for (t, _), n in self.cache.stats().pages.items() if t is tier)

    def close(self) -> None:
        self.let_go()
        for lease in list(self.leases):
            self.release(lease)
        assert self.cache.drain(10.0)
        self.agree()
        self.cache.close()

    def _rows(self, lease: Lease, page: int) -> list[tuple[str, int, int]]:
        slots = {a.name: self.cache.page_table(lease, a.name)[page] for a in self.memory.anchors}
        return [
            (pool.name, layer, int(slots[pool.follows or pool.name]))
            for pool in self.memory.pools
            for layer in pool.layers
            if slots[pool.follows or pool.name] >= 0
        ]

    def _row(self, pool: str, layer: int, slot: int) -> torch.Tensor:
        return self.cache.hardware.device.rows(pool, layer)[slot]

    def _expected(self, lease: Lease, pool: str, layer: int, page: int) -> torch.Tensor:
        """Different for every rank, pool, layer and prefix: a draft's page depends on the tokens
        behind it, the others do not."""
        behind = self.memory.holdback if pool in self.optional else 0
        tokens = lease.prompt.packed[: ((page + 1) * PAGE + behind) * 4]
        digest = hashlib.shake_256(repr((self.world.rank, pool, layer)).encode() + tokens)
        size = self.memory.pool(pool).row_bytes(PAGE)
        return torch.frombuffer(bytearray(digest.digest(size)), dtype=torch.uint8)
