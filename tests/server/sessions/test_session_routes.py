"""Sessions over HTTP: how they end, how they are reported, what changed in their prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from tests.server.serving import PAGE, InProcess
from tests.server.talking import Client, Json
from tests.server.test_admin import grown, scraped

PROMPT = [5 + n % 90 for n in range(6 * PAGE + 1)]
SYSTEM = "the cat sat on the mat and then the hat, that is that. " * 4


def listed(client: Client) -> dict[str, Json]:
    return {each["id"]: each for each in client.get("/admin/sessions").json()["sessions"]}


def ask(client: Client, prompt: Json = PROMPT, **fields: Json) -> Json:
    return client.complete(prompt, max_tokens=2, temperature=0, **fields)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.005)


# -- how they end -------------------------------------------------------------------------------


def test_a_session_is_released_by_its_id(server: InProcess, client: Client) -> None:
    before = scraped(client)
    ask(client, session_id="to go")
    assert listed(client)["to go"]["pinned_tokens"] == 6 * PAGE
    assert listed(client)["to go"]["tokens"] == len(PROMPT) + 2
    assert grown(client, before, "kvtide_sessions") == 1
    assert (
        scraped(client)[
            "kvtide_session_pinned_pages", frozenset({("tier", "device"), ("pool", "kv")})
        ]
        >= 6
    )
    reply = client.post("/v1/sessions/to%20go/release")
    assert reply.status == 200 and reply.json() == {"id": "to go", "released": True}
    assert "to go" not in listed(client)
    assert grown(client, before, "kvtide_session_ends_total", reason="released") == 1
    again = client.post("/v1/sessions/to%20go/release")
    assert again.status == 404 and again.json()["error"]["code"] == "session_not_found"
    assert "there is no session 'to go' here" in again.problem


@pytest.mark.parametrize("name", ["a/b", "ü", '"', "..", "%"])
def test_any_text_names_a_session(client: Client, name: str) -> None:
    ask(client, session_id=name)
    reply = client.post(f"/v1/sessions/{quote(name, safe='')}/release")
    assert reply.status == 200 and reply.json()["id"] == name and name not in listed(client)


def test_a_session_is_its_salts_own(client: Client) -> None:
    ask(client, session_id="salted", cache_salt="mine")
    assert listed(client)["salted"]["salted"] is True
    assert client.post("/v1/sessions/salted/release").status == 404
    assert client.post("/v1/sessions/salted/release", {"cache_salt": "yours"}).status == 404
    assert client.post("/v1/sessions/salted/release", {"cache_salt": "mine"}).status == 200


def test_a_session_ends_by_itself_on_an_idle_server(client: Client) -> None:
    before = scraped(client)
    ask(client, session_id="brief", session_ttl_seconds=0.2)
    ask(client, session_id="long", session_ttl_seconds=1000)
    until(lambda: "brief" not in listed(client))
    assert 900 < listed(client)["long"]["seconds_left"] <= 1000
    assert grown(client, before, "kvtide_session_ends_total", reason="expired") == 1
    assert client.post("/v1/sessions/long/release").status == 200


def test_the_engine_wakes_up_by_itself_to_end_a_session(server: InProcess) -> None:
    """Nothing but time passes: no request, no report."""
    ask(server.client, session_id="asleep", session_ttl_seconds=0.1)
    sessions = server.engine.cache.sessions
    until(lambda: '["", "", "asleep"]' not in sessions._sessions)


def test_the_ttl_is_a_setting(serve: Any) -> None:
    client = serve(session_ttl_seconds=77.0).client
    ask(client, session_id="a")
    assert 60 < listed(client)["a"]["seconds_left"] <= 77


def test_with_a_ttl_of_zero_a_session_is_over_with_its_request(client: Client) -> None:
    ask(client, session_id="gone", session_ttl_seconds=0)
    until(lambda: "gone" not in listed(client))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"session_ttl_seconds": -1}, "session_ttl_seconds is -1; send 0 to"),
        ({"session_ttl_seconds": 1e9}, "session_ttl_seconds is 1e+09; send 0 to"),
        ({"session_ttl_seconds": "1"}, "session_ttl_seconds is '1'; send a number"),
        ({"session_id": "x" * 513}, "session_id has 513 characters; send at most 512"),
        ({"session_id": 3}, "session_id is 3; send a text"),
    ],
)
def test_fields_that_cannot_be_used_are_refused(client: Client, fields: Json, problem: str) -> None:
    for path, body in (("/v1/completions", {"prompt": [1]}), ("/v1/prefetch", {"prompt": [1]})):
        reply = client.post(path, {**body, "session_id": "a", **fields})
        assert reply.status == 400 and problem in reply.problem


def test_keys_guard_sessions(serve: Any) -> None:
    server = serve(api_key="user", admin_key="root")
    stranger = Client(server.address, server.port)
    assert stranger.post("/v1/sessions/a/release").status == 401
    assert stranger.post("/v1/prefetch", {"prompt": [1]}).status == 401
    assert Client(server.address, server.port, "user").get("/admin/sessions").status == 401
    assert server.client.get("/admin/sessions").json() == {"sessions": []}


# -- when slots are needed ------------------------------------------------------------------------


def test_pins_that_fill_the_device_give_way_to_requests(serve: Any) -> None:
    server = serve(device_tokens=16 * PAGE, host_ratio=0, session_fraction=1.0)
    client = server.client
    for number in range(4):
        ask(client, [number, *PROMPT[: 4 * PAGE]], session_id=str(number))
    pinned = sum(each["pinned_tokens"] for each in listed(client).values())
    assert pinned == 12 * PAGE, "no slots are left for a request of this size"
    whole = [200 + n % 90 for n in range(15 * PAGE)]
    assert client.complete(whole, max_tokens=PAGE // 2)["usage"]["completion_tokens"] > 0
    assert server.settled()["sessions"] < 4
    assert scraped(client)["kvtide_session_ends_total", frozenset({("reason", "evicted")})] >= 1


def test_no_session_takes_more_than_its_share(serve: Any) -> None:
    client = serve(device_tokens=32 * PAGE, host_ratio=0, session_fraction=0.5).client
    ask(client, [n % 90 for n in range(20 * PAGE)], session_id="large")
    ask(client, session_id="small")
    pins = {name: each["pinned_tokens"] for name, each in listed(client).items()}
    assert pins == {"large": 8 * PAGE, "small": 6 * PAGE}


# -- what changed -------------------------------------------------------------------------------


def changes(usage: Json) -> list[Json]:
    return [each for each in usage["miss_reasons"] if each["pool"] == "prompt"]


def chat(client: Client, system: str, *turns: str, **fields: Json) -> Json:
    return client.chat(
        {"role": "system", "content": system}, *turns, max_tokens=2, temperature=0, **fields
    )["usage"]


def test_what_changed_at_the_front_is_named(client: Client) -> None:
    before = scraped(client)
    asked = {"session_id": "dated", "return_cached_tokens_details": True}
    one = chat(client, f"Date: 2026-11-17\n{SYSTEM}", "hi", **asked)
    assert changes(one) == []
    same = chat(client, f"Date: 2026-11-17\n{SYSTEM}", "hi", "and", **asked)
    assert changes(same) == []
    assert grown(client, before, "kvtide_session_prompt_changes_total") == 0
    other = chat(client, f"Date: 2026-11-18\n{SYSTEM}", "hi", "and", **asked)
    (change,) = changes(other)
    assert change["reason"].startswith(f"the prompt differs at token {change['at']} from")
    assert change["reason"].endswith("Date: 2026-11-17' became '|>Date: 2026-11-18'")
    assert 0 < change["at"] < 40
    assert grown(client, before, "kvtide_session_prompt_changes_total") == 1
    unasked = chat(client, f"Date: 2026-11-19\n{SYSTEM}", "hi", session_id="dated")
    assert "miss_reasons" not in unasked
    assert b"2026" not in client.get("/metrics").body
    assert b"2026" not in client.get("/admin/sessions").body


def test_requests_beside_a_conversation_change_nothing_of_it(client: Client) -> None:
    """As clients send sub-agents and titles: under the session of the main conversation."""
    before = scraped(client)
    asked = {"session_id": "busy", "return_cached_tokens_details": True}
    turns: list[str] = []
    for number in range(3):
        turns += ["and then the hat " * 4]
        main = chat(client, SYSTEM, *turns, **asked)
        agent = chat(client, "Find files, and read them. " * 8, *turns, **asked)
        title = chat(client, "Name it in three words.", "the cat sat " * 9, **asked)
        assert [changes(each) for each in (main, agent, title)] == [[], [], []]
        assert number == 0 or main["prompt_tokens_details"]["cached_tokens"] >= 6 * PAGE
    assert grown(client, before, "kvtide_session_prompt_changes_total") == 0
    session = listed(client)["busy"]
    assert session["lines"] == 3 and session["tokens"] == title["prompt_tokens"] + 2
    assert session["pinned_tokens"] > main["prompt_tokens"] + agent["prompt_tokens"] - 2 * PAGE


def test_changes_are_named_in_streams_too(client: Client) -> None:
    asked = {"session_id": "streamed", "return_cached_tokens_details": True, "max_tokens": 1}
    client.stream("/v1/completions", prompt=[1, *PROMPT], **asked)
    *_, last = client.stream("/v1/completions", prompt=[2, *PROMPT], n=2, **asked)
    (change,) = changes(last["usage"])
    assert change["at"] == 0


def test_other_salts_learn_nothing_of_a_session(client: Client) -> None:
    asked = {"session_id": "secret", "return_cached_tokens_details": True}
    chat(client, f"My word is 1234\n{SYSTEM}", "hi", cache_salt="a", **asked)
    other = chat(client, f"My word is 5678\n{SYSTEM}", "hi", cache_salt="b", **asked)
    assert changes(other) == []


def test_rules_make_the_prefix_of_two_days_one(serve: Any) -> None:
    """With a real server: what a changing front costs, and what the rules save."""
    found = {}
    for rules in (None, "billing-header,dates"):
        client = serve(stable_prefix=rules).client
        used = []
        for day, mark in ((17, "1a"), (18, "2b")):
            header = f"x-anthropic-billing-header: cc_version=2.1; cch={mark};"
            system = [{"type": "text", "text": text} for text in
                      (header, f"Today's date is 2026-11-{day}.\n{SYSTEM}")]  # fmt: skip
            messages = ({"role": "system", "content": system}, "hi")
            usage = client.chat(
                *messages, max_tokens=2, session_id="s", return_cached_tokens_details=True
            )["usage"]
            used.append(usage)
        found[rules] = used[1]["prompt_tokens_details"]["cached_tokens"], changes(used[1])
    cached, named = found[None]
    assert cached <= 3 * PAGE and len(named) == 1
    saved, named = found["billing-header,dates"]
    assert saved >= 6 * PAGE >= 2 * cached, "all of the system text"
    assert all(each["at"] >= saved for each in named)
