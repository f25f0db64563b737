"""What a cache runs on: the memory of both tiers, and the copier between them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtide.cache.cache_config import CacheConfig
from kvtide.cache.rank_agreement import Agreement
from kvtide.spec import ModelMemory, PageMove, Tier
from kvtide.storage import ObjectFormat, object_formats
from kvtide.tiers import Arena, Arrangement, Buffers, capacity_pages, device_arena, host_arena
from kvtide.transfer.backends import open_copier
from kvtide.transfer.copier import Copier
from kvtide.transfer.host_pages import tails


@dataclass(frozen=True, slots=True)
class Hardware:
    device: Buffers
    host: Buffers
    copier: Copier
    arenas: Sequence[Arena] = ()

    @classmethod
    def open(cls, memory: ModelMemory, config: CacheConfig, agreement: Agreement) -> Hardware:
        """Allocate the memory that the config asks for, or refuse, naming what the machine has.

        Ranks keep the same tree and so need the same slots: the smallest rank decides.
        """
        on = config.torch_device
        slots = _slots(memory, config, agreement)
        device = Arrangement(memory, slots[Tier.DEVICE], config.device_layout)
        behind = tails(formats(memory, config))
        host = Arrangement(memory.at_rest, slots[Tier.HOST], config.host_layout, behind)
        arenas = [device_arena(device.bytes, on)]
        try:
            arenas.append(host_arena(host.bytes, pinned=on.type == "cuda"))
            blocks = [Buffers(a, b.data) for a, b in zip((device, host), arenas, strict=True)]
            copier = open_copier(config.backend_name, *blocks)
        except Exception:
            for arena in arenas:
                arena.close()
            raise
        return cls(blocks[0], blocks[1], copier, arenas)

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

    It is the same with any draft and without one.
    """
    schema = memory.at_rest.without_draft.schema_digest()
    return hashlib.sha256(config.fingerprint + schema).digest()


def formats(memory: ModelMemory, config: CacheConfig) -> dict[str, ObjectFormat]:
    """The storage formats of pages, by pool."""
    return object_formats(memory.at_rest, space(memory, config), config.draft_fingerprint)


def _slots(
    memory: ModelMemory, config: CacheConfig, agreement: Agreement
) -> dict[Tier, dict[str, int]]:
    """Pages per tier and anchor, agreed between ranks."""
    distance = config.tokens_per_checkpoint
    device = capacity_pages(memory, config.device_size, tokens_per_checkpoint=distance)
    host = dict.fromkeys(device, 0)
    if config.host_size is not None:
        device_bytes = sum(memory.slot_bytes(anchor) * count for anchor, count in device.items())
        behind = tails(formats(memory, config))
        host = capacity_pages(memory.at_rest, config.host_size, device_bytes, distance, behind)
    agreed = iter(agreement.all_min([*device.values(), *host.values()]))
    return {tier: {anchor: next(agreed) for anchor in device} for tier in (Tier.DEVICE, Tier.HOST)}
