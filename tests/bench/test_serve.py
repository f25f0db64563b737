"""Conversations as a load, and what becomes of what was measured."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvtide.bench.conversations import (
    DraftCounts,
    Held,
    Load,
    Phase,
    Reply,
    Spread,
    StreamEvent,
    Turn,
    figures,
    measure,
)

LOAD = Load(5, 3, system_tokens=40, question_tokens=8, answer_tokens=2, at_once=2)


class Scribe:
    """A server that records its turns, and the maximum of concurrent ones."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.present = self.max_present = 0

    async def ask(self, turn: Turn) -> Reply:
        self.present += 1
        self.max_present = max(self.max_present, self.present)
        await asyncio.sleep(0)
        self.present -= 1
        self.turns.append(turn)
        return Reply((turn.user, turn.number), 1.0, 1.5, 2.0, {"device": 8})


def held(rounds: int, load: Load = LOAD) -> tuple[Scribe, list[Held]]:
    scribe = Scribe()
    found = asyncio.run(measure(load, rounds, scribe.ask))
    scribe.turns = [turn for turn in scribe.turns if turn.round >= 0]
    return scribe, found


def test_phases_alternate_after_a_warm_up_that_is_not_counted() -> None:
    scribe, found = held(3)
    on, off = Phase.ON, Phase.OFF
    assert [one.phase for one in found] == [on, off, off, on, on, off]
    assert all(len(one.events) == 15 for one in found)
    assert len(scribe.turns) == 6 * 15
    assert scribe.max_present == LOAD.at_once


def test_both_phases_ask_the_same_and_every_round_something_else() -> None:
    scribe, _ = held(2)

    def asked(phase: Phase, round_: int) -> dict[tuple[int, int], tuple[int, ...]]:
        turns = (t for t in scribe.turns if (t.phase, t.round) == (phase, round_))
        return {(t.user, t.number): t.prompt for t in turns}

    for round_ in range(2):
        assert asked(Phase.ON, round_) == asked(Phase.OFF, round_)
    first, second = ({p[:40] for p in asked(Phase.ON, n).values()} for n in range(2))
    assert not first & second


def test_a_prompt_is_the_whole_history_and_a_new_question() -> None:
    scribe, _ = held(1)
    talks = {(t.user, t.number): t.prompt for t in scribe.turns if t.phase is Phase.ON}
    assert len({prompt[:40] for prompt in talks.values()}) == 1
    for user in range(LOAD.users):
        first, second, third = (talks[user, number] for number in range(3))
        assert second[: 48 + 2] == (*first, user, 0)
        assert third[: 58 + 2] == (*second, user, 1) and len(third) == 68
    assert len({prompt[-8:] for prompt in talks.values()}) == 15
    assert LOAD.longest_tokens == 70


def test_a_seed_repeats_its_load_and_another_does_not() -> None:
    prompts = [{t.prompt for t in held(1, load)[0].turns} for load in (LOAD, replace(LOAD, seed=1))]
    assert prompts[0] == {t.prompt for t in held(1)[0].turns}
    assert not prompts[0] & prompts[1]


def test_the_first_problem_ends_everything() -> None:
    class OutOfTeaError(Exception):
        pass

    async def ask(turn: Turn) -> Reply:
        if turn.user == 1:
            raise OutOfTeaError
        await asyncio.sleep(60)
        raise AssertionError("was not cancelled")

    with pytest.raises(OutOfTeaError):
        asyncio.run(asyncio.wait_for(measure(LOAD, 1, ask), 20))


def test_an_event_says_when_tokens_came() -> None:
    turn = Turn(Phase.ON, 0, 3, 1, tuple(range(100)), 5)
    event = StreamEvent.of(turn, Reply((1, 2, 3, 4, 5), 10.0, 10.25, 10.45, {"host": 64}))
    assert (event.user, event.turn, event.prompt_tokens, event.generated_tokens) == (3, 1, 100, 5)
    assert event.ttft_ms == pytest.approx(250) and event.tpot_ms == pytest.approx(50)
    alone = StreamEvent.of(turn, Reply((1,), 10.0, 10.25, 10.25, {}))
    assert alone.tpot_ms is None and alone.ttft_ms == pytest.approx(250)


def recorded(phase: Phase, turn: int, ttft_ms: float, **tiers: int) -> StreamEvent:
    return StreamEvent(phase, 0, 0, turn, 100, 10, ttft_ms, ttft_ms / 10, tiers)


def test_figures_of_recorded_events() -> None:
    on = [recorded(Phase.ON, n // 101, n % 101 + 1.0, device=50, host=n % 2) for n in range(202)]
    off = recorded(Phase.OFF, 0, 7.0, device=0, host=0)
    rounds = [
        Held(Phase.ON, 3.0, tuple(on[:100])),
        Held(Phase.OFF, 5.0, (off,)),
        Held(Phase.ON, 7.0, tuple(on[100:])),
    ]
    found = figures(Phase.ON, rounds)
    expected = Spread(51.0, 91.0, 100.0)
    assert found.ttft_ms_by_turn == (expected, expected)
    assert found.ttft_ms == Spread(51.0, pytest.approx(91.0), pytest.approx(100.0))
    assert found.tpot_ms == Spread(5.1, pytest.approx(9.1), pytest.approx(10.0))
    assert (found.requests, found.seconds) == (202, 10.0)
    assert found.requests_s == pytest.approx(20.2)
    assert found.prompt_tokens_s == pytest.approx(2020)
    assert found.generated_tokens_s == pytest.approx(202)
    assert found.hits == {"device": 0.5, "host": pytest.approx(0.005)}
    assert figures(Phase.OFF, rounds).hits == {"device": 0.0, "host": 0.0}
    assert figures(Phase.OFF, rounds).as_json()["ttft_ms"] == {"p50": 7.0, "p90": 7.0, "p99": 7.0}


def test_figures_of_drafts() -> None:
    event = recorded(Phase.ON, 0, 7.0)
    plain = figures(Phase.ON, [Held(Phase.ON, 1.0, (event,))])
    assert (plain.drafts, plain.accept_length) == (None, None)
    drafted = [replace(event, drafts=DraftCounts(*counts)) for counts in ((4, 6, 2), (0, 0, 0))]
    found = figures(Phase.ON, [Held(Phase.ON, 1.0, (event, *drafted))])
    assert (found.drafts, found.accept_length) == (DraftCounts(4, 6, 2), 2.5)
    assert DraftCounts(0, 0, 0).accept_length is None
