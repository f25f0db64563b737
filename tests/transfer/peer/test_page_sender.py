"""The page sender: rooms in order, one answer per job, the truth about silence."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvtide.transfer.peer.page_sender import (
    BURST_S,
    CANCELLED,
    CLOSED,
    PART_BYTES,
    PARTS_IN_FLIGHT,
    PageSender,
    SendJob,
    SendQuota,
)
from kvtide.transfer.peer.transport import TransportError, WriteBatch
from tests.transfer.peer.links import DEADLINE_S, HandLink, Heard

MIB = 1 << 20
ROW = WriteBatch.of([0], [0], [100])


@pytest.fixture
def sender() -> Iterator[PageSender]:
    one = PageSender()
    yield one
    assert one.close(DEADLINE_S)


def job(heard: Heard, name: str, link: HandLink, room: object = "a", epoch: int = 1, **given):
    batch = given.pop("batch", ROW)
    return SendJob(room, epoch, [(link, batch)], heard.as_(name), **given)


def until(holds) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# -- order ----------------------------------------------------------------------------------


def test_jobs_of_a_room_are_written_one_after_the_other(sender: PageSender) -> None:
    link, heard = HandLink(), Heard()
    for number in range(3):
        sender.submit(job(heard, f"job {number}", link, batch=WriteBatch.of([0], [number], [1])))
    for number in range(3):
        link.wait(number + 1)
        assert len(link.began) == number + 1
        link.end(number)
        heard.wait(number + 1)
    assert heard.calls == [(f"job {number}", None, True) for number in range(3)]
    assert [one.batch.target[0] for one in link.began] == [0, 1, 2]


def test_a_job_waits_for_its_device_work_and_others_pass_it(sender: PageSender) -> None:
    link, heard, ready = HandLink(at_once=True), Heard(), threading.Event()
    sender.submit(job(heard, "computing", link, "a", when_ready=ready.is_set))
    sender.submit(job(heard, "behind", link, "a"))
    sender.submit(job(heard, "other room", link, "b"))
    assert heard.wait(1) == [("other room", None, True)]
    assert sender.stats().queued_jobs == 2
    ready.set()
    assert heard.wait(3)[1:] == [("computing", None, True), ("behind", None, True)]


def test_rooms_take_turns_on_a_link(sender: PageSender) -> None:
    link, heard = HandLink(), Heard()
    large = WriteBatch.of([0], [0], [8 * PART_BYTES])
    sender.submit(job(heard, "large", link, "a", batch=large))
    link.wait(PARTS_IN_FLIGHT)
    sender.submit(job(heard, "small", link, "b"))
    until(lambda: sender.stats().active_jobs == 2)
    link.end(0, 1)
    link.wait(PARTS_IN_FLIGHT + 2)
    assert 100 in [one.batch.total_bytes for one in link.began[: PARTS_IN_FLIGHT + 2]]
    link.at_once = True
    link.end(*range(len(link.began)))
    heard.wait(2)


def test_a_job_goes_over_all_its_links_in_parts(sender: PageSender) -> None:
    links, heard = [HandLink(at_once=True), HandLink(at_once=True)], Heard()
    batch = WriteBatch.of(np.arange(5) * 7 * MIB, np.arange(5) * 7 * MIB, 7 * MIB)
    sender.submit(SendJob("a", 1, [(link, batch) for link in links], heard.as_("done")))
    assert heard.wait(1) == [("done", None, True)]
    for link in links:
        assert sum(one.batch.total_bytes for one in link.began) == 35 * MIB
        assert max(one.batch.total_bytes for one in link.began) <= PART_BYTES
    stats = sender.stats()
    assert stats.jobs_done == 1
    assert stats.written_bytes == 70 * MIB
    assert stats.written_rows == sum(len(o.batch) for link in links for o in link.began)
    assert stats.in_flight_bytes == stats.active_jobs == stats.queued_jobs == 0


def test_a_job_without_rows_is_done_in_its_turn(sender: PageSender) -> None:
    link, heard = HandLink(), Heard()
    sender.submit(job(heard, "first", link))
    sender.submit(SendJob("a", 1, [], heard.as_("empty")))
    link.wait(1)
    link.end(0)
    assert heard.wait(2) == [("first", None, True), ("empty", None, True)]


# -- failures -------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", [True, False])
def test_a_failure_ends_the_epoch_and_tells_whether_it_is_silent(
    sender: PageSender, silent: bool
) -> None:
    link, heard = HandLink(), Heard()
    sender.submit(job(heard, "first", link))
    sender.submit(job(heard, "second", link))
    sender.submit(job(heard, "other", link, "b"))
    link.wait(2)
    link.fail(0, silent)
    link.end(1)
    calls = {name: (error, quiet) for name, error, quiet in heard.wait(3)}
    assert calls["first"] == ("the peer is gone", silent)
    assert calls["second"] == ("an earlier write of the room failed: the peer is gone", silent)
    assert calls["other"] == (None, True)
    sender.submit(job(heard, "late", link))
    assert heard.wait(4)[3][2] is silent
    assert len(link.began) == 2
    sender.submit(job(heard, "next epoch", link, epoch=2))
    link.wait(3)
    link.end(2)
    assert heard.wait(5)[4] == ("next epoch", None, True)
    assert sender.stats().unsilent == (0 if silent else 3)


def test_parts_in_flight_end_before_a_failure_is_reported(sender: PageSender) -> None:
    link, heard = HandLink(), Heard()
    sender.submit(job(heard, "large", link, batch=WriteBatch.of([0], [0], [8 * PART_BYTES])))
    link.wait(PARTS_IN_FLIGHT)
    link.fail(0, silent=True)
    link.end(1, 2)
    until(lambda: sender.stats().in_flight_bytes == PART_BYTES)
    assert heard.calls == []
    link.fail(3, silent=False)
    assert heard.wait(1) == [("large", "the peer is gone", False)]
    assert len(link.began) == PARTS_IN_FLIGHT


def test_a_dead_link_fails_a_job_before_it_begins(sender: PageSender) -> None:
    link, heard = HandLink(), Heard()
    link.dead = True
    sender.submit(job(heard, "job", link))
    assert heard.wait(1) == [("job", "the link is dead", True)]
    assert link.began == []


def _raises() -> bool:
    raise ZeroDivisionError("no such page")


def test_the_thread_survives_whatever_is_raised(sender: PageSender) -> None:
    link, heard = HandLink(at_once=True), Heard()
    sender.submit(job(heard, "not ready", link, when_ready=_raises))
    assert heard.wait(1) == [("not ready", "ZeroDivisionError: no such page", True)]
    link.refuse = KeyError("library")
    sender.submit(job(heard, "crash", link, "b"))
    assert heard.wait(2)[1] == ("crash", "KeyError: 'library'", False)
    link.refuse = TransportError("too large", silent=True)
    sender.submit(job(heard, "refused", link, "c"))
    assert heard.wait(3)[2] == ("refused", "too large", True)
    link.refuse = None
    sender.submit(SendJob("d", 1, [(link, ROW)], lambda error, silent: _raises()))
    sender.submit(job(heard, "sound", link, "e"))
    assert heard.wait(4)[3] == ("sound", None, True)
    stats = sender.stats()
    assert (stats.crashes, stats.jobs_failed, stats.jobs_done) == (3, 3, 2)


# -- cancelling -----------------------------------------------------------------------------


def test_a_cancelled_room_is_silent_when_the_parts_in_flight_have_ended(
    sender: PageSender,
) -> None:
    link, heard = HandLink(), Heard()
    sender.submit(job(heard, "large", link, batch=WriteBatch.of([0], [0], [8 * PART_BYTES])))
    sender.submit(job(heard, "behind", link))
    link.wait(PARTS_IN_FLIGHT)
    sender.cancel("a", 1, heard.as_("silent"))
    link.end(0, 1, 2)
    until(lambda: sender.stats().in_flight_bytes == PART_BYTES)
    assert heard.calls == []
    link.end(3)
    assert heard.wait(3) == [
        ("large", CANCELLED, True),
        ("behind", CANCELLED, True),
        ("silent", True),
    ]
    assert len(link.began) == PARTS_IN_FLIGHT
    assert sender.stats().jobs_cancelled == 2


def test_a_cancelled_room_whose_write_fails_late_is_not_silent(sender: PageSender) -> None:
    link, heard = HandLink(), Heard()
    sender.submit(job(heard, "job", link))
    link.wait(1)
    sender.cancel("a", 1, heard.as_("silent"))
    link.fail(0, silent=False)
    assert heard.wait(2) == [("job", CANCELLED, False), ("silent", False)]
    sender.cancel("a", 1, heard.as_("again"))
    assert heard.wait(3)[2] == ("again", False)


def test_jobs_of_a_cancelled_epoch_are_refused_and_of_the_next_are_not(sender: PageSender) -> None:
    link, heard = HandLink(at_once=True), Heard()
    sender.cancel("a", 3, heard.as_("silent"))
    for epoch in (1, 3, 4):
        sender.submit(job(heard, f"epoch {epoch}", link, epoch=epoch))
    assert heard.wait(4) == [
        ("silent", True),
        ("epoch 1", CANCELLED, True),
        ("epoch 3", CANCELLED, True),
        ("epoch 4", None, True),
    ]


def test_cancelling_an_epoch_leaves_the_next_one_in_the_queue(sender: PageSender) -> None:
    link, heard = HandLink(), Heard()
    sender.submit(job(heard, "old", link, epoch=1))
    sender.submit(job(heard, "new", link, epoch=2))
    link.wait(1)
    sender.cancel("a", 1, heard.as_("silent"))
    link.end(0)
    link.wait(2)
    link.end(1)
    assert heard.wait(3) == [("old", CANCELLED, True), ("silent", True), ("new", None, True)]


def test_a_forgotten_room_leaves_nothing_behind(sender: PageSender) -> None:
    link, heard = HandLink(at_once=True), Heard()
    for number in range(200):
        sender.submit(job(heard, "job", link, number))
        sender.cancel(number, 1)
        sender.forget(number)
    heard.wait(200)
    sender.submit(job(heard, "anew", link, 7))
    assert heard.wait(201)[200] == ("anew", None, True)
    sender.forget(7)
    until(lambda: not sender._rooms and not sender._busy)


# -- ends -----------------------------------------------------------------------------------


def test_close_fails_what_was_not_begun_and_waits_for_the_rest() -> None:
    sender, link, heard = PageSender(), HandLink(), Heard()
    sender.submit(job(heard, "begun", link))
    sender.submit(job(heard, "queued", link))
    sender.submit(job(heard, "computing", link, "b", when_ready=lambda: False))
    link.wait(1)
    assert not sender.close(0.05)
    link.end(0)
    assert sender.close(DEADLINE_S)
    assert sorted(heard.calls) == [
        ("begun", CLOSED, True),
        ("computing", CLOSED, True),
        ("queued", CLOSED, True),
    ]
    sender.submit(job(heard, "after", link, "c"))
    assert heard.calls[-1] == ("after", CLOSED, True)
    sender.cancel("c", 1, heard.as_("silent"))
    assert heard.calls[-1] == ("silent", True)


@pytest.mark.parametrize("seed", range(3))
def test_every_job_gets_one_answer_whatever_happens(seed: int) -> None:
    chance, heard = random.Random(seed), Heard()
    sender = PageSender()
    links = [HandLink(at_once=True) for _ in range(3)]
    wanted, silences = [], 0
    for number in range(400):
        link, room = chance.choice(links), chance.randrange(12)
        link.at_once = chance.random() < 0.7
        for pending in link.began:
            if not pending.over and pending.error is None:
                if chance.random() < 0.3:
                    pending.error = TransportError("gone", silent=chance.random() < 0.5)
                else:
                    pending.over = True
        verb = chance.random()
        if verb < 0.8:
            wanted.append(f"job {number}")
            sender.submit(job(heard, f"job {number}", link, room, epoch=number // 50))
        elif verb < 0.9:
            silences += 1
            sender.cancel(room, number // 50, heard.as_("silent"))
        else:
            sender.forget(room)
    deadline = time.monotonic() + DEADLINE_S
    while len(heard.calls) < len(wanted) + silences:
        assert time.monotonic() < deadline, f"seed {seed}"
        for link in links:
            link.at_once = True
            link.end(*range(len(link.began)))
        time.sleep(0.002)
    assert sender.close(DEADLINE_S)
    assert sorted(name for name, *_ in heard.calls if name != "silent") == sorted(wanted)
    assert sender.stats().in_flight_bytes == sender.stats().active_jobs == 0


# -- the quota ------------------------------------------------------------------------------


def test_the_quota_gives_its_rate_and_a_short_burst() -> None:
    now = 0.0
    quota = SendQuota(1000.0, clock=lambda: now)
    taken = 0
    while now < 10.0:
        while quota.take(10):
            taken += 10
        now += 0.001
    assert 10_000 <= taken <= 10_000 + 1000 * BURST_S + 20
    now += 100.0
    burst = 0
    while quota.take(10):
        burst += 10
    assert burst <= 1000 * BURST_S + 10


def test_a_sender_with_a_quota_takes_its_time() -> None:
    sender, link, heard = PageSender(bytes_per_s=20 * MIB), HandLink(at_once=True), Heard()
    start = time.monotonic()
    sender.submit(job(heard, "job", link, batch=WriteBatch.of([0], [0], [10 * MIB])))
    heard.wait(1)
    assert time.monotonic() - start > 0.3
    assert max(one.batch.total_bytes for one in link.began) <= MIB
    assert sender.close(DEADLINE_S)
