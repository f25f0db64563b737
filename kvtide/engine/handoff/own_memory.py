"""This rank's memory as a peer sees it: its manifest, and the regions that the manifest names."""

from __future__ import annotations

from typing import NamedTuple

from kvtide.cache import TieredCache
from kvtide.tiers.manifest import PAGES, TAIL, Area, MemoryKind, MemoryManifest, running_areas
from kvtide.transfer.peer.transport import Region


class OwnMemory(NamedTuple):
    manifest: MemoryManifest
    regions: tuple[Region, ...]


def source_memory(cache: TieredCache) -> OwnMemory:
    """What a prefill side reads: the pages of running requests."""
    device, host = cache.hardware.arenas[:2]
    areas = running_areas(
        cache.hardware.device.arrangement, cache.hardware.host.arrangement, regions=(0, 1)
    )
    return OwnMemory(_manifest(cache, areas), (Region.of(device), Region.of(host)))


def target_memory(cache: TieredCache) -> OwnMemory:
    """What a decode side has written to it: pages on the host, and tails."""
    tails, host = cache.hardware.tails, cache.hardware.arenas[1]
    assert tails is not None, "without tail rows nothing is received"
    areas = (
        Area.of(PAGES, cache.hardware.host.arrangement, MemoryKind.HOST, region=0),
        Area.of(TAIL, tails.buffers.arrangement, MemoryKind.HOST, region=1),
    )
    return OwnMemory(_manifest(cache, areas), (Region.of(host), Region.of(tails.arena)))


def _manifest(cache: TieredCache, areas: tuple[Area, ...]) -> MemoryManifest:
    config = cache.config
    prints = config.identity, config.draft_fingerprint
    return MemoryManifest.of(cache.memory, areas, *prints)
