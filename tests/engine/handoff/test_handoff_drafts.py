"""Handoffs with speculation: a draft's pages travel with the target's, and runs stay as long.

The pair of `lookup_pair` looks every token up in its prompt, so that a draft without the prompt's
pages is wrong about nearly every token. The other pairs have random weights: there equal tokens
must get equal drafts, wherever the pages were computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Request, RequestParams
from kvtide.engine.handoff.handoff_state import HandoffState
from kvtide.engine.handoff.messages import Complete, Written
from kvtide.engine.sampling.sampling_params import GREEDY
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.engine.speculation.ngram import NgramDrafter
from kvtide.models import Model
from kvtide.models.draft import DraftModel
from kvtide.spec import Tier
from tests.engine.handoff.handing_over import Pair, expected, family_pair, pair_of, tokens_of
from tests.engine.restoring import text
from tests.engine.speculation import lookup_pair
from tests.engine.speculation.drafting import ConsistentDrafter, ErringDrafter, Seen
from tests.engine.speculation.lookup_pair import (
    ANSWER,
    PAGE,
    LookupServer,
    Served,
    alone,
    walks,
)
from tests.engine.speculation.test_draft_restores import PAIRS, SAMPLING, Bed
from tests.engine.speculation.test_lossless import prompts
from tests.engine.torch_graphs import use_torch_graphs
from tests.grids import everything

KEPT, FALLEN, DRAFTS = 0.98, 0.8, 3
PROMPTS = [one.prompt for one in walks(4 if everything() else 2)]
PREFIX = (len(PROMPTS[0]) - 1) // PAGE * PAGE


def cache_of(model: Model, *, tails: int = 0, draft: bytes = b"") -> TieredCache:
    shared = {"tail_rows": tails, "shared_host": tails > 0}
    config = CacheConfig(
        Tokens(4096),
        Tokens(8192),
        fingerprint=b"weights",
        draft_fingerprint=draft,
        tokens_per_checkpoint=32,
        **shared,
    )
    return TieredCache(model.memory, config)


def drafting_pair(
    models: tuple[Model, Model], drafts: tuple[DraftModel | None, DraftModel | None], **more: Any
) -> Pair:
    """Each side drafts with its own model, or not at all."""
    caches = cache_of(models[0], draft=b"draft"), cache_of(models[1], tails=4, draft=b"draft")
    drafters = tuple(
        None if draft is None else ModelDrafter(draft, draft.captures, cache, model.vocabulary)
        for draft, cache, model in zip(drafts, caches, models, strict=True)
    )
    speculation = {"draft_tokens": DRAFTS, "fixed_drafts": True}
    return pair_of(*caches, models, chunks=(256, 256), drafters=drafters, **speculation, **more)


class Counted:
    """What verify steps of the decode side gave, as `LookupServer` counts it."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.steps, self.tokens, self.decode_steps = pair, 0, 0, 0

    def serve(self, asked: Iterable[Sequence[int]], **options: Any) -> list[Request]:
        requests = []
        for prompt in asked:
            request = self.pair.submit(prompt, ANSWER, sampling=GREEDY, **options)
            while request.finish is None:
                whole = len(request.drafts) == DRAFTS
                before = len(request.output)
                self.pair.step()
                given = len(request.output) - before
                self.steps, self.tokens = self.steps + whole, self.tokens + given * whole
                self.decode_steps += given > 0
            assert tuple(one.token for one in request.output) == alone(tuple(prompt), ANSWER)
            requests.append(request)
        return requests

    @property
    def accept_length(self) -> float:
        assert self.steps, "nothing was drafted"
        return self.tokens / self.steps


@pytest.fixture(scope="module")
def alone_served() -> Served:
    """By one engine that computes every prompt."""
    opened = LookupServer()
    served = opened.serve(PROMPTS)
    opened.close()
    return served


@pytest.fixture(scope="module")
def cold(alone_served: Served) -> float:
    """Its accept length."""
    return alone_served.accept_length


def decode_steps(requests: Sequence[Request]) -> int:
    """Steps behind the first token: each gives a token, and the drafts that it accepts."""
    return sum(len(one.output) - 1 - one.accepted_drafts for one in requests)


@pytest.fixture
def both() -> Iterator[Pair]:
    target, draft = lookup_pair.pair().target, lookup_pair.pair().draft
    pair = drafting_pair((target, target), (draft, draft))
    yield pair
    pair.settle()
    pair.close()


def carried(cache: TieredCache, prompt: Sequence[int]) -> list[bool]:
    """Of every page that is found of a prompt: whether the draft's is there."""
    lease = cache.reserve(cache.match(cache.prompt(tuple(prompt))))
    assert lease is not None
    cache.load(lease)
    assert cache.drain(30)
    (pool,) = cache.memory.draft_sidecars
    found = cache.carries(lease, pool)[: lease.cached_tokens // PAGE].tolist()
    cache.release(lease)
    return [bool(each) for each in found]


# -- accept lengths ----------------------------------------------------------------------------


def test_draft_pages_travel_and_keep_the_accept_length(both: Pair, cold: float) -> None:
    counted = Counted(both)
    for request in counted.serve(PROMPTS):
        handoff = request.handoff
        assert handoff is not None and handoff.state is HandoffState.DECODING
        assert handoff.first == request.output[0]
    assert counted.accept_length >= KEPT * cold
    assert all(not each.absent for each in both.sent(Written))
    both.settle()
    both.decode.cache.flush(Tier.DEVICE)
    for prompt in PROMPTS:
        found = carried(both.decode.cache, prompt)
        assert len(found) == PREFIX // PAGE and all(found)


def test_no_step_is_lost_where_the_prefix_has_landed(both: Pair, alone_served: Served) -> None:
    landed_when_admitted(both)
    requests = Counted(both).serve(PROMPTS)
    assert decode_steps(requests) == decode_steps(alone_served.requests)


def test_an_idle_decode_side_begins_with_one_step_without_drafts(
    both: Pair, alone_served: Served
) -> None:
    """It runs while the prefix is loading: with drafts it would begin when all has landed."""
    requests = Counted(both).serve(PROMPTS)
    lost = decode_steps(requests) - decode_steps(alone_served.requests)
    assert 0 <= lost <= len(PROMPTS)


def test_pages_that_were_handed_over_keep_it_in_the_next_turn(both: Pair, cold: float) -> None:
    first = Counted(both).serve(PROMPTS)
    both.settle()
    both.decode.cache.flush(Tier.DEVICE)
    again = Counted(both)
    again.serve(PROMPTS)
    assert again.accept_length >= KEPT * cold and len(first) == len(PROMPTS)


def test_a_request_that_is_retracted_keeps_it(both: Pair, cold: float) -> None:
    counted, retracted = Counted(both), set[Request]()
    step = both.step

    def stepped() -> None:
        step()
        for request in list(both.decode.scheduler.running):
            if len(request.output) >= ANSWER // 3 and request not in retracted:
                retracted.add(request)
                both.decode.scheduler.retract(request)

    both.step = stepped  # type: ignore[method-assign]
    counted.serve(PROMPTS)
    assert len(retracted) == len(PROMPTS)
    assert counted.accept_length >= KEPT * cold


def test_a_peer_without_the_draft_gives_text_and_shorter_runs(cold: float) -> None:
    """Its tail lacks a pool that is kept here: it is computed here, and the draft's with it."""
    target, draft = lookup_pair.pair().target, lookup_pair.pair().draft
    plain = lookup_pair.plain_target()
    pair = drafting_pair((plain, target), (None, draft))
    counted = Counted(pair)
    requests = counted.serve(PROMPTS)
    assert all(not each.tail for each in pair.sent(Complete)) and len(pair.sent(Complete)) == len(
        PROMPTS
    )
    assert not any(request.handoff and request.handoff.whole for request in requests)
    assert counted.accept_length <= FALLEN * cold
    pair.settle()
    assert not any(carried(pair.decode.cache, PROMPTS[0]))
    pair.close()


def test_a_peer_that_keeps_the_draft_and_does_not_run_it_claims_no_tail_of_it(
    cold: float,
) -> None:
    target, draft = lookup_pair.pair().target, lookup_pair.pair().draft
    pair = drafting_pair((target, target), (None, draft))
    counted = Counted(pair)
    counted.serve(PROMPTS)
    assert not any(each.tail for each in pair.sent(Complete))
    pair.settle()
    for prompt in PROMPTS:
        whole = (*prompt, *alone(prompt, ANSWER), 1)
        found = carried(pair.decode.cache, whole)
        assert not any(found[: PREFIX // PAGE]) and all(found[PREFIX // PAGE :])
    pair.close()


def test_a_decode_side_without_the_draft_takes_the_rest() -> None:
    target, draft = lookup_pair.pair().target, lookup_pair.pair().draft
    pair = drafting_pair((target, lookup_pair.plain_target()), (draft, None))
    for prompt in PROMPTS:
        request = pair.answer(prompt, ANSWER)
        assert tuple(one.token for one in request.output) == alone(tuple(prompt), ANSWER)
        assert request.handoff is not None and request.handoff.first == request.output[0]
    pair.settle()
    pair.close()


def test_a_request_that_does_not_speculate_brings_no_draft_pages(both: Pair, cold: float) -> None:
    for prompt in PROMPTS:
        request = both.answer(prompt, 2, speculate=False)
        assert request.handoff is not None and request.handoff.state is HandoffState.DECODING
        assert request.handoff.first == request.output[0], "its tail needs no draft"
    both.settle()
    assert not any(carried(both.decode.cache, PROMPTS[0]))
    again = Counted(both)
    again.serve(PROMPTS)
    assert again.accept_length <= FALLEN * cold


def test_pages_that_lack_the_draft_there_lack_it_here(both: Pair) -> None:
    """Half of a prefix was computed by the peer without a draft."""
    prompt = PROMPTS[0]
    half = PREFIX // PAGE // 2 * PAGE
    both.prefill.submit(RequestParams(tuple(prompt[: half + 1]), 1, speculate=False))
    both.run()
    Counted(both).serve([prompt])
    both.settle()
    assert carried(both.prefill.cache, prompt) == carried(both.decode.cache, prompt)
    found = carried(both.decode.cache, prompt)
    assert found == [False] * (half // PAGE) + [True] * (PREFIX // PAGE - half // PAGE)


# -- other drafts ------------------------------------------------------------------------------


def landed_when_admitted(pair: Pair) -> None:
    """Prefixes are on the device before a step is scheduled, as where other requests run."""
    scheduler = pair.decode.scheduler
    admitted = scheduler.on_admitted

    def loaded(request: Request) -> None:
        admitted(request)
        assert pair.decode.cache.drain(30) and not request.held.loading

    scheduler.on_admitted = loaded


@pytest.mark.quick(name=["eagle3-falcon_h1", "deepseek_v3-mtp"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_drafts_are_those_of_one_engine_from_the_first_step_on(
    name: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = PAIRS[name](tmp_path)
    asked, seen = prompts(4, 2 * PAGE, 3 * PAGE + 2), Seen()
    bed = Bed((target, draft), DRAFTS, 64, seen)
    answers = [tuple(bed.serve(one)[0].output) for one in asked]
    bed.cache.close()
    if graphs:
        use_torch_graphs(monkeypatch, target)
    pair = drafting_pair((target, target), (draft, draft))
    landed_when_admitted(pair)
    speculation = pair.decode._speculation
    assert speculation is not None
    watched = ConsistentDrafter(speculation._drafter, seen)
    speculation._drafter = watched
    for prompt, answer in zip(asked, answers, strict=True):
        compared = watched.compared
        request = pair.submit(prompt, len(answer), sampling=SAMPLING)
        pair.run(lambda request=request: len(request.output) > 1)  # type: ignore[misc]
        assert request.verify_steps == 1 and watched.compared > compared
        pair.finish(request)
        assert tokens_of(request) == answer
        assert request.handoff is not None and request.handoff.first == answer[0]
    assert (pair.decode.steps_by_kind["verify_graph"] > 0) == graphs
    pair.settle()
    pair.close()


@pytest.mark.parametrize("size", [0, 3])
def test_a_row_that_does_not_fit_gives_no_first_drafts(
    both: Pair, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft goes on behind the first step."""
    landed_when_admitted(both)
    other = [torch.zeros(size)]
    monkeypatch.setattr(ModelDrafter, "captured", lambda *_: lambda: other)
    request = both.submit(PROMPTS[0], ANSWER, sampling=GREEDY)
    both.run(lambda: len(request.output) > 1)
    assert len(request.output) == 2 and not request.verify_steps
    both.finish(request)
    assert request.verify_steps
    assert tuple(one.token for one in request.output) == alone(tuple(PROMPTS[0]), ANSWER)


@pytest.mark.quick(drafter=["ngram"])
@pytest.mark.parametrize("drafter", ["erring", "ngram"])
def test_drafts_of_tokens_alone_need_nothing_of_the_peer(drafter: str) -> None:
    rng = Random(3)
    asked = [text(rng, 3 * PAGE) * 2 + text(rng, 5) for _ in range(2)]
    answers = {prompt: expected("llama", prompt, ANSWER) for prompt in asked}
    known = {prompt: [one.token for one in answer] for prompt, answer in answers.items()}
    drafters = None, ErringDrafter(known, 0.4) if drafter == "erring" else NgramDrafter()
    pair = family_pair("llama", drafters=drafters, draft_tokens=DRAFTS)
    for prompt in asked:
        request = pair.answer(prompt, ANSWER)
        assert tokens_of(request) == answers[prompt]
        assert request.handoff is not None and request.handoff.first == request.output[0]
    lengths = pair.decode.accept_length_stats
    assert lengths is not None and (drafter == "ngram" or request.verify_steps)
    pair.settle()
    pair.close()
