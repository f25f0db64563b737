"""What must hold between the index, the transfers and the leases; docs/INVARIANTS.md says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvtide.cache.flights import Flights
from kvtide.cache.lease import Lease
from kvtide.index import Index
from kvtide.transfer.transfer import State

Check = Callable[[Index, Flights, Mapping[int, Lease]], Iterator[str]]


def violations(index: Index, flights: Flights, leases: Mapping[int, Lease]) -> list[str]:
    return [sentence for check in CHECKS for sentence in check(index, flights, leases)]


def every_arrival_has_one_transfer(
    index: Index, flights: Flights, leases: Mapping[int, Lease]
) -> Iterator[str]:
    arrivals = {id(arrival) for arrival in index.books.arrivals.values()}
    held = [id(flight.holding) for flight in flights if flight.holding is not None]
    if len(held) != len(set(held)):
        yield "two transfers bring the same arrival"
    for _ in arrivals - set(held):
        yield "an arrival is expected that no transfer brings"
    for _ in set(held) - arrivals:
        yield "a transfer brings an arrival that nobody expects"


def transfers_in_flight_hold_something(
    index: Index, flights: Flights, leases: Mapping[int, Lease]
) -> Iterator[str]:
    for flight in flights:
        if flight.state not in (State.RESERVED, State.FLYING) or flight.holding is None:
            yield f"transfer {flight.number} is {flight.state.value} and still open"


def leases_are_those_of_the_index(
    index: Index, flights: Flights, leases: Mapping[int, Lease]
) -> Iterator[str]:
    for number, lease in leases.items():
        if index.books.leases.get(number) is not lease.inner:
            yield f"lease {number} is not known to the index"


def leases_that_are_ready_are_on_the_device(
    index: Index, flights: Flights, leases: Mapping[int, Lease]
) -> Iterator[str]:
    for number, lease in leases.items():
        if lease.failed or lease.loading:
            continue
        if lease.pending:
            yield f"lease {number} has a commit that nothing will make happen"
        if not index.on_device(lease.inner):
            yield f"lease {number} counts as ready, yet its prefix is not on the device"


CHECKS: tuple[Check, ...] = (
    every_arrival_has_one_transfer,
    transfers_in_flight_hold_something,
    leases_are_those_of_the_index,
    leases_that_are_ready_are_on_the_device,
)
