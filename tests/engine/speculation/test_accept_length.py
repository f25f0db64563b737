"""Restored prefixes bring their draft pages along: verify steps accept as much as after prefill.

The pair of `lookup_pair` looks every token up in its prompt. A draft that cannot see the prompt is
wrong about nearly every token, so that lost, stale or misplaced draft pages show.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.engine import Request
from kvtide.engine.speculation import accept_length_guard
from kvtide.engine.speculation.accept_length_stats import PrefixOrigin
from kvtide.spec import Tier
from tests.data.lookup_task import repetitive_walk
from tests.engine.speculation.lookup_pair import ANSWER, PAGE, LookupServer, alone, walks
from tests.grids import everything

KEPT, FALLEN = 0.98, 0.8
FILL = 2
"""Tokens of an answer that is asked for to have the prompt's pages, with the draft's."""
WALKS = walks(4 if everything() else 2)
PROMPTS = [one.prompt for one in WALKS]
PREFIX = (len(PROMPTS[0]) - 1) // PAGE * PAGE
"""Tokens of each prompt that a cache can give."""


@pytest.fixture
def server() -> Iterator[LookupServer]:
    opened = LookupServer()
    yield opened
    opened.settle()
    opened.close()


@pytest.fixture(scope="module")
def cold() -> float:
    """The accept length where every prompt is computed."""
    opened = LookupServer()
    served = opened.serve(PROMPTS)
    assert served.origins == {PrefixOrigin.COMPUTED}
    opened.close()
    return served.accept_length


def test_answers_are_right_and_most_drafts_are_accepted(cold: float) -> None:
    right = [
        token == wanted
        for one in WALKS
        for token, wanted in zip(alone(one.prompt, ANSWER), one.answer, strict=False)
    ]
    assert sum(right) >= 0.98 * len(right)
    assert cold >= 2.5


def test_pages_on_the_device_keep_the_accept_length(server: LookupServer, cold: float) -> None:
    server.serve(PROMPTS, count=FILL)
    again = server.serve(PROMPTS)
    assert again.origins == {PrefixOrigin.DEVICE}
    assert all(request.by_tier == {Tier.DEVICE: PREFIX} for request in again.requests)
    assert again.accept_length >= KEPT * cold


def test_pages_from_the_host_keep_the_accept_length(server: LookupServer, cold: float) -> None:
    server.serve(PROMPTS, count=FILL)
    server.settle()
    server.cache.flush(Tier.DEVICE)
    again = server.serve(PROMPTS)
    assert again.origins == {PrefixOrigin.HOST}
    assert all(request.by_tier == {Tier.HOST: PREFIX} for request in again.requests)
    assert again.accept_length >= KEPT * cold


def test_pages_of_another_request_keep_the_accept_length(server: LookupServer) -> None:
    """The same tables, asked for other keys; prompts part after the prefix."""
    others = [(*one.prompt[:-1], one.answer[4]) for one in WALKS]
    fresh = LookupServer()
    computed = fresh.serve(others)
    fresh.close()
    assert computed.origins == {PrefixOrigin.COMPUTED}
    server.serve(PROMPTS, count=FILL)
    again = server.serve(others)
    assert all(request.by_tier == {Tier.DEVICE: PREFIX} for request in again.requests)
    assert again.accept_length >= KEPT * computed.accept_length


@pytest.mark.parametrize("from_host", [False, True], ids=["device", "host"])
def test_a_retracted_request_keeps_its_accept_length(
    from_host: bool, server: LookupServer, cold: float
) -> None:
    retracted: set[Request] = set()

    def retract(request: Request) -> None:
        """Once, in the middle of its answer, with drafts that wait to be verified."""
        if len(request.output) >= ANSWER // 3 and request.finish is None:
            if request in retracted:
                return
            assert request.drafts
            retracted.add(request)
            server.engine.scheduler.retract(request)
            if from_host:
                server.settle()
                server.cache.flush(Tier.DEVICE)

    served = server.serve(PROMPTS, between=retract)
    assert len(retracted) == len(PROMPTS)
    assert all(request.admissions == 2 for request in served.requests)
    assert served.accept_length >= KEPT * cold


def test_pages_from_storage_keep_the_accept_length_after_a_restart(
    tmp_path: Path, cold: float
) -> None:
    first = LookupServer(tmp_path)
    first.serve(PROMPTS, count=FILL)
    first.settle()
    first.close()
    second = LookupServer(tmp_path)
    again = second.serve(PROMPTS)
    assert again.origins == {PrefixOrigin.STORAGE}
    assert all(request.by_tier == {Tier.STORAGE: PREFIX} for request in again.requests)
    assert again.accept_length >= KEPT * cold
    second.close()


@pytest.mark.full
def test_a_repetitive_prompt_of_1024_tokens_with_7_drafts_survives_a_restart(
    tmp_path: Path,
) -> None:
    prompt = repetitive_walk(random.Random(9), 1024, 40).prompt
    first = LookupServer(tmp_path, drafts=7)
    before = first.serve([prompt])
    assert before.accept_length >= 3
    first.settle()
    first.close()
    second = LookupServer(tmp_path, drafts=7)
    after = second.serve([prompt])
    assert after.origins == {PrefixOrigin.STORAGE}
    assert after.accept_length >= KEPT * before.accept_length
    second.close()


# -- without draft pages -----------------------------------------------------------------------


@pytest.mark.quick(tier=[Tier.DEVICE])
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST], ids=["device", "host"])
def test_without_draft_pages_the_accept_length_falls(
    tier: Tier, server: LookupServer, cold: float
) -> None:
    """The tests above can fail: pages that were committed without a draft are found, and steps
    accept far less; the text stays right."""
    server.serve(PROMPTS, count=FILL, speculate=False)
    server.settle()
    if tier is Tier.HOST:
        server.cache.flush(Tier.DEVICE)
    again = server.serve(PROMPTS)
    assert all(request.by_tier == {tier: PREFIX} for request in again.requests)
    assert again.accept_length <= FALLEN * cold


def test_draft_pages_dropped_on_restore_lower_the_accept_length(
    server: LookupServer, cold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.serve(PROMPTS, count=FILL)
    server.settle()
    server.cache.flush(Tier.DEVICE)
    carries = server.cache.carries
    monkeypatch.setattr(server.cache, "carries", lambda lease, pool: carries(lease, pool) & False)
    again = server.serve(PROMPTS)
    assert again.origins == {PrefixOrigin.HOST}
    assert again.accept_length <= FALLEN * cold


def test_the_engine_asks_the_guard_and_warns_of_lost_draft_pages(
    server: LookupServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, few in (("MIN_REQUESTS", 2), ("MIN_STEPS", 16), ("STEPS_PER_LOOK", 4)):
        monkeypatch.setattr(accept_length_guard, name, few)
    guard = server.engine.accept_length_guard
    assert guard is not None
    server.serve(PROMPTS)
    lost = [one.prompt for one in walks(2, seed=8)]
    server.serve(lost, count=FILL, speculate=False)
    assert guard.alarms.total() == 0
    server.serve(lost)
    assert guard.alarms[PrefixOrigin.DEVICE] == guard.alarms.total() == 1
    (message,) = caplog.messages
    assert message.startswith("prefixes from device accept") and "pools (draft)" in message
    keys = {next(server.cache.index.page_keys(server.cache.prompt(one), 1)).key for one in lost}
    assert any(key.hex() in message for key in keys)


def test_some_draft_pages_absent_shorten_runs(server: LookupServer, cold: float) -> None:
    """Half of every prefix is computed without a draft, the rest with one."""
    half = PREFIX // PAGE // 2 * PAGE + 1
    server.serve([prompt[:half] for prompt in PROMPTS], count=1, speculate=False)
    server.settle()
    some = server.serve(PROMPTS)
    assert all(request.by_tier == {Tier.DEVICE: half - 1} for request in some.requests)
    assert some.accept_length < KEPT * cold
    none = LookupServer()
    none.serve(PROMPTS, count=FILL, speculate=False)
    assert some.accept_length > none.serve(PROMPTS).accept_length
    none.close()
