"""Counters and gauges of a cache, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from kvtide.cache.inflight import InFlightTransfers
from kvtide.cache.sessions.session_pins import SessionStats
from kvtide.cache.storage_tier import StorageStats
from kvtide.durations import Durations
from kvtide.index import Index, Stop
from kvtide.spec import Tier
from kvtide.transfer.copy_jobs import Issuer
from kvtide.transfer.strided import Way
from kvtide.transfer.transfers import TransferState


@dataclass(frozen=True, slots=True)
class PageCount:
    """Pages of one anchor in one tier; of the resident ones, `pinned` cannot be evicted now."""

    capacity: int
    resident: int
    free: int
    pinned: int


@dataclass(frozen=True, slots=True)
class TransferQueue:
    """Transfers of one direction that have not ended: reserved ones leave with the next step."""

    reserved: int = 0
    in_flight: int = 0
    pages: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Counted since the cache was made, except where it says "now".

    prompt_tokens     of all leases but those of scratch prompts
    cached_tokens     of these, how many each tier gave
    misses            leases by the (pool, reason) that kept the match from going deeper
    refused           calls of `reserve` for which there was no room
    transfers         ended, by direction and end: ("load", "landed")
    moved_bytes       by direction; `moved_pages` alike, `moved_pool_pages` also by pool
    transfer_seconds  from submission to the poll that saw a transfer landed, by direction
    queues            transfers that have not ended, by direction, now
    in_flight         all of them, now; `overdue` of these are past their deadline
    busy_s            how long any transfer of a direction was in flight
    lane_failures     jobs that raised, by direction
    skipped_backups   copies to the host that found no room there
    pages             by tier and anchor, now; `evicted_pages` were dropped, demoted ones aside
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
    moved_pool_pages: Mapping[tuple[str, str], int]
    transfer_seconds: Mapping[str, Durations]
    queues: Mapping[str, TransferQueue]
    in_flight: int
    overdue: int
    busy_s: Mapping[str, float]
    lane_failures: Mapping[str, int]
    skipped_backups: int
    pages: Mapping[tuple[Tier, str], PageCount]
    evicted_pages: Mapping[tuple[Tier, str], int]
    sessions: SessionStats
    prefetches: Mapping[str, int]
    storage: StorageStats | None = None


class PageCounts(TypedDict):
    """The fields of `Stats` about pages on the device and on the host."""

    pages: Mapping[tuple[Tier, str], PageCount]
    evicted_pages: Mapping[tuple[Tier, str], int]


def counts_of_pages(index: Index) -> PageCounts:
    cells = [(tier, name) for tier in (Tier.DEVICE, Tier.HOST) for name in index.anchor_names]
    return PageCounts(
        pages={
            cell: PageCount(
                index.capacity(*cell),
                index.resident_pages(*cell),
                index.free_pages(*cell),
                index.unevictable_pages(*cell),
            )
            for cell in cells
        },
        evicted_pages={cell: index.evicted_pages(*cell) for cell in cells},
    )


class TransferCounts(TypedDict):
    """The fields of `Stats` about transfers between device and host."""

    transfers: Mapping[tuple[str, str], int]
    moved_bytes: Mapping[str, int]
    moved_pages: Mapping[str, int]
    moved_pool_pages: Mapping[tuple[str, str], int]
    transfer_seconds: Mapping[str, Durations]
    queues: Mapping[str, TransferQueue]
    in_flight: int
    overdue: int
    busy_s: Mapping[str, float]
    lane_failures: Mapping[str, int]


def counts_of_transfers(
    transfers: InFlightTransfers, lanes: Mapping[Way, Issuer]
) -> TransferCounts:
    moved_pages: Counter[str] = Counter({way.name.lower(): 0 for way in Way})
    for (way, _), pages in transfers.moved_pages.items():
        moved_pages[way.name.lower()] += pages
    return TransferCounts(
        transfers={(w.name.lower(), s.value): n for (w, s), n in transfers.ended.items()},
        moved_bytes={way.name.lower(): transfers.moved_bytes[way] for way in Way},
        moved_pages=moved_pages,
        moved_pool_pages={(w.name.lower(), p): n for (w, p), n in transfers.moved_pages.items()},
        transfer_seconds={w.name.lower(): s.seen() for w, s in transfers.seconds.items()},
        queues={way.name.lower(): _queue(transfers, way) for way in Way},
        in_flight=len(transfers),
        overdue=len(transfers.overdue()),
        busy_s={way.name.lower(): busy.seconds for way, busy in transfers.busy.items()},
        lane_failures={way.name.lower(): lane.failures for way, lane in lanes.items()},
    )


def _queue(transfers: InFlightTransfers, way: Way) -> TransferQueue:
    of_way = [transfer for transfer in transfers if transfer.way is way]
    return TransferQueue(
        reserved=sum(one.state is TransferState.RESERVED for one in of_way),
        in_flight=sum(one.state is TransferState.IN_FLIGHT for one in of_way),
        pages=sum(one.pages for one in of_way),
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
