"""Requests that come together and share a prefix that none has computed: one of them does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvtide.cache import CacheConfig, Namespace, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams, RequestState
from kvtide.engine.scheduler import MAX_PREFIX_WAITS
from kvtide.index import Branches, LastPage
from kvtide.spec import Tier
from tests.engine.restoring import PAGE, SAMPLING, WRITING, alone, model_of, text
from tests.grids import everything

PREFIX = 8 * PAGE
REST = 13
ANSWER = 3
MANY = 6 if everything() else 4
STEPS = 200

HISTORIES = ("llama", "deepseek_v3")
"""Full attention and latents."""
CHECKPOINTS = ("gpt_oss", "gemma3", "mistral-windows", "falcon_h1", "qwen3_next", "deepseek_v4")
"""Windows, nothing but windows, recurrent states, and compressed streams."""

OWN = REST + ANSWER - 1
"""What each computes for itself: the last token it says is not computed."""


def asked(number: int, tokens: int = PREFIX, rest: int = REST) -> tuple[int, ...]:
    """A prompt that shares so many tokens with those of other numbers, and nothing else."""
    shared = text(random.Random(0), tokens)
    return (*shared, 1 + number, *text(random.Random(1000 + number), rest - 1))


class Served:
    """An engine and what it computed. Its tokens are those of an engine without a cache."""

    def __init__(self, family: str = "llama", **options: Any) -> None:
        self.family = family
        model = model_of(family)
        pace = {"chunk_tokens": 64, "max_running": 64}
        pace = {name: options.pop(name, number) for name, number in pace.items()}
        placement = options.pop("placement", None)
        sizes = Tokens(2048), Tokens(4096)
        config = CacheConfig(*sizes, tokens_per_checkpoint=PAGE, **options)
        self.cache = TieredCache(model.memory, config, placement=placement)
        self.engine = Engine(model, self.cache, **pace)
        self.requests: list[Request] = []
        self.computed = 0

    def submit(self, tokens: Sequence[int], count: int = ANSWER, **more: Any) -> Request:
        self.requests.append(
            self.engine.submit(RequestParams(tuple(tokens), count, SAMPLING, **more))
        )
        return self.requests[-1]

    def steps(self, number: int = 1) -> None:
        for _ in range(number):
            self.engine.step()
            self.computed += self.engine.computed
            assert self.cache.validate() == []

    def until(self, wanted: Callable[[], bool]) -> None:
        for _ in range(STEPS):
            if wanted():
                return
            self.steps()
        raise AssertionError("it never came to be")

    def right(self) -> None:
        """All are through, and none waited too often."""
        self.until(lambda: self.engine.idle)
        for request in self.requests:
            assert request.prefix_waits <= MAX_PREFIX_WAITS
            if request.params.score is None and request.output:
                output = alone(self.family, request.params.tokens, request.params.max_tokens)
                assert tuple(request.output) == output[: len(request.output)]

    @property
    def found(self) -> list[int]:
        return [sum(request.by_tier.values()) for request in self.requests]


Opener = Callable[..., Served]


@pytest.fixture
def opened() -> Iterator[Opener]:
    found: list[Served] = []

    def open_one(*arguments: Any, **options: Any) -> Served:
        found.append(Served(*arguments, **options))
        return found[-1]

    yield open_one
    for served in found:
        assert not served.cache.index.leases
        assert served.cache.close()


# -- computed once -----------------------------------------------------------------------------


@pytest.mark.quick(family=["llama", "gpt_oss", "falcon_h1", "deepseek_v4"])
@pytest.mark.parametrize("chunk_tokens", [24, 64, 1024])
@pytest.mark.parametrize("family", [*HISTORIES, *CHECKPOINTS])
def test_requests_that_come_together_compute_their_prefix_once(
    family: str, chunk_tokens: int, opened: Opener
) -> None:
    """Also where it takes a checkpoint: the first leaves one where its last whole page ends."""
    served = opened(family, chunk_tokens=chunk_tokens)
    first, *others = [served.submit(asked(number)) for number in range(MANY)]
    served.steps()
    assert first.state is RequestState.RUNNING
    assert chunk_tokens > PREFIX or all(other.state is RequestState.WAITING for other in others)
    served.right()
    assert served.computed == PREFIX + MANY * OWN
    assert served.found == [0] + [PREFIX] * (MANY - 1)
    found = {Tier.DEVICE: PREFIX}
    assert all(other.by_tier == found and other.prefix_waits == 1 for other in others)


@pytest.mark.parametrize("writing", WRITING)
def test_it_holds_for_every_write_policy(writing: str, opened: Opener) -> None:
    served = opened("llama", write_policy=writing)
    for number in range(MANY):
        served.submit(asked(number))
    served.right()
    assert served.computed == PREFIX + MANY * OWN


def test_the_same_prompt_many_times_is_computed_once(opened: Opener) -> None:
    """But for the last page, which leaves each a token to compute."""
    served = opened("llama")
    for _ in range(MANY):
        served.submit(asked(0)[:PREFIX])
    served.right()
    last = PAGE + ANSWER - 1
    assert served.computed == PREFIX - PAGE + MANY * last


def test_what_is_on_the_host_is_not_waited_for_and_the_rest_is(opened: Opener) -> None:
    served = opened("llama")
    served.submit(asked(99, tokens=PREFIX // 2))
    served.right()
    assert served.cache.drain(10) and served.cache.flush(Tier.DEVICE)
    before = served.computed
    others = [served.submit(asked(number)) for number in range(MANY)]
    served.right()
    assert served.computed - before == PREFIX // 2 + MANY * OWN
    assert others[0].by_tier == {Tier.HOST: PREFIX // 2}
    assert [sum(other.by_tier.values()) for other in others[1:]] == [PREFIX] * (MANY - 1)


def test_prefixes_that_part_one_after_the_other_are_each_computed_once(opened: Opener) -> None:
    """Two pairs share a page of each other's, and each pair a document: both are waited for."""
    served = opened("llama", chunk_tokens=24)
    system = text(random.Random(5), 4 * PAGE)
    papers = [(7 + paper, *text(random.Random(60 + paper), 4 * PAGE - 1)) for paper in range(2)]
    for number in range(4):
        served.submit((*system, *papers[number // 2], *asked(number, tokens=0)))
    served.right()
    assert served.computed == 3 * 4 * PAGE + 4 * OWN
    assert [request.prefix_waits for request in served.requests] == [0, 1, 1, 2]


# -- where nothing is found at first -----------------------------------------------------------


@pytest.mark.quick(family=["falcon_h1", "gpt_oss"])
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_where_prompts_part_before_a_checkpoint_their_prefix_is_computed_twice(
    family: str, opened: Opener
) -> None:
    """No step of the first ends there; the second leaves one, and all others wait for that too."""
    served, rest = opened(family, placement=Branches(), chunk_tokens=56), 3 * PAGE
    first, second, *others = [served.submit(asked(n, rest=rest)) for n in range(MANY)]
    served.right()
    nothing, little, *all_of_it = served.found
    assert nothing == 0 and little < PREFIX and all_of_it == [PREFIX] * (MANY - 2)
    assert served.computed == 2 * PREFIX - little + MANY * (rest + ANSWER - 1)
    assert (first.prefix_waits, second.prefix_waits) == (0, 1)
    assert all(other.prefix_waits == MAX_PREFIX_WAITS for other in others)


@pytest.mark.quick(family=["falcon_h1", "gpt_oss", "llama"])
@pytest.mark.parametrize("family", [*HISTORIES, *CHECKPOINTS])
def test_requests_too_late_for_a_checkpoint_compute_their_prefix_twice_in_all(
    family: str, opened: Opener
) -> None:
    """The first is past the point where they part: one of the others leaves a checkpoint there."""
    served = opened(family, placement=Branches())
    first = served.submit(asked(0, rest=20 * PAGE))
    served.until(lambda: first.computed >= PREFIX + 2 * PAGE)
    before, still = served.computed, first.length - first.computed
    others = [served.submit(asked(1 + number)) for number in range(MANY)]
    served.right()
    again = 0 if family in HISTORIES else PREFIX
    assert served.computed - before == again + MANY * OWN + still + ANSWER - 1
    assert others[0].prefix_waits == 0
    assert all(other.prefix_waits == (again > 0) for other in others[1:])


@pytest.mark.quick(family=["falcon_h1", "gpt_oss"])
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_where_nothing_can_be_found_no_request_waits_more_than_twice(
    family: str, opened: Opener
) -> None:
    """No checkpoint is left where prompts part: the requests that wait for it go on together."""
    served, rest = opened(family, placement=LastPage(), chunk_tokens=256), 3 * PAGE
    first, *others = [served.submit(asked(number, rest=rest)) for number in range(MANY)]
    served.until(lambda: not served.engine.scheduler.waiting)
    assert set(served.engine.scheduler.running) >= set(others[1:])
    served.right()
    assert (first.prefix_waits, others[0].prefix_waits) == (0, 1)
    assert all(other.prefix_waits == MAX_PREFIX_WAITS for other in others[1:])
    assert served.computed == MANY * (PREFIX + rest + ANSWER - 1)


# -- the request ahead goes --------------------------------------------------------------------


def test_when_the_one_ahead_is_aborted_another_computes_the_rest(opened: Opener) -> None:
    served = opened("llama", chunk_tokens=3 * PAGE)
    first, *others = [served.submit(asked(number)) for number in range(MANY)]
    served.steps()
    assert first.computed == 3 * PAGE
    served.engine.abort(first)
    served.right()
    assert served.computed == PREFIX + (MANY - 1) * OWN, "what it had computed is found"
    assert [other.prefix_waits for other in others] == [1] + [2] * (MANY - 2)
    assert all(len(other.output) == ANSWER for other in others)


def test_all_requests_ahead_may_go_and_none_waits_for_ever(opened: Opener) -> None:
    served = opened("falcon_h1", chunk_tokens=PAGE)
    requests = [served.submit(asked(number)) for number in range(MANY)]
    for request in requests[:-1]:
        served.steps()
        served.engine.abort(request)
    served.right()
    assert len(requests[-1].output) == ANSWER and requests[-1].prefix_waits == MAX_PREFIX_WAITS


def test_aborting_one_that_waits_leaves_the_others_alone(opened: Opener) -> None:
    served = opened("llama")
    requests = [served.submit(asked(number)) for number in range(MANY)]
    served.steps()
    served.engine.abort(requests[1])
    served.right()
    assert served.computed == PREFIX + (MANY - 1) * OWN


def test_a_retracted_one_is_waited_for_again(opened: Opener) -> None:
    """A higher priority takes its place; it goes on first, being older, and the others after it."""
    served = opened("llama", chunk_tokens=2 * PAGE, max_running=2)
    first, second = served.submit(asked(0)), served.submit(asked(1))
    served.steps()
    assert second.prefix_owner is not None and second.prefix_owner.request is first
    urgent = [served.submit(text(random.Random(8 + n), PAGE), priority=1) for n in range(2)]
    served.steps()
    assert first.state is RequestState.WAITING and [one.admissions for one in urgent] == [1, 1]
    served.until(lambda: first.admissions == 2)
    assert second.prefix_owner is not None and second.prefix_owner.request is first
    served.right()
    assert first.computed >= PREFIX and second.prefix_waits == 1, "there was no place to ask about"
    assert served.computed == PREFIX + 2 * OWN + 2 * (PAGE + ANSWER - 1)
    assert sum(second.by_tier.values()) == PREFIX


def test_one_whose_pages_are_taken_back_is_waited_for_no_longer(opened: Opener) -> None:
    """It starts over like any other: the first request computes the rest."""
    served = opened("llama", chunk_tokens=2 * PAGE)
    requests = [served.submit(asked(number)) for number in range(3)]
    served.steps()
    served.engine.scheduler.retract(requests[0])
    assert all(request.ready for request in requests)
    served.right()
    assert served.computed == PREFIX + 3 * OWN


def test_what_was_quarantined_is_not_waited_for(opened: Opener) -> None:
    served = opened("llama", chunk_tokens=2 * PAGE)
    first, second = served.submit(asked(0)), served.submit(asked(1))
    served.steps()
    assert second.prefix_owner is not None and not second.ready
    assert served.cache.quarantine(first.prompt)
    served.steps()
    assert second.state is RequestState.RUNNING
    served.right()
    assert served.computed == 2 * (PREFIX + OWN)


# -- requests that do not wait-------------------------------------------------------------------


def test_no_request_waits_for_a_lower_priority(opened: Opener) -> None:
    served = opened("llama", chunk_tokens=24)
    low = served.submit(asked(0))
    served.steps()
    high = served.submit(asked(1), priority=1)
    served.steps()
    assert high.state is RequestState.RUNNING and high.prefix_waits == 0 and low.computed < PREFIX
    lowest = served.submit(asked(2), priority=-1)
    served.right()
    assert lowest.prefix_waits == 1 and sum(lowest.by_tier.values()) == PREFIX


def test_namespaces_do_not_wait_for_each_other(opened: Opener) -> None:
    served = opened("llama", chunk_tokens=24)
    salts = [Namespace(cache_salt=salt) for salt in "abab"]
    requests = [served.submit(asked(0), namespace=salt) for salt in salts]
    served.steps()
    assert [request.state for request in requests] == [RequestState.RUNNING] * 2 + [
        RequestState.WAITING
    ] * 2
    served.right()
    assert [request.prefix_waits for request in requests] == [0, 0, 1, 1]


@pytest.mark.parametrize("more", [{"recompute": True}, {"score": 1}], ids=["recompute", "score"])
def test_a_request_that_recomputes_neither_waits_nor_is_waited_for(
    more: dict[str, Any], opened: Opener
) -> None:
    served = opened("llama", chunk_tokens=24)
    ways: list[dict[str, Any]] = [more, more, {}, more]
    requests = [served.submit(asked(0), **way) for way in ways]
    served.steps()
    assert all(
        request.state is RequestState.RUNNING and not request.prefix_waits for request in requests
    )
    served.right()
    assert served.computed == 4 * (PREFIX + OWN)


def test_a_request_that_waits_for_another_keeps_no_third_waiting(opened: Opener) -> None:
    served = opened("llama", chunk_tokens=24)
    first, waiting = served.submit(asked(0)), served.submit(asked(1))
    unrelated = [served.submit(text(random.Random(seed), PAGE)) for seed in (50, 51)]
    served.steps()
    assert served.engine.scheduler.running == [first, *unrelated]
    assert waiting.prefix_owner is not None and waiting.prefix_owner.request is first
    served.right()


def test_a_request_that_shares_less_than_a_page_does_not_wait(opened: Opener) -> None:
    served = opened("llama", chunk_tokens=24)
    first, second = (served.submit(asked(n, tokens=PAGE - 1)) for n in range(2))
    served.steps()
    assert first.state is second.state is RequestState.RUNNING
    served.right()


def test_waiting_costs_no_comparison_of_prompts(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whom a request waits for is noted: it is asked again when that is over, not every step.
    Nor is a request looked at while there is no place."""
    served = opened("llama", chunk_tokens=PAGE, max_running=2)
    for number in range(MANY):
        served.submit(asked(number))
    for number in range(2):
        served.submit(text(random.Random(50 + number), PAGE), 60)
    served.steps()
    assert len(served.engine.scheduler.running) == 2
    compared: list[int] = []
    shared_pages = served.cache.shared_pages

    def counted(*arguments: Any) -> int:
        compared.append(shared_pages(*arguments))
        return compared[-1]

    monkeypatch.setattr(served.cache, "shared_pages", counted)
    served.steps(PREFIX // PAGE - 2)
    assert not compared
    served.right()
    assert compared
