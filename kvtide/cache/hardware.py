"""What a cache runs on: the memory of both tiers, and the copier between them."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvtide.cache.cache_config import CacheConfig
from kvtide.cache.rank_agreement import Agreement
from kvtide.spec import ALL, ModelMemory, PageMove, RankShape, Tier
from kvtide.spec.residency import HotShape
from kvtide.storage import ObjectFormat, object_formats
from kvtide.tiers import (
    Arena,
    Arrangement,
    Buffers,
    Bytes,
    HotBuffers,
    TierError,
    TierSize,
    capacity_pages,
    device_arena,
    host_arena,
)
from kvtide.transfer.backends import open_copier
from kvtide.transfer.copy_jobs import Copier
from kvtide.transfer.host_pages import tails
from kvtide.transfer.peer.tail_rows import TailRows
from kvtide.transfer.shapes import OtherShapes


@dataclass(frozen=True, slots=True)
class Hardware:
    """`hot` are the buffers of pools whose pages are on the host, by pool. `tails` receive the last
    pages of prompts that peers prefill; None where nothing is received."""

    device: Buffers
    host: Buffers
    copier: Copier
    arenas: Sequence[Arena] = ()
    hot: Mapping[str, HotBuffers] = field(default_factory=dict)
    tails: TailRows | None = None

    @classmethod
    def open(cls, memory: ModelMemory, config: CacheConfig, agreement: Agreement) -> Hardware:
        """Allocate the memory that the config asks for, or refuse, naming what the machine has.

        Ranks keep the same tree and so need the same slots: the smallest rank decides.
        """
        on = config.torch_device
        check_residency(memory, config)
        slots = _slots(memory, config, agreement)
        device = Arrangement(memory, slots[Tier.DEVICE], config.device_layout)
        behind = tails(formats(memory, config))
        host = Arrangement(memory.at_rest, slots[Tier.HOST], config.host_layout, behind)
        arenas, hot = [device_arena(device.bytes, on)], dict[str, HotBuffers]()
        try:
            for pool, shape in hot_shapes(memory, config, slots).items():
                spec = memory.pool(pool)
                hot[pool] = HotBuffers(spec, shape, memory.page_tokens, on)
                arenas.append(hot[pool].arena)
            pinned, shared = on.type == "cuda", config.shared_host
            arenas.insert(1, host_arena(host.bytes, pinned, shared=shared))
            blocks = [Buffers(a, b.data) for a, b in zip((device, host), arenas, strict=False)]
            tail_rows = None
            if config.tail_rows:
                homes = dict(zip((Tier.DEVICE, Tier.HOST), blocks, strict=True))
                tail_rows = TailRows(memory, config.tail_rows, homes, pinned=pinned, shared=shared)
                arenas.append(tail_rows.arena)
            copier = open_copier(config.backend_name, *blocks)
        except Exception:
            for arena in arenas:
                arena.close()
            raise
        return cls(blocks[0], blocks[1], copier, arenas, hot, tail_rows)

    @property
    def capacity_pages(self) -> Mapping[Tier, Mapping[str, int]]:
        return {
            Tier.DEVICE: self.device.arrangement.slots,
            Tier.HOST: self.host.arrangement.slots,
        }

    def copy_on_device(self, move: PageMove) -> None:
        """Copy a sidecar between device slots, behind the work that is queued now."""
        assert move.source is move.target is Tier.DEVICE and move.sidecar is not None
        self.device.copy_rows(move.sidecar, move.source_slots, move.target_slots)

    def close(self, timeout_s: float) -> None:
        """Free the memory, unless a copy is still running."""
        if self.copier.close(timeout_s):
            for arena in self.arenas:
                arena.close()


def space(memory: ModelMemory, config: CacheConfig) -> bytes:
    """The prefix of all keys in storage: different weights or pools never share one.

    It is the same with any draft and without one, and for all ranks of any shape.
    """
    schema = memory.whole.at_rest.without_draft.schema_digest()
    return hashlib.sha256(config.identity + schema).digest()


def formats(memory: ModelMemory, config: CacheConfig) -> dict[str, ObjectFormat]:
    """The storage formats of pages, by pool."""
    return object_formats(memory.at_rest, space(memory, config), config.draft_fingerprint)


def object_suffixes(
    memory: ModelMemory, config: CacheConfig, anchor: str, shape: RankShape
) -> tuple[bytes, ...]:
    """What follows a page's key in the keys of the anchor's objects, which the ranks of a shape
    store: the page is there when all of them are."""
    ranks = memory.whole.ranks(shape)
    return tuple(dict.fromkeys(formats(rank, config)[anchor].suffix for rank in ranks))


def other_shapes(host: Arrangement, config: CacheConfig) -> OtherShapes:
    """The shapes of ranks whose stored pages are found as well."""
    return OtherShapes(
        host,
        space(host.memory, config),
        config.draft_fingerprint,
        any_tensor_ranks=config.any_tensor_ranks,
    )


TierPages = dict[Tier, dict[str, int]]


def check_residency(memory: ModelMemory, config: CacheConfig) -> None:
    """Refuse hot pools where there is no host to keep them, or no request may run."""
    if not memory.hot_pools:
        return
    names = ", ".join(pool.name for pool in memory.hot_pools)
    if config.host_size is None:
        raise TierError(
            f"{memory.model}: {names} would be kept on the host, and there is no host tier; "
            "use --resident all, or a host tier"
        )
    if config.hot_rows < 1:
        raise TierError(f"{config.hot_rows} hot buffers of {names}; use at least 1")


def hot_shapes(memory: ModelMemory, config: CacheConfig, pages: TierPages) -> dict[str, HotShape]:
    """The device memory of every hot pool, beside so many pages of the others."""
    return _shapes(memory, config, _longest(memory, config, pages)) if memory.hot_pools else {}


def _shapes(memory: ModelMemory, config: CacheConfig, longest: int) -> dict[str, HotShape]:
    return {
        pool.name: HotShape.of(pool, memory.page_tokens, config.hot_rows, longest)
        for pool in memory.hot_pools
    }


def _longest(
    memory: ModelMemory,
    config: CacheConfig,
    pages: TierPages,
    tiers: Collection[Tier] = tuple(Tier),
) -> int:
    """Pages of the longest sequence that fits where its histories live, in these tiers."""
    histories = [anchor for anchor in memory.anchors if anchor.reuse.reach is ALL]
    longest = min(pages[a.home][a.name] for a in histories if a.home in tiers)
    if config.longest_tokens is None:
        return longest
    return min(longest, -(-config.longest_tokens // memory.page_tokens))


def _slots(memory: ModelMemory, config: CacheConfig, agreement: Agreement) -> TierPages:
    """Pages per tier and anchor, agreed between ranks."""
    pages = _sized(memory, config, _hot_bytes(memory, config))
    device, host = pages[Tier.DEVICE], pages[Tier.HOST]
    agreed = iter(agreement.all_min([*device.values(), *host.values()]))
    return {tier: {anchor: next(agreed) for anchor in device} for tier in (Tier.DEVICE, Tier.HOST)}


def _hot_bytes(memory: ModelMemory, config: CacheConfig) -> int:
    """What hot buffers take of the device, for the longest sequence that fits beside them.

    The longer that is, the larger are the buffers, and the fewer pages they leave (a host that is a
    ratio of the device counts them, too): the least length is found that none beside it exceeds.
    """
    if not memory.hot_pools:
        return 0

    def needed(longest: int) -> int:
        return sum(shape.bytes for shape in _shapes(memory, config, longest).values())

    def enough(longest: int) -> bool:
        try:
            beside = _sized(memory, config, needed(longest))
        except TierError:  # Too long: hardly anything is left.
            return True
        return _longest(memory, config, beside) <= longest

    max_pages = _longest(memory, config, _sized(memory, config, 0), (Tier.DEVICE,))
    lengths = range(1, max_pages + 1)
    return needed(lengths[bisect_left(lengths[:-1], True, key=enough)])


def _sized(memory: ModelMemory, config: CacheConfig, hot_bytes: int) -> TierPages:
    """Pages per tier and anchor, where hot buffers take so much of the device's bytes."""
    distance, resident = config.tokens_per_checkpoint, memory.in_device_pages
    device = capacity_pages(resident, _left(config, hot_bytes), tokens_per_checkpoint=distance)
    device |= dict.fromkeys((pool.name for pool in memory.hot_pools), 0)
    device = {anchor.name: device[anchor.name] for anchor in memory.anchors}
    host = dict.fromkeys(device, 0)
    if config.host_size is not None:
        device_bytes = sum(memory.slot_bytes(anchor) * count for anchor, count in device.items())
        behind = tails(formats(memory, config))
        size = device_bytes + hot_bytes
        host = capacity_pages(memory.at_rest, config.host_size, size, distance, behind)
    return {Tier.DEVICE: device, Tier.HOST: host}


def _left(config: CacheConfig, hot_bytes: int) -> TierSize:
    """What hot buffers leave of the device tier; a tier sized in tokens has them on top."""
    size = config.device_size
    if not isinstance(size, Bytes) or not hot_bytes:
        return size
    if hot_bytes >= size.bytes:
        raise TierError(
            f"device memory: hot buffers of {config.hot_rows} requests take {hot_bytes:,} of "
            f"{size.bytes:,} bytes; use fewer requests (--max-running), a smaller hot:B, or more "
            "device memory"
        )
    return Bytes(size.bytes - hot_bytes)
