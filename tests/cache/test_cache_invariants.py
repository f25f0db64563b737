"""Every check of the cache's validator can fail: each is shown a broken cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvtide.cache import cache_invariants as checks
from kvtide.cache.fetching import Stage
from kvtide.cache.storage_tier import AttachmentState
from kvtide.cache.supplements.supplement_fetching import SupplementFetch, SupplementStage
from kvtide.testing.faulty_store import Fault
from kvtide.transfer.transfers import TransferState
from tests.cache.building import Rig, text
from tests.cache.stores import begun, faulty, opened, settle, stored, until

Case = tuple[Callable[..., object], Callable[[Rig], None], str]


@pytest.fixture
def busy(url, rigs) -> Iterator[Rig]:
    """Leases, a load and a backup in flight; pages that are fetched, and some that are stored."""
    stored(opened(rigs, url), text(1, 4))
    rig = opened([], url, device=64, host=64, tails=2)
    rig.remember_on_host(text(2, 3))
    settle(rig)
    store = faulty(rig)
    store.always = {"read": Fault.BLOCK, "write": Fault.BLOCK}
    for number in (3, 4, 5):
        rig.remember(text(number, 2))
        rig.settle()
    begun(rig, text(1, 4))
    until(lambda: bool(rig.cache.poll()) and store.waiting == 2)
    store.next("exists", Fault.BLOCK)
    begun(rig, text(6, 4))
    rig.started(text(2, 3))
    ready = rig.started(text(3, 2))
    assert not ready.loading
    received = rig.cache.receiving.begin(rig.cache.prompt(text(7, 3)))
    abandoned = rig.cache.receiving.begin(rig.cache.prompt(text(8, 3)))
    assert received is not None and abandoned is not None
    rig.cache.receiving.abandon(abandoned)
    assert rig.cache.validate() == []
    yield rig
    store.heal()


def _transfer(rig: Rig):
    return next(iter(rig.cache._in_flight))


def _ready(rig: Rig):
    return next(lease for lease in rig.cache._leases.values() if not lease.loading)


def _one(rig: Rig):
    return rig.cache.storage.stores[-1]


def _reading(rig: Rig):
    return next(fetch for fetch in _one(rig).fetches.open if fetch.stage is Stage.READING)


def _receipt(rig: Rig):
    return next(iter(rig.cache.receiving._open.values()))


def _two_bring_it(rig: Rig) -> None:
    rig.cache._in_flight._transfers._open[99] = _transfer(rig)


def _without_a_transfer(rig: Rig) -> None:
    rig.cache._in_flight._transfers._open.clear()


def _without_an_arrival(rig: Rig) -> None:
    rig.cache.index.tree.arrivals.clear()


def _landed_and_open(rig: Rig) -> None:
    _transfer(rig).state = TransferState.LANDED


def _unknown_lease(rig: Rig) -> None:
    rig.cache.index.tree.leases.pop(_ready(rig).number)


def _pending_commit(rig: Rig) -> None:
    _ready(rig).pending.append((8, ()))


def _not_on_device(rig: Rig) -> None:
    lease = next(lease for lease in rig.cache._leases.values() if lease.loading)
    lease.transfers.clear()


def _import_twice(rig: Rig) -> None:
    _one(rig).fetches._leaving.append(_reading(rig))


def _import_over(rig: Rig) -> None:
    rig.cache.index.tree.imports.clear()


def _import_without_a_fetch(rig: Rig) -> None:
    _one(rig).fetches._open.clear()


def _import_of_a_receipt_over(rig: Rig) -> None:
    rig.cache.receiving._open.clear()


def _row_twice(rig: Rig) -> None:
    rig.cache.receiving._free_rows.append(0)


def _row_lost(rig: Rig) -> None:
    rig.cache.receiving._tails_held.popitem()


def _receipt_without_slots(rig: Rig) -> None:
    _receipt(rig).arriving.live = False


def _landed_count(rig: Rig) -> None:
    _receipt(rig).landed.add(0)


def _abandoned_with_a_lease(rig: Rig) -> None:
    receiving, receipt = rig.cache.receiving, _receipt(rig)
    receiving._quarantined[receipt.epoch] = receiving._open.pop(receipt.epoch)


def _departure_twice(rig: Rig) -> None:
    storing = _one(rig).storing
    storing._queue.append(next(storing.at_work).departures[0])


def _departure_over(rig: Rig) -> None:
    rig.cache.index.tree.departures.clear()


def _departure_lost(rig: Rig) -> None:
    _one(rig).storing._queue.clear()


def _waiting_count(rig: Rig) -> None:
    _one(rig).storing._waiting["kv"] += 1


def _over_and_open(rig: Rig) -> None:
    _reading(rig).stage = Stage.OVER


def _behind_no_fetch(rig: Rig) -> None:
    next(f for f in _one(rig).fetches.open if f.stage is Stage.LOOKING).stage = Stage.BEHIND


def _reading_without_slots(rig: Rig) -> None:
    _reading(rig).arriving = None


def _leaving_with_a_lease(rig: Rig) -> None:
    fetches, fetch = _one(rig).fetches, _reading(rig)
    fetch.stage = Stage.OVER
    fetches._open.remove(fetch)
    fetches._leaving.append(fetch)


def _expected_of_no_fetch(rig: Rig) -> None:
    _one(rig).fetches._coming[b"page"] = next(
        f for f in _one(rig).fetches.open if f.stage is Stage.LOOKING
    )


def _not_expected(rig: Rig) -> None:
    _one(rig).fetches._coming.popitem()


def _departs_to_no_store(rig: Rig) -> None:
    rig.cache._in_flight.departs = False


def _two_attached(rig: Rig) -> None:
    rig.cache.storage._stores.insert(0, _one(rig))


def _closed_too_early(rig: Rig) -> None:
    _one(rig).state = AttachmentState.CLOSING


def _sidecars_of_no_fetch(rig: Rig) -> None:
    rig.cache.index.sidecars.take(rig.cache.prompt(text(3, 2)), [])


def _sidecars_read_without_pins(rig: Rig) -> None:
    lookup = _one(rig).link.look_behind(list, 1.0)
    fetch = SupplementFetch(rig.cache.prompt(text(3, 2)), [], lookup, [])
    fetch.stage = SupplementStage.READING
    _one(rig).supplements._open.append(fetch)


CASES: list[Case] = [
    (checks.every_arrival_has_one_transfer, _two_bring_it, "bring the same arrival"),
    (checks.every_arrival_has_one_transfer, _without_a_transfer, "that no transfer brings"),
    (checks.every_arrival_has_one_transfer, _without_an_arrival, "that the index does not expect"),
    (checks.transfers_in_flight_hold_something, _landed_and_open, "is landed and still open"),
    (checks.leases_are_those_of_the_index, _unknown_lease, "is not known to the index"),
    (checks.leases_that_are_ready_are_at_home, _pending_commit, "nothing will make happen"),
    (checks.leases_that_are_ready_are_at_home, _not_on_device, "is not at home"),
    (checks.every_import_has_one_owner, _import_twice, "belongs to 2 fetches"),
    (checks.every_import_has_one_owner, _import_over, "which is over"),
    (checks.every_import_has_one_owner, _import_without_a_fetch, "belongs to no fetch"),
    (checks.every_import_has_one_owner, _import_of_a_receipt_over, "belongs to no fetch"),
    (checks.receipts_hold_what_they_say, _row_twice, "are held"),
    (checks.receipts_hold_what_they_say, _row_lost, "are held"),
    (checks.receipts_hold_what_they_say, _receipt_without_slots, "is open without slots"),
    (checks.receipts_hold_what_they_say, _landed_count, "counts 1 landed pages"),
    (checks.receipts_hold_what_they_say, _abandoned_with_a_lease, "still pins pages"),
    (checks.every_departure_is_queued_or_being_written, _departure_twice, "queued 2 times"),
    (checks.every_departure_is_queued_or_being_written, _departure_over, "queued, and over"),
    (checks.every_departure_is_queued_or_being_written, _departure_lost, "is in no queue"),
    (checks.every_departure_is_queued_or_being_written, _waiting_count, "the queue counts"),
    (checks.fetches_have_what_their_stage_says, _over_and_open, "is over, and still open"),
    (checks.fetches_have_what_their_stage_says, _behind_no_fetch, "that does not exist"),
    (checks.fetches_have_what_their_stage_says, _reading_without_slots, "is reading without"),
    (
        checks.fetches_have_what_their_stage_says,
        _leaving_with_a_lease,
        "an ended fetch still pins pages",
    ),
    (checks.pages_that_come_are_those_being_read, _expected_of_no_fetch, "that reads nothing"),
    (checks.pages_that_come_are_those_being_read, _not_expected, "are being read"),
    (checks.one_store_is_attached_at_most, _departs_to_no_store, "that is not attached"),
    (checks.one_store_is_attached_at_most, _two_attached, "that is not the last one"),
    (checks.one_store_is_attached_at_most, _closed_too_early, "while work is open"),
    (checks.every_sidecar_import_is_being_read, _sidecars_of_no_fetch, "belongs to no fetch"),
    (checks.every_sidecar_import_is_being_read, _sidecars_read_without_pins, "read without"),
]


@pytest.mark.parametrize(
    ("check", "corrupt", "sentence"),
    CASES,
    ids=[f"{check.__name__}-{corrupt.__name__[1:]}" for check, corrupt, _ in CASES],
)
def test_a_check_reports_what_it_is_for(busy: Rig, check, corrupt, sentence: str) -> None:
    cache = busy.cache
    corrupt(busy)
    found = list(
        check(
            checks.CacheParts(
                cache.index, cache._in_flight, cache._leases, cache.storage, cache.receiving
            )
        )
    )
    assert any(sentence in problem for problem in found), found
    assert set(found) <= set(cache.validate()), "validate collects the sentences of every check"


def test_every_check_has_a_case_that_breaks_it() -> None:
    assert {check for check, _, _ in CASES} == set(checks.CHECKS)
    defined = {
        value
        for name, value in vars(checks).items()
        if callable(value) and getattr(value, "__module__", "") == checks.__name__
        and not name.startswith("_") and not isinstance(value, type)
    }  # fmt: skip
    assert defined - {checks.violations} == set(checks.CHECKS), "a check that is not in the table"
