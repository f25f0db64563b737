"""Lanes: jobs in order, failures that stay with their job, threads that come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from kvtide.testing.faults import FaultError, FaultyBackend
from kvtide.tiers.layout import Piece
from kvtide.transfer.copy_kernel import Kernel
from kvtide.transfer.lane import Backend, Job, Lane, Ticket, TransferError
from kvtide.transfer.strided import Reference, Strided
from kvtide.transfer.timeline import CudaTimeline, HostTimeline, Timeline
from tests.transfer.memories import Sketch, random_bytes

ROW_BYTES = 64
ROWS = 12
LONG_S = 30.0
SHORT_S = 0.05


class Bench:
    """Rows to copy, a lane that copies them, and the faults it is to meet."""

    def __init__(self, device: torch.device) -> None:
        rng = np.random.default_rng(11)
        self.source = random_bytes(rng, ROWS * ROW_BYTES).to(device).view(ROWS, ROW_BYTES)
        self.target = torch.zeros_like(self.source)
        on_cuda = device.type == "cuda"
        self._backend: Backend = Kernel(device) if on_cuda else Reference()
        self._timeline: Timeline = CudaTimeline(device) if on_cuda else HostTimeline()
        self.lanes: list[tuple[Lane, FaultyBackend]] = []

    def lane(self, **faults: Sequence[int]) -> tuple[Lane, FaultyBackend]:
        backend = FaultyBackend(self._backend, **faults)
        self.lanes.append((Lane("test", self._timeline, backend), backend))
        return self.lanes[-1]

    def copy(self, rows: Sequence[int], leg: int = 0, legs: int = 1) -> Strided:
        """A copy of these rows that belongs to one leg of several."""
        piece = Piece(0, ROW_BYTES, 0, ROW_BYTES, ROW_BYTES)
        found = tuple((piece,) if number == leg else () for number in range(legs))
        ends = self.source.data_ptr(), self.target.data_ptr()
        return Sketch(found, tuple(rows), tuple(rows)).work(*ends)

    def submit(self, lane: Lane, *legs: Sequence[int], timeout_s: float = LONG_S) -> Ticket:
        """A job that brings these rows, leg by leg."""
        ticket = Ticket(lane.timeline, len(legs), time.monotonic() + timeout_s)
        works = [self.copy(rows, leg, len(legs)) for leg, rows in enumerate(legs)]
        lane.submit(Job(ticket, works, len(legs), lane.timeline.fence()))
        return ticket

    def arrived(self) -> list[int]:
        """The rows that are in the target by now."""
        return [row for row in range(ROWS) if torch.equal(self.source[row], self.target[row])]


@pytest.fixture
def bench(device: torch.device) -> Iterator[Bench]:
    bench = Bench(device)
    yield bench
    for lane, backend in bench.lanes:
        backend.hold.set()
        assert lane.close(LONG_S)
    assert not alive()


def alive() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("kvtide-test")]


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, "did not come about in time"
        time.sleep(0.001)


# -- work -----------------------------------------------------------------------------------


def test_a_wait_returns_when_the_legs_bytes_are_there(bench: Bench) -> None:
    lane, _ = bench.lane()
    ticket = bench.submit(lane, [0, 1], [5])
    ticket.wait(0)
    assert {0, 1} <= set(bench.arrived())
    ticket.wait(1)
    assert bench.arrived() == [0, 1, 5]
    eventually(ticket.done)
    assert lane.failures == 0


def test_jobs_run_in_the_order_of_their_submission(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, backend = bench.lane()
    backend.hold.clear()
    seen: list[int] = []
    issue = backend.issue

    def recorded(works: Sequence[Strided], legs: int) -> Iterator[None]:
        seen.append(int(works[0].source_index[0]))
        return issue(works, legs)

    monkeypatch.setattr(backend, "issue", recorded)
    tickets = [bench.submit(lane, [row]) for row in (3, 8, 0)]
    backend.hold.set()
    for ticket in tickets:
        ticket.wait(0)
    assert seen == [3, 8, 0]


def test_a_job_without_a_copy_still_ends(bench: Bench) -> None:
    lane, _ = bench.lane()
    ticket = Ticket(lane.timeline, 2, time.monotonic() + LONG_S)
    lane.submit(Job(ticket, [], 2, lane.timeline.fence()))
    ticket.wait(1)
    assert ticket.error is None
    eventually(ticket.done)


def test_the_last_leg_is_found_from_the_end_and_an_unknown_one_refused(bench: Bench) -> None:
    lane, _ = bench.lane()
    ticket = bench.submit(lane, [0], [1])
    ticket.wait(-1)
    assert bench.arrived() == [0, 1]
    with pytest.raises(IndexError):
        ticket.wait(2)


# -- failures -------------------------------------------------------------------------------


def test_an_exception_fails_its_own_ticket_and_the_lane_goes_on(bench: Bench) -> None:
    lane, _ = bench.lane(raises=[1])
    before, failed, after = (bench.submit(lane, [row]) for row in (2, 3, 4))
    before.wait(0)
    with pytest.raises(TransferError, match="the copy failed: leg 1") as refusal:
        failed.wait(0)
    assert isinstance(refusal.value.__cause__, FaultError)
    after.wait(0)
    assert bench.arrived() == [2, 4]
    assert lane.failures == 1
    assert before.error is after.error is None
    eventually(failed.done)


def test_after_a_failure_no_later_leg_of_the_job_is_issued(bench: Bench) -> None:
    lane, backend = bench.lane(raises=[1])
    ticket = bench.submit(lane, [0], [1], [2])
    for leg in (1, 2):
        with pytest.raises(TransferError, match="leg 1"):
            ticket.wait(leg)
    eventually(ticket.done)
    assert backend.legs == 2
    assert bench.arrived() == [0]


def test_a_copy_that_broke_halfway_has_failed(bench: Bench) -> None:
    lane, _ = bench.lane(halves=[0])
    ticket = bench.submit(lane, [1, 2, 3, 4])
    with pytest.raises(TransferError, match="halfway"):
        ticket.wait(0)
    eventually(ticket.done)
    assert bench.arrived() == [1, 2]


def test_every_failure_is_counted(bench: Bench) -> None:
    lane, _ = bench.lane(raises=[0, 2, 3])
    tickets = [bench.submit(lane, [row]) for row in range(5)]
    tickets[-1].wait(0)
    assert [ticket.error is None for ticket in tickets] == [False, True, False, False, True]
    assert lane.failures == 3


# -- jobs that would end the thread ----------------------------------------------------------


def test_a_job_that_exits_fails_alone_and_the_same_thread_goes_on(bench: Bench) -> None:
    lane, backend = bench.lane(kills=[0])
    backend.hold.clear()
    killed, next_one = bench.submit(lane, [0]), bench.submit(lane, [1])
    backend.hold.set()
    with pytest.raises(TransferError, match="killed by a test"):
        killed.wait(0)
    next_one.wait(0)
    assert bench.arrived() == [1]
    assert lane.failures == 1 and len(alive()) == 1


def test_closing_after_a_job_that_exited_still_runs_what_was_submitted(bench: Bench) -> None:
    lane, backend = bench.lane(kills=[0])
    backend.hold.clear()
    _, next_one = bench.submit(lane, [0]), bench.submit(lane, [1])
    backend.hold.set()
    assert lane.close(LONG_S)
    next_one.wait(-1)
    assert bench.arrived() == [1] and next_one.done()


def test_a_closed_lane_takes_no_more_jobs(bench: Bench) -> None:
    lane, _ = bench.lane()
    assert lane.close(LONG_S)
    with pytest.raises(AssertionError, match="closed"):
        bench.submit(lane, [0])


class Broken(HostTimeline):
    """A device that cannot say how far it got."""

    def record(self) -> None:
        raise RuntimeError("no context")

    def passed(self, event: object) -> bool:
        return event is not None


def test_waiters_get_an_error_even_if_the_device_is_broken_and_it_is_never_done() -> None:
    ticket = Ticket(Broken(), 2, time.monotonic() + LONG_S)
    ticket.fail(ValueError("broken"))
    with pytest.raises(TransferError, match="broken"):
        ticket.wait(1)
    assert not ticket.done()


# -- deadlines and closing ------------------------------------------------------------------


def test_a_held_copy_misses_its_deadline_but_is_not_done_until_it_ended(bench: Bench) -> None:
    lane, backend = bench.lane()
    backend.hold.clear()
    ticket = bench.submit(lane, [7], timeout_s=SHORT_S)
    with pytest.raises(TransferError, match="missed its deadline"):
        ticket.wait(0)
    assert not ticket.done()
    assert bench.arrived() == []
    backend.hold.set()
    eventually(ticket.done)
    assert bench.arrived() == [7]
    assert lane.failures == 0


def test_a_wait_ends_at_the_deadline_and_not_later(bench: Bench) -> None:
    lane, backend = bench.lane()
    backend.hold.clear()
    ticket = bench.submit(lane, [7], timeout_s=2 * SHORT_S)
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(TransferError, match="missed its deadline"):
            ticket.wait(0)
    assert 2 * SHORT_S * 0.5 < time.monotonic() - started < LONG_S / 2


def test_closing_runs_what_was_submitted_and_then_ends_the_thread(bench: Bench) -> None:
    lane, backend = bench.lane(raises=[1])
    backend.hold.clear()
    tickets = [bench.submit(lane, [row]) for row in range(4)]
    threading.Timer(SHORT_S, backend.hold.set).start()
    assert lane.close(LONG_S)
    assert not alive()
    tickets[-1].wait(0)
    assert bench.arrived() == [0, 2, 3]


def test_closing_a_lane_that_hangs_says_so_and_leaves_its_job_undone(bench: Bench) -> None:
    lane, backend = bench.lane()
    backend.hold.clear()
    ticket = bench.submit(lane, [0])
    assert not lane.close(SHORT_S)
    assert not ticket.done()
    backend.hold.set()
    assert lane.close(LONG_S)
    eventually(ticket.done)
    assert bench.arrived() == [0]


def test_handing_a_job_over_waits_for_its_first_leg_and_not_for_long(bench):
    lane, backend = bench.lane()
    backend.hold.clear()
    ticket = bench.submit(lane, [0], [1])
    start = time.monotonic()
    ticket.wait_issued(SHORT_S)
    assert SHORT_S <= time.monotonic() - start < LONG_S / 2
    threading.Timer(SHORT_S, backend.hold.set).start()
    ticket.wait_issued(LONG_S)
    assert time.monotonic() - start < LONG_S / 2
    ticket.wait(-1)


class Joined(HostTimeline):
    """Points are numbers; `joined` are those that were waited for."""

    def __init__(self) -> None:
        self.points, self.joined = 0, []

    def record(self):
        self.points += 1
        return self.points

    def join(self, event) -> None:
        self.joined.append(event)


def test_a_job_is_waited_for_when_all_of_it_was_issued():
    timeline = Joined()
    ticket = Ticket(timeline, 2, time.monotonic() + LONG_S)
    for joined in ([], [], [2]):
        ticket.join()
        assert timeline.joined == joined
        ticket.leg_issued()


def test_what_was_waited_for_is_there(bench):
    lane, _ = bench.lane()
    ticket = bench.submit(lane, [0, 3], [1])
    eventually(lambda: len(ticket._issued) == 2)
    ticket.join()
    assert ticket.done() and bench.arrived() == [0, 1, 3]
