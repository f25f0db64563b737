"""What must hold between the index, the transfers, the leases and storage.

docs/INVARIANTS.md says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvtide.cache.fetching import AbandonedRead, Fetch, Stage
from kvtide.cache.inflight import InFlightTransfers
from kvtide.cache.lease import Lease
from kvtide.cache.receiving import Receiving
from kvtide.cache.storage_tier import AttachmentState, Storage
from kvtide.cache.supplements.supplement_fetching import SupplementStage
from kvtide.index import Index
from kvtide.transfer.transfers import TransferState


@dataclass(frozen=True, slots=True)
class CacheParts:
    """A cache, taken apart."""

    index: Index
    in_flight: InFlightTransfers
    leases: Mapping[int, Lease]
    storage: Storage
    receiving: Receiving


CacheCheck = Callable[[CacheParts], Iterator[str]]


def violations(parts: CacheParts) -> list[str]:
    return [sentence for check in CHECKS for sentence in check(parts)]


def every_arrival_has_one_transfer(parts: CacheParts) -> Iterator[str]:
    arrivals = {id(arrival) for arrival in parts.index.arrivals.values()}
    held = [id(transfer.holds) for transfer in parts.in_flight if transfer.holds is not None]
    if len(held) != len(set(held)):
        yield "two transfers bring the same arrival"
    for _ in arrivals - set(held):
        yield "an arrival is expected that no transfer brings"
    for _ in set(held) - arrivals:
        yield "a transfer brings an arrival that the index does not expect"


def transfers_in_flight_hold_something(parts: CacheParts) -> Iterator[str]:
    for transfer in parts.in_flight:
        if (
            transfer.state not in (TransferState.RESERVED, TransferState.IN_FLIGHT)
            or transfer.holds is None
        ):
            yield f"transfer {transfer.number} is {transfer.state.value} and still open"


def leases_are_those_of_the_index(parts: CacheParts) -> Iterator[str]:
    for number, lease in parts.leases.items():
        if parts.index.leases.get(number) is not lease._index_lease:
            yield f"lease {number} is not known to the index"


def leases_that_are_ready_are_at_home(parts: CacheParts) -> Iterator[str]:
    for number, lease in parts.leases.items():
        if lease.failed or lease.loading:
            continue
        if lease.pending:
            yield f"lease {number} has a commit that nothing will make happen"
        if not parts.index.at_home(lease._index_lease):
            yield f"lease {number} counts as ready, yet its prefix is not at home"


def every_import_has_one_owner(parts: CacheParts) -> Iterator[str]:
    held = Counter(fetch.arriving.number for fetch in _fetches(parts) if fetch.arriving is not None)
    held.update(arriving.number for arriving in parts.receiving.imports)
    imports = parts.index.imports
    for number in held:
        if held[number] > 1:
            yield f"import {number} belongs to {held[number]} fetches or receipts"
        if number not in imports:
            yield f"a fetch or receipt has import {number}, which is over"
    for number in imports.keys() - held.keys():
        yield f"import {number} belongs to no fetch or receipt: its slots never go back"


def receipts_hold_what_they_say(parts: CacheParts) -> Iterator[str]:
    yield from parts.receiving.violations()


def every_departure_is_queued_or_being_written(parts: CacheParts) -> Iterator[str]:
    held = Counter(departure.number for departure in parts.in_flight.departures)
    for one in parts.storage.stores:
        queued = list(one.storing.queued)
        queued += [departure for store in one.storing.at_work for departure in store.departures]
        held.update(departure.number for departure in queued)
        pages = sum(len(departure.pages) for departure in queued)
        if len(one.storing) != pages:
            yield f"{pages} pages wait to be stored, the queue counts {len(one.storing)}"
    departures = parts.index.departures
    for number in held:
        if held[number] > 1:
            yield f"departure {number} is queued {held[number]} times"
        if number not in departures:
            yield f"departure {number} is queued, and over"
    for number in departures.keys() - held.keys():
        yield f"departure {number} is in no queue: its pages stay for ever"


def fetches_have_what_their_stage_says(parts: CacheParts) -> Iterator[str]:
    for one in parts.storage.stores:
        for fetch in one.fetches.open:
            if fetch.over:
                yield "a fetch is over, and still open"
            if fetch.stage is Stage.BEHIND and fetch.leader is None:
                yield "a fetch is behind another one that does not exist"
            if (fetch.stage is Stage.READING) != (fetch.arriving is not None):
                yield f"a fetch is {fetch.stage.value} and has slots, or is reading without"
        for remains in one.fetches.leaving:
            if remains.arriving.lease.live:
                yield "an ended fetch still pins pages"


def pages_that_come_are_those_being_read(parts: CacheParts) -> Iterator[str]:
    for one in parts.storage.stores:
        reading = [fetch for fetch in one.fetches.open if fetch.stage is Stage.READING]
        expected = sum(len(fetch.order.pages) for fetch in reading if fetch.order is not None)
        if set(one.fetches.coming.values()) - set(reading):
            yield "pages are expected from a fetch that reads nothing"
        if len(one.fetches.coming) != expected:
            yield f"{len(one.fetches.coming)} pages are expected, {expected} are being read"


def every_sidecar_import_is_being_read(parts: CacheParts) -> Iterator[str]:
    held = Counter[int]()
    for one in parts.storage.stores:
        for fetch in one.supplements.open:
            if (fetch.stage is SupplementStage.READING) != (fetch.arriving is not None):
                yield f"sidecars are {fetch.stage.value} and pin pages, or are read without"
            if fetch.arriving is not None:
                held[fetch.arriving.number] += 1
    for number in held.keys() ^ parts.index.sidecars.open.keys():
        yield f"sidecar import {number} belongs to no fetch, or is over"


def one_store_is_attached_at_most(parts: CacheParts) -> Iterator[str]:
    stores = parts.storage.stores
    attached = [one for one in stores if one.state is AttachmentState.ATTACHED]
    if attached and attached != list(stores[-1:]):
        yield "a store is attached that is not the last one"
    if parts.in_flight.departs != bool(attached):
        yield "what lands on the host goes on to a store that is not attached, or does not"
    for one in stores:
        if one.state is AttachmentState.CLOSING and one.at_work:
            yield "a store is being closed while work is open"


def _fetches(parts: CacheParts) -> Iterator[Fetch | AbandonedRead]:
    for one in parts.storage.stores:
        yield from one.fetches.open
        yield from one.fetches.leaving


CHECKS: tuple[CacheCheck, ...] = (
    every_arrival_has_one_transfer,
    transfers_in_flight_hold_something,
    leases_are_those_of_the_index,
    leases_that_are_ready_are_at_home,
    every_import_has_one_owner,
    receipts_hold_what_they_say,
    every_departure_is_queued_or_being_written,
    fetches_have_what_their_stage_says,
    pages_that_come_are_those_being_read,
    every_sidecar_import_is_being_read,
    one_store_is_attached_at_most,
)
