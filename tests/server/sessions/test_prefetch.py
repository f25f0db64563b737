"""`POST /v1/prefetch`: prefixes that are there before the request is."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide.cache.sessions import prefetching
from tests.server import stores
from tests.server.serving import PAGE, ForkedChild, InProcess
from tests.server.talking import Client, Json
from tests.server.test_admin import scraped

PAGES = 8
PROMPT = [5 + n % 90 for n in range(PAGES * PAGE + 1)]
WORDS = "the cat sat on the mat and then the hat, that is that. " * 4
_NUMBERS = itertools.count()


@pytest.fixture
def url() -> str:
    return f"memory:prefetch-{next(_NUMBERS)}"


@pytest.fixture
def server(serve: Any, url: str) -> InProcess:
    return serve(device_tokens=1024, prefetch_min_tokens=1, storage=url)


@pytest.fixture
def frozen(serve: Any) -> Iterator[InProcess]:
    """Reads of its store do not return while the test runs; what was stored is in no tier."""
    stores.Frozen.ice.clear()
    url = f"tests.server.stores:Frozen?name=ice-{next(_NUMBERS)}&calls=read"
    server = serve(device_tokens=1024, prefetch_min_tokens=1, storage=url)
    only_stored(server.client)
    yield server
    stores.Frozen.ice.set()


def prefetch(client: Client, **fields: Json) -> Json:
    reply = client.post("/v1/prefetch", fields)
    assert reply.status == 200, reply.body
    return reply.json()


def ask(client: Client, prompt: Json = PROMPT, **fields: Json) -> Json:
    return client.complete(
        prompt, max_tokens=2, temperature=0, return_cached_tokens_details=True, **fields
    )["usage"]


def stored(client: Client, pages: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        report = client.get("/admin/cache").json()["storage"]
        if report["stored_pages"] >= pages and not report["waiting_pages"]:
            return
        assert time.monotonic() < deadline, report
        time.sleep(0.005)


def only_stored(client: Client) -> None:
    """Compute the prompt and let its pages be stored; nothing else keeps it then."""
    ask(client)
    stored(client, PAGES)
    assert client.post("/admin/flush").status == 200


def test_a_prefix_comes_from_storage_to_the_device(server: InProcess) -> None:
    client = server.client
    only_stored(client)
    came = prefetch(client, prompt=PROMPT)
    assert came.pop("waited_ms") >= 0
    assert came == {
        "tokens": PAGES * PAGE,
        "cached_tokens_details": {"device": PAGES * PAGE, "host": 0, "storage": 0},
        "fetched_tokens": PAGES * PAGE,
        "outcome": "loaded",
    }
    usage = ask(client)
    assert usage["cached_tokens_details"] == {"device": PAGES * PAGE, "host": 0, "storage": 0}
    assert usage["storage_fetches"] == [], "the request has nothing to wait for"
    samples = scraped(client)
    assert samples["kvtide_prefetches_total", frozenset({("outcome", "loaded")})] == 1
    assert samples["kvtide_prompt_tokens_total", frozenset()] == 2 * len(PROMPT), "of requests"
    server.settled()


def test_a_next_server_has_the_prefix_before_the_request(serve: Any, url: str) -> None:
    first, second = (serve(prefetch_min_tokens=1, storage=url) for _ in range(2))
    ask(first.client)
    stored(first.client, PAGES)
    came = prefetch(second.client, prompt=PROMPT, session_id="next")
    assert came["cached_tokens_details"]["device"] == came["fetched_tokens"] == PAGES * PAGE
    usage = ask(second.client, session_id="next")
    assert usage["cached_tokens_details"] == {"device": PAGES * PAGE, "host": 0, "storage": 0}
    assert usage["storage_fetches"] == []
    assert not [each for each in usage["miss_reasons"] if each["pool"] == "prompt"]


@pytest.mark.full
def test_a_prefix_of_an_ended_process_is_there_before_the_request(
    model_folder: Path, tmp_path: Path
) -> None:
    flags = ("--port", "0", "--page-tokens", str(PAGE), "--prefetch-min-tokens", "1")
    arguments = (str(model_folder), *flags, "--storage", f"file://{tmp_path}/pages?cap=1GB")
    with ForkedChild(arguments) as first:
        client = first.client()
        ask(client)
        stored(client, PAGES)
        first.terminate()
        assert first.exit_code() == 0
    with ForkedChild(arguments) as second:
        client = second.client()
        came = prefetch(client, prompt=PROMPT, timeout_seconds=60)
        assert came["cached_tokens_details"]["device"] == PAGES * PAGE
        usage = ask(client)
        assert usage["cached_tokens_details"]["device"] == PAGES * PAGE
        assert usage["storage_fetches"] == []
        assert client.get("/admin/cache").json()["violations"] == []


def test_a_conversation_is_prefetched_as_it_would_be_asked(server: InProcess) -> None:
    client = server.client
    messages = [{"role": "user", "content": WORDS}]
    usage = client.chat(WORDS, max_tokens=1)["usage"]
    client.post("/admin/flush?tier=device")
    came = prefetch(client, messages=messages)
    assert came["tokens"] == usage["prompt_tokens"] // PAGE * PAGE
    assert came["cached_tokens_details"]["device"] == came["tokens"]
    assert prefetch(client, messages=messages, chat_template_kwargs={"shout": True})["tokens"] >= (
        came["tokens"] - PAGE
    )
    assert prefetch(client, prompt=WORDS, cache_salt="other")["tokens"] == 0


def test_a_session_alone_names_its_last_prompt_and_its_answer(server: InProcess) -> None:
    client = server.client
    answer = client.complete(
        PROMPT, max_tokens=2 * PAGE, temperature=0, ignore_eos=True, session_id="a",
        session_ttl_seconds=1000, cache_salt="s",
    )  # fmt: skip
    whole = (answer["usage"]["total_tokens"] - 1) // PAGE * PAGE
    assert whole > PAGES * PAGE
    stored(client, whole // PAGE)
    for _ in range(2):
        came = prefetch(client, session_id="a", cache_salt="s", session_ttl_seconds=50)
        assert came["tokens"] == came["cached_tokens_details"]["device"] == whole
    (state,) = client.get("/admin/sessions").json()["sessions"]
    assert state["pinned_tokens"] == whole and 40 < state["seconds_left"] <= 50
    client.post("/admin/flush")
    again = prefetch(client, session_id="a", cache_salt="s")
    assert again["cached_tokens_details"]["device"] == whole and again["fetched_tokens"] == 0
    reply = client.post("/v1/prefetch", {"session_id": "a"})
    assert reply.status == 404 and "there is no session 'a' here" in reply.problem


def test_a_session_that_lost_its_pin_is_still_known(server: InProcess) -> None:
    client = server.client
    ask(client, session_id="a", cache_salt="s")
    stored(client, PAGES)
    server.on_loop(lambda: server.service.call(lambda engine: engine.cache.sessions.unpin_one()))
    client.post("/admin/flush")
    came = prefetch(client, session_id="a", cache_salt="s")
    assert came["cached_tokens_details"]["device"] == came["fetched_tokens"] == PAGES * PAGE


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "send one of prompt and messages, or a session_id"),
        ({"prompt": [1], "messages": []}, "send one of prompt and messages, or a session_id"),
        ({"prompt": ["a", "b"]}, "there are several prompts; prefetch them one by one"),
        ({"prompt": []}, "prompt is missing"),
        ({"prompt": [1], "timeout_seconds": -1}, "timeout_seconds is -1; send 0 to 600"),
        ({"prompt": [1], "timeout_seconds": "x"}, "timeout_seconds is 'x'; send a number"),
        ({"messages": []}, "messages is missing"),
        ({"prompt": [999999]}, "token ids must lie in"),
        ({"prompt": [1] * 9999}, "this engine serves"),
        ({"prompt": [1], "priority": 10**9}, "priority is 1000000000"),
        ({"prompt": [1], "model": "another"}, "there is no model 'another' here"),
    ],
)
def test_what_cannot_be_prefetched_is_refused(server: InProcess, body: Json, problem: str) -> None:
    reply = server.client.post("/v1/prefetch", body)
    assert reply.status in (400, 404) and problem in reply.problem


def test_a_prefetch_waits_no_longer_than_it_may_and_holds_up_no_request(frozen: InProcess) -> None:
    client = frozen.client
    answers: list[Json] = []
    waiting = threading.Thread(
        target=lambda: answers.append(prefetch(client, prompt=PROMPT, timeout_seconds=0.8))
    )
    waiting.start()
    other = [300 - n % 90 for n in range(3 * PAGE)]
    for _ in range(3):
        client.complete(other, max_tokens=4)
    assert waiting.is_alive(), "requests were served meanwhile"
    waiting.join(60)
    (came,) = answers
    assert came["tokens"] == 0 and 700 < came["waited_ms"] < 30_000
    assert came["cached_tokens_details"]["storage"] == PAGES * PAGE
    assert came["outcome"] in ("ended", "loaded")


def test_a_prefetch_ends_with_its_client(frozen: InProcess) -> None:
    client = frozen.client
    left = client.open("POST", "/v1/prefetch", json.dumps({"prompt": PROMPT}).encode())
    prefetches = frozen.engine.cache.prefetches
    deadline = time.monotonic() + 60
    while not len(prefetches):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    left.leave()
    while len(prefetches):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert prefetches.ended == {"ended": 1} and frozen.serving.rank.prefetches == {}


def test_too_many_prefetches_are_refused(
    frozen: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetching, "MAX_PREFETCHES", 1)
    client = frozen.client
    first = client.open("POST", "/v1/prefetch", json.dumps({"prompt": PROMPT}).encode())
    deadline = time.monotonic() + 60
    while not len(frozen.engine.cache.prefetches):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    reply = client.post("/v1/prefetch", {"prompt": PROMPT})
    assert reply.status == 429 and reply.headers["retry-after"] == "1"
    first.leave()


@pytest.mark.full
@pytest.mark.parametrize("shape", [("--tp", "2"), ("--pp", "2")])
def test_sessions_and_prefetches_over_ranks(
    model_folder: Path, tmp_path: Path, shape: tuple[str, str]
) -> None:
    flags = (*shape, "--port", "0", "--page-tokens", str(PAGE), "--prefetch-min-tokens", "1")
    arguments = (str(model_folder), *flags, "--storage", f"file://{tmp_path}/pages?cap=1GB")
    with ForkedChild(arguments, patience_s=120.0) as child:
        client = child.client()
        ask(client)
        stored(client, PAGES)
        client.post("/admin/flush")
        came = prefetch(client, prompt=PROMPT, session_id="a", timeout_seconds=60)
        assert came["cached_tokens_details"]["device"] == came["fetched_tokens"] == PAGES * PAGE
        usage = ask(client, session_id="a", session_ttl_seconds=0.3)
        assert usage["cached_tokens_details"]["device"] == PAGES * PAGE
        deadline = time.monotonic() + 60
        while client.get("/admin/sessions").json()["sessions"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert client.post("/v1/prefetch", {"session_id": "a"}).status == 404
        assert client.post("/v1/sessions/a/release").status == 404
        assert ask(client)["cached_tokens_details"]["device"] == PAGES * PAGE
        assert client.get("/admin/cache").json()["violations"] == []
        child.terminate()
        assert child.exit_code() == 0, child.printed
