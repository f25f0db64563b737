"""Counters and gauges of a cache, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from kvtide.cache.inflight import InFlightTransfers
from kvtide.cache.sessions.session_pins import SessionStats
from kvtide.cache.storage_tier import StorageStats
from kvtide.index import Index, Stop
from kvtide.spec import Tier
from kvtide.transfer.copier import Issuer
from kvtide.transfer.strided import Way


@dataclass(frozen=True, slots=True)
class PageCount:
    """Pages of one anchor in one tier."""

    capacity: int
    resident: int
    free: int


def page_counts(index: Index) -> dict[tuple[Tier, str], PageCount]:
    """Of every anchor on the device and on the host."""
    return {
        (tier, anchor): PageCount(
            index.capacity(tier, anchor),
            index.resident_pages(tier, anchor),
            index.free_pages(tier, anchor),
        )
        for tier in (Tier.DEVICE, Tier.HOST)
        for anchor in index.anchor_names
    }


@dataclass(frozen=True, slots=True)
class Stats:
    """Counted since the cache was made, except where it says "now".

    prompt_tokens     of all leases but those of scratch prompts
    cached_tokens     of these, how many each tier gave
    misses            leases by the (pool, reason) that kept the match from going deeper
    refused           calls of `reserve` for which there was no room
    transfers         ended, by direction and end: ("load", "landed")
    moved_bytes       by direction; `moved_pages` alike
    in_flight         transfers now; `overdue` of these are past their deadline
    flying            the submitted ones of these, by direction
    busy_s            how long any transfer of a direction was in flight
    lane_failures     jobs that raised, by direction
    skipped_backups   copies to the host that found no room there
    pages             by tier and anchor, now
    sessions          those known and pinned now, and how they ended
    prefetches        ended, by outcome
    storage           how the attached store is used; None without one
    """

    prompt_tokens: int
    cached_tokens: Mapping[Tier, int]
    misses: Mapping[tuple[str, str], int]
    refused: int
    transfers: Mapping[tuple[str, str], int]
    moved_bytes: Mapping[str, int]
    moved_pages: Mapping[str, int]
    in_flight: int
    overdue: int
    flying: Mapping[str, int]
    busy_s: Mapping[str, float]
    lane_failures: Mapping[str, int]
    skipped_backups: int
    pages: Mapping[tuple[Tier, str], PageCount]
    sessions: SessionStats
    prefetches: Mapping[str, int]
    storage: StorageStats | None = None


class TransferCounts(TypedDict):
    """The fields of `Stats` about transfers between device and host."""

    transfers: Mapping[tuple[str, str], int]
    moved_bytes: Mapping[str, int]
    moved_pages: Mapping[str, int]
    in_flight: int
    overdue: int
    flying: Mapping[str, int]
    busy_s: Mapping[str, float]
    lane_failures: Mapping[str, int]


def counts_of_transfers(
    transfers: InFlightTransfers, lanes: Mapping[Way, Issuer]
) -> TransferCounts:
    return TransferCounts(
        transfers={(w.name.lower(), s.value): n for (w, s), n in transfers.ended.items()},
        moved_bytes={way.name.lower(): transfers.moved_bytes[way] for way in Way},
        moved_pages={way.name.lower(): transfers.moved_pages[way] for way in Way},
        in_flight=len(transfers),
        overdue=len(transfers.overdue()),
        flying={way.name.lower(): busy.open for way, busy in transfers.busy.items()},
        busy_s={way.name.lower(): busy.seconds for way, busy in transfers.busy.items()},
        lane_failures={way.name.lower(): lane.failures for way, lane in lanes.items()},
    )


@dataclass(slots=True)
class CacheCounts:
    """The counters that `TieredCache` itself keeps."""

    prompt_tokens: int = 0
    cached_tokens: Counter[Tier] = field(default_factory=Counter)
    misses: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: int = 0

    def leased(self, tokens: int, by_tier: Mapping[Tier, int], why: tuple[Stop, ...]) -> None:
        self.prompt_tokens += tokens
        self.cached_tokens.update(by_tier)
        self.misses.update((stop.pool, stop.reason) for stop in why)
