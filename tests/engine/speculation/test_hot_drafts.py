"""Drafts over hot pools: answers are those of resident pools without drafts, from every tier.

A verify step has several queries of a request. What they select shares one hot buffer, and what
was drafted in vain leaves no entry that any other request reads.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams, SamplingParams
from kvtide.engine.speculation.ngram import NgramDrafter
from kvtide.layers.reference import swap_in
from kvtide.spec import Tier
from kvtide.spec.residency import Residency
from tests.engine.restoring import PAGE, Stand, alone, model_of
from tests.engine.speculation.drafting import ErringDrafter, Seen
from tests.engine.speculation.test_draft_restores import Bed
from tests.engine.speculation.test_lossless import prompts
from tests.models import tiny_mtp
from tests.models.tiny import VOCABULARY

DRAFTS, ANSWER = 3, PAGE + 4
GREEDY = SamplingParams(logprobs=2)
FAMILIES = {"deepseek_v32": 24, "glm_moe_dsa-shared": 24, "deepseek_v4": 6}
"""What a query selects at most."""
MTP = {"deepseek_v32-mtp": 24, "glm_moe_dsa-mtp": 24, "deepseek_v4-mtp": 6}


class Swap(NamedTuple):
    """The selections of a request in one layer and step, and what was read from the host."""

    selected: Tensor
    misses: Tensor


@pytest.fixture
def swaps(monkeypatch: pytest.MonkeyPatch) -> list[Swap]:
    seen, plan = list[Swap](), swap_in.plan

    def planned(*args: object) -> swap_in.SwapPlan:
        found = plan(*args)  # type: ignore[arg-type]
        selected = args[2]
        assert isinstance(selected, Tensor)
        seen.append(Swap(selected, found.misses))
        return found

    monkeypatch.setattr(swap_in, "plan", planned)
    return seen


@pytest.mark.quick(model=["deepseek_v32"], room=[0], errors=[0.3])
@pytest.mark.parametrize("errors", [0.3, 1.0])
@pytest.mark.parametrize("room", [0, 1, 1000])
@pytest.mark.parametrize("model", FAMILIES)
def test_drafts_change_no_bit(model: str, room: int, errors: float, swaps: list[Swap]) -> None:
    """Hot buffers have just room for all queries of a step, or more. The second time prompts are
    found on the host: what was drafted in vain is not there."""
    family = f"{model} hot:{FAMILIES[model] * (DRAFTS + 1) + room}"
    asked = prompts(3, 2 * PAGE, 4 * PAGE + 1, PAGE - 2)
    answers = {p: [t.token for t in alone(family, p, ANSWER, GREEDY)] for p in asked}
    drafter = ErringDrafter(answers, errors, seed=room)
    stand = Stand(family, drafter=drafter, draft_tokens=DRAFTS)
    for _ in range(2):
        requests = [stand.engine.submit(RequestParams(p, ANSWER, GREEDY)) for p in asked]
        while not stand.engine.idle:
            stand.engine.step()
            stand.check_hot_rows()
            assert stand.cache.validate() == []
        for request in requests:
            wanted = alone(family, request.params.tokens, ANSWER, GREEDY)
            assert tuple(request.output) == wanted
        stand.settle()
        stand.cache.flush(Tier.DEVICE)
    lengths = stand.engine.accept_length_stats
    assert lengths is not None and lengths.rejected and bool(lengths.accepted) == (errors < 1)
    assert stand.loads and any(request.by_tier for request in requests)
    check_swaps(swaps, FAMILIES[model])
    stand.end()


def check_swaps(swaps: list[Swap], topk: int) -> None:
    """Several queries of a request have one swap-in, which reads an entry once."""
    assert all(len(swap.misses.unique()) == len(swap.misses) for swap in swaps)
    assert all(bool(torch.isin(swap.misses, swap.selected).all()) for swap in swaps)
    assert any(len(swap.selected) > topk for swap in swaps), "never more than one query selects"


@pytest.mark.full
@pytest.mark.parametrize("name", MTP)
def test_next_token_layers_draft_alike_over_hot_and_resident_pools(name: str) -> None:
    """Also from the host: equal tokens get equal drafts, so that the accept length is the same."""
    asked = prompts(4, 2 * PAGE, 3 * PAGE + 2, PAGE - 1)
    seen: Seen = {}
    answers, lengths = [], []
    hot = Residency(MTP[name] * (2 * DRAFTS + 1))
    for resident in (Residency(), hot):
        pair = tiny_mtp.pair(name, deterministic=True, resident=resident, draft_tokens=DRAFTS)
        bed = Bed(pair, DRAFTS, 40, seen)
        if resident != hot:
            plain = bed.serve(*asked, speculate=False)
            answers.append([request.output for request in plain])
            bed.cache.flush(Tier.DEVICE)
            bed.cache.flush(Tier.HOST)
        cold = [bed.serve(one)[0] for one in asked]
        bed.cache.flush(Tier.DEVICE)
        restored = [bed.serve(one)[0] for one in asked]
        assert sum(one.by_tier.get(Tier.HOST, 0) for one in restored) > PAGE
        for each in (cold, restored):
            answers.append([request.output for request in each])
            lengths.append([(one.accepted_drafts, one.rejected_drafts) for one in each])
        assert bed.drafter.compared > 0
        assert bed.cache.index.hot_rows[0] == 0 and bed.cache.close()
    assert all(each == answers[0] for each in answers)
    assert all(each == lengths[0] for each in lengths) and sum(map(sum, lengths[0]))


def test_repeated_text_is_drafted_and_answered_as_without() -> None:
    rng = random.Random(8)
    phrase = tuple(rng.randrange(1, VOCABULARY) for _ in range(9))
    family = f"deepseek_v32 hot:{24 * (DRAFTS + 1)}"
    stand = Stand(family, drafter=NgramDrafter(), draft_tokens=DRAFTS)
    tokens = phrase * 6
    request = stand.engine.submit(RequestParams(tokens, ANSWER, GREEDY))
    while not stand.engine.idle:
        stand.engine.step()
        stand.check_hot_rows()
    assert tuple(request.output) == alone(family, tokens, ANSWER, GREEDY)
    assert request.accepted_drafts + request.rejected_drafts > 0
    stand.end()


def test_drafts_are_left_out_where_their_context_cannot_be_gathered() -> None:
    """With recurrent states a verify step also computes accepted tokens again: too many queries for
    this buffer, and too many contexts for the pages that a step gathers."""
    family = "deepseek_v4 hot:24"
    model = model_of(family)
    config = CacheConfig(
        Tokens(2048), Tokens(4096), tokens_per_checkpoint=PAGE, hot_rows=3, longest_tokens=128
    )
    cache = TieredCache(model.memory, config)
    asked = prompts(70, 71, 73)
    answers = {p: [t.token for t in alone(family, p, ANSWER, GREEDY)] for p in asked}
    engine = Engine(
        model,
        cache,
        chunk_tokens=64,
        max_running=3,
        drafter=ErringDrafter(answers, 0.3, seed=1),
        draft_tokens=DRAFTS,
        fixed_drafts=True,
    )
    requests = [engine.submit(RequestParams(p, ANSWER, GREEDY)) for p in asked]
    while not engine.idle:
        engine.step()
        assert cache.validate() == []
    for request in requests:
        assert tuple(request.output) == alone(family, request.params.tokens, ANSWER, GREEDY)
    assert sum(request.accepted_drafts for request in requests) > 0
    cache.close()
