"""How far a storage request has come, whatever order its batches end in."""

from __future__ import annotations

import random

import pytest

from kvtide.storage import ObjectFormat
from kvtide.transfer.storage_requests import PageBatch, Paging, Reading, Writing
from tests.transfer.stores import LARGE, SMALL, SPACE, Clock

FORMAT = ObjectFormat(SMALL, "kv", SPACE)
KINDS = (Reading, Writing)


def _request(kind: type[Paging], pages: int, per_batch: int = 1) -> Paging:
    clock = Clock()
    stored = [(str(n)) for n in range(pages)]
    max_bytes = per_batch * FORMAT.bytes
    return kind(stored, [FORMAT.bytes] * pages, max_bytes, clock.now + 10, clock)


def _claimed(request: Paging) -> PageBatch:
    batch = request.claim()
    assert batch is not None
    return batch


def test_batches_hold_what_fits_and_a_page_that_does_not_fit_is_one() -> None:
    large, small = ObjectFormat(LARGE, "kv", SPACE), ObjectFormat(LARGE, "swa", SPACE)
    sizes = [one.bytes for one in (small, small, large, small, large, large)]
    request = Writing([None] * 6, sizes, large.bytes + small.bytes, 0.0)  # type: ignore[list-item]
    assert request.batches == [(0, 2), (2, 4), (4, 5), (5, 6)]
    one_by_one = Writing([None] * 6, sizes, 1, 0.0)  # type: ignore[list-item]
    assert one_by_one.batches == [(n, n + 1) for n in range(6)]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_do_is_over_at_once(kind: type[Paging]) -> None:
    request = _request(kind, 0)
    assert request.over and request.quiet and request.claim() is None and request.ready == 0


@pytest.mark.parametrize("seed", range(20))
def test_ready_counts_whole_pages_from_the_first_on_in_any_order(seed: int) -> None:
    chance, request = random.Random(seed), _request(Writing, 12, 2)
    batches = [_claimed(request) for _ in request.batches]
    assert request.claim() is None and not request.over and not request.quiet
    whole = [chance.random() < 0.8 for _ in range(12)]
    done = [False] * 12
    for batch in chance.sample(batches, len(batches)):
        assert not request.quiet
        request.finish(batch, whole[batch.start : batch.end])
        done[batch.start : batch.end] = [True] * 2
        known = [a and b for a, b in zip(done, whole, strict=True)]
        assert request.ready == (known.index(False) if False in known else 12)
        assert request.count == sum(known)
    assert request.over and request.quiet


def test_what_comes_behind_a_page_that_failed_is_not_read() -> None:
    request = _request(Reading, 4)
    request.finish(_claimed(request), [True])
    second, third = _claimed(request), _claimed(request)
    request.finish(third, [True])
    request.fail(second, ValueError("broken"))
    assert request.claim() is None and request.over and request.quiet
    assert request.ready == 1 and request.count == 2
    assert str(request.error) == "broken"


def test_every_page_that_is_written_counts_for_itself() -> None:
    request = _request(Writing, 3)
    request.fail(_claimed(request), ValueError("broken"))
    assert not request.over
    for _ in range(2):
        request.finish(_claimed(request), [True])
    assert request.over and request.count == 2 and request.ready == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_storage_request_is_quiet_when_what_was_begun_has_ended(
    kind: type[Paging],
) -> None:
    request = _request(kind, 3)
    begun = _claimed(request)
    request.stop()
    assert request.claim() is None
    assert not request.quiet and not request.over
    request.finish(begun, [True])
    assert request.quiet and request.over and request.ready == 1


@pytest.mark.parametrize("kind", KINDS)
def test_lingering_memory_is_not_quiet_until_its_time_is_up(kind: type[Paging]) -> None:
    request = _request(kind, 1)
    begun = _claimed(request)
    request.linger(5.0)
    request.linger(1.0)
    request.fail(begun, ValueError("it lingers"))
    assert request.over and not request.quiet
    request._clock.now += 4.9  # type: ignore[attr-defined]
    assert not request.quiet
    request._clock.now += 0.1  # type: ignore[attr-defined]
    assert request.quiet
