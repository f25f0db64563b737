"""Built-in workloads: repeatable, of a useful size, and shaped like the traffic they stand for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kvtide.planner.traces import TraceError, footprint_tokens
from kvtide.planner.workloads import WORKLOADS, make, parse
from tests.planner.sessions import by_session, shared_tokens

AGENT = "agent:sessions=4,requests=12,context=20000,sub_agent_percent=10"
SMALL = ["chat:users=5,turns=3", AGENT, "rag:requests=20"]

# -- what holds for all ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens"),
    [("chat", 1500, 8e6), ("agent", 3500, 440e6), ("rag", 1200, 12e6)],
)
def test_defaults_replay_in_seconds(name: str, requests: int, prompt_tokens: float) -> None:
    trace = make(name)
    assert trace.requests == pytest.approx(requests, rel=0.02)
    assert trace.prompt_tokens == pytest.approx(prompt_tokens, rel=0.2)
    assert 0 < footprint_tokens(trace, 64) < trace.prompt_tokens


@pytest.mark.parametrize("text", SMALL)
def test_same_options_give_the_same_trace(text: str) -> None:
    walks = [parse(text), parse(text)]
    first, second = ([(r.arrival_s, r.output_tokens, r.prompt.tolist()) for r in w] for w in walks)
    assert first == second
    assert first == [(r.arrival_s, r.output_tokens, r.prompt.tolist()) for r in walks[0]]


@pytest.mark.parametrize("text", SMALL)
def test_another_seed_gives_another_trace(text: str) -> None:
    other = f"{text},seed=1"
    assert [r.arrival_s for r in parse(text)] != [r.arrival_s for r in parse(other)]


@pytest.mark.parametrize("text", SMALL)
def test_announced_sizes_are_those_of_the_walk(text: str) -> None:
    trace = parse(text)
    requests = list(trace)
    assert trace.name == text
    assert trace.requests == len(requests)
    assert trace.prompt_tokens == sum(len(r.prompt) for r in requests)
    assert all(r.prompt.dtype == np.int32 and len(r.prompt) and r.output_tokens for r in requests)


@pytest.mark.parametrize("text", SMALL)
def test_requests_come_in_order_of_arrival(text: str) -> None:
    arrivals = [r.arrival_s for r in parse(text)]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0


def test_texts_of_different_users_share_no_block() -> None:
    requests = list(make("chat", users=20, turns=1, system=0, question=1200))
    heads = [head for request in requests for head in request.prompt[::512].tolist()]
    assert len(heads) > 40
    assert len(set(heads)) == len(heads)


# -- what each is like ----------------------------------------------------------------------


def test_chat_prompt_holds_the_earlier_prompt_and_room_for_its_answer() -> None:
    for turns in by_session(make("chat", users=6, turns=5)).values():
        assert len(turns) == 5
        for before, after in pairwise(turns):
            assert shared_tokens(before, after) == len(before.prompt)
            assert len(after.prompt) > len(before.prompt) + before.output_tokens


def test_chat_users_share_the_system_prompt_and_nothing_else() -> None:
    first = [turns[0] for turns in by_session(make("chat", users=6, turns=2, system=700)).values()]
    assert {shared_tokens(first[0], other) for other in first[1:]} == {700}


def test_rag_prompts_put_shared_documents_in_varied_order_before_a_new_question() -> None:
    options = {"requests": 60, "documents": 4, "retrieved": 3, "system": 512, "document": 200}
    requests = list(make("rag", **options))
    starts = {tuple(request.prompt[512:520].tolist()) for request in requests}
    assert len(starts) == 4
    assert len({request.prompt[-1] for request in requests}) == 60
    assert all(shared_tokens(requests[0], other) >= 512 for other in requests)


def test_rag_popularity_follows_zipf() -> None:
    def most_common(zipf: float) -> int:
        requests = make("rag", requests=300, documents=50, retrieved=1, system=0, zipf=zipf)
        firsts = [int(request.prompt[0]) for request in requests]
        return max(map(firsts.count, firsts))

    assert most_common(0.0) < 30 < 100 < most_common(2.0)


def test_conversations_begin_at_the_asked_rate() -> None:
    sessions = by_session(make("chat", users=600, turns=1, users_per_minute=30))
    assert max(turns[0].arrival_s for turns in sessions.values()) == pytest.approx(1200, rel=0.15)


# -- options --------------------------------------------------------------------------------


def test_parse_is_make() -> None:
    a, b = (
        parse(" chat : users=3, turns=2 , think_s=1.5"),
        make("chat", users=3, turns=2, think_s=1.5),
    )
    assert a.name == b.name == "chat:users=3,turns=2,think_s=1.5"
    assert a.prompt_tokens == b.prompt_tokens


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chess", "no workload named 'chess'; use chat, agent, rag"),
        ("", "no workload named ''; use chat, agent, rag"),
        ("chat:user=3", r"chat: no option user; use users \(150\), turns \(10\), .*seed \(0\)"),
        ("chat:users", "'users' is not an option; write it as name=number"),
        ("chat:users=many", "'users=many' needs a number after the '='"),
        ("chat:users=", "'users=' needs a number after the '='"),
        ("chat:users=1.5", r"chat: users must be a whole number, got 1\.5"),
        ("chat:users=0", "chat: users must be from 1 to 1,048,576, got 0"),
        ("chat:users=-4", "chat: users must be from 1 to 1,048,576, got -4"),
        ("chat:users=2000000", "chat: users must be from 1 to 1,048,576, got 2000000"),
        ("chat:think_s=nan", "chat: think_s must be from 0.0 to 1,048,576, got nan"),
        ("chat:users_per_minute=0", "chat: users_per_minute must be from 0.001"),
        ("agent:edit_percent=101", "agent: edit_percent must be from 0.0 to 100, got 101"),
        ("rag:zipf=1000", "rag: zipf must be from 0.0 to 10, got 1000"),
        ("rag:documents=3,retrieved=4", "a corpus of 3; use retrieved=3 or less"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        parse(text)


@pytest.mark.parametrize("value", [True, "3", None])
def test_option_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(TraceError, match="users must be a whole number"):
        make("chat", users=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_option_says_what_it_is(name: str) -> None:
    assert all(option.metadata["help"] for option in WORKLOADS[name].known().values())


def test_extreme_options_still_make_a_trace() -> None:
    assert parse("rag:requests=3,documents=1,retrieved=1,system=0,zipf=10").requests == 3
    assert parse("chat:users=1,turns=1,system=0,question=1,think_s=0").requests == 1
    tiny = "agent:sessions=3,requests=9,system=1,start=1,extension=1,context=64,gap_s=0"
    for often in ("sub_agent_percent=100", "edit_percent=100", "extension=100000"):
        assert parse(f"{tiny},{often}").longest_tokens <= 1 + 64 * 3
