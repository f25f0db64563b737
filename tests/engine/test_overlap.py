"""Steps that are launched before their tokens are read, beside copies, with random traffic.

Requests are answered as if alone. And no copy meets a step: a step launched after all that a
load waits for has none of the pages that it brings, and writes none that a backup reads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import (
    Engine,
    Request,
    RequestParams,
    SamplingParams,
    scheduler,
)
from kvtide.engine.chunks import PlannedStep, ScheduledChunk
from kvtide.engine.graphs import step_graphs
from kvtide.engine.overlap import Overlap, OverlapState
from kvtide.engine.runner import HiddenOutput, LaunchedStep, PreparedStep, StepOutput
from kvtide.engine.sampling import sampler
from kvtide.engine.sampling.sampler import SampledToken
from kvtide.engine.scheduler import Scheduler
from kvtide.engine.speculation.drafter import DraftWish, TokenDrafter, UnreadDrafts
from kvtide.layers import Step
from kvtide.spec import PageMove
from kvtide.transfer.copy_jobs import Copier
from kvtide.transfer.lane import Ticket
from kvtide.transfer.strided import Way
from kvtide.transfer.timeline import HostTimeline
from tests.cache.memories import FULL
from tests.engine.test_engine import (
    PAGE,
    VOCABULARY,
    Stand,
    Sums,
    answer_to,
    complete,
    needed,
    words,
)
from tests.models.with_kernels import by_kernels, in_torch

STEPS = 120


class Pages(NamedTuple):
    """Of a step: those it has, and those it writes."""

    had: set[int]
    written: set[int]


class Watch:
    """A fence is the number of steps that were launched before it, and one more. A step is noted
    when the model computes it: on a CPU, when it is launched."""

    def __init__(self) -> None:
        self.launched: list[Pages] = []
        self.met: list[str] = []
        self.beside = 0

    def begin(self, rows: list[tuple[int, int, int]], tables: list[list[int]]) -> None:
        had, written = set[int](), set[int]()
        for (start, end, past), table in zip(rows, tables, strict=True):
            had |= {slot for slot in table if slot >= 0}
            written |= {table[at // PAGE] for at in range(past, past + end - start)} - {-1}
        self.launched.append(Pages(had, written))

    def copy(self, way: Way, moves: Sequence[PageMove], after: int | None) -> None:
        later = self.launched[(after or len(self.launched) + 1) - 1 :]
        self.beside += len(later)
        for move, each in ((move, each) for move in moves for each in later):
            loads = way is Way.LOAD
            slots = {*(move.target_slots if loads else move.source_slots).tolist()}
            if slots & (each.had if loads else each.written):
                self.met.append(f"{way.name} of {sorted(slots)} beside {each}")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    seen = Watch()
    forward, copy = Sums.forward, Copier.copy

    def watching(self: Sums, step: Step, *more: Any) -> Tensor:
        sequences = step.sequences or needed(step)
        rows = [(each.start, each.end, each.past) for each in sequences]
        seen.begin(rows, [each.slots["kv"].tolist() for each in sequences])
        return forward(self, step, *more)

    def copying(
        self: Copier, way: Way, moves: Sequence[PageMove], timeout_s: float, after: Any = None
    ) -> Ticket:
        seen.copy(way, moves, after)
        return copy(self, way, moves, timeout_s, after)

    monkeypatch.setattr(step_graphs, "TOKENS_PER_PREFILL", 4)
    monkeypatch.setattr(Sums, "forward", watching)
    monkeypatch.setattr(Copier, "copy", copying)
    monkeypatch.setattr(HostTimeline, "fence", lambda self: len(seen.launched) + 1)
    return seen


def asked(rng: random.Random, at: Stand, number: int) -> Request:
    """With a beginning that others have too; half are sampled, often by a second look."""
    tokens = [*words(rng.randrange(3), rng.choice((4, 8, 12)))]
    tokens += rng.choices(range(VOCABULARY), k=rng.randint(1, 14))
    settings = rng.choice(
        (
            SamplingParams(temperature=40.0, seed=number, top_p=rng.choice((1.0, 0.9))),
            SamplingParams(logprobs=rng.choice((0, 3)), repetition_penalty=rng.choice((1.0, 1.3))),
        )
    )
    stops = rng.sample(range(VOCABULARY), rng.choice((0, 6)))
    return at.submit(
        tokens,
        rng.choice((0, 1, 2, 5, 12, 20)),
        sampling=settings,
        stop_ids=frozenset(stops),
        priority=rng.choice((0, 0, 0, 1, 2)),
        score=rng.choice((None, None, None, None, 1)),
    )


def outcome(request: Request) -> tuple[Any, ...]:
    replied = [
        (sampled.token, round(sampled.logprob, 4), len(sampled.top)) for sampled in request.output
    ]
    return replied, request.finish, [sampled.token for sampled in request.scores]


@pytest.mark.quick(seed=range(1))
@pytest.mark.parametrize("seed", range(24))
def test_requests_are_answered_as_if_alone_and_no_copy_meets_a_step(
    seed: int, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    monkeypatch.setattr(scheduler, "BLOCKED_STEP_TOKENS", 6 if seed % 2 else 1024)
    rng, late = random.Random(seed), random.Random(seed)
    at = Stand(
        captured=True,
        device=rng.choice((11, 16, 24)),
        host=rng.choice((16, 40)),
        max_running=rng.choice((2, 4, 8)),
        chunk_tokens=rng.choice((8, 16, 64)),
        write_policy=rng.choice(("write_through", "write_back")),
    )
    at.engine.scheduler.skips_loading = rng.random() < 0.7
    requests: list[Request] = []
    aborted: set[int] = set()
    ahead = 0
    with monkeypatch.context() as patch:
        patch.setattr(HostTimeline, "passed", lambda self, event: late.random() < 0.4)
        deadline, step = time.monotonic() + 60, 0
        while step < STEPS or not at.engine.idle:
            assert time.monotonic() < deadline, "a request is stuck"
            if step < STEPS and rng.random() < 0.35:
                requests.append(asked(rng, at, len(requests)))
            if requests and rng.random() < 0.06:
                gone = rng.choice(requests)
                aborted |= set() if gone.finish else {gone.number}
                at.engine.abort(gone)
            if rng.random() < 0.03:
                at.break_load(rng.randrange(3))
            at.step()
            step += 1
            ahead += at.engine.overlap.state is OverlapState.LAUNCHED
    at.end()
    assert not watch.met
    assert ahead > 5 and watch.beside > 0
    alone = Stand(captured=False)
    for request in requests:
        replied, *rest = outcome(request)
        ask = request.params
        more = {"sampling": ask.sampling, "stop_ids": ask.stop_ids, "score": ask.score}
        wanted, *others = outcome(alone.ask(ask.tokens, ask.max_tokens, **more))
        if request.number in aborted:
            assert replied == wanted[: len(replied)]
        else:
            assert (replied, rest) == (wanted, others)
    alone.end()


def prefills_launched(at: Stand) -> list[Request]:
    """The requests with a prefill chunk in the step that was launched ahead."""
    launched = at.engine.overlap.state is OverlapState.LAUNCHED
    chunks = at.engine.overlap.chunks if launched else ()
    return [chunk.request for chunk in chunks if chunk.tokens > 1]


@pytest.mark.parametrize(
    ("device", "late", "launches"), [(26, True, True), (26, False, False), (80, True, False)]
)
def test_prefills_are_launched_ahead_where_a_request_waits_for_room(
    device: int, late: bool, launches: bool, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And most of a step is done: a request whose prefix lands before would wait in vain."""
    monkeypatch.setattr(scheduler, "BLOCKED_STEP_TOKENS", 6)
    monkeypatch.setattr(scheduler, "MIXED_STEP_TOKENS", 6)
    if not late:
        monkeypatch.setattr(HiddenOutput, "wait_until_late", lambda self: False)
    at = Stand(captured=True, device=device)
    requests = [at.submit(words(number, 25), 6) for number in range(8)]
    prompts = 0
    while not at.engine.idle:
        at.step()
        prompts += len(prefills_launched(at))
    assert complete(*requests) and not watch.met
    assert prompts > 5 if launches else prompts == 0
    at.end()


def test_a_request_whose_prefix_lands_during_a_step_is_in_the_next(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "BLOCKED_STEP_TOKENS", 8)
    at = Stand(captured=True, device=26)
    at.engine.scheduler.skips_loading = True
    at.remember_on_host(words(2, 20))
    first = at.submit(words(1, 3), 20)
    at.step()
    at.let_by()
    long, loading, waiting = (
        at.submit(words(n, count), 2) for n, count in ((3, 40), (2, 24), (4, 9))
    )
    lands = near = False
    timeline = at.cache.hardware.copier.lanes[Way.LOAD].timeline
    wait_until_late = HiddenOutput.wait_until_late
    passed = timeline.passed
    monkeypatch.setattr(timeline, "passed", lambda event: lands and passed(event))

    def waiting_until_late(self: HiddenOutput) -> bool:
        nonlocal lands
        lands = near and loading.held.loading
        while lands and not all(each.ticket.done() for each in loading.held.transfers):
            time.sleep(0.001)
        return wait_until_late(self)

    monkeypatch.setattr(HiddenOutput, "wait_until_late", waiting_until_late)
    for _ in range(3):
        at.step()
        assert loading.held.loading and waiting.lease is None
    assert prefills_launched(at) == [long]
    while long.length - long.computed > 12:
        at.step()
    near = True
    at.step()
    assert prefills_launched(at) == [loading, long]
    at.finish()
    assert complete(first, long, loading, waiting) and not watch.met
    at.end()


def test_a_mixed_graph_tells_when_it_is_late_and_no_other_step_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_graphs, "MIXED_TOKENS", (16,))
    at = Stand(captured=True, device=32)
    at.model.tried = False
    outputs: list[StepOutput] = []
    sample = at.engine._sample

    def sampling(chunks: Any, output: StepOutput) -> Any:
        outputs.append(output)
        return sample(chunks, output)

    monkeypatch.setattr(at.engine, "_sample", sampling)
    at.submit(words(1, 40), 3)
    for kind in ("eager", "decode_graph"):
        at.step()
        assert at.engine.steps_by_kind[kind] and outputs[-1].wait_until_late() is False
    at.submit(words(2, 9), 3)
    at.let_by()
    at.step()
    assert at.engine.steps_by_kind["mixed_graph"] and outputs[-1].wait_until_late()
    at.finish()
    at.end()


class DeviceDrafter(TokenDrafter):
    """Its drafts are on the device until `propose` reads them. `right`: they are what the model
    says, else never."""

    cost = 0.05

    def __init__(self, right: bool) -> None:
        self._right = right

    def extend(
        self, chunks: Sequence[ScheduledChunk], output: StepOutput, wishes: Sequence[DraftWish]
    ) -> None:
        replied = [answer_to(wish.request.tokens, 3) for wish in wishes]
        wrong = 0 if self._right else 1
        drafts = torch.tensor([[(token + wrong) % VOCABULARY for token in one] for one in replied])
        rows = {wish.request: row for row, wish in enumerate(wishes)}
        self.unread = UnreadDrafts(drafts, rows) if wishes else None

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        if not wishes:
            return []
        assert self.unread is not None
        drafts = self.unread.tokens.tolist()
        return [tuple(drafts[self.unread.rows[request]][:limit]) for request, limit in wishes]


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("chunk_tokens", [64, 3])
def test_verify_steps_are_launched_on_drafts_that_the_host_has_not_read(
    right: bool, chunk_tokens: int, watch: Watch
) -> None:
    """Where drafts do not pay, decode steps are launched ahead, with a trial now and then. A step
    of few tokens has room for few drafts, or none."""
    at = Stand(captured=True, device=96, chunk_tokens=chunk_tokens, drafter=DeviceDrafter(right))
    at.model.tried = False
    requests = [at.submit(words(number, 2), 80) for number in (1, 2, 3)]
    states = set()
    while not at.engine.idle:
        at.step()
        states.add(at.engine.overlap.state)
    assert complete(*requests) and not watch.met
    assert OverlapState.LAUNCHED in states
    lengths = at.engine.accept_length_stats
    assert lengths is not None
    assert (lengths.accepted > 0, lengths.rejected > 0) == (right, not right)
    at.end()


@pytest.mark.full
def test_a_family_samples_the_same_tokens_in_steps_launched_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows and sinks, by interpreted kernels beside torch; some end unexpectedly."""
    monkeypatch.setattr(step_graphs, "MIN_LENGTH", 32)
    monkeypatch.setattr(step_graphs, "MIXED_TOKENS", (16,))
    models = (in_torch("gpt_oss"), by_kernels("gpt_oss", monkeypatch))
    rng = random.Random(1)
    vocabulary = models[0].vocabulary
    asks = [
        RequestParams(tuple(rng.choices(range(vocabulary), k=count)), 7, settings, stop_ids=stops)
        for count, settings, stops in (
            (4, SamplingParams(), frozenset[int]()),
            (5, SamplingParams(temperature=0.8, seed=3), frozenset(range(0, vocabulary, 4))),
            (6, SamplingParams(temperature=0.8, seed=4), frozenset[int]()),
        )
    ]
    answers: list[list[Request]] = []
    for model in models:
        cache = TieredCache(model.memory, CacheConfig(Tokens(1024)))
        engine = Engine(model, cache, chunk_tokens=16, max_running=3)
        answers.append([engine.submit(ask) for ask in asks])
        ahead = 0
        while not engine.idle:
            engine.step()
            ahead += engine.overlap.state is OverlapState.LAUNCHED
        cache.close()
    assert ahead >= 5
    lengths = [len(request.output) for request in answers[0]]
    assert lengths[0] == lengths[2] == 7 > lengths[1], "it would not have shown"
    for one, other in zip(*answers, strict=True):
        assert [sampled.token for sampled in one.output] == [
            sampled.token for sampled in other.output
        ]
        for ours, theirs in zip(one.output, other.output, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


# -- the state machine, without a model ------------------------------------------------------


class Launches:
    """A runner that notes what it launches; steps fit a graph if `fits`."""

    def __init__(self) -> None:
        self.fits = True
        self.done: list[str] = []

    def run(self, chunks: Sequence[ScheduledChunk]) -> Any:
        self.done.append("run")

    def prepare(self, chunks: Sequence[ScheduledChunk], max_accepted: int) -> Any:
        return PreparedStep(chunks, len(chunks), None, None) if self.fits else None

    def launch_prepared(self, step: PreparedStep) -> Any:
        self.done.append("launch_prepared")

    def launch_ahead(self, step: PreparedStep, requests: Any, sampled: Any) -> Any:
        self.done.append("launch_ahead")
        return LaunchedStep(step, sampled)

    def read_launched(self, step: LaunchedStep, chunks: Sequence[ScheduledChunk]) -> Any:
        self.done.append(f"read {len(chunks)} of {len(step.prepared.chunks)}")


class Steps:
    """Two requests whose prompts are computed, and an overlap to drive by hand."""

    def __init__(self) -> None:
        config = CacheConfig(Tokens(16 * PAGE), host_size=None)
        self.cache = TieredCache(FULL, config)
        self.scheduler = Scheduler(self.cache, 64, 8, cuda_graphs=True)
        self.runner = Launches()
        self.overlap = Overlap(self.cache, self.runner)
        self.requests = [self._running(number) for number in (1, 2)]

    def _running(self, number: int) -> Request:
        params = RequestParams(words(number, PAGE + 1), 9)
        prompt = self.cache.prompt(params.tokens)
        request = Request(number, params, prompt, list(params.tokens))
        self.scheduler.queue(request)
        self.scheduler.admit()
        (chunk,) = [c for c in self.scheduler.schedule() if c.request is request]
        request.computed = chunk.end
        self.cache.commit(request.held, chunk.end)
        return request

    def come_to(self, state: OverlapState) -> None:
        if state is not OverlapState.IDLE:
            planned = self.scheduler.plan_decode()
            assert planned is not None
            self.overlap.plan(planned)
        if state in (OverlapState.PREPARED, OverlapState.LAUNCHED):
            assert self.overlap.prepare()
        if state is OverlapState.LAUNCHED:
            self.overlap.launch(self.requests, torch.zeros(2))
        assert self.overlap.state is state

    def sampled(self) -> None:
        for request in self.scheduler.running:
            request.append(SampledToken(7, 0.0))

    def launch(self) -> str:
        """Take the next step, or schedule another, and launch it."""
        self.runner.done.clear()
        step = self.overlap.take(self.scheduler)
        step = step or self.overlap.afresh(self.scheduler.schedule())
        assert self.overlap.state is OverlapState.IDLE
        step.launch()
        return f"{self.runner.done[-1]}: {len(step.chunks)} chunks"


ANY_STATE = pytest.mark.parametrize("state", OverlapState, ids=lambda state: state.value)


@ANY_STATE
def test_a_step_is_taken_from_every_state(state: OverlapState) -> None:
    at = Steps()
    at.come_to(state)
    at.sampled()
    how = {"prepared": "launch_prepared", "launched": "read 2 of 2"}.get(state.value, "run")
    assert at.launch() == f"{how}: 2 chunks"


@ANY_STATE
def test_a_request_that_leaves_is_in_no_taken_step(state: OverlapState) -> None:
    at = Steps()
    at.come_to(state)
    at.sampled()
    at.scheduler.remove(at.requests[0])
    how = "read 1 of 2" if state is OverlapState.LAUNCHED else "run"
    assert at.launch() == f"{how}: 1 chunks"


@ANY_STATE
def test_a_step_of_requests_that_all_left_is_discarded(state: OverlapState) -> None:
    at = Steps()
    at.come_to(state)
    for request in at.requests:
        at.scheduler.remove(request)
    assert at.overlap.take(at.scheduler) is None
    assert at.overlap.state is OverlapState.IDLE and at.cache.validate() == []


@ANY_STATE
def test_a_request_that_arrives_joins_unless_the_step_is_launched(state: OverlapState) -> None:
    at = Steps()
    at.come_to(state)
    at.sampled()
    at._running(3).append(SampledToken(7, 0.0))
    assert at.launch().endswith("2 chunks" if state is OverlapState.LAUNCHED else "3 chunks")


@ANY_STATE
def test_a_retracted_request_that_runs_again_is_planned_afresh(state: OverlapState) -> None:
    """It has another lease: what was planned for its old slots is not used."""
    at = Steps()
    at.come_to(state)
    at.sampled()
    at.scheduler.retract(at.requests[0])
    at.scheduler.admit()
    assert len(at.scheduler.running) == 2
    how = "read 1 of 2: 1 chunks" if state is OverlapState.LAUNCHED else "run: 2 chunks"
    assert at.launch() == how


def test_a_row_that_ran_on_another_token_is_dropped_only_from_a_launched_step() -> None:
    for state, how in (("prepared", "launch_prepared: 2"), ("launched", "read 1 of 2: 1")):
        at = Steps()
        at.come_to(OverlapState(state))
        at.overlap.drop(at.requests[0])
        at.sampled()
        assert at.launch() == f"{how} chunks"


def test_a_step_without_a_fitting_graph_stays_planned() -> None:
    at = Steps()
    at.runner.fits = False
    at.come_to(OverlapState.PLANNED)
    assert not at.overlap.prepare() and at.overlap.state is OverlapState.PLANNED
    at.sampled()
    assert at.launch() == "run: 2 chunks"


@pytest.mark.parametrize(
    ("state", "verb"),
    [
        (OverlapState.PLANNED, "plan"),
        (OverlapState.PREPARED, "plan"),
        (OverlapState.LAUNCHED, "plan"),
        (OverlapState.IDLE, "launch"),
        (OverlapState.PLANNED, "launch"),
        (OverlapState.LAUNCHED, "launch"),
        (OverlapState.IDLE, "prepare"),
        (OverlapState.LAUNCHED, "prepare"),
    ],
)
def test_no_other_change_of_state_is_possible(state: OverlapState, verb: str) -> None:
    at = Steps()
    at.come_to(state)
    calls = {
        "plan": lambda: at.overlap.plan(PlannedStep([], frees_slots=False)),
        "prepare": at.overlap.prepare,
        "launch": lambda: at.overlap.launch(at.requests, torch.zeros(2)),
    }
    with pytest.raises(AssertionError):
        calls[verb]()
