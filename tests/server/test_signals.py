"""`kvtide serve` as a process: it starts with its settings, and ends as it should."""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtide.cli import serve_command
from kvtide.cli.serve_command import _serve_until
from kvtide.server import setting_sources
from tests.server.serving import Child, ForkedChild
from tests.server.talking import Client, Json

PATH = "/v1/completions"
SLOW = """
import time
from kvtide.engine import Engine
step = Engine.step
def slow_step(engine):
    time.sleep(0.01)
    running = engine.scheduler.running
    assert all(request.params.priority != 13 for request in running), "a fault of the test"
    return step(engine)
Engine.step = slow_step
"""
"""Ten milliseconds a step, and a priority at which the engine breaks."""


@pytest.fixture(scope="module")
def _children(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Iterator[Child]]:
    """One for each test, in order, started at once: most of a start is waiting for imports."""
    file = tmp_path_factory.mktemp("config") / "kvtide.toml"
    file.write_text("name = 'from the file'\nport = 1\npage_tokens = 8\nhost-ratio = 0\n")
    variables = {"KVTIDE_CONFIG": str(file), "KVTIDE_PAGE_TOKENS": "16", "KVTIDE_API_KEY": "knock"}
    arguments = (str(model_folder), "--port", "0")
    with ExitStack() as stack:
        children = [
            ForkedChild(arguments, variables if first else {}, SLOW)
            for first in (True, False, False)
        ]
        yield iter([stack.enter_context(child) for child in children])


@pytest.fixture
def child(_children: Iterator[Child]) -> Child:
    return next(_children)


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def running(client: Client, tokens: int, **fields: Json) -> Iterator[Json]:
    """The rest of a stream whose first piece is there."""
    asked = {"prompt": [5, 6], "stream": True, "ignore_eos": True, "max_tokens": tokens, **fields}
    events = client.start(PATH, **asked).events()
    next(events)
    return events


def test_a_file_and_variables_are_heard_and_a_signal_lets_a_stream_finish(child: Child) -> None:
    client = child.client()
    assert client.get("/v1/models").status == 401
    client.key = "knock"
    assert client.get("/v1/models").json()["data"][0]["id"] == "from the file"
    report = client.get("/admin/cache").json()
    assert report["page_tokens"] == 16, "a variable goes before the file"
    assert report["tiers"]["host"]["kv"]["capacity_pages"] == 0
    assert "pages of 16 tokens" in child.printed
    events = running(client, 150)
    child.terminate()
    wait(lambda: client.get("/health").status == 503)
    reply = client.post(PATH, {"prompt": [5]})
    assert reply.status == 503
    assert reply.problem == "the server is shutting down; ask another one"
    rest = list(events)
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    assert len(rest) == 149
    assert child.exit_code() == 0
    assert "Traceback" not in child.printed


def test_a_second_signal_does_not_wait(child: Child) -> None:
    client = child.client()
    events = running(client, 3000)
    child.terminate()
    wait(lambda: client.get("/health").status == 503)
    began = time.monotonic()
    child.process.send_signal(signal.SIGINT)
    assert list(events)[-1]["error"]["message"] == "the server is shutting down; ask another one"
    assert child.exit_code() == 0
    assert time.monotonic() - began < 15, "3,000 steps take 30 s"
    assert "Traceback" not in child.printed


def test_an_engine_that_breaks_ends_the_process_with_an_error(child: Child) -> None:
    client = child.client()
    events = running(client, 3000)
    whole = client.start(PATH, prompt=[5], max_tokens=3000)
    # Of two tokens at least: a request that ends with a step is not seen before the next.
    broken = client.start(PATH, prompt=[5], priority=13, ignore_eos=True)
    assert list(events)[-1]["error"]["message"] == "the engine has stopped; restart the server"
    for request in (whole, broken):
        assert request.answer().status == 503
    assert child.exit_code() == 1
    assert "a fault of the test" in child.printed


def test_draining_has_an_end() -> None:
    """Of requests that have not finished by then, streams end as with a second signal."""
    app, service = SimpleNamespace(open_requests=1, draining=False), SimpleNamespace(broken=None)

    async def drained() -> None:
        signals = SimpleNamespace(count=1)
        await _serve_until(signals, app, service, 0.05, SimpleNamespace(lost=None))

    began = time.monotonic()
    asyncio.run(drained())
    assert app.draining
    assert 0.05 <= time.monotonic() - began < 30


def test_what_a_server_has_opened_is_not_searched_for_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen = []

    async def serve(*_: object) -> tuple[int, bool]:
        frozen.append(gc.get_freeze_count())
        return 0, True

    monkeypatch.setattr(serve_command, "open_engine", lambda *chosen: chosen)
    monkeypatch.setattr(serve_command, "_print_ready", lambda *_: None)
    monkeypatch.setattr(serve_command, "_serve", serve)
    parser = argparse.ArgumentParser()
    setting_sources.add_flags(parser)
    try:
        assert serve_command._run(parser.parse_args([])) == 0
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000
