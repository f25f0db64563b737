"""Handoffs of every shape: what either side has already, how it keeps it, how it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.cache import FetchPatience, Layout, Namespace
from kvtide.engine import Engine, Request, RequestParams, SamplingParams
from kvtide.engine.handoff.handoff_state import HandoffState
from kvtide.engine.handoff.messages import Ask, First, Reserve, Written
from kvtide.engine.request import Finish
from kvtide.spec import ALL, Tier
from kvtide.storage import open_store
from tests.engine.handoff.handing_over import Pair, expected, family_pair, tokens_of
from tests.engine.restoring import PAGE, SAMPLING, WRITING, model_of
from tests.grids import covered, everything

FORMS = ("llama", "gpt_oss", "falcon_h1", "deepseek_v4")
LENGTH = 6 * PAGE + 5
PATIENT = FetchPatience("wait_complete", min_tokens=1)
Make = Callable[..., Pair]


@pytest.fixture
def make() -> Iterator[Make]:
    """Pairs of which nothing is left in the end."""
    pairs: list[Pair] = []

    def built(family: str, **options: object) -> Pair:
        pairs.append(family_pair(family, **options))
        return pairs[-1]

    yield built
    for pair in pairs:
        pair.settle()
        pair.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Pair]:
    pair = family_pair("llama")
    yield pair
    pair.close()


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    yield from shared.lent()


def decoded(request: Request, family: str = "llama") -> None:
    """The request has the answer of one engine, and its first token from the peer."""
    params = request.params
    assert tokens_of(request) == expected(family, params.tokens, params.max_tokens, params.sampling)
    assert request.handoff is not None and request.handoff.state is HandoffState.DECODING
    assert request.handoff.first == request.output[0]


def history_places(pair: Pair, reserve: Reserve) -> int:
    """Pages of the first history that a reservation asks for."""
    histories = [a.name for a in pair.decode.cache.memory.anchors if a.reuse.reach is ALL]
    name = (histories or [pair.decode.cache.memory.anchors[0].name])[0]
    return sum(len(some.pages) for some in reserve.places if some.anchor == name)


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "device", "prefill_host", "host", "chunks"),
    covered(
        [
            (family, device, other, host, chunks)
            for family in ("gpt_oss", "falcon_h1", "deepseek_v4")
            for device in Layout
            for other in Layout
            for host in Layout
            for chunks in ((PAGE, 64), (40, 16), (256, 256))
            if (device, other, host, chunks).count(Layout.LAYER_FIRST) < 2
        ],
        1,
    ),
)
def test_layouts_and_chunk_sizes_may_differ(
    make: Make,
    family: str,
    device: Layout,
    prefill_host: Layout,
    host: Layout,
    chunks: tuple[int, int],
) -> None:
    pair = make(
        family,
        chunks=chunks,
        prefill_cache={"device_layout": device, "host_layout": prefill_host},
        decode_cache={"host_layout": host},
    )
    decoded(pair.answer(pair.fresh(LENGTH)), family)


@pytest.mark.quick(family=["deepseek_v32 hot:24"])
@pytest.mark.parametrize(
    "family", ["deepseek_v32 hot:24", "deepseek_v4 hot:7", "glm_moe_dsa hot:512"]
)
@pytest.mark.parametrize("sides", ["prefill", "decode", "both"])
def test_hot_pools_of_one_side_need_none_on_the_other(make: Make, family: str, sides: str) -> None:
    model = family.partition(" ")[0]
    decode = model if sides == "prefill" else family
    pair = make(decode, prefill_name=model if sides == "decode" else family)
    for length in (LENGTH, 7 * PAGE):
        decoded(pair.answer(pair.fresh(length)), model)


@pytest.mark.quick(family=["gpt_oss"])
@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("writing", WRITING)
def test_write_policies_may_differ(make: Make, family: str, writing: str) -> None:
    other = WRITING[WRITING.index(writing) - 1]
    small = {"tokens": 24 * PAGE, "host": 48 * PAGE}
    pair = make(
        family,
        prefill_cache={**small, "write_policy": other},
        decode_cache={**small, "write_policy": writing},
    )
    prompt = pair.fresh(LENGTH)
    for turn in range(4 if everything() else 2):
        request = pair.answer(prompt)
        decoded(request, family)
        answer = tuple(sampled.token for sampled in request.output)
        prompt = (*prompt, *answer, *pair.fresh(PAGE + turn))
        pair.answer(pair.fresh(8 * PAGE))


# -- what the decode side has ------------------------------------------------------------------


@pytest.mark.quick(family=["gpt_oss", "falcon_h1"])
@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("tier", ["device", "host", "storage"])
def test_only_what_the_decode_side_lacks_is_asked_for(
    make: Make, family: str, tier: str, tmp_path: Path
) -> None:
    """The second turn of a conversation whose first one was answered here."""
    pair = make(family, decode_cache={"patience": PATIENT})
    cache = pair.decode.cache
    if tier == "storage":
        cache.storage.attach(open_store(f"file://{tmp_path}", cache.storage.space))
    prompt = pair.fresh(9 * PAGE + 9)
    first = pair.answer(prompt, 8)
    decoded(first, family)
    assert history_places(pair, pair.sent(Reserve)[-1]) == 9
    pair.settle()
    if tier != "device":
        assert cache.drain(30)
        cache.flush(Tier.DEVICE)
    if tier == "storage":
        cache.flush(Tier.HOST)
    answer = tuple(sampled.token for sampled in first.output)
    second = pair.answer((*prompt, *answer, *pair.fresh(PAGE + 1)))
    decoded(second, family)
    found = sum(second.by_tier.values())
    assert set(second.by_tier) <= {Tier.DEVICE, Tier.HOST, Tier.STORAGE}
    assert found >= 9 * PAGE, "prompt and answer of the first turn"
    assert history_places(pair, pair.sent(Reserve)[-1]) == 11 - found // PAGE
    assert {each.name.lower() for each, n in second.by_tier.items() if n} == {tier}
    assert sum(each.tokens for each in (second.handoff,) if each) == 11 * PAGE - found


def test_a_decode_side_that_begins_anew_restores_from_storage(make: Make, tmp_path: Path) -> None:
    """What a peer has written and what was generated, also of windows and states."""
    for family in FORMS if everything() else ("gpt_oss",):
        store = f"file://{tmp_path / family}"
        first = make(family, decode_cache={"patience": PATIENT})
        first.decode.cache.storage.attach(open_store(store, first.decode.cache.storage.space))
        prompt = first.fresh(LENGTH)
        request = first.answer(prompt, 3 * PAGE)
        decoded(request, family)
        first.settle()
        assert first.decode.cache.drain(30)
        first.decode.cache.storage.detach(30)
        assert first.decode.cache.drain(30)
        second = make(family, decode_cache={"patience": PATIENT})
        second.decode.cache.storage.attach(open_store(store, second.decode.cache.storage.space))
        answer = tuple(sampled.token for sampled in request.output)
        longer = (*prompt, *answer, 1)
        again = second.answer(longer)
        assert tokens_of(again) == expected(family, longer)
        assert again.by_tier[Tier.STORAGE] == 9 * PAGE
        assert not second.sent(Reserve), "nothing is missing"


def test_the_next_prefill_fetches_what_the_decode_side_stored(make: Make, tmp_path: Path) -> None:
    for family in FORMS if everything() else ("gpt_oss",):
        store = f"file://{tmp_path / family}"
        options = {"patience": PATIENT}
        pair = make(family, prefill_cache=options, decode_cache=options)
        for engine in (pair.prefill, pair.decode):
            cache = engine.cache
            cache.storage.attach(open_store(store, cache.storage.space))
        prompt = pair.fresh(LENGTH)
        request = pair.answer(prompt, 3 * PAGE)
        pair.settle()
        for engine in (pair.prefill, pair.decode):
            assert engine.cache.drain(30)
            for tier in (Tier.DEVICE, Tier.HOST):
                engine.cache.flush(tier)
        pair.decode.cache.storage.detach(30)
        assert pair.decode.cache.drain(30)
        longer = (*prompt, *(one.token for one in request.output), *pair.fresh(PAGE))
        decoded(pair.answer(longer), family)
        assert pair.sent(First)[-1].cached == {"storage": 9 * PAGE}


@pytest.mark.quick(family=["falcon_h1"])
@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST], ids=["device", "host"])
def test_the_prefill_side_uses_its_own_prefix_cache(make: Make, family: str, tier: Tier) -> None:
    pair = make(family)
    prompt = pair.fresh(LENGTH)
    pair.prefill.submit(RequestParams(prompt, 3, SAMPLING))
    pair.run()
    pair.settle()
    if tier is Tier.HOST:
        assert pair.prefill.cache.drain(30)
        pair.prefill.cache.flush(Tier.DEVICE)
    request = pair.answer(prompt)
    decoded(request, family)
    assert request.handoff is not None
    assert request.handoff.cached == {tier.name.lower(): 6 * PAGE} and request.by_tier == {}


# -- requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE])
def test_a_prompt_without_a_whole_page_before_its_last_token_is_prefilled_here(
    pair: Pair, length: int
) -> None:
    prompt = pair.fresh(length)
    request = pair.answer(prompt)
    assert tokens_of(request) == expected("llama", prompt)
    assert request.handoff is not None and request.handoff.state is HandoffState.DECLINED


@pytest.mark.parametrize("length", [PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 5 * PAGE, 5 * PAGE + 1])
def test_prompts_of_whole_pages_and_one_more(pair: Pair, length: int) -> None:
    request = pair.answer(pair.fresh(length), 2 * PAGE)
    decoded(request)
    assert pair.sent(Reserve)[-1].count == (length - 1) // PAGE


@pytest.mark.parametrize("count", [1, 2])
def test_short_answers(pair: Pair, count: int) -> None:
    request = pair.answer(pair.fresh(LENGTH), count)
    decoded(request)
    assert request.finish is Finish.LENGTH and len(request.output) == count


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_answer_ends_at_a_stop_token(pair: Pair, number: int) -> None:
    """Also at its first one, which the peer has sampled."""
    prompt = pair.fresh(LENGTH)
    answer = expected("llama", prompt, 4)
    stop = answer[number].token
    request = pair.answer(prompt, 4, stop_ids=frozenset({stop}))
    ends = next(n for n, sampled in enumerate(answer) if sampled.token == stop)
    assert tokens_of(request) == answer[: ends + 1] and request.finish is Finish.STOP


@pytest.mark.parametrize("number", range(5))
def test_sampling_goes_on_where_the_peer_ended(pair: Pair, number: int) -> None:
    sampling = (
        SamplingParams(logprobs=5),
        SamplingParams(temperature=1.0, seed=2**62 + 3, logprobs=2),
        SamplingParams(temperature=0.7, top_p=0.8, top_k=20, min_p=0.01, seed=1),
        SamplingParams(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
        SamplingParams(temperature=1.3, seed=9, frequency_penalty=2.0, logprobs=1),
    )[number]
    for routed in (False, True):
        prompt = pair.fresh(LENGTH)
        if routed:
            to_prefill, to_decode = pair.route(prompt, 12, sampling=sampling)
            to_prefill()
            request = to_decode()
            pair.finish(request)
        else:
            request = pair.answer(prompt, 12, sampling=sampling)
        decoded(request)


def test_equal_prompts_at_once_are_handed_over_once(pair: Pair) -> None:
    prompt = pair.fresh(LENGTH)
    seeded = [SamplingParams(temperature=1.0, seed=seed) for seed in range(5)]
    requests = [pair.submit(prompt, 6, sampling=sampling) for sampling in seeded]
    pair.run()
    for request in requests:
        assert tokens_of(request) == expected("llama", prompt, 6, request.params.sampling)
    states = [request.handoff.state for request in requests if request.handoff is not None]
    assert states == [HandoffState.DECODING] + [HandoffState.DECLINED] * 4
    assert len(pair.sent(Ask)) == 1
    assert sum(len(each.numbers) for each in pair.sent(Written)) == 6


def test_a_prefix_that_two_prompts_share_is_handed_over_once(pair: Pair) -> None:
    root = pair.fresh(4 * PAGE)
    requests = [pair.submit((*root, *pair.fresh(2 * PAGE))) for _ in range(2)]
    other = pair.submit(pair.fresh(3 * PAGE + 1))
    pair.run()
    for request in (*requests, other):
        decoded(request)
    assert sorted(each.count for each in pair.sent(Reserve)) == [1, 3, 5]


def test_a_handoff_that_others_wait_for_may_fail(pair: Pair) -> None:
    prompt = pair.fresh(LENGTH)
    requests = [pair.submit(prompt) for _ in range(3)]
    pair.run(lambda: bool(pair.sent(Reserve)))
    pair.decode.abort(requests[0])
    pair.run()
    for request in requests[1:]:
        assert tokens_of(request) == expected("llama", prompt)
    assert len(pair.sent(Ask)) == 2


def test_namespaces_stay_apart(pair: Pair) -> None:
    prompt = pair.fresh(LENGTH)
    for namespace in (Namespace("one"), Namespace("two"), Namespace("one", "salt")):
        request = pair.answer(prompt, namespace=namespace)
        decoded(request)
        assert pair.sent(Reserve)[-1].count == 6 and request.handoff is not None
        assert request.handoff.cached == {}, "nor does the peer find another's"
    request = pair.answer(prompt, namespace=Namespace("two"))
    assert request.handoff is not None and request.handoff.state is HandoffState.DECLINED


@pytest.mark.parametrize("how", ["recompute", "score"])
def test_requests_without_the_cache_are_prefilled_here(pair: Pair, how: str) -> None:
    prompt = pair.fresh(LENGTH)
    options = {"recompute": True} if how == "recompute" else {"score": 2}
    request = pair.answer(prompt, **options)
    assert tokens_of(request) == expected("llama", prompt)
    assert request.handoff is not None and request.handoff.state is HandoffState.DECLINED
    assert request.by_tier == {} and not pair.sent(Ask)


# -- retraction --------------------------------------------------------------------------------


@pytest.mark.quick(family=["gpt_oss", "falcon_h1"], tokens=[1])
@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("tokens", [1, 2, PAGE])
@pytest.mark.parametrize("flushed", [False, True])
def test_a_request_that_is_retracted_goes_on_where_it_was(
    make: Make, family: str, tokens: int, flushed: bool
) -> None:
    """Right behind its tail: the last page is not full, and nothing but the lease had it."""
    pair = make(family)
    for length in (LENGTH, 6 * PAGE):
        prompt = pair.fresh(length)
        request = pair.submit(prompt, 2 * PAGE)
        while len(request.output) < tokens or request.lease is None:
            pair.step()
        pair.decode.scheduler.retract(request)
        if flushed:
            assert pair.decode.cache.drain(30)
            pair.decode.cache.flush(Tier.DEVICE)
        pair.finish(request)
        decoded(request, family)
        assert request.admissions == 2


@pytest.mark.quick(family=["gpt_oss"])
@pytest.mark.parametrize("family", FORMS)
def test_a_device_too_small_for_all_requests_makes_them_take_turns(make: Make, family: str) -> None:
    """Retractions on both sides, by priority, while others are handed over."""
    small = {"tokens": 20 * PAGE, "host": 80 * PAGE}
    pair = make(family, prefill_cache=small, decode_cache={**small, "tails": 6})
    requests: list[Request] = []
    for number in range(4):
        requests.append(pair.submit(pair.fresh(LENGTH + number), 2 * PAGE, priority=number // 2))
        while number == 1 and not all(request.output for request in requests):
            pair.step()
    pair.run()
    for request in requests:
        params = request.params
        assert tokens_of(request) == expected(family, params.tokens, params.max_tokens)
    assert [request.admissions for request in requests] == [2, 2, 1, 1]


def test_a_server_may_prefill_and_decode_at_once(make: Make) -> None:
    """What it prefills for a peer it also answers to its own clients."""
    pair = make("llama")
    prompt = pair.fresh(LENGTH)
    own = pair.prefill.submit(RequestParams((*prompt, 5), 4, SAMPLING))
    request = pair.submit(prompt)
    pair.run()
    decoded(request)
    assert tokens_of(own) == expected("llama", (*prompt, 5))


def test_an_engine_without_tail_rows_declines(make: Make) -> None:
    model = model_of("llama")
    pair = make("llama")
    cache = replace(pair.decode.cache.config, tail_rows=0, shared_host=False)
    engine = Engine(model, type(pair.decode.cache)(model.memory, cache), handoff_min_tokens=1)
    prompt = pair.fresh(LENGTH)
    request = engine.submit(replace(pair.submit(prompt).params))
    pair.run()
    while not engine.idle:
        engine.step()
    assert tokens_of(request) == expected("llama", prompt)
    assert request.handoff is not None and request.handoff.state is HandoffState.DECLINED
    engine.cache.close()
