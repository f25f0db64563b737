"""Random traffic of constrained and free requests: every one is answered as if alone.

The traffic is that of `tests/engine/speculation`: drafts, retractions, restored prefixes, several
answers to a prompt, stops, failing copies and stores. The reference has none of these.
"""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from functools import cache as cached
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, Finish, Request, RequestParams, SamplingParams
from kvtide.engine.grammar import step_masks
from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.overlap import OverlapState
from kvtide.engine.speculation.ngram import NgramDrafter
from tests.engine.handoff.handing_over import Pair, family_pair
from tests.engine.restoring import model_of, text
from tests.engine.speculation.test_draft_restores import PAIRS
from tests.engine.speculation.test_drafted_traffic import Letters, Run, _letters, reference
from tests.engine.speculation.test_graph_traffic import GraphRun
from tests.engine.torch_graphs import use_torch_graphs
from tests.grids import everything

REGEXES = (
    "((ab|cd|[ac][a-p])([a-h][a-p]){0,3}){2,9}",
    "([a-h][abc]){1,30}",
    "(aa|ab|ba|bb){5}",
    "([a-f][a-p]){0,3}(ca|[a-c]b){1,20}",
)
"""Of two letters at a time, as the tokens are; most have many texts, one few."""
ANSWER = 30 if everything() else 12


def text_of(request: Request) -> str:
    return b"".join(_letters(str(one.token)) for one in request.output).decode()


def check_texts(requests: list[Request]) -> int:
    """What ended by itself matches: returns how many did."""
    ended = 0
    for request in requests:
        grammar = request.params.grammar
        if grammar is None or not request.output:
            continue
        assert request.finish is not Finish.ERROR
        whole, regex = text_of(request), re.compile(grammar.text)
        stops = request.params.stop_ids or request.params.stop
        if request.finish is Finish.STOP and not stops:
            assert regex.fullmatch(whole)
            ended += 1
    return ended


class ConstrainedRun(Run):
    """Most requests have a grammar."""

    def _grammar(self) -> Grammar | None:
        regex = self.rng.choice((*REGEXES, None, None))
        return None if regex is None else Grammar("regex", regex)

    def check(self) -> None:
        super().check()
        answered = [request for _, request, _ in self.requests if request.output]
        check_texts(answered)
        kinds = {request.params.grammar is None for request in answered}
        assert kinds == {True, False} or not everything()


class ConstrainedGraphRun(GraphRun, ConstrainedRun):
    pass


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cached(lambda name: PAIRS[name](tmp_path_factory.mktemp("drafts")))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["eagle3-llama", "eagle3-gpt_oss", "qwen3_next-mtp"])
def test_eager_steps_with_drafts_of_a_model(
    name: str, seed: int, pairs: Any, tmp_path: Path
) -> None:
    run = ConstrainedRun(name, pairs(name), seed, tmp_path)
    run.play(24 if everything() else 7)
    run.check()


@pytest.mark.quick(seed=[0], name=["eagle3-llama"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["eagle3-llama", "eagle3-gpt_oss", "qwen3_next-mtp"])
def test_graphs_that_are_launched_ahead_and_accept_on_the_device(
    name: str, seed: int, pairs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = pairs(name)
    reference(name, target)  # It has no graphs.
    use_torch_graphs(monkeypatch, target)
    if seed % 2:
        monkeypatch.setattr("kvtide.engine.sampling.sampler.CANDIDATES", 2)
    run = ConstrainedGraphRun(name, pairs(name), seed, tmp_path)
    run.play(24 if everything() else 7)
    run.check()
    assert run.engine.steps_by_kind["verify_graph"] > 0


# -- one engine at a time -------------------------------------------------------------------------


def engine_of(name: str = "llama", **options: Any) -> Engine:
    model = model_of(name)
    cache = TieredCache(model.memory, CacheConfig(Tokens(640), None, tokens_per_checkpoint=16))
    tokenizer: Any = Letters()
    return Engine(model, cache, tokenizer, **options)


def asked(number: int, regex: str | None, sampling: SamplingParams, **more: Any) -> RequestParams:
    tokens = text(Random(number), 20 + number)
    grammar = None if regex is None else Grammar("regex", regex)
    return RequestParams(tokens, ANSWER, sampling, grammar=grammar, **more)


def mixture() -> list[RequestParams]:
    kinds = (SamplingParams(logprobs=1), SamplingParams(0.9, top_k=20), SamplingParams(1.3, 0.8))
    return [
        asked(number, (*REGEXES, None)[number % 5], replace(kinds[number % 3], seed=number))
        for number in range(15 if everything() else 10)
    ]


def answers(engine: Engine, requests: list[RequestParams]) -> list[Request]:
    running = [engine.submit(params) for params in requests]
    while not engine.idle:
        engine.step()
    return running


@cached
def solo_answers() -> list[Any]:
    engine = engine_of()
    found = []
    for params in mixture():
        (request,) = answers(engine, [replace(params, recompute=True)])
        found.append((request.output, request.finish))
    return found


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({"chunk_tokens": 7, "max_running": 4}, False),
        ({"chunk_tokens": 512, "max_running": 16}, False),
        (
            {
                "chunk_tokens": 64,
                "drafter": NgramDrafter(),
                "draft_tokens": 7,
                "fixed_drafts": True,
            },
            False,
        ),
        ({"chunk_tokens": 64, "max_running": 6}, True),
    ],
    ids=["small steps", "one batch", "n-grams", "launched ahead"],
)
def test_a_batch_gives_the_texts_of_requests_alone(
    options: dict[str, Any], launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = solo_answers()
    if launches:
        model: Any = model_of("llama")
        use_torch_graphs(monkeypatch, model)
    engine = engine_of(**options)
    states = set()
    running = [engine.submit(params) for params in mixture()]
    while not engine.idle:
        engine.step()
        states.add(engine.overlap.state)
    assert [(one.output, one.finish) for one in running] == wanted
    assert check_texts(running) > 0
    assert (OverlapState.LAUNCHED in states) == launches
    if options.get("drafter"):
        assert engine.accept_length_stats is not None and engine.accept_length_stats.accepted > 0


def test_masks_are_computed_beside_the_commit_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, committed = engine_of(), threading.Event()
    compute, commit = step_masks.StepMasks._compute, engine.cache.commit

    def compute_late(*given: Any) -> None:
        assert committed.wait(60), "the engine does not go on before the masks are there"
        committed.clear()
        compute(*given)

    def commit_first(*given: Any, **options: Any) -> None:
        commit(*given, **options)
        committed.set()

    monkeypatch.setattr(step_masks.StepMasks, "_compute", compute_late)
    monkeypatch.setattr(engine.cache, "commit", commit_first)
    request = engine.submit(asked(3, REGEXES[0], SamplingParams(1.0, seed=4)))
    while not engine.idle:
        engine.step()
    check_texts([request])
    assert engine.masks.steps == len(request.output) > 0


def test_drafts_that_a_grammar_refuses_are_not_verified() -> None:
    """A prompt that repeats what the grammar forbids: n-grams would draft it every time."""
    engine = engine_of(drafter=NgramDrafter(), draft_tokens=4, fixed_drafts=True)
    forbidden = (0x12, 0x34, 0x12, 0x34) * 6
    params = RequestParams(forbidden, 12, grammar=Grammar("regex", "(bc[e-h][a-p])*"))
    request = engine.submit(params)
    while not engine.idle:
        engine.step()
        assert not any(draft == 0x34 for draft in request.drafts)
    assert request.output[0].token == 0x12 and request.finish is Finish.LENGTH


def test_a_retracted_request_keeps_its_place_in_the_grammar() -> None:
    engine, params = engine_of(), asked(3, REGEXES[0], SamplingParams(1.0, seed=4))
    (wanted,) = answers(engine_of(), [params])
    request = engine.submit(params)
    while not engine.idle:
        engine.step()
        if request.output and len(request.output) % 3 == 0 and request.finish is None:
            engine.scheduler.retract(request)
    assert request.admissions > 2
    assert (request.output, request.finish) == (wanted.output, wanted.finish)


def test_a_request_ends_where_its_grammar_does_or_at_a_stop_id() -> None:
    engine, stop = engine_of(), 0x77
    plain = RequestParams((5, 6, 7), 30, grammar=Grammar("regex", "abcdef"))
    ids = frozenset({stop})
    forced, stopped, open_end = answers(
        engine,
        [
            plain,
            replace(plain, stop_ids=ids),
            replace(
                plain,
                stop_ids=ids,
                grammar=Grammar("regex", "ab(cd)*"),
                sampling=SamplingParams(logit_bias=((stop, 100.0),)),
            ),
        ],
    )
    for request in (forced, stopped):
        assert (text_of(request), request.finish) == ("abcdef", Finish.STOP)
    assert [one.token for one in open_end.output] == [0x01, stop]
    assert open_end.finish is Finish.STOP and open_end.text is not None
    (cut,) = answers(engine, [replace(plain, max_tokens=2)])
    assert (text_of(cut), cut.finish) == ("abcd", Finish.LENGTH)
    (exact,) = answers(engine, [replace(plain, max_tokens=3)])
    assert (text_of(exact), exact.finish) == ("abcdef", Finish.STOP)


def test_a_text_that_no_token_continues_ends_in_an_error_and_nothing_else_does() -> None:
    engine = engine_of()
    wrong = RequestParams((5, 6, 7), 30, grammar=Grammar("regex", "abcde"))
    beside = asked(1, REGEXES[1], SamplingParams())
    (wanted,) = answers(engine_of(), [beside])
    failed, good = answers(engine, [wrong, beside])
    assert failed.finish is Finish.ERROR and text_of(failed) == "abcd"
    assert (good.output, good.finish) == (wanted.output, wanted.finish)


# -- handed over ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def handing() -> Any:
    tokenizer: Any = Letters()
    pair = family_pair("llama", tokenizer=tokenizer)
    yield pair
    pair.settle()
    pair.close()


@pytest.mark.parametrize("routed", [False, True])
def test_the_token_that_a_prefill_server_samples_obeys_the_grammar(
    handing: Pair, routed: bool
) -> None:
    for number, regex in enumerate(REGEXES if everything() else REGEXES[::2]):
        params = asked(40 + number, regex, SamplingParams(1.0, seed=number))
        (wanted,) = answers(engine_of(), [params])
        options = {"sampling": params.sampling, "grammar": params.grammar}
        if routed:
            at_prefill, at_decode = handing.route(params.tokens, ANSWER, **options)
            at_prefill()
            request = at_decode()
        else:
            request = handing.submit(params.tokens, ANSWER, **options)
        handing.finish(request)
        assert (request.output, request.finish) == (wanted.output, wanted.finish)
    free = asked(40, None, SamplingParams(1.0, seed=0))
    (without,) = answers(engine_of(), [free])
    (within,) = answers(engine_of(), [replace(free, grammar=Grammar("regex", REGEXES[2]))])
    assert within.output[0] != without.output[0], "the first token depends on the grammar"


def test_one_token_may_be_all_of_a_handed_answer(handing: Pair) -> None:
    request = handing.answer(text(Random(90), 60), 9, grammar=Grammar("regex", "ab"))
    assert (text_of(request), request.finish) == ("ab", Finish.STOP)
    stop = frozenset({0x77})
    biased = SamplingParams(logit_bias=((0x77, 100.0),))
    options = {"grammar": Grammar("regex", "(ab)*"), "stop_ids": stop, "sampling": biased}
    request = handing.answer(text(Random(91), 60), 9, **options)
    assert ([one.token for one in request.output], request.finish) == ([0x77], Finish.STOP)
