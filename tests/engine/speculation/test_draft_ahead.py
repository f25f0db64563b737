"""What is launched behind a verify step before the host knows what was accepted: which rows, which
slots, and the acceptance on the device."""

from __future__ import annotations

import pytest
import torch

from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.runner import UnreadTokens
from kvtide.engine.sampling.sampler import SampledToken
from kvtide.spec import ModelMemory
from tests.cache.memories import DRAFTED, FULL, PAGE, RECURRENT, WINDOW
from tests.engine.desk import Desk

CPU = torch.device("cpu")


def decoding(at: Desk, *answers: int) -> list[ScheduledChunk]:
    """Requests that have one token each to compute, and their chunks with three drafts."""
    for answer in answers:
        at.queue(1, answer=answer)
    while any(len(request.output) < 1 for request in at.requests):
        at.step()
    for request in at.requests:
        request.drafts = (1, 2, 3)[: at.scheduler.slots_for_drafts(request, 3)]
    return at.scheduler.schedule()


@pytest.mark.parametrize("memory", [FULL, WINDOW, DRAFTED], ids=["full", "window", "draft"])
@pytest.mark.parametrize("accepted", range(4))
def test_there_are_slots_wherever_acceptance_ends(memory: ModelMemory, accepted: int) -> None:
    at = Desk(memory, pages=64)
    chunks = decoding(at, 30, 30)
    planned = at.scheduler.plan_verify_ahead(chunks, lambda request: 3)
    assert planned is not None and not planned.frees_slots
    assert [chunk.request for chunk in planned.chunks] == [chunk.request for chunk in chunks]
    at.overlap.plan(planned)
    assert at.overlap.prepare()
    at.overlap.launch_verify_ahead(UnreadTokens(torch.empty(0), {}, torch.empty(0)), torch.empty(0))
    for chunk in chunks:
        request = chunk.request
        request.computed = chunk.end + accepted
        for _ in range(accepted + 1):
            request.append(SampledToken(7, 0.0))
        at.cache.commit(request.held, request.computed)
        # Of the step behind: what it reads, and what it writes with its drafts.
        at.check(request, request.length + 3)
    taken = at.overlap.take(at.scheduler)
    assert taken is not None and taken.launched
    assert [chunk.end for chunk in taken.chunks] == [r.length for r in at.requests]
    assert [chunk.start for chunk in taken.chunks] == [r.computed for r in at.requests]
    assert all(len(chunk.drafts) == 3 and chunk.completes for chunk in taken.chunks)
    at.end()


def test_nothing_is_drafted_beyond_a_requests_last_token() -> None:
    at = Desk(pages=64)
    chunks = decoding(at, 3, 6, 30)
    planned = at.scheduler.plan_verify_ahead(chunks, lambda request: 3)
    assert planned is not None
    by_request = {chunk.request: chunk for chunk in planned.chunks}
    drafts = {chunk.request: len(chunk.drafts) for chunk in chunks}
    for request in at.requests:
        behind = by_request[request]
        last = request.length + 1 + drafts[request] + len(behind.drafts)
        assert last <= request.max_length, "a token is sampled behind every draft"
    assert [len(by_request[request].drafts) for request in at.requests] == [0, 0, 3]
    at.end()


def test_a_request_that_ends_now_is_not_in_the_step_behind() -> None:
    at = Desk(pages=64, max_running=2)
    chunks = decoding(at, 2, 30)
    planned = at.scheduler.plan_verify_ahead(chunks, lambda request: 3)
    assert planned is not None and planned.frees_slots
    assert [chunk.request for chunk in planned.chunks] == at.requests[1:]
    at.queue(1, answer=4)
    at.scheduler.admit()
    assert at.scheduler.plan_verify_ahead(chunks, lambda request: 3) is None, (
        "a request gets its slots"
    )
    at.end()


def test_running_states_are_drafted_for_up_to_the_end_of_their_page() -> None:
    """A state is written where a step ends, wherever acceptance of the step before ended."""
    at = Desk(RECURRENT, pages=64)
    assert at.scheduler.keeps_states, "the host reads before the next step"
    max_drafts = 0
    request = at.queue(1, answer=30)
    for length in range(PAGE + 2, 3 * PAGE + 2):
        while request.length < length:
            at.step()
        request.drafts = (1,)[: at.scheduler.slots_for_drafts(request, 1)]
        (chunk,) = at.scheduler.schedule()
        planned = at.scheduler.plan_verify_ahead([chunk], lambda request: 2)
        assert planned is not None
        (behind,) = planned.chunks
        end = -(-length // PAGE) * PAGE
        last = length + 1 + len(chunk.drafts) + len(behind.drafts)
        assert last <= end or not behind.drafts
        assert len(at.cache.page_table(request.held, "state")) <= end // PAGE + 1
        max_drafts, request.drafts = max(max_drafts, len(behind.drafts)), ()
    assert max_drafts > 0
    at.end()


@pytest.mark.parametrize("why", ["prefill", "waiting"])
def test_the_host_reads_first_where_other_requests_may_be_in_the_step(why: str) -> None:
    at = Desk(FULL, pages=64)
    chunks = decoding(at, 30, 30)
    if why == "prefill":
        chunks = chunks[:1]
    elif why == "waiting":
        at.queue(1, answer=4)
    assert at.scheduler.plan_verify_ahead(chunks, lambda request: 3) is None
    at.end()
