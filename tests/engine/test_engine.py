"""The engine over a model whose answers are easy to work out: all of its memory has to be right.

The next token is a sum over every token so far, as each layer has kept it. So a page that is
missing, stale or another's changes the answer; slots without an owner are full of poison.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvtide.cache import (
    CacheConfig,
    Hardware,
    Lease,
    Namespace,
    TieredCache,
    Tokens,
    TransferError,
)
from kvtide.engine import (
    Engine,
    Finish,
    Request,
    RequestError,
    RequestParams,
    RequestState,
    SamplingParams,
    Update,
)
from kvtide.engine.graphs import step_graphs
from kvtide.engine.overlap import OverlapState
from kvtide.engine.sampling import sampler
from kvtide.engine.scheduler import Scheduler
from kvtide.engine.speculation.drafter import Drafter
from kvtide.layers import Rows as Sequenced
from kvtide.layers import Step
from kvtide.models.draft import CapturedStates
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Tier
from kvtide.testing.faults import FaultyBackend
from kvtide.tiers import Arrangement, Buffers, Layout
from kvtide.transfer.copy_jobs import Copier
from kvtide.transfer.lane import Lane
from kvtide.transfer.strided import Reference, Way
from kvtide.transfer.timeline import HostTimeline
from tests.cache.building import POISON, TIERS, PoisonedSlots, Rows

PAGE = 4
LAYERS = 3
VOCABULARY = 97
MEMORY = ModelMemory(
    "sums",
    PAGE,
    (PoolSpec("kv", tuple(range(LAYERS)), Entry((Field("x", (1,), DType.FP32),))),),
    layers=LAYERS,
)


def reply_after(tokens: Sequence[int]) -> int:
    layers = sum(layer + 1 for layer in range(LAYERS))
    return layers * sum((at + 1) * token for at, token in enumerate(tokens)) % VOCABULARY


def answer_to(tokens: Sequence[int], count: int) -> list[int]:
    """What the model says, by arithmetic."""
    replied = list(tokens)
    for _ in range(count):
        replied.append(reply_after(replied))
    return replied[len(tokens) :]


def words(number: int, count: int) -> tuple[int, ...]:
    """A prompt that shares no page with that of any other number."""
    return (number, *((number * 31 + at * 7) % VOCABULARY for at in range(count - 1)))


class Seen(NamedTuple):
    """A step, less its tensors: how many tokens, and which of each sequence."""

    tokens: int
    spans: list[range]


class Sums:
    """Keeps every token in every layer, and says their weighted sum. If it is `captured`, what it
    knows of sequences is in a step's tensors."""

    memory = MEMORY
    vocabulary = VOCABULARY

    def __init__(self, max_positions: int, captured: bool) -> None:
        self.max_positions, self.captured = max_positions, captured
        self.uses_kernels = captured
        self.tried = False
        self.steps: list[Seen] = []

    def forward(
        self, step: Step, before: Tensor | None = None, captured: CapturedStates | None = None
    ) -> Tensor:
        sequences = step.sequences or needed(step)
        assert not (self.tried and self.captured and step.sequences), "computed as it came"
        spans = [range(rows.past, rows.total) for rows in sequences]
        self.steps.append(Seen(sum(map(len, spans)), spans))
        hidden = torch.zeros(len(step.tokens), 1, dtype=torch.float64)
        for layer in range(LAYERS):
            step.wait(layer)
            kept = step.view("kv", layer)["x"]
            for rows in sequences:
                hidden[rows.start : rows.end, 0] += self._layer(layer, kept, step, rows)
        return hidden

    def _layer(self, layer: int, kept: Tensor, step: Step, rows: Any) -> Tensor:
        slots = rows.slots["kv"]
        at = step.positions[rows.start : rows.end]
        assert at.tolist() == list(range(rows.past, rows.total))
        kept[slots[at // PAGE], at % PAGE, 0] = step.tokens[rows.start : rows.end].float() + layer
        pages = slots[: -(-rows.total // PAGE)]
        assert (pages >= 0).all(), "a page without a slot"
        history = kept[pages].reshape(-1)[: rows.total].double() - layer
        weights = torch.arange(1, rows.total + 1, dtype=torch.float64)
        return (layer + 1) * (history * weights).cumsum(0)[rows.past :]

    def carried(self, tokens: Tensor) -> Tensor:
        return torch.empty(len(tokens), 1, dtype=torch.float64)

    def logits(self, hidden: Tensor) -> Tensor:
        return -((torch.arange(VOCABULARY) - hidden) % VOCABULARY).float()


def needed(step: Step) -> list[Sequenced]:
    """Those sequences of a captured step that a request needs."""
    assert step.batch is not None
    rows, tables = step.batch.rows.tolist(), step.batch.slots["kv"].long()
    pairs = zip(rows, tables, strict=True)
    every = [Sequenced(*row, {"kv": slots}) for row, slots in pairs]
    for number, one in enumerate(every):
        assert step.batch.owners[one.start : one.end].unique().tolist() in ([], [number])
    return [one for one in every if (one.slots["kv"] >= 0).any()]


class Stand:
    """An engine over poisoned memory, whose loads break on demand."""

    def __init__(
        self,
        *,
        device: int = 16,
        host: int = 32,
        chunk_tokens: int = 64,
        max_running: int = 8,
        max_positions: int = 4096,
        captured: bool = False,
        drafter: Drafter | None = None,
        **options: Any,
    ) -> None:
        self._raises: set[int] = set()
        self.loads = FaultyBackend(Reference(), raises=self._raises)
        backends = {way: self.loads if way is Way.LOAD else Reference() for way in Way}
        lanes = {way: Lane(way.name.lower(), HostTimeline(), backends[way]) for way in Way}
        blocks = (_buffers(device), _buffers(host))
        copier = Copier(*blocks, lanes, [range(layer, layer + 1) for layer in range(LAYERS)])
        config = CacheConfig(Tokens(PAGE), **{"host_size": Tokens(PAGE), **options})
        self.cache = TieredCache(MEMORY, config, hardware=Hardware(*blocks, copier))
        for cell in self.cache.index.tree.cells:
            if cell.tier in TIERS:
                rows = Rows(blocks[TIERS.index(cell.tier)])
                cell.slots = PoisonedSlots(cell.slots.capacity, rows, "kv")
        self.model = Sums(max_positions, captured)
        self.engine = Engine(
            self.model,
            self.cache,
            chunk_tokens=chunk_tokens,
            max_running=max_running,
            drafter=drafter,
        )
        self.engine.scheduler.skips_loading = False
        self.model.tried = True
        self.model.steps.clear()

    def submit(self, tokens: Sequence[int], count: int = 3, **more: Any) -> Request:
        return self.engine.submit(RequestParams(tuple(tokens), count, **more))

    def step(self) -> list[Update]:
        updates = self.engine.step()
        assert self.cache.validate() == []
        return updates

    def let_by(self) -> None:
        """A new request is part of the step after the one that is launched, if one is."""
        if self.engine.overlap.state is OverlapState.LAUNCHED:
            assert self.step() != []

    def finish(self, steps: int = 200) -> None:
        """Step until all is answered. Steps that compute nothing wait for a copy, by the clock."""
        deadline = time.monotonic() + 60
        while steps and time.monotonic() < deadline:
            if self.engine.idle:
                return
            self.step()
            if self.engine.computed:
                steps -= 1
            else:
                time.sleep(0.001)
        raise AssertionError(f"still busy, with {steps} steps left")

    def ask(self, tokens: Sequence[int], count: int = 3, **more: Any) -> Request:
        """Submit, and step until it is answered."""
        request = self.submit(tokens, count, **more)
        self.finish()
        return request

    def remember_on_host(self, tokens: Sequence[int]) -> None:
        self.ask(tokens, 1)
        assert self.cache.drain(10)
        self.cache.flush(Tier.DEVICE)

    def break_load(self, leg: int = 0) -> None:
        """The next load breaks before its leg of that number."""
        self._raises.add(self.loads.legs + leg)

    def end(self) -> None:
        for request in list(self.engine.scheduler.running):
            self.engine.abort(request)
        self.cache.sessions.forget_all()
        assert self.cache.drain(10)
        assert self.cache.validate() == []
        assert not self.cache._leases and not self.cache.index.leases
        for count in self.cache.stats().pages.values():
            assert count.free + count.resident == count.capacity
        for tier in TIERS:
            self.cache.flush(tier)
        assert all(count.free == count.capacity for count in self.cache.stats().pages.values())
        self.cache.close()


def _buffers(pages: int) -> Buffers:
    arrangement = Arrangement(MEMORY, {"kv": pages}, Layout.PAGE_FIRST_DIRECT)
    return Buffers(arrangement, torch.full((arrangement.bytes,), POISON, dtype=torch.uint8))


def right(request: Request) -> bool:
    """Whether the answer so far is what the model has to say."""
    replied = [sampled.token for sampled in request.output]
    return replied == answer_to(request.params.tokens, len(replied))


def complete(*requests: Request) -> bool:
    return all(
        r.state is RequestState.FINISHED and len(r.output) == r.params.max_tokens and right(r)
        for r in requests
    )


def listed(monkeypatch: pytest.MonkeyPatch, *methods: tuple[Any, str]) -> list[str]:
    """The names of these as they are called from now on."""
    called: list[str] = []

    def noted(where: Any, name: str) -> None:
        function = getattr(where, name)

        def call(*args: Any, **more: Any) -> Any:
            called.append(name)
            return function(*args, **more)

        monkeypatch.setattr(where, name, call)

    for where, name in methods:
        noted(where, name)
    return called


@pytest.fixture(params=["computed", "captured"])
def stand(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Stand]]:
    """Makes engines; whatever a test does with one, in the end nothing of it is missing."""
    monkeypatch.setattr(step_graphs, "TOKENS_PER_PREFILL", 4)  # However many prompts there are.
    stands: list[Stand] = []

    def make(**options: Any) -> Stand:
        stands.append(Stand(captured=request.param == "captured", **options))
        return stands[-1]

    yield make
    for each in stands:
        each.end()


# -- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "count", "remedy"),
    [
        ((), 1, "send at least one"),
        ((1, VOCABULARY), 1, r"must lie in 0\.\.96"),
        ((-1,), 1, r"must lie in 0\.\.96"),
        ((1,), -3, "ask for 0 or more"),
        (words(1, 60), 5, "are 65; this engine serves 64: shorten one of them"),
    ],
)
def test_what_can_never_be_served_is_refused_with_a_remedy(stand, tokens, count, remedy):
    at = stand(device=16)
    with pytest.raises(RequestError, match=remedy):
        at.submit(tokens, count)
    assert at.engine.idle


def test_the_models_positions_limit_too(stand):
    at = stand(max_positions=10)
    assert at.engine.max_sequence_tokens == 10
    with pytest.raises(RequestError, match="this engine serves 10"):
        at.submit(words(1, 8), 3)
    assert complete(at.ask(words(1, 8), 2))


def test_the_longest_request_that_is_not_refused_is_served(stand):
    at = stand(device=16, chunk_tokens=7)
    for count in (1, 5, 62):
        assert complete(at.ask(words(count, 64 - count), count))


# -- answers --------------------------------------------------------------------------------


def test_requests_end_at_their_length(stand):
    at = stand()
    request = at.submit(words(1, 9), 3)
    updates = []
    while not at.engine.idle:
        updates += at.step()
    assert [u.sampled.token for u in updates] == answer_to(words(1, 9), 3)
    assert [u.finish for u in updates] == [None, None, Finish.LENGTH]
    assert request.finish is Finish.LENGTH and complete(request)


def test_a_stop_id_ends_the_answer_and_is_part_of_it(stand):
    at = stand()
    replied = answer_to(words(1, 9), 8)
    stop = next(token for token in replied[2:] if token not in replied[:2])
    request = at.ask(words(1, 9), 8, stop_ids=frozenset({stop, 96 if stop != 96 else 95}))
    assert request.finish is Finish.STOP and right(request)
    assert request.output[-1].token == stop and len(request.output) < 8


def test_a_stop_id_in_the_last_place_is_a_stop(stand):
    at = stand()
    last = answer_to(words(1, 9), 1)[0]
    assert at.ask(words(1, 9), 1, stop_ids=frozenset({last})).finish is Finish.STOP


@pytest.mark.parametrize("chunk_tokens", [1, 3, 5, 64])
def test_no_chunk_changes_an_answer(stand, chunk_tokens):
    at = stand(chunk_tokens=chunk_tokens, device=24)
    requests = [at.submit(words(n, 5 + 4 * n), 5) for n in range(1, 5)]
    at.finish(400)
    assert complete(*requests)
    assert max(step.tokens for step in at.model.steps) <= chunk_tokens


def test_a_later_request_joins_the_decode_batch(stand):
    at = stand()
    first = at.submit(words(1, 9), 10)
    at.step()
    at.step()
    second = at.submit(words(2, 6), 3)
    at.let_by()
    updates = at.step()
    assert [update.request for update in updates] == [first, second]
    assert [1, 6] in [[*map(len, step.spans)] for step in at.model.steps]
    at.finish()
    assert complete(first, second) and len(at.model.steps) == 10, "neither waited for the other"


def test_a_request_whose_turn_has_not_come_leaves_no_update(stand):
    at = stand(chunk_tokens=4)
    request = at.submit(words(1, 9), 1)
    assert [at.step(), at.step()] == [[], []] and request.computed == 8
    ((_, sampled, _, finish),) = at.step()
    assert sampled.token == answer_to(words(1, 9), 1)[0] and finish is Finish.LENGTH


def test_priorities_are_answered_first(stand):
    at = stand(max_running=1)
    low, high = at.submit(words(1, 5), 2), at.submit(words(2, 5), 2, priority=1)
    at.step()
    assert at.engine.scheduler.running == [high] and low.state is RequestState.WAITING
    at.finish()
    assert complete(low, high)


def test_what_was_computed_is_found_again_in_either_tier(stand):
    at = stand()
    tokens = words(1, 3 * PAGE + 1)
    assert at.ask(tokens).by_tier == {}
    assert at.ask(tokens).by_tier == {Tier.DEVICE: 3 * PAGE}
    assert at.cache.drain(10)
    at.cache.flush(Tier.DEVICE)
    again = at.ask(tokens)
    assert again.by_tier == {Tier.HOST: 3 * PAGE} and complete(again)


def test_more_requests_than_fit_take_turns(stand):
    at = stand(device=8, host=64, chunk_tokens=9)
    requests = [at.submit(words(n % 5 + 1, 6 + n), 6) for n in range(12)]
    at.finish(1000)
    assert complete(*requests)


def test_sampled_answers_do_not_depend_on_company(stand):
    sampling = SamplingParams(temperature=20.0, seed=11, logprobs=2)
    alone = stand().ask(words(1, 9), 6, sampling=sampling)
    at = stand(chunk_tokens=5)
    others = [at.submit(words(n, 7), 4) for n in (2, 3)]
    request = at.submit(words(1, 9), 6, sampling=sampling)
    for _ in range(6):
        at.step()
    if request.state is RequestState.RUNNING:
        at.engine.scheduler.retract(request)
    at.finish()
    assert request.output == alone.output and complete(*others)
    assert len({sampled.token for sampled in alone.output}) > 1 and not right(alone)


# -- aborts ---------------------------------------------------------------------------------


def test_a_waiting_request_can_be_aborted(stand):
    at = stand(max_running=1)
    first, second, third = (at.submit(words(n, 6), 3) for n in (1, 2, 3))
    at.step()
    at.engine.abort(second)
    assert second.state is RequestState.FINISHED and second.finish is Finish.ABORT
    at.finish()
    assert complete(first, third) and second.output == []


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_running_request_can_be_aborted_at_any_step(stand, steps):
    at = stand(chunk_tokens=5)
    first, second = at.submit(words(1, 9), 4), at.submit(words(2, 9), 4)
    for _ in range(steps):
        at.step()
    at.engine.abort(first)
    assert first.finish is (
        Finish.ABORT if first.lease is None and len(first.output) < 4 else Finish.LENGTH
    )
    assert first.lease is None and first not in at.engine.scheduler.running
    at.finish()
    assert complete(second) and right(first)


def test_a_request_can_be_aborted_while_its_prefix_is_on_its_way(stand):
    at = stand(chunk_tokens=4)
    at.remember_on_host(words(1, 15))
    busy = at.submit(words(2, 12), 2)
    request = at.submit(words(1, 15), 2)
    at.loads.hold.clear()
    at.step()  # The chunk is spent on the older one, so neither waits for the load.
    assert request.held.loading
    at.engine.abort(request)
    at.loads.hold.set()
    at.finish()
    assert complete(busy) and complete(at.ask(words(1, 15), 2))


def test_a_finished_request_cannot_be_aborted_any_more(stand):
    at = stand()
    request = at.ask(words(1, 6))
    at.engine.abort(request)
    at.engine.abort(request)
    assert request.finish is Finish.LENGTH and complete(request)


def test_an_aborted_request_gives_everything_back(stand):
    at = stand()
    request = at.submit(words(1, 13), 9)
    at.step()
    at.engine.abort(request)
    assert not at.cache.index.leases
    assert at.cache.drain(10)
    pages = at.cache.stats().pages[Tier.DEVICE, "kv"]
    assert pages.free + pages.resident == pages.capacity and pages.resident == 3
    assert at.ask(words(1, 13)).by_tier == {Tier.DEVICE: 12}, "what it computed is kept"


# -- sessions -------------------------------------------------------------------------------


def test_a_session_keeps_its_conversation(stand):
    at = stand(device=16, host_size=None)
    first = at.ask(words(1, 13), 3, session="a")
    assert at.cache.stats().sessions.pinned == 1
    for number in range(2, 9):
        at.ask(words(number, 22), 3)
    following = at.ask((*first.tokens, 5, 6), 3, session="a")
    assert following.by_tier == {Tier.DEVICE: 12} and complete(following)
    assert at.cache.stats().sessions.pinned == 1
    assert at.cache.sessions.forget(following.params.pin) and at.cache.stats().sessions.pinned == 0


def test_sessions_of_two_namespaces_are_two_whatever_they_are_called(stand):
    at = stand()
    for salt in ("alice", "bob"):
        at.ask(words(1, 13), 3, session="chat", namespace=Namespace(cache_salt=salt))
    assert at.cache.stats().sessions.pinned == 2


def test_without_a_session_nothing_is_pinned(stand):
    at = stand()
    at.ask(words(1, 13))
    assert at.cache.stats().sessions.pinned == 0


def test_sessions_never_keep_a_request_out_that_was_accepted(stand):
    at = stand(device=16)
    at.ask(words(1, 29), 3, session="a")
    assert at.cache.stats().sessions.pinned == 1
    assert complete(at.ask(words(2, 60), 4))


def test_a_request_keeps_its_session_alive_and_says_what_it_changed(stand):
    at = stand(device=16)
    sessions = at.cache.sessions
    sessions.tick(10.0)
    first = at.ask(words(1, 13), 3, session="a", session_ttl_s=5.0)
    assert first.prompt_change is None and sessions.states()[0].left_s == 5.0
    sessions.tick(14.0)
    following = at.ask((9, *first.tokens[1:], 5, 6), 3, session="a", session_ttl_s=5.0)
    assert following.prompt_change.at == 0 and sessions.states()[0].left_s == 5.0
    recomputed = at.ask((8, *first.tokens[1:]), 3, session="a", recompute=True)
    assert recomputed.prompt_change is None, "it runs alone, in no session"
    sessions.tick(19.0)
    assert at.cache.stats().sessions[:2] == (0, 0)


# -- loads that fail ------------------------------------------------------------------------


@pytest.mark.parametrize("step", range(LAYERS))
def test_a_load_that_fails_in_the_midst_of_a_step_changes_no_answer(stand, step, monkeypatch):
    monkeypatch.setattr(Scheduler, "may_launch", lambda *_: False)  # It would fail before then.
    at = stand()
    at.remember_on_host(words(1, 13))
    busy = at.submit(words(2, 7), 6)
    at.step()
    at.break_load(step)
    request = at.submit(words(1, 13), 4)
    assert at.step() == [] and range(7, 8) in at.model.steps[-1].spans
    assert at.engine.scheduler.running == [] and at.engine.scheduler.waiting == 2
    assert busy.lease is None and request.lease is None
    at.finish()
    assert complete(busy, request)
    assert busy.admissions == 2 and request.admissions >= 2


def test_all_requests_of_a_step_that_broke_start_again(stand, monkeypatch):
    at = stand()
    at.remember_on_host(words(1, 13))
    requests = [at.submit(words(n, 13), 4) for n in (2, 3, 1)]
    wait, calls = at.cache.wait, []

    def breaking(lease: Any, layer: int) -> None:
        calls.append(layer)
        if calls == [0, 1]:
            raise TransferError("once")
        wait(lease, layer)

    monkeypatch.setattr(at.cache, "wait", breaking)
    assert at.step() == [] and at.engine.scheduler.waiting == 3
    at.finish()
    assert complete(*requests) and [r.admissions for r in requests] == [2, 2, 2]


def test_a_load_that_fails_unnoticed_is_started_again(stand):
    """Its request is not in the step; the next poll says that it failed."""
    at = stand(chunk_tokens=4)
    at.remember_on_host(words(1, 15))
    busy = at.submit(words(2, 12), 2)
    at.break_load(1)
    request = at.submit(words(1, 15), 3)
    at.step()
    assert request.admissions == 1 and request.computed == 12
    deadline = time.monotonic() + 60
    while not at.cache.hardware.copier.lanes[Way.LOAD].failures and time.monotonic() < deadline:
        time.sleep(0.001)
    at.step()
    assert request.admissions == 2 and busy.admissions == 1
    at.finish()
    assert complete(busy, request)


def test_what_did_not_come_is_not_reported_as_found(stand):
    at = stand()
    at.ask(words(1, 13))
    assert at.cache.drain(10)
    at.cache.flush(Tier.DEVICE)
    at.break_load()
    request = at.ask(words(1, 13))
    assert request.by_tier == {} and request.admissions == 2


def test_loads_that_always_fail_keep_no_request_from_an_answer(stand):
    at = stand()
    at.remember_on_host(words(1, 13))
    for step in range(1000):
        at.break_load(step)
    request = at.submit(words(1, 13), 4)
    at.finish()
    assert complete(request)


def test_many_failures_change_no_answer(stand):
    at = stand(device=12, host=64, chunk_tokens=11)
    requests = []
    for turn in range(6):
        at.break_load(turn % 4)
        at.break_load(3 + turn)
        requests += [at.submit((*words(n, 9 + n), turn), 4) for n in range(1, 5)]
        at.finish(300)
        at.cache.drain(10)
        at.cache.flush(Tier.DEVICE)
    assert complete(*requests)
    assert at.cache.stats().lane_failures["load"] > 2


@pytest.mark.parametrize(
    ("sampling", "remedy"),
    [
        (
            SamplingParams(temperature=float("nan")),
            "temperature is nan; use a number from 0 to 100",
        ),
        (SamplingParams(top_p=1.5), "top_p is 1.5"),
        (SamplingParams(min_p=-1), "min_p is -1"),
        (SamplingParams(repetition_penalty=0), "repetition_penalty is 0"),
    ],
)
def test_settings_that_cannot_be_sampled_with_are_refused(stand, sampling, remedy):
    at = stand()
    with pytest.raises(RequestError, match=remedy):
        at.engine.submit(RequestParams((1, 2, 3), 4, sampling))


def test_an_answer_of_one_token_on_a_loading_prefix_keeps_what_it_computed(stand):
    at = stand()
    at.remember_on_host(words(1, 13))
    request = at.submit(words(1, 25), 1)
    at.finish()
    assert complete(request)
    found = at.cache.match(at.cache.prompt([*words(1, 25), 0])).tokens
    assert found == 25 // at.cache.memory.page_tokens * at.cache.memory.page_tokens


def test_a_prefix_on_its_way_keeps_no_other_request_waiting(stand, monkeypatch):
    """Where the scheduler lets it land first."""
    at, gate = stand(max_running=4), threading.Event()
    at.engine.scheduler.skips_loading = True
    at.remember_on_host(words(1, 13))
    issue = at.loads.issue

    def held(works, legs):
        assert gate.wait(20)
        return issue(works, legs)

    monkeypatch.setattr(at.loads, "issue", held)
    others = [at.submit(words(n, 5), 12) for n in (2, 3)]
    at.step()
    late = at.submit(words(1, 20), 2)
    for count in range(2, 10):
        at.step()
        assert late.held.loading and not late.output
        assert all(len(request.output) == count for request in others)
    gate.set()
    at.finish()
    assert complete(late, *others) and late.by_tier[Tier.HOST] > 0


def test_a_prefix_with_no_request_beside_it_is_computed_on_as_it_comes(stand):
    at = stand()
    at.engine.scheduler.skips_loading = True
    at.remember_on_host(words(1, 13))
    late = at.submit(words(1, 20), 2)
    at.step()
    assert len(late.output) == 1 and late.by_tier[Tier.HOST] > 0
    at.finish()
    assert complete(late)


def test_a_request_whose_first_layers_are_there_waits_for_no_other_prefix(stand, monkeypatch):
    at = stand(max_running=4)
    at.engine.scheduler.skips_loading = True
    for number in (1, 2):
        at.remember_on_host(words(number, 13))
    issue, plan = at.loads.issue, at.engine.scheduler.schedule
    first_leg, planned, gate = threading.Event(), threading.Event(), threading.Event()

    def held(works, legs):
        """The first load stops after a leg until a step is planned, the second before any."""
        assert not first_leg.is_set() or gate.wait(20)
        for _ in issue(works, legs):
            yield
            first_leg.set()
            assert planned.wait(20)

    def late_plan():
        assert first_leg.wait(20)
        chunks = plan()
        planned.set()
        return chunks

    monkeypatch.setattr(at.loads, "issue", held)
    monkeypatch.setattr(at.engine.scheduler, "schedule", late_plan)
    early, late = (at.submit(words(number, 20), 2) for number in (1, 2))
    at.step()
    assert len(early.output) == 1 and early.by_tier[Tier.HOST] > 0
    assert late.held.loading and not late.held.arriving and not late.output
    gate.set()
    at.finish()
    assert complete(early, late) and late.by_tier[Tier.HOST] > 0


def test_steps_are_counted_by_kind(stand):
    at = stand()
    at.ask(words(1, 9), 3)
    wanted = {"mixed_graph": 1, "decode_graph": 2} if at.model.captured else {"eager": 3}
    assert at.engine.steps_by_kind == wanted


def test_a_batch_between_two_sizes_of_graphs_is_served_right(stand):
    """The largest default batch: its graphs have 96, 128, … and 256 rows beside the small ones."""
    at = stand(device=512, chunk_tokens=512, max_running=256)
    requests = [at.submit(words(n % VOCABULARY, 2 + n % 5), 3 + n % 4) for n in range(210)]
    most = 0
    while not at.engine.idle:
        at.engine.step()
        most = max(most, len(at.engine.scheduler.running))
    assert complete(*requests) and most > 192 and at.cache.validate() == []
    assert (at.engine.steps_by_kind["decode_graph"] > 0) == at.model.captured


def test_copies_are_looked_after_while_the_device_is_at_work(stand, monkeypatch):
    at = stand()
    request = at.submit(words(1, 9), 9)
    at.step()
    done = listed(
        monkeypatch,
        (at.cache, "fence"),
        *((at.engine._runner, name) for name in ("run", "read_launched", "launch_ahead")),
        (Lease, "join"),
        (at.cache, "poll"),
        (at.cache, "commit"),
        (at.engine, "_sample"),
    )
    during = ["join", "poll", "commit", "_sample"]
    for _ in range(2):
        at.step()
        if at.model.captured:
            assert done == ["read_launched", *during, "fence", "launch_ahead"]
        else:
            assert done == ["fence", "run", *during]
        done.clear()
    at.engine.abort(request)
    at.engine.step()
    at.engine.step()
    assert done == ["poll"], "and where nothing is computed"


@pytest.mark.parametrize("in_launch", [True, False])
def test_the_engine_calls_before_it_waits_for_the_device(stand, monkeypatch, in_launch):
    """On a CPU the launch is the wait; elsewhere the host waits for tokens, with the next step
    launched."""
    at = stand()
    request = at.submit(words(1, 9), 9)
    at.step()
    assert at.engine.computes_in_launch, "the tests' device is a CPU"
    at.engine.computes_in_launch = in_launch
    done = listed(
        monkeypatch,
        (at.engine, "on_waiting"),
        *((at.engine._runner, name) for name in ("run", "read_launched", "launch_ahead")),
        (sampler.SamplingBatch, "read"),
    )
    at.step()
    launches = ["read_launched", "launch_ahead"] if at.model.captured else ["run"]
    before = ["on_waiting", *launches] if in_launch else [*launches, "on_waiting"]
    assert done == [*before, "read"]
    at.engine.abort(request)
    at.engine.step()
    done.clear()
    at.engine.step()
    assert "read" not in done, "nothing is computed"


def test_copies_are_polled_before_a_step_that_could_admit_a_request(stand, monkeypatch):
    """A page that has left, or come from storage, is what it waits for."""
    at = stand(device=6)
    first, second = at.submit(words(1, 9), 9), at.submit(words(2, 9), 9)
    at.step()
    assert second.state is RequestState.WAITING
    with monkeypatch.context() as patch:
        launches = ((at.engine._runner, name) for name in ("run", "read_launched"))
        done = listed(patch, (at.cache, "land"), *launches)
        at.step()
    assert done == ["land", "read_launched" if at.model.captured else "run", "land"]
    at.finish()
    assert complete(first, second)


def test_a_prefix_that_came_after_the_last_poll_is_there_for_the_next_step(stand, monkeypatch):
    at = stand()
    at.remember_on_host(words(2, 20))
    at.engine.scheduler.skips_loading = True
    first = at.submit(words(1, 9), 20)
    at.step()
    issue, choose, gate = at.loads.issue, at.engine._sample, threading.Event()

    def held(works: Any, legs: int) -> Iterator[None]:
        assert gate.wait(20)
        yield from issue(works, legs)

    def late(*args: Any) -> Any:
        """The step is over, and so is the load by now."""
        gate.set()
        for transfer in second.held.transfers:
            while transfer.ticket is None or not transfer.ticket.done():
                time.sleep(0.001)
        return choose(*args)

    with monkeypatch.context() as patch:
        patch.setattr(at.loads, "issue", held)
        patch.setattr(at.engine, "_sample", late)
        second = at.submit(words(2, 20), 3)
        at.step()
        assert second.held.loading and not second.output
        at.step()
        assert len(second.output) == 1 and second.by_tier[Tier.HOST] > 0
    at.finish()
    assert complete(first, second)


def test_no_step_is_planned_ahead_of_a_prefix_that_has_not_landed(stand, monkeypatch):
    """What was computed on it is committed later, and its pages may be others then."""
    at = stand()
    at.remember_on_host(words(1, 20))
    request = at.submit(words(1, 20), 6)
    with monkeypatch.context() as patch:
        timeline = at.cache.hardware.copier.lanes[Way.LOAD].timeline
        patch.setattr(timeline, "passed", lambda event: False)
        for _ in range(2):
            at.step()
            assert request.held.loading and request.output
            assert at.engine.overlap.state is OverlapState.IDLE
    at.step()
    assert not request.held.loading and at.engine.overlap.state is not OverlapState.IDLE
    at.finish()
    assert complete(request)


@pytest.mark.parametrize("where", ["_sample", "_accept"])
def test_a_step_that_broke_off_leaves_nothing_to_be_replayed(stand, monkeypatch, where):
    at = stand()
    request = at.submit(words(1, 9), 6)
    for _ in range(2):
        at.step()
    with monkeypatch.context() as patch:
        patch.setattr(at.engine, where, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            at.step()
    replied = list(request.output)
    at.step()
    assert request.output == replied, "the token that was not sampled is not there"
    assert request.computed == request.length
    at.engine.abort(request)


@pytest.mark.parametrize("steady", [False, True])
def test_a_decode_step_is_prepared_before_its_tokens_are_known(stand, monkeypatch, steady):
    """And launched then, if a token too many does no harm."""
    at = stand()
    monkeypatch.setattr(Scheduler, "may_launch", lambda *_: steady)
    prepared: list[int] = []
    name = "launch_ahead" if steady else "launch_prepared"
    play = getattr(step_graphs.StepGraph, name)

    def counted(self: Any, *args: Any) -> Tensor:
        prepared.append(len(args[-1]))
        return play(self, *args)

    monkeypatch.setattr(step_graphs.StepGraph, name, counted)
    long, short = at.submit(words(1, 9), 12), at.submit(words(2, 9), 4)
    for _ in range(4):
        at.step()
    wanted = ([2, 2, 2, 1] if steady else [2, 2, 2]) if at.model.captured else []
    assert prepared == wanted, "all but that of the prompts"
    assert complete(short)
    late = at.submit(words(3, 9), 6)
    at.step()
    assert prepared == wanted, "a request came"
    at.finish()
    assert complete(long, short, late)
    assert not at.model.captured or len(prepared) > 5


def test_a_request_that_loads_is_left_out_of_the_plan_ahead(stand, monkeypatch):
    at = stand()
    at.engine.scheduler.skips_loading = True
    at.remember_on_host(words(2, 20))
    first = at.submit(words(1, 9), 20)
    at.step()
    with monkeypatch.context() as patch:
        timeline = at.cache.hardware.copier.lanes[Way.LOAD].timeline
        patch.setattr(timeline, "passed", lambda event: False)
        late = at.submit(words(2, 20), 3)
        for _ in range(3):
            at.step()
            assert late.held.loading and not late.output
            assert [chunk.request for chunk in at.engine.overlap.chunks] == [first]
            prepared = OverlapState.PREPARED if at.model.captured else OverlapState.PLANNED
            assert at.engine.overlap.state is prepared, "launched, it would delay the prefix"
    while not all(transfer.ticket.done() for transfer in late.held.transfers):
        time.sleep(0.001)
    at.step()
    assert len(late.output) == 1 and len(first.output) == 5
    at.finish()
    assert complete(first, late)


def test_a_request_that_waits_for_room_is_admitted_while_the_device_is_at_work(stand, monkeypatch):
    at = stand(device=11)
    at.remember_on_host(words(3, 9))
    short, long = at.submit(words(1, 9), 3), at.submit(words(2, 9), 12)
    late = at.submit(words(3, 9), 8)
    while short.finish is None:
        at.step()
        assert late.state is RequestState.WAITING
    assert at.cache.drain(10), "pages that are copied are not free"
    done = listed(
        monkeypatch,
        *((at.engine._runner, name) for name in ("run", "launch_prepared")),
        *((at.engine.scheduler, name) for name in ("admit", "admit_without_preemption")),
        (at.cache, "load"),
        (at.cache, "poll"),
    )
    at.step()
    beside = ["launch_prepared", "admit_without_preemption", "load", "poll"]
    assert done == (beside if at.model.captured else ["admit", "load", "run", "poll"])
    assert late.state is RequestState.RUNNING
    at.finish()
    assert complete(short, long, late) and late.by_tier[Tier.HOST] > 0


def test_a_token_that_takes_a_second_look_is_not_taken_for_another(stand, monkeypatch):
    """The step that was launched before it was read had another token in its place."""
    monkeypatch.setattr(sampler, "CANDIDATES", 2)
    resampled: list[int] = []
    read = sampler.SamplingBatch.read

    def noting(launched: Any) -> Any:
        sampled = read(launched)
        resampled.extend(launched.resampled)
        return sampled

    monkeypatch.setattr(sampler.SamplingBatch, "read", noting)
    at, other = stand(), Stand()
    replied = []
    for each in (at, other):
        requests = [
            each.submit(words(n, 9), 12, sampling=SamplingParams(20.0 * n, top_p=0.95, seed=n))
            for n in range(4)
        ]
        each.finish()
        replied.append([[sampled.token for sampled in request.output] for request in requests])
    other.end()
    assert replied[0] == replied[1] and len(resampled) > 20


def test_a_prepared_step_is_not_launched_for_others(stand):
    """A request ends at a stop word, leaves or comes: none gets another's tokens."""
    at = stand()
    stop = answer_to(words(1, 9), 6)[3]
    stopping = at.submit(words(1, 9), 6, stop_ids=frozenset({stop}))
    others = [at.submit(words(number, 9), 12) for number in (2, 3, 4)]
    for _ in range(6):
        at.step()
    assert stopping.finish is Finish.STOP and right(stopping)
    at.engine.abort(others[0])
    at.step()
    at.engine.scheduler.retract(others[1])
    at.finish()
    assert right(others[0]) and complete(*others[1:])
