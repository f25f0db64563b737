"""Which requests run next, and how many tokens of each: without a model, steps are only counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.cache import Fetch
from kvtide.cache.rank_agreement import Alone
from kvtide.engine import Request, RequestState, scheduler
from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.overlap import OverlapState
from kvtide.engine.request import Activity, PrefixOwner
from kvtide.engine.sampling.sampler import SampledToken
from kvtide.index import EveryPages
from kvtide.spec import Tier
from tests.cache.memories import DRAFTED, FULL, PAGE, RECURRENT, V4_DRAFTED, WINDOW
from tests.engine.desk import Ahead, Desk
from tests.grids import everything

DECODE, FETCHING, PREFILL = Activity.DECODE, Activity.FETCHING, Activity.PREFILL
QUEUED, SHARING = Activity.QUEUED, Activity.SHARING


@pytest.fixture
def desk() -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def make(*args: Any, **options: Any) -> Desk:
        desks.append(Desk(*args, **options))
        return desks[-1]

    yield make
    for each in desks:
        each.end()


# -- admission ------------------------------------------------------------------------------


def test_priorities_come_before_age_and_age_among_equals(desk):
    at = desk()
    low, high, second_low, second_high = (at.queue(priority=p) for p in (0, 2, 0, 2))
    at.scheduler.admit()
    assert at.scheduler.running == [high, second_high, low, second_low]
    assert all(request.state is RequestState.RUNNING for request in at.requests)


def test_no_more_run_than_may(desk):
    at = desk(max_running=2)
    first, second, third = (at.queue() for _ in range(3))
    at.scheduler.admit()
    assert at.scheduler.running == [first, second] and at.scheduler.waiting == 1
    at.scheduler.remove(first)
    at.scheduler.admit()
    assert at.scheduler.running == [second, third]


def test_no_request_overtakes_the_head_that_waits_for_room(desk):
    at = desk(pages=9)
    running, large, small = at.queue(4), at.queue(6), at.queue(1)
    at.scheduler.admit()
    assert at.scheduler.running == [running] and at.scheduler.waiting == 2
    assert large.lease is None and small.state is RequestState.WAITING
    at.scheduler.remove(running)
    at.scheduler.admit()
    assert at.scheduler.running == [large] and at.scheduler.waiting == 1


def test_a_higher_priority_becomes_the_head(desk):
    at = desk(pages=9)
    running, large = at.queue(4), at.queue(6)
    at.scheduler.admit()
    urgent = at.queue(1, priority=1)
    at.scheduler.admit()
    assert at.scheduler.running == [running, urgent] and large.state is RequestState.WAITING


def test_a_higher_priority_takes_the_room_of_lower_ones_and_no_more_than_it_needs(desk):
    at = desk(pages=18)
    first, second, third = (at.queue(3, priority=p) for p in (0, 1, 0))
    at.step()
    at.step()
    assert set(at.scheduler.running) == {first, second, third}
    urgent = at.queue(3, priority=2)
    at.scheduler.admit()
    assert set(at.scheduler.running) == {first, second, urgent}, "the latest of the lowest went"
    assert third.state is RequestState.WAITING and third.lease is None
    at.scheduler.remove(urgent)
    at.scheduler.admit()
    assert third.state is RequestState.RUNNING and third.computed == 3 * PAGE, (
        "it goes on where it was"
    )


def test_no_request_is_retracted_for_one_that_would_not_fit_all_the_same(desk):
    at = desk(pages=12)
    low, high = at.queue(3), at.queue(3, priority=5)
    at.step()
    urgent = at.queue(6, priority=2)
    at.scheduler.admit()
    assert set(at.scheduler.running) == {low, high} and urgent.state is RequestState.WAITING


def test_prompts_of_higher_priority_get_a_steps_tokens_first(desk):
    at = desk(pages=64, chunk_tokens=8)
    long, urgent = at.queue(10), at.queue(2, priority=1)
    assert [(chunk.request, chunk.end) for chunk in at.step()] == [(urgent, 8)]
    assert [chunk.request for chunk in at.step()] == [urgent, long]


def test_a_full_batch_gives_way_to_a_higher_priority_but_not_to_an_equal(desk):
    at = desk(max_running=2)
    first, second = at.queue(), at.queue()
    at.step()
    equal = at.queue()
    at.scheduler.admit()
    assert set(at.scheduler.running) == {first, second} and equal.state is RequestState.WAITING
    urgent = at.queue(priority=1)
    at.scheduler.admit()
    assert set(at.scheduler.running) == {first, urgent}


def test_admission_reserves_room_for_the_whole_answer(desk):
    at = desk(pages=8)
    talker, other = at.queue(2, answer=4 * PAGE), at.queue(2)
    at.scheduler.admit()
    assert at.scheduler.running == [talker] and other.state is RequestState.WAITING
    while talker.length < talker.max_length:
        assert [chunk.request for chunk in at.step()] == [talker]
    assert talker.admissions == 1


def test_what_is_found_is_counted_at_the_first_admission(desk):
    at = desk()
    first = at.queue(3)
    at.step()
    assert first.by_tier == {} or sum(first.by_tier.values()) == 0
    asked = first.params.tokens
    again = Request(99, first.params, at.cache.prompt(asked), list(asked))
    at.requests.append(again)
    at.scheduler.queue(again)
    at.scheduler.admit()
    assert again.by_tier == {Tier.DEVICE: 3 * PAGE} and again.computed == 3 * PAGE


# -- a step ---------------------------------------------------------------------------------


def test_decodes_come_before_prefills(desk):
    at = desk(pages=32, chunk_tokens=12)
    old = at.queue(5)
    at.step()
    quick = at.queue(0, extra=2)
    at.scheduler.admit()
    assert at.step() == [ScheduledChunk(quick, 2), ScheduledChunk(old, 5 * PAGE + 1)]
    long = at.queue(8)
    late = at.queue(0, extra=1)  # One token is all it has: it counts as a decode.
    chunks = at.step()
    *first, last = [chunk.request for chunk in chunks]
    assert sorted(first, key=lambda request: request.number) == [old, quick, late] and last is long
    assert chunks[-1].end == 12 - 3, "the prompt gets what is left"


def test_prefill_chunks_are_smaller_beside_a_decode_batch(desk, monkeypatch):
    monkeypatch.setattr(scheduler, "MIXED_STEP_TOKENS", 2 * PAGE)
    at = desk(pages=32, chunk_tokens=6 * PAGE)
    long = at.queue(8)
    assert at.step() == [ScheduledChunk(long, 6 * PAGE)], "no request waits for a token"
    quick = at.queue(0, extra=1)
    assert at.step() == [ScheduledChunk(quick, 1), ScheduledChunk(long, 8 * PAGE - 1)]
    other = at.queue(4)
    chunks = at.step()
    assert len(chunks) == 3 and ScheduledChunk(other, 2 * PAGE - 3) in chunks


def test_decodes_are_neighbours_if_they_begin_alike(desk):
    at = desk(pages=48)
    first, second = at.queue(1, answer=6), at.queue(1, answer=6)
    at.step()
    more = [at.queue(1, after=one, answer=6) for one in (second, first, second, first)]
    at.step()
    order = [chunk.request for chunk in at.step()]
    assert len(order) == 6
    firsts = sorted(order.index(one) for one in (first, more[1], more[3]))
    assert firsts in ([0, 1, 2], [3, 4, 5])


PLANNED_AHEAD = (FULL, WINDOW, RECURRENT, DRAFTED, V4_DRAFTED)


class Chances:
    """Requests come, leave, are interrupted, all at random: the same ones for every desk."""

    def __init__(self, desk: Desk, seed: int) -> None:
        self._desk = desk
        self._rng = random.Random(seed)

    def happen(self) -> None:
        rng, desk = self._rng, self._desk
        present = [r for r in desk.requests if desk.scheduler.find(r.number) is r]
        what = rng.random()
        if what < 0.15:
            desk.queue(rng.randrange(4), extra=rng.randrange(1, PAGE), answer=rng.randrange(1, 30))
        elif what < 0.18 and present:
            desk.scheduler.remove(rng.choice(present))
        elif what < 0.21 and desk.scheduler.running:
            desk.scheduler.retract(rng.choice(desk.scheduler.running))
        elif what < 0.24:
            desk.scheduler.chunk_tokens = rng.choice((2, 64, 64, 64))


@pytest.mark.quick
@pytest.mark.parametrize("memory", PLANNED_AHEAD, ids=lambda memory: memory.model)
@pytest.mark.parametrize("seed", range(6))
def test_a_step_planned_ahead_is_the_one_that_would_be_planned(desk, memory, seed, monkeypatch):
    """Or nothing is left of it."""
    monkeypatch.setattr(scheduler, "BLOCKED_STEP_TOKENS", 2 * PAGE)
    planning, other = (desk(memory, pages=24 if seed % 2 else 48) for _ in range(2))
    chances = [Chances(one, seed) for one in (planning, other)]
    planned = 0
    for number in range(300 if everything() else 120):
        for chance in chances:
            chance.happen()
        planning.scheduler.admit()  # The plan holds if no request is admitted.
        planned += planning.overlap.state is OverlapState.PLANNED
        steps = (planning.step(Ahead.MIXED if seed % 2 else Ahead.DECODE), other.step())
        # The order of decodes may depend on what is known of a short prompt.
        numbers = [{(chunk.request.number, chunk.end) for chunk in chunks} for chunks in steps]
        assert numbers[0] == numbers[1], f"step {number}"
        assert planning.cache.validate() == []
        both = (planning, other)
        kept = [[at.cache.match(r.prompt).tokens for r in at.requests] for at in both]
        assert kept[0] == kept[1], f"step {number}"
    assert planned > 10


def test_a_request_that_found_no_room_is_not_looked_at_before_another_has_left(desk):
    """But for the one that comes first now, and where others have to give way."""
    at = desk(pages=6)
    first, second = at.queue(2, answer=8), at.queue(2, answer=8)
    at.scheduler.admit()
    assert at.scheduler.blocked and second.lease is None
    at.queue(1)
    assert at.scheduler.blocked
    urgent = at.queue(2, answer=8, priority=1)
    assert not at.scheduler.blocked
    at.scheduler.admit_without_preemption()
    assert not at.scheduler.blocked and first.lease is not None and urgent.lease is None
    at.scheduler.admit()
    assert first.lease is None and urgent.lease is not None and at.scheduler.blocked
    at.scheduler.remove(urgent)
    at.scheduler.admit_without_preemption()
    assert first.lease is not None and at.scheduler.blocked


def test_the_live_rows_of_a_launched_step_are_the_next_step(desk, monkeypatch):
    at = desk(pages=32)
    first, second, third = (at.queue(1, answer=20) for _ in range(3))
    at.step(Ahead.DECODE)
    assert at.may_launch
    dropped: list[str] = []
    traffic = at.cache._in_flight
    monkeypatch.setattr(traffic, "drop_fence", lambda way=None: dropped.append("fence"))
    at.launch()
    late = at.queue(1, answer=20)
    at.scheduler.remove(second)
    at.overlap.drop(third)
    assert dropped == ["fence"], "the launched step still uses its slots"
    assert [chunk.request for chunk in at.step()] == [first]
    dropped.clear()
    at.scheduler.remove(third)
    assert dropped == ["fence"], "its row is discarded and still computed"
    assert late.lease is not None
    assert {chunk.request for chunk in at.step()} == {first, late}
    at.cache.fence([first.held])
    dropped.clear()
    at.scheduler.remove(late)
    assert dropped == [], "no step uses its slots"
    at.scheduler.remove(first)
    assert dropped == ["fence"]


def test_a_step_is_not_launched_ahead_if_a_request_waits_for_one_that_ends(desk):
    at = desk(max_running=2)
    at.queue(1, answer=20)
    short = at.queue(1, answer=3)
    for _ in range(2):
        at.step(Ahead.DECODE)
        assert at.may_launch
    at.queue(1)
    at.step(Ahead.DECODE)
    assert at.overlap.chunks and not at.may_launch
    assert short.length == short.max_length


@pytest.mark.parametrize(
    ("memory", "states"),
    [(FULL, False), (WINDOW, False), (DRAFTED, False), (RECURRENT, True), (V4_DRAFTED, True)],
)
def test_states_are_not_launched_ahead_where_the_host_may_read_other_tokens(desk, memory, states):
    at = desk(memory, pages=48)
    request = at.queue(1, answer=20)
    while not request.output:  # A state is kept where the prompt's page ends.
        at.step()
    at.step(Ahead.DECODE)
    assert at.may_launch
    assert at.may_launch_uncertain is not states


@pytest.mark.parametrize(
    ("memory", "launches"),
    [(FULL, True), (WINDOW, True), (DRAFTED, True), (RECURRENT, False), (V4_DRAFTED, False)],
    ids=lambda value: getattr(value, "model", ""),
)
def test_prefill_chunks_are_launched_ahead_where_a_request_waits_for_room(
    desk, monkeypatch, memory, launches
):
    for limit in ("MIXED_STEP_TOKENS", "BLOCKED_STEP_TOKENS"):
        monkeypatch.setattr(scheduler, limit, 2 * PAGE)
    at = desk(memory, pages=20)
    first = at.queue(1, extra=3, answer=20)
    at.step()
    long = at.queue(8)
    at.step(Ahead.MIXED)
    assert not at.overlap.chunks, "there is room"
    quick, waiting = at.queue(0, answer=1), at.queue(4)
    assert quick in {chunk.request for chunk in at.step(Ahead.MIXED)}
    assert waiting.lease is None and at.scheduler.blocked
    coming = (
        [ScheduledChunk(first, PAGE + 6), ScheduledChunk(long, 6 * PAGE - 4)] if launches else []
    )
    assert at.overlap.chunks == coming and at.may_launch is launches
    if not launches:
        return
    at.launch()
    at.scheduler.remove(first)
    assert at.step() == coming[1:]


def test_prefills_have_their_turn_in_steps_launched_ahead(desk, monkeypatch):
    """The higher priority first; and no step is launched in which none has one."""
    monkeypatch.setattr(scheduler, "BLOCKED_STEP_TOKENS", 2 * PAGE)
    at = desk(pages=32)
    first = at.queue(1, answer=20)
    at.step()
    old, urgent, _ = at.queue(8), at.queue(8, priority=1), at.queue(20)
    at.scheduler.admit()
    at.step(Ahead.MIXED)
    assert at.scheduler.plans_prefill_ahead
    assert [chunk.request for chunk in at.overlap.chunks] == [first, urgent]
    for tokens, coming in ((3, 2), (2, 0), (1, 0)):
        at.scheduler.chunk_tokens = tokens
        at.step(Ahead.MIXED)
        assert len(at.overlap.chunks) == coming
    assert old.lease is not None


def test_a_request_left_out_of_a_step_is_in_the_next(desk):
    at = desk(pages=32)
    first, second = at.queue(1, answer=20), at.queue(1, answer=20)
    at.step(Ahead.DECODE)
    at.launch()
    at.overlap.drop(second)
    assert [chunk.request for chunk in at.step(Ahead.DECODE)] == [first]
    assert not at.overlap.chunks, "its token is known"
    assert {chunk.request for chunk in at.step()} == {first, second}


def test_slots_of_a_chunk_that_is_not_launched_are_given_back(desk, monkeypatch):
    """Windows are kept before the end of a step, and the next one ends elsewhere."""
    monkeypatch.setattr(scheduler, "BLOCKED_STEP_TOKENS", 5 * PAGE)
    at = desk(WINDOW, pages=32, chunk_tokens=PAGE, placement=EveryPages(64))
    at.queue(1, answer=20)
    long = at.queue(16)
    at.queue(10)
    for _ in range(4):
        at.step()
    assert at.scheduler.plans_prefill_ahead
    at.scheduler.chunk_tokens = 10 * PAGE
    at.step(Ahead.MIXED)
    assert at.overlap.chunks[-1].end - long.computed > 4 * PAGE
    at.scheduler.chunk_tokens = PAGE
    before = long.computed
    for _ in range(12):
        at.step()
    assert long.computed > before + 4 * PAGE, "it has come where the windows were"


def test_requests_with_more_to_compute_or_that_end_are_not_planned_ahead(desk):
    at = desk(chunk_tokens=PAGE)
    request = at.queue(2, answer=3)
    for ends in ([], [], [2 * PAGE + 2], [2 * PAGE + 3], []):
        at.step(Ahead.DECODE)
        assert [chunk.end for chunk in at.overlap.chunks] == ends
    assert request.length == request.max_length


def test_the_plan_ahead_is_dropped_when_a_request_comes_or_goes(desk):
    at = desk(pages=32)
    first, second = at.queue(1, answer=20), at.queue(1, answer=20)
    at.step(Ahead.DECODE)
    at.scheduler.retract(second)
    assert at.step(Ahead.DECODE)[0] == ScheduledChunk(first, PAGE + 2), "both, where they were"
    assert second.lease is not None and second.computed == PAGE + 2
    third = at.queue(1, answer=20)
    assert {chunk.request for chunk in at.step(Ahead.DECODE)} == {first, second, third}
    assert len(at.step(Ahead.DECODE)) == 3
    at.scheduler.remove(third)
    assert {chunk.request for chunk in at.step()} == {first, second}


def test_prompts_are_served_oldest_first(desk):
    at = desk(chunk_tokens=2 * PAGE)
    first, second = at.queue(1), at.queue(3)
    assert at.step() == [ScheduledChunk(first, PAGE + 1), ScheduledChunk(second, PAGE - 1)]


@pytest.mark.parametrize("memory", [FULL, RECURRENT], ids=["full", "recurrent"])
@pytest.mark.parametrize("chunk_tokens", [1, 3, PAGE, 3 * PAGE + 2])
def test_no_step_computes_more_than_a_chunk(desk, memory, chunk_tokens):
    at = desk(memory, pages=48, chunk_tokens=chunk_tokens)
    for pages in (4, 1, 3, 0):
        at.queue(pages, answer=3)
    for _ in range(400):
        before = {request.number: request.computed for request in at.requests}
        at.scheduler.admit()
        chunks = at.scheduler.schedule()
        counts = [chunk.end - before[chunk.request.number] for chunk in chunks]
        assert all(count > 0 for count in counts) and 0 < sum(counts) <= chunk_tokens
        for request, end, _ in chunks:
            request.computed = end
            at.cache.commit(request.held, end)
            if end == request.length:
                request.append(SampledToken(7, 0.0))
                if len(request.output) == request.params.max_tokens:
                    at.scheduler.remove(request)
        if not at.scheduler.running and not at.scheduler.waiting:
            break
    assert all(len(request.output) == 3 for request in at.requests)


# -- out again ------------------------------------------------------------------------------


def test_a_retracted_request_gets_its_old_place_and_its_pages_back(desk):
    at = desk(max_running=1)
    first, second = at.queue(3), at.queue(1)
    at.step()
    third = at.queue(1)
    at.scheduler.retract(first)
    assert first.state is RequestState.WAITING and first.lease is None and at.scheduler.waiting == 3
    at.scheduler.admit()
    assert at.scheduler.running == [first]
    assert first.computed == 3 * PAGE and first.admissions == 2 and len(first.output) == 1
    at.scheduler.remove(first)
    at.scheduler.admit()
    assert at.scheduler.running == [second] and third.state is RequestState.WAITING


def test_for_the_oldest_request_the_latest_gives_up_its_slots(desk, monkeypatch):
    """Two requests that retract themselves in turns would never end."""
    at = desk()
    oldest, latest = at.queue(2, answer=8), at.queue(2, answer=8)
    at.step()
    grow = at.cache.grow
    monkeypatch.setattr(
        at.cache, "grow", lambda lease, tokens: latest.lease is None and grow(lease, tokens)
    )
    assert [chunk.request for chunk in at.step()] == [oldest]
    assert latest.state is RequestState.WAITING and latest.lease is None


def test_session_pins_give_way_before_a_running_request_is_retracted(desk, monkeypatch):
    """With few slots for states, at random; else no request lacks slots once it runs."""
    gave = 0
    for seed in range(12):
        rng = random.Random(seed)
        at = desk(RECURRENT, pages=rng.choice((12, 16, 24)), chunk_tokens=16, max_running=4,
                  tokens_per_checkpoint=rng.choice((4, 6, 8)) * PAGE)  # fmt: skip
        sessions, retract = at.cache.sessions, at.scheduler.retract

        def judged(request, sessions=sessions, retract=retract):
            assert not sessions.hold_enough, "pins hold what it lacks"
            retract(request)

        monkeypatch.setattr(at.scheduler, "retract", judged)
        for _ in range(60):
            if at.scheduler.waiting < 3:
                at.queue(rng.randrange(1, 5), answer=rng.randrange(1, 14))
            running, before = [*at.scheduler.running], sessions.ended["evicted"]
            at.step()
            gave += sessions.ended["evicted"] - before if len(running) > 1 else 0
            for request in running:
                if request.length == request.max_length:
                    sessions.keep(str(rng.randrange(3)), request.prompt)
            assert at.cache.validate() == []
        sessions.forget_all()
    assert gave > 0


def test_retractions_are_counted(desk):
    at = desk(pages=9)
    running = at.queue(4)
    at.step()
    assert at.scheduler.retractions == 0
    at.scheduler.retract(running)
    assert at.scheduler.retractions == 1


def test_a_request_says_what_it_does_or_waits_for(desk):
    at = desk(pages=12, chunk_tokens=8, max_running=2)
    first, sharing, large = at.queue(4), at.queue(2), at.queue(12)
    sharing.prefix_owner = PrefixOwner(first, 4)
    at.step()
    assert [r.activity for r in at.requests] == [PREFILL, SHARING, QUEUED]
    while first.computed < len(first.params.tokens):
        at.step()
    assert first.activity is DECODE
    large.fetch = Fetch(large.prompt, 0.0, 0.0)
    assert large.activity is FETCHING
    large.fetch = None
    large.handoff = SimpleNamespace(waits=True)
    assert large.activity is Activity.HANDOFF
    large.handoff = None
    lease, first.lease = first.lease, SimpleNamespace(loading=True)
    assert first.activity is Activity.LOADING
    first.lease = lease


def test_a_retracted_request_holds_nothing(desk):
    at = desk()
    request = at.queue(3)
    at.step()
    at.scheduler.retract(request)
    assert not at.cache.index.leases
    at.cache.flush(Tier.DEVICE)
    assert all(
        count.free == count.capacity
        for (tier, _), count in at.cache.stats().pages.items()
        if tier is Tier.DEVICE
    )
    at.step()
    assert request.computed == request.length - 1, "it computes what is gone, and goes on"


def test_a_waiting_request_can_be_removed_from_anywhere(desk):
    at = desk(max_running=1)
    requests = [at.queue(1, priority=p) for p in (0, 3, 1, 2)]
    at.scheduler.remove(requests[2])
    at.scheduler.remove(requests[2])
    order = []
    while at.scheduler.waiting:
        at.scheduler.admit()
        order.append(at.scheduler.running[0])
        at.scheduler.remove(at.scheduler.running[0])
    assert order == [requests[1], requests[3], requests[0]]


# -- recurrent states -------------------------------------------------------------------------


def test_a_step_ends_where_a_state_is_kept(desk):
    at = desk(RECURRENT, pages=32, placement=EveryPages(2))
    request = at.queue(5, extra=2)
    ends = []
    while request.computed < len(request.params.tokens):
        ((_, end, _),) = at.step()
        ends.append(end)
    assert ends == [2 * PAGE, 4 * PAGE, 5 * PAGE, 5 * PAGE + 2]


def test_no_step_passes_a_page_with_a_state(desk):
    """The state after a page is written only by a step that ends there."""
    at = desk(RECURRENT, pages=64, chunk_tokens=11, placement=EveryPages(3))
    for pages in (7, 2, 9):
        at.queue(pages, extra=3, answer=2 * PAGE)
    for _ in range(60):
        before = {request: request.computed for request in at.requests}
        at.scheduler.admit()
        for request, end, _ in at.scheduler.schedule():
            table = at.cache.page_table(request.held, "state")
            inside = range(before[request] // PAGE, (end - 1) // PAGE)
            assert all(table[page] < 0 for page in inside)
            assert table[(end - 1) // PAGE] >= 0, "the state where the step ends has a slot"
            request.computed = end
            at.cache.commit(request.held, end)
            if end == request.length and request.length < request.max_length:
                request.append(SampledToken(7, 0.0))
            elif end == request.length:
                at.scheduler.remove(request)
        assert at.cache.validate() == []
    assert not at.scheduler.running and not at.scheduler.waiting


def test_a_resumed_state_is_where_the_match_says(desk):
    at = desk(RECURRENT, pages=32, placement=EveryPages(2))
    request = at.queue(5, extra=2)
    at.step()
    at.scheduler.retract(request)
    at.scheduler.admit()
    assert request.computed == 2 * PAGE
    assert at.cache.page_table(request.held, "state")[1] >= 0


class Elsewhere(Alone):
    """Another rank holds nothing to be so."""

    def all_true(self, bits: Sequence[bool]) -> list[bool]:
        return [False] * len(bits)


def test_steps_end_where_any_stage_wants_a_state_kept() -> None:
    """Slices differ in their sidecars: what this stage has not, the next one may have."""
    plans = []
    for agreement in (Alone(), Elsewhere()):
        desk = Desk(agreement=agreement, placement=EveryPages(1))
        desk.queue(3)
        plans.append([chunk.end for chunk in desk.step()])
    assert plans == [[3 * PAGE + 1], [PAGE]]
