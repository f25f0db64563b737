"""How far an errand has come, whatever order its batches end in."""

from __future__ import annotations

import random

import pytest

from kvtide.storage import ObjectFormat
from kvtide.transfer.storage_requests import PageBatch, Paging, Reading, Writing
from tests.transfer.stores import LARGE, SMALL, SPACE, Clock

FORMAT = ObjectFormat(SMALL, "kv", SPACE)
KINDS = (Reading, Writing)


def _errand(kind: type[Paging], pages: int, per_batch: int = 1) -> Paging:
    clock = Clock()
    stored = [(str(n)) for n in range(pages)]
    most = per_batch * FORMAT.bytes
    return kind(stored, [FORMAT] * pages, most, clock.now + 10, clock)  # type: ignore[arg-type]


def _claimed(errand: Paging) -> PageBatch:
    batch = errand.claim()
    assert batch is not None
    return batch


def test_batches_hold_what_fits_and_a_page_that_does_not_fit_is_one() -> None:
    large, small = ObjectFormat(LARGE, "kv", SPACE), ObjectFormat(LARGE, "swa", SPACE)
    formats = [small, small, large, small, large, large]
    errand = Writing([None] * 6, formats, large.bytes + small.bytes, 0.0)  # type: ignore[list-item]
    assert errand.batches == [(0, 2), (2, 4), (4, 5), (5, 6)]
    one_by_one = Writing([None] * 6, formats, 1, 0.0)  # type: ignore[list-item]
    assert one_by_one.batches == [(n, n + 1) for n in range(6)]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_do_is_over_at_once(kind: type[Paging]) -> None:
    errand = _errand(kind, 0)
    assert errand.over and errand.quiet and errand.claim() is None and errand.ready == 0


@pytest.mark.parametrize("seed", range(20))
def test_ready_counts_whole_pages_from_the_first_on_in_any_order(seed: int) -> None:
    chance, errand = random.Random(seed), _errand(Writing, 12, 2)
    batches = [_claimed(errand) for _ in errand.batches]
    assert errand.claim() is None and not errand.over and not errand.quiet
    whole = [chance.random() < 0.8 for _ in range(12)]
    done = [False] * 12
    for batch in chance.sample(batches, len(batches)):
        assert not errand.quiet
        errand.finish(batch, whole[batch.start : batch.end])
        done[batch.start : batch.end] = [True] * 2
        known = [a and b for a, b in zip(done, whole, strict=True)]
        assert errand.ready == (known.index(False) if False in known else 12)
        assert errand.count == sum(known)
    assert errand.over and errand.quiet


def test_what_comes_behind_a_page_that_failed_is_not_read() -> None:
    errand = _errand(Reading, 4)
    errand.finish(_claimed(errand), [True])
    second, third = _claimed(errand), _claimed(errand)
    errand.finish(third, [True])
    errand.fail(second, ValueError("broken"))
    assert errand.claim() is None and errand.over and errand.quiet
    assert errand.ready == 1 and errand.count == 2
    assert str(errand.error) == "broken"


def test_every_page_that_is_written_counts_for_itself() -> None:
    errand = _errand(Writing, 3)
    errand.fail(_claimed(errand), ValueError("broken"))
    assert not errand.over
    for _ in range(2):
        errand.finish(_claimed(errand), [True])
    assert errand.over and errand.count == 2 and errand.ready == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_errand_is_quiet_when_what_was_begun_has_ended(kind: type[Paging]) -> None:
    errand = _errand(kind, 3)
    begun = _claimed(errand)
    errand.stop()
    assert errand.claim() is None
    assert not errand.quiet and not errand.over
    errand.finish(begun, [True])
    assert errand.quiet and errand.over and errand.ready == 1


@pytest.mark.parametrize("kind", KINDS)
def test_lingering_memory_is_not_quiet_until_its_time_is_up(kind: type[Paging]) -> None:
    errand = _errand(kind, 1)
    begun = _claimed(errand)
    errand.linger(5.0)
    errand.linger(1.0)
    errand.fail(begun, ValueError("it lingers"))
    assert errand.over and not errand.quiet
    errand._clock.now += 4.9  # type: ignore[attr-defined]
    assert not errand.quiet
    errand._clock.now += 0.1  # type: ignore[attr-defined]
    assert errand.quiet
