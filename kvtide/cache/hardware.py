"""What a cache runs on: the memory of both tiers, and the copier between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtide.cache.config import CacheConfig
from kvtide.cache.ranks import Agreement
from kvtide.spec import ModelMemory, Tier
from kvtide.tiers import Arena, Arrangement, Buffers, capacity_pages, device_arena, host_arena
from kvtide.transfer.backends import open_copier
from kvtide.transfer.copier import Copier


@dataclass(frozen=True, slots=True)
class Hardware:
    device: Buffers
    host: Buffers
    copier: Copier
    arenas: Sequence[Arena] = ()

    @classmethod
    def open(cls, memory: ModelMemory, config: CacheConfig, agreement: Agreement) -> Hardware:
        """Take the memory the config asks for, or refuse saying what the machine has.

        Ranks that keep the same books need the same slots, so the smallest rank decides.
        """
        on = config.torch_device
        slots = _slots(memory, config, agreement)
        device = Arrangement(memory, slots[Tier.DEVICE], config.device_layout)
        host = Arrangement(memory, slots[Tier.HOST], config.layout)
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

    def close(self, timeout_s: float) -> None:
        """Memory is given back only when nothing copies any more."""
        if self.copier.close(timeout_s):
            for arena in self.arenas:
                arena.close()


def _slots(
    memory: ModelMemory, config: CacheConfig, agreement: Agreement
) -> dict[Tier, dict[str, int]]:
    """Pages per tier and anchor, agreed between ranks."""
    distance = config.tokens_per_checkpoint
    device = capacity_pages(memory, config.device_size, tokens_per_checkpoint=distance)
    host = dict.fromkeys(device, 0)
    if config.host_size is not None:
        device_bytes = sum(memory.slot_bytes(anchor) * count for anchor, count in device.items())
        host = capacity_pages(memory, config.host_size, device_bytes, distance)
    agreed = iter(agreement.least([*device.values(), *host.values()]))
    return {tier: {anchor: next(agreed) for anchor in device} for tier in (Tier.DEVICE, Tier.HOST)}
