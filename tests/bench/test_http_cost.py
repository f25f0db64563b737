"""A load over HTTP beside the same on the engine alone, with a stand-in for the device."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvtide.bench.conversations import Load
from kvtide.bench.http.both_ways import ClientError, LoadWay, ServedBed, _asked, measure
from kvtide.bench.http.http_users import UserSpec
from kvtide.bench.http.stand_in import StepTime, stand_in_server
from kvtide.bench.http.turn_times import Round, TurnTimes, jain, way_figures
from kvtide.engine import RequestParams
from kvtide.server.settings import Settings

LOAD = Load(5, 2, system_tokens=150, question_tokens=20, answer_tokens=6, at_once=5)
STEP_S = 0.002
TIMES = StepTime(STEP_S, 0.0)
SETTINGS = Settings(storage="none", chunk_tokens=256, max_running=8)


@pytest.fixture
def bed() -> Iterator[ServedBed]:
    threads = torch.get_num_threads()
    found = ServedBed(SETTINGS, stand_in_server(LOAD, TIMES, SETTINGS))
    yield found
    found.engine.cache.close()
    torch.set_num_threads(threads)


def test_both_ways_answer_the_same_turns(bed: ServedBed) -> None:
    ticks: list[int] = []
    found = measure(bed, LOAD, 2, lambda: ticks.append(1))
    assert len(ticks) == 4 and [*found] == [LoadWay.ENGINE, LoadWay.HTTP]
    for way, rounds in found.items():
        for each in rounds:
            assert sorted((t.user, t.turn) for t in each.turns) == [
                (user, turn) for user in range(5) for turn in range(2)
            ]
            assert {t.generated_tokens for t in each.turns} == {6}
            assert {t.prompt_tokens for t in each.turns} == {170, 196}
            assert all(t.asked_s < t.first_s < t.ended_s for t in each.turns)
            assert each.steps >= 12 and each.seconds > 12 * STEP_S, "steps take their time"
            assert each.server_cpu_s > 0 and len(each.client_cpu_s) == (way is LoadWay.HTTP)
    assert bed.engine.idle and bed.engine.cache.validate() == []


def test_users_are_divided_among_client_processes(
    bed: ServedBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.bench.http.both_ways.USERS_OF_A_PROCESS", 2)
    (each,) = measure(bed, LOAD, 1, lambda: None)[LoadWay.HTTP]
    assert {turn.user for turn in each.turns} == {*range(5)} and len(each.client_cpu_s) == 3


def test_a_client_without_a_server_is_an_error() -> None:
    with pytest.raises(ClientError, match="Connect call failed"):
        asyncio.run(_asked([UserSpec(1, LOAD, 0, 0, 1)]))


def test_a_client_says_what_the_server_refused(bed: ServedBed) -> None:
    keyed = replace(bed, settings=replace(SETTINGS, api_key="secret"))
    with pytest.raises(ClientError, match="this needs the API key"):
        measure(keyed, LOAD, 1, lambda: None)


def test_the_spec_of_users_travels_as_json() -> None:
    spec = UserSpec(8000, LOAD, 3, 1, 4)
    assert UserSpec.from_json(json.dumps(json.loads(spec.to_json()))) == spec


def test_a_stand_in_takes_the_time_of_its_steps_and_calls_before_it_waits(bed: ServedBed) -> None:
    engine, calls = bed.engine, []
    engine.on_waiting = lambda: calls.append(time.perf_counter())
    engine.submit(RequestParams(tuple(range(40)), 5))
    began = time.perf_counter()
    while not engine.idle:
        engine.step()
    seconds = time.perf_counter() - began
    assert seconds >= 5 * STEP_S
    assert len(calls) >= 5


def turn(user: int, asked: float, first: float, ended: float, tokens: int = 5) -> TurnTimes:
    return TurnTimes(user, 0, 10, tokens, asked, first, ended)


def test_figures_of_recorded_turns() -> None:
    fast, slow = turn(0, 0.0, 0.5, 1.0), turn(1, 0.0, 1.0, 4.0)
    found = way_figures([Round((fast, slow), 0.5, (0.4, 2.0), 20)])
    assert (found.requests, found.seconds, found.requests_s) == (2, 4.0, 0.5)
    assert Round((fast, slow), 0.5, (), 20).requests_s == 0.5
    assert found.generated_tokens_s == 2.5 and found.ttft_max_ms == 1000
    assert found.ttft_ms.p50 == 750 and found.tpot_ms is not None
    assert found.tpot_ms.p50 == pytest.approx((125 + 750) / 2)
    assert found.fairness == pytest.approx((5 + 1.25) ** 2 / (2 * (25 + 1.5625)))
    assert found.slowest == pytest.approx(1.25 / 3.125)
    assert (found.step_ms, found.server_cpu_ms, found.client_busy) == (200, 250, 0.5)
    single = way_figures([Round((turn(0, 0, 1, 1, tokens=1),), 0.1, (), 1)])
    assert single.tpot_ms is None and single.client_busy == 0.0


def test_jains_index() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
