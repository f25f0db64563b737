"""Speculation changes no bit of an answer: not in any family, at any acceptance, from any tier."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtide.engine import Request, RequestParams, SamplingParams
from kvtide.spec import Tier
from kvtide.tiers import Layout
from tests.engine.restarting import Life, Past
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


def drafted(
    family: str, asked: Sequence[tuple[int, ...]], sampling: SamplingParams, errors: float, n: int
) -> dict[str, Any]:
    """Options of a `Stand` whose drafter knows the answers, with errors."""
    answers = {p: [t.token for t in alone(family, p, ANSWER, sampling)] for p in asked}
    return {"drafter": ErringDrafter(answers, errors, seed=n), "draft_tokens": n}


def answer_all(
    stand: Stand, asked: Sequence[tuple[int, ...]], sampling: SamplingParams
) -> list[Request]:
    """All at once; the answers are those of an engine without drafts, to the last bit."""
    requests = [stand.engine.submit(RequestParams(p, ANSWER, sampling)) for p in asked]
    while not stand.engine.idle:
        stand.engine.step()
    assert stand.cache.validate() == []
    for request in requests:
        tokens = request.params.tokens
        assert tuple(request.output) == alone(stand.family, tokens, ANSWER, sampling)
    stand.served += requests
    return requests


def serve(family: str, sampling: SamplingParams, errors: float, drafts: int, chunk: int) -> Stand:
    """Prompts of whole pages and others; then again, from the host."""
    asked = prompts(3, 2 * PAGE, 3 * PAGE + 1, PAGE - 2)
    drafting = drafted(family, asked, sampling, errors, drafts)
    layouts = (Layout.LAYER_FIRST, Layout.PAGE_FIRST_DIRECT)
    stand = Stand(family, chunk_tokens=chunk, layouts=layouts, **drafting)
    for _ in range(2):
        answer_all(stand, asked, sampling)
        stand.settle()
        stand.cache.flush(Tier.DEVICE)
    assert drafting["drafter"].proposed > 0
    return stand


@pytest.mark.quick(family=[family.name for family in FORMS])
@pytest.mark.parametrize("family", ALL_NAMES)
def test_every_family_answers_as_without(family: str) -> None:
    stand = serve(family, SAMPLED, errors=0.25, drafts=5, chunk=64)
    lengths = stand.engine.accept_length_stats
    assert lengths is not None and lengths.accepted and lengths.rejected
    assert stand.loads and stand.found[Tier.HOST]
    stand.end()


@pytest.mark.quick(family=["falcon_h1", "deepseek_v4"])
@pytest.mark.parametrize("family", ALL_NAMES)
def test_every_family_answers_as_without_after_a_restart(family: str, tmp_path: Path) -> None:
    """The second life goes on from the first one's answers: accepted drafts are in their pages."""
    asked, past = prompts(3, 2 * PAGE, 3 * PAGE + 1, PAGE - 2), Past(f"file://{tmp_path}")
    for turn in range(2):
        drafting = drafted(family, asked, SAMPLED, errors=0.25, n=5)
        life = Life(family, past, chunk_tokens=64, **drafting)
        answered = answer_all(life, asked, SAMPLED)
        lengths = life.engine.accept_length_stats
        assert lengths is not None and lengths.accepted and lengths.rejected
        assert (life.found[Tier.STORAGE] > 0) == (turn > 0)
        asked = [tuple(request.tokens) for request in answered]
        life.end()


@pytest.mark.quick(family=["llama", "gpt_oss", "falcon_h1"])
@pytest.mark.parametrize("chunk", [16, 257])
@pytest.mark.parametrize("drafts", [1, 3, 16])
@pytest.mark.parametrize("errors", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("family", [family.name for family in FORMS])
def test_at_any_acceptance(family: str, errors: float, drafts: int, chunk: int) -> None:
    serve(family, GREEDY, errors, drafts, chunk).end()
