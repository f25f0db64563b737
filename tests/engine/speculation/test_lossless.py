"""Speculation changes no bit of an answer: not in any family, at any acceptance, from any tier."""

from __future__ import annotations

import random

import pytest

from kvtide.engine import RequestParams, SamplingParams
from kvtide.spec import Tier
from kvtide.tiers import Layout
from tests.engine.restoring import ALL_NAMES, FORMS, PAGE, Stand, alone
from tests.engine.speculation.drafting import ErringDrafter
from tests.models.tiny import VOCABULARY

ANSWER = PAGE + 6
"""More than a page: drafts cross its end."""
SAMPLED = SamplingParams(temperature=1.3, top_p=0.9, seed=11, logprobs=2, presence_penalty=0.5)
GREEDY = SamplingParams(logprobs=2, repetition_penalty=1.1)


def prompts(seed: int, *lengths: int) -> list[tuple[int, ...]]:
    """Prompts that share their beginnings, as far as they go."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(1, VOCABULARY) for _ in range(2 * PAGE + 5))
    return [
        (shared + tuple(rng.randrange(1, VOCABULARY) for _ in range(length)))[:length]
        for length in lengths
    ]


def serve(family: str, sampling: SamplingParams, errors: float, drafts: int, chunk: int) -> Stand:
    """Prompts of whole pages and others; then again, from the host."""
    asked = prompts(3, 2 * PAGE, 3 * PAGE + 1, PAGE - 2)
    answers = {p: [t.token for t in alone(family, p, ANSWER, sampling)] for p in asked}
    drafter = ErringDrafter(answers, errors, seed=drafts)
    stand = Stand(
        family,
        chunk_tokens=chunk,
        layouts=(Layout.LAYER_FIRST, Layout.PAGE_FIRST_DIRECT),
        drafter=drafter,
        draft_tokens=drafts,
    )
    for _ in range(2):
        requests = [stand.engine.submit(RequestParams(p, ANSWER, sampling)) for p in asked]
        while not stand.engine.idle:
            stand.engine.step()
        assert stand.cache.validate() == []
        for request in requests:
            assert tuple(request.output) == alone(family, request.params.tokens, ANSWER, sampling)
        stand.served += requests
        stand.settle()
        stand.cache.flush(Tier.DEVICE)
    assert drafter.proposed > 0
    return stand


@pytest.mark.quick(family=[family.name for family in FORMS])
@pytest.mark.parametrize("family", ALL_NAMES)
def test_every_family_answers_as_without(family: str) -> None:
    stand = serve(family, SAMPLED, errors=0.25, drafts=5, chunk=64)
    lengths = stand.engine.accept_lengths
    assert lengths is not None and lengths.accepted and lengths.rejected
    assert stand.loads and stand.found[Tier.HOST]
    stand.end()


@pytest.mark.quick(family=["llama", "gpt_oss", "falcon_h1"])
@pytest.mark.parametrize("chunk", [16, 257])
@pytest.mark.parametrize("drafts", [1, 3, 16])
@pytest.mark.parametrize("errors", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("family", [family.name for family in FORMS])
def test_at_any_acceptance(family: str, errors: float, drafts: int, chunk: int) -> None:
    serve(family, GREEDY, errors, drafts, chunk).end()
