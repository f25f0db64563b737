"""Clients that go away, too many of them at once, and an engine that breaks under them."""

from __future__ import annotations

import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvtide.engine import Engine, RankTopology
from kvtide.spec import Tier
from tests.server.serving import PAGE, InProcess
from tests.server.talking import Client, Json, joined
from tests.server.test_admin import grown, scraped

PATH = "/v1/completions"
LONG = {"max_tokens": 900, "ignore_eos": True}
STEP_S = 0.004

_numbers = itertools.count(1)


def prompt() -> list[int]:
    return [3 + next(_numbers) % 300, *range(5, 5 + 2 * PAGE)]


def slowed(server: InProcess, monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """Steps take long enough for whatever is to happen between them."""
    step = server.engine.step

    def slow_step() -> Any:
        time.sleep(STEP_S)
        return step()

    monkeypatch.setattr(server.engine, "step", slow_step)
    return server


@pytest.fixture
def narrow(serve: Any, monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """Two may run, two may wait."""
    return slowed(serve(max_running=2, max_waiting=2, device_tokens=2048), monkeypatch)


def standing(running: int, waiting: int) -> Callable[[dict[str, Any]], bool]:
    def stands(report: dict[str, Any]) -> bool:
        requests = report["requests"]
        return (requests["running"], requests["waiting"]) == (running, waiting)

    return stands


# -- gone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_runs_ends_with_its_client(narrow: InProcess, stream: bool, n: int) -> None:
    client = narrow.client
    before = scraped(client)
    request = client.start(PATH, prompt=prompt(), stream=stream, n=n, **LONG)
    narrow.until(standing(n, 0))
    request.leave()
    narrow.settled()
    assert grown(client, before, "kvtide_requests_total", finish="abort") == n


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_ends_with_its_client(narrow: InProcess, stream: bool) -> None:
    client = narrow.client
    first = [client.start(PATH, prompt=prompt(), **LONG) for _ in range(2)]
    narrow.until(standing(2, 0))
    waiting = client.start(PATH, prompt=prompt(), stream=stream, **LONG)
    narrow.until(standing(2, 1))
    waiting.leave()
    narrow.until(standing(2, 0))
    for request in first:
        request.leave()
    narrow.settled()


def test_a_stream_that_is_left_half_way_ends(narrow: InProcess) -> None:
    request = narrow.client.start(PATH, prompt=prompt(), stream=True, **LONG)
    events = request.events()
    assert [next(events)["choices"][0]["index"] for _ in range(3)] == [0, 0, 0]
    request.leave()
    narrow.settled()


def test_a_client_that_never_reads_holds_up_no_other_request(narrow: InProcess) -> None:
    deaf = narrow.client.start(PATH, prompt=prompt(), stream=True, logprobs=20, **LONG)
    narrow.until(standing(1, 0))
    assert narrow.client.complete(prompt(), max_tokens=100, ignore_eos=True)
    deaf.leave()
    narrow.settled()


def test_what_a_client_that_left_had_computed_is_found_by_others(narrow: InProcess) -> None:
    ids = [300, *range(5, 5 + 4 * PAGE)]
    request = narrow.client.start(PATH, prompt=ids, stream=True, **LONG)
    next(request.events())
    request.leave()
    narrow.settled()
    usage = narrow.client.complete(ids, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4 * PAGE


def test_clients_that_leave_at_any_moment_leave_nothing(
    narrow: InProcess, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(40):
        body = {"prompt": prompt(), "stream": bool(number % 2), **LONG}
        request = narrow.client.start(PATH, **body)
        time.sleep(random.Random(number).choice([0, 0, 0.001, 0.003, 0.01]))
        request.leave()
    narrow.settled()
    assert not caplog.records


@pytest.mark.parametrize("sent", [b"", b'{"prompt": "a', b"POST"])
def test_clients_that_leave_in_the_midst_of_a_body_leave_nothing(
    narrow: InProcess, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection((narrow.address, narrow.port), timeout=10) as raw:
        raw.sendall((head if sent != b"POST" else b"") + sent)
        time.sleep(0.02)
    narrow.settled()
    assert not caplog.records


# -- too many -------------------------------------------------------------------------------------


def test_requests_beyond_the_limit_are_refused_with_retry_after(narrow: InProcess) -> None:
    client = narrow.client
    here = [client.start(PATH, prompt=prompt(), **LONG) for _ in range(4)]
    narrow.until(standing(2, 2))
    reply = client.post(PATH, {"prompt": prompt(), "max_tokens": 1})
    assert reply.status == 429
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert reply.problem.startswith("4 requests run or wait here; try again in")
    streamed = client.post(PATH, {"prompt": prompt(), "stream": True})
    assert streamed.status == 429, "before a stream begins there is still a status to tell it by"
    bad = client.post(PATH, {"prompt": [-1]})
    assert bad.status == 400, "what can never be served need not come again"
    here.pop().leave()
    narrow.until(standing(2, 1))
    assert client.post(PATH, {"prompt": prompt(), "n": 2}).status == 429, "all or none"
    for request in here:
        request.leave()
    narrow.settled()
    assert client.post(PATH, {"prompt": prompt(), "max_tokens": 1}).status == 200


def test_a_full_batch_is_served_though_none_may_wait(serve: Any) -> None:
    server = serve(max_running=3, max_waiting=0)
    choices = server.client.complete([5, 6], n=5, max_tokens=2, ignore_eos=True)["choices"]
    assert len(choices) == 5, "no other request is there, so it may take its time"
    here = [server.client.start(PATH, prompt=prompt(), **LONG) for _ in range(3)]
    server.until(standing(3, 0))
    assert server.client.post(PATH, {"prompt": prompt()}).status == 429
    for request in here:
        request.leave()
    server.settled()


def test_waiting_requests_are_served_by_priority_and_in_the_end_all(narrow: InProcess) -> None:
    client = narrow.client
    ends: list[int] = []

    def ask(priority: int, tokens: int) -> None:
        client.complete(prompt(), max_tokens=tokens, priority=priority, ignore_eos=True)
        ends.append(priority)

    threads = []
    for priority, tokens, stands in (
        (0, 40, standing(1, 0)),
        (0, 90, standing(2, 0)),
        (1, 4, standing(2, 1)),
        (2, 4, standing(2, 2)),
    ):
        threads.append(threading.Thread(target=ask, args=(priority, tokens)))
        threads[-1].start()
        narrow.until(stands)
    for thread in threads:
        thread.join(20)
    assert sorted(ends[:2]) == [1, 2] and ends[2:] == [0, 0], "they took the others' places"
    narrow.settled()


# -- all at once ----------------------------------------------------------------------------------


class Visitor:
    """A client that does one thing after another, and checks what must hold of each."""

    def __init__(self, client: Client, seed: int) -> None:
        self._client = client
        self._order = random.Random(seed)
        self.answers = 0
        self.problems: list[str] = []

    def visit(self, times: int) -> None:
        for _ in range(times):
            try:
                self._do(self._body())
            except Exception as problem:
                self.problems.append(repr(problem))
                return

    def _body(self) -> dict[str, Json]:
        order = self._order
        shared = [order.randrange(4) + 5] * (PAGE * order.randrange(1, 9))
        return {
            "prompt": shared + [order.randrange(320) for _ in range(order.randrange(1, 40))],
            "max_tokens": order.choice([0, 1, 5, 20, 60]),
            "n": order.choice([1, 1, 1, 3]),
            "seed": 1,
            "echo": order.random() < 0.2,
            "logprobs": order.choice([None, None, 1]),
            "recompute": order.random() < 0.1,
            "cache_salt": order.choice(["", "", "salt"]),
            "session_id": order.choice([None, "a", "b"]),
            "priority": order.choice([0, 0, 1]),
            "stop": order.choice([None, ["a"], ["th", "e"]]),
        }

    def _do(self, body: dict[str, Json]) -> None:
        way = self._order.choice(["whole", "stream", "leave", "flush", "report"])
        if way == "leave":
            request = self._client.start(PATH, **body, stream=self._order.random() < 0.5)
            time.sleep(self._order.random() * 0.05)
            request.leave()
        elif way == "flush":
            self._client.post(f"/admin/flush?tier={self._order.choice(['device', 'host', 'all'])}")
        elif way == "report":
            assert self._client.get("/admin/cache").json()["violations"] == []
        else:
            self._answered(way, body)

    def _answered(self, way: str, body: dict[str, Json]) -> None:
        if way == "whole":
            choices = self._client.complete(**body)["choices"]
            assert len(choices) == body["n"]
            assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
        else:
            chunks = self._client.stream(PATH, **body)
            ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
            assert len([end for end in ends if end]) == body["n"]
            texts = [joined(chunks, index) for index in range(body["n"])]
            stops = [] if body["echo"] else list(body["stop"] or "")
            assert not any(stop in text for stop in stops for text in texts)
        self.answers += 1


def test_many_clients_at_once_leave_nothing_behind(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(device_tokens=1024, host_tokens=2048, max_running=8, chunk_tokens=48)
    visitors = [Visitor(server.client, seed) for seed in range(16)]
    threads = [threading.Thread(target=visitor.visit, args=(5,)) for visitor in visitors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [problem for visitor in visitors for problem in visitor.problems] == []
    assert sum(visitor.answers for visitor in visitors) > 16
    report = server.settled()
    assert report["overdue"] == 0
    assert not caplog.records
    server.client.post("/admin/flush")
    assert server.client.complete([5, 6, 7], max_tokens=3, ignore_eos=True)


# -- broken ---------------------------------------------------------------------------------------


class BrokenError(Exception):
    """Put there by a test."""


def breaks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The engine raises in the step in which it finds the event set."""
    now, step = threading.Event(), engine.step

    def step_or_break() -> Any:
        time.sleep(STEP_S)
        if now.is_set():
            time.sleep(0.2)  # So that others come during this step.
            raise BrokenError
        return step()

    monkeypatch.setattr(engine, "step", step_or_break)
    return now


def test_an_engine_that_breaks_answers_every_request_with_an_error(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    client, now = server.client, breaks(server.engine, monkeypatch)
    stream = client.start(PATH, prompt=prompt(), stream=True, **LONG)
    whole = client.start(PATH, prompt=prompt(), **LONG)
    events = stream.events()
    next(events)
    now.set()
    time.sleep(0.05)
    late = client.start(PATH, prompt=prompt(), **LONG)
    report = client.open("GET", "/admin/cache")
    last = list(events)[-1]
    assert last["error"]["message"] == "the engine has stopped; restart the server"
    for request in (whole, late, report):
        answer = request.answer()
        assert answer.status == 503
        assert json.loads(answer.read())["error"]["type"] == "server_error"
        request.leave()
    for reply in (
        client.get("/health"),
        client.get("/metrics"),
        client.post(PATH, {"prompt": [5]}),
    ):
        assert reply.status == 503
        assert "restart the server" in reply.problem
    assert isinstance(server.service.broken, BrokenError)
    assert "the engine broke" in caplog.text


class Mute(RankTopology):
    """A topology whose commands reach no other rank."""

    def broadcast_command(self, command: bytes) -> None:
        pass


def test_a_leader_that_fails_where_others_may_not_have_serves_no_more(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that fails on the leader alone leaves the ranks with different trees."""
    server = serve()
    leader = server.service._leader
    monkeypatch.setattr(leader, "topology", Mute(stages=2))

    def break_down(tier: Tier) -> int:
        raise MemoryError

    monkeypatch.setattr(server.engine.cache, "flush", break_down)
    reply = server.client.post("/admin/flush?tier=device", {})
    assert reply.status in (500, 503)
    assert isinstance(leader.diverged, MemoryError)
    assert server.client.get("/health").status == 503
    assert isinstance(server.service.broken, MemoryError)
