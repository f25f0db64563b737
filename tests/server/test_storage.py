"""Storage behind a server: attached, replaced, detached and cleared while it serves."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvtide.server import engine_commands
from kvtide.server.admin import storage_routes
from kvtide.storage import open_store
from kvtide.storage.store_registry import STORES
from tests.server import stores
from tests.server.serving import PAGE, InProcess
from tests.server.talking import Client, Json, Reply
from tests.server.test_admin import scraped

ROUTE = "/admin/storage"
MARKS = 1
"""Objects of a store beside pages: the mark of their shape."""
PROMPT = [5 + n % 90 for n in range(8 * PAGE + 1)]
_NUMBERS = itertools.count()


@pytest.fixture
def url() -> str:
    return f"memory:server-{next(_NUMBERS)}"


@pytest.fixture
def server(serve: Callable[..., InProcess]) -> InProcess:
    return serve(device_tokens=1024, prefetch_base_seconds=5.0, prefetch_min_tokens=1)


@pytest.fixture
def ice() -> Iterator[None]:
    """Whatever froze in a test goes on after it."""
    stores.Frozen.ice.clear()
    stores.closed.clear()
    yield
    stores.Frozen.ice.set()


def put(client: Client, url: str, **fields: Json) -> Reply:
    return client.send("PUT", ROUTE, json.dumps({"url": url, **fields}).encode())


def attach(client: Client, url: str) -> Json:
    reply = put(client, url)
    assert reply.status == 200, reply.body
    return reply.json()


def until(client: Client, wanted: Callable[[Json], bool]) -> Json:
    deadline = time.monotonic() + 60
    while not wanted(report := client.get("/admin/cache").json()["storage"]):
        assert time.monotonic() < deadline, report
        time.sleep(0.005)
    return report


def found(client: Client, prompt: list[int] = PROMPT) -> Json:
    """What the usage says of a prompt that is asked for."""
    return client.complete(prompt, max_tokens=2, temperature=0, return_cached_tokens_details=True)[
        "usage"
    ]


def remember(client: Client) -> None:
    """Compute the prompt and let its pages be stored; nothing else keeps it then."""
    found(client)
    until(client, lambda report: report["stored_pages"] >= 8 and not report["waiting_pages"])
    assert client.post("/admin/flush").status == 200


# -- attaching ------------------------------------------------------------------------------------


def test_without_a_store_there_is_none(server: InProcess) -> None:
    client = server.client
    assert client.get(ROUTE).json() == {"attached": False}
    assert client.get("/admin/cache").json()["storage"] == {"attached": False}
    for reply in (client.send("DELETE", ROUTE), client.post(f"{ROUTE}/clear")):
        assert reply.status == 409
        assert reply.problem.startswith("no store is attached; PUT")
    samples = scraped(client)
    assert samples["kvtide_storage_attached", frozenset()] == 0
    assert ("kvtide_storage_answers", frozenset()) not in samples


def test_a_store_is_attached_while_serving_and_gives_pages_back(
    server: InProcess, url: str
) -> None:
    client = server.client
    report = attach(client, url)
    assert (report["attached"], report["name"], report["answers"]) == (True, url, True)
    remember(client)
    usage = found(client)
    assert usage["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 8 * PAGE}
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8 * PAGE}
    assert usage["storage_fetches"] == [{"outcome": "fetched", "tokens": 8 * PAGE}]
    report = client.get(ROUTE).json()
    assert report["fetches"]["fetched"] == 1 and report["fetched_pages"] == 8
    assert report["store"]["objects"] == 8 + MARKS and report["store"]["bytes"] > 0
    assert server.settled()["tokens"]["from_storage"] == 8 * PAGE


def test_a_coded_store_gives_pages_back_and_shows_what_it_has_in_fewer_bytes(
    server: InProcess, url: str
) -> None:
    client = server.client
    report = attach(client, f"{url}?codec=lossless")
    assert report["name"] == f"{url}?codec=lossless"
    remember(client)
    assert found(client)["cached_tokens_details"]["storage"] == 8 * PAGE
    report = client.get(ROUTE).json()
    coded = report["coded_bytes"]
    assert coded["store"] == report["store"]["bytes"]
    assert 0 < coded["store"] - coded["fetch"] < 256, "pages, and a mark that is never read"
    samples = scraped(client)
    for way, total in coded.items():
        assert samples["kvtide_storage_coded_bytes_total", frozenset({("way", way)})] == total
        raw = samples["kvtide_storage_bytes_total", frozenset({("way", way)})]
        assert raw == report["moved_bytes"][way] > 0
    assert any("were written as" in note for note in report["store"]["notes"])


def test_a_store_that_rounds_is_refused_by_a_server_of_exact_pages(
    server: InProcess, url: str
) -> None:
    reply = put(server.client, f"{url}?codec=fp8")
    assert reply.status == 400
    assert reply.problem.startswith(f"storage {url}?codec=fp8 rounds pages, and those of this")
    reply = put(server.client, f"{url}?codec=zip")
    assert reply.status == 400 and "use lossless, fp8, none" in reply.problem
    assert server.client.get(ROUTE).json() == {"attached": False}


def test_pages_are_stored_though_no_further_request_comes(server: InProcess, url: str) -> None:
    """The engine goes on when its last request has ended, but does not run in circles."""
    attach(server.client, url)
    found(server.client)
    deadline = time.monotonic() + 60
    while server.engine.cache.storage.stats().stored_pages < 8:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert server.engine.cache.storage.stats().stored_pages == 8
    assert server.engine.token_s == server.service.rate.prefill_token_s > 0


def test_metrics_say_what_the_report_says(server: InProcess, url: str) -> None:
    client = server.client
    attach(client, url)
    remember(client)
    found(client)
    report, samples = client.get(ROUTE).json(), scraped(client)

    def sample(name: str, **labels: str) -> float:
        return samples[f"kvtide_{name}", frozenset(labels.items())]

    assert sample("cached_tokens_total", tier="storage") == 8 * PAGE
    assert sample("storage_attached") == sample("storage_answers") == 1
    assert sample("storage_fetching") == sample("storage_waiting_pages") == 0
    assert sample("storage_read_bytes_per_second") == report["read_bytes_s"] > 0
    for outcome, count in report["fetches"].items():
        assert sample("storage_fetches_total", outcome=outcome) == count
    for event, count in report["objects"].items():
        assert sample("storage_objects_total", event=event) == count
    for end in ("fetched", "stored", "dropped", "failed"):
        assert sample("storage_pages_total", end=end) == report[f"{end}_pages"]
    assert sample("transfer_seconds_count", way="fetch") == 1
    assert sample("transfer_seconds_count", way="store") >= 1


def test_a_store_replaces_another(server: InProcess, url: str) -> None:
    client = server.client
    attach(client, f"{url}-before")
    remember(client)
    assert attach(client, url)["stored_pages"] == 0
    assert found(client)["cached_tokens_details"]["storage"] == 0, "the other one had it"
    assert until(client, lambda report: report["stored_pages"] == 8)["name"] == url
    assert attach(client, f"{url}-before")["name"] == f"{url}-before"
    assert client.post("/admin/flush").status == 200
    assert found(client)["cached_tokens_details"]["storage"] == 8 * PAGE


# -- what cannot be attached ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "storage nonsense: no such store; use file:, "),
        ("reddis://me:hidden@host/0", "storage reddis://host/0: no such store"),
        ("memory:a?hidden=1", "storage memory:a: no setting hidden"),
        ("redis://me:hidden", "storage redis://me: the port is not a number"),
        ("redis://me:hid#den@host", "the URL has a # or a late @; write %23"),
        ("redis://me:1/hidden@host", "the URL has a # or a late @; write %23"),
        ("redis://[hidden", "the URL is none; write it like"),
        ("file:relative", "give the whole path of a folder"),
        ("file:///dev/null/x", "cannot be used (Not a directory)"),
        ("no.such.package:Store?key=hidden", "cannot be imported (No module named 'no')"),
        ("tests.server.stores:Absent", "cannot be imported (module"),
        ("tests.server.stores:Refusing?key=hidden", "(ValueError: not today)"),
        ("os:getcwd", "cannot be opened (TypeError: "),
    ],
)
def test_stores_that_cannot_be_opened_are_refused_and_change_nothing(
    server: InProcess, url: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    attach(server.client, "memory:")
    reply = put(server.client, url)
    assert reply.status == 400 and words in reply.problem
    assert "hid" not in reply.problem.replace("no setting hidden", "")
    assert "hid" not in caplog.text
    assert server.client.get(ROUTE).json()["name"] == "memory:"


def test_a_store_that_tells_its_password_is_kept_from_it(
    server: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STORES, "telling", "tests.server.stores:Telling")
    reply = put(server.client, "telling://me:hidden@host")
    assert reply.problem == (
        "storage telling://host: cannot be opened (ValueError: no way in with …)"
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is not JSON"),
        (b"[]", "the body is not a JSON object"),
        (b"{}", "there is no url; send"),
        (b'{"url": 5}', "url is 5; send a text"),
        (b'{"url": "memory:", "timeout_seconds": -1}', "timeout_seconds is -1; send 0 to 3600"),
        (b'{"url": "memory:", "timeout_seconds": "1"}', "timeout_seconds is '1'; send a number"),
    ],
)
def test_bodies_that_name_no_store_are_refused(server: InProcess, body: bytes, words: str) -> None:
    reply = server.client.send("PUT", ROUTE, body)
    assert reply.status == 400 and words in reply.problem
    assert server.client.get(ROUTE).json() == {"attached": False}


def test_waits_without_an_end_are_refused(server: InProcess) -> None:
    client = server.client
    attach(client, "memory:")
    for text in ("nan", "inf", "-1", "soon", "1e9"):
        for method, path in (("GET", ROUTE), ("DELETE", ROUTE), ("POST", f"{ROUTE}/clear")):
            reply = client.send(method, f"{path}?timeout_seconds={text}")
            assert reply.status == 400 and reply.problem.startswith("timeout_seconds is "), text
    assert client.get(ROUTE).json()["attached"]


def test_a_client_that_goes_while_a_store_is_attached_leaves_one_that_answers(
    server: InProcess, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, at_it = threading.Event(), threading.Event()
    apply = engine_commands.AttachStore.apply

    def slowly(command: engine_commands.AttachStore, rank: engine_commands.EngineRank) -> None:
        at_it.set()
        assert busy.wait(10)
        apply(command, rank)

    monkeypatch.setattr(engine_commands.AttachStore, "apply", slowly)
    body = json.dumps({"url": url}).encode()
    head = f"PUT {ROUTE} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((server.address, server.port), timeout=10) as raw:
        raw.sendall(head + body)
        assert at_it.wait(10), "the engine is not asked"
    time.sleep(0.2)
    busy.set()
    until(server.client, lambda report: report["attached"])
    report = server.client.get(f"{ROUTE}?timeout_seconds=5").json()
    assert report["store"] is not None, "the store was closed, and is attached"


def test_a_page_in_a_browser_attaches_nothing(server: InProcess) -> None:
    """Browsers send a POST for any page; for PUT and DELETE they ask first, and get no answer."""
    assert server.client.post(ROUTE, {"url": "memory:"}).status == 405
    assert server.client.send("OPTIONS", ROUTE).status == 405


def test_all_of_it_needs_the_admin_key(serve: Callable[..., InProcess]) -> None:
    server = serve(api_key="public", admin_key="secret")
    attach(server.client, "memory:")
    for key in (None, "public"):
        stranger = Client(server.address, server.port, key)
        assert put(stranger, "memory:other").status == 401
        for method, path in (("GET", ROUTE), ("DELETE", ROUTE), ("POST", f"{ROUTE}/clear")):
            assert stranger.send(method, path).status == 401
    assert server.client.get(ROUTE).json()["name"] == "memory:"


def test_storage_needs_a_host_tier(serve: Callable[..., InProcess]) -> None:
    reply = put(serve(host_ratio=0).client, "memory:")
    assert reply.status == 400
    assert reply.problem == ("storage is reached through a host tier, and there is none; size one")


# -- detaching and clearing -----------------------------------------------------------------------


def test_detaching_while_requests_run_disturbs_none(server: InProcess, url: str) -> None:
    client = server.client
    attach(client, url)
    remember(client)
    asked = {"prompt": PROMPT, "max_tokens": 80, "ignore_eos": True, "temperature": 0}
    expected = client.complete(**asked)["choices"][0]["text"]
    for _ in range(3):
        client.post("/admin/flush")
        running = [client.start("/v1/completions", **asked) for _ in range(3)]
        server.until(lambda report: report["requests"]["running"] > 0)
        reply = client.send("DELETE", ROUTE)
        assert (reply.status, reply.json()) == (200, {"attached": False})
        for request in running:
            answer = request.answer()
            assert answer.status == 200
            assert json.loads(answer.read())["choices"][0]["text"] == expected
            request.leave()
        attach(client, url)
    assert server.settled()["violations"] == []


def test_what_is_in_line_is_written_before_a_store_is_left(server: InProcess, url: str) -> None:
    client = server.client
    attach(client, url)
    found(client)
    assert client.send("DELETE", ROUTE).status == 200
    stored = open_store(url, server.engine.cache.storage.space).status().objects
    assert stored == 8 + MARKS


def test_clearing_removes_our_pages_and_no_others(server: InProcess, url: str) -> None:
    client = server.client
    attach(client, url)
    other = open_store(url, b"other space".ljust(32))
    other.write([b"k" * 32], [memoryview(b"theirs")])
    remember(client)
    size = client.get(ROUTE).json()["store"]["bytes"]
    reply = client.post(f"{ROUTE}/clear")
    assert (reply.status, reply.json()) == (
        200,
        {"over": True, "objects": 8 + MARKS, "bytes": size},
    )
    assert client.get(ROUTE).json()["store"]["objects"] == 0
    assert other.exists([b"k" * 32]) == [True]
    assert found(client)["storage_fetches"] == [{"outcome": "nothing", "tokens": 0}]


def test_what_a_store_says_when_it_fails_is_passed_on(server: InProcess) -> None:
    client = server.client
    attach(client, "tests.server.stores:Failing?calls=clear,status")
    reply = client.post(f"{ROUTE}/clear")
    assert (reply.status, reply.problem) == (502, "ArithmeticError: clear does not add up")
    report = client.get(ROUTE).json()
    assert (report["store"], report["problem"]) == (None, "ArithmeticError: status does not add up")


# -- stores that freeze ---------------------------------------------------------------------------


@pytest.mark.usefixtures("ice")
def test_a_store_that_does_not_open_keeps_no_request_waiting(
    server: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.client
    opening = client.open("PUT", ROUTE, b'{"url": "tests.server.stores:Frozen?calls=open"}')
    assert found(client)["prompt_tokens"] == len(PROMPT)
    opening.leave()
    monkeypatch.setattr(storage_routes, "OPEN_S", 0.2)
    reply = put(client, "tests.server.stores:Frozen?calls=open")
    assert reply.status == 504 and reply.problem.startswith("the store is not open after 0.2 s")
    assert client.get(ROUTE).json() == {"attached": False}
    stores.Frozen.ice.set()
    deadline = time.monotonic() + 60
    while len(stores.closed) < 2:
        assert time.monotonic() < deadline, "no request wants these stores, yet they stay open"
        time.sleep(0.01)
    assert client.get(ROUTE).json() == {"attached": False}


@pytest.mark.usefixtures("ice")
def test_a_store_that_freezes_keeps_no_request_waiting(serve: Callable[..., InProcess]) -> None:
    server = serve(prefetch_base_seconds=0.1, prefetch_per_1k_seconds=0, prefetch_min_tokens=1)
    client = server.client
    attach(client, "tests.server.stores:Frozen?calls=exists,read,write,clear,status")
    expected = client.complete(PROMPT, max_tokens=8, temperature=0, recompute=True)
    for _ in range(3):
        answer = client.complete(PROMPT, max_tokens=8, temperature=0)
        assert answer["choices"] == expected["choices"]
        client.post("/admin/flush")
    steps = itertools.count()
    step, server.engine.step = server.engine.step, lambda: (next(steps) and []) or step()
    time.sleep(0.5)
    assert next(steps) < 120, "it waits for the store in circles"
    report = client.get(f"{ROUTE}?timeout_seconds=0.1").json()
    assert report["store"] is None
    assert report["problem"] == "the store has not answered for 0.1 s"
    reply = client.post(f"{ROUTE}/clear?timeout_seconds=0.1")
    assert (reply.status, reply.json()) == (202, {"over": False})
    began = time.monotonic()
    reply = client.send("DELETE", f"{ROUTE}?timeout_seconds=0.1")
    assert (reply.status, reply.json()["state"]) == (202, "leaving")
    assert not reply.json()["attached"] and time.monotonic() - began < 30
    assert client.complete(PROMPT, max_tokens=8, temperature=0)["choices"] == expected["choices"]
    stores.Frozen.ice.set()
    until(client, lambda report: report == {"attached": False})
    assert stores.closed == ["frozen"]
    server.settled()


@pytest.mark.usefixtures("ice")
def test_a_request_that_does_not_wait_is_answered_at_once(serve: Callable[..., InProcess]) -> None:
    server = serve(prefetch_policy="best_effort", prefetch_min_tokens=1)
    attach(server.client, "tests.server.stores:Frozen?calls=exists")
    usage = found(server.client)
    assert usage["storage_fetches"][0]["tokens"] == 0
    assert usage["timing"]["time_to_first_token_ms"] < 30_000
    stores.Frozen.ice.set()
