"""A prefill server and a decode server, each a process of its own, over HTTP and shared memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import PAGE, Child
from tests.server.test_admin import scraped

COMMON = ("--port", "0", "--deterministic", "--page-tokens", str(PAGE), "--storage", "none")
PROMPT = [7 + number % 90 for number in range(20 * PAGE + 5)]


def ask(client: Any, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "max_tokens": 12,
        "logprobs": 3,
        "return_token_ids": True,
        "return_cached_tokens_details": True,
        **fields,
    }
    response = client.post("/v1/completions", body)
    assert response.status == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def answer(found: dict[str, Any]) -> str:
    return json.dumps(found["choices"], sort_keys=True)


@pytest.fixture(scope="module")
def servers(model_folder: Path) -> Iterator[tuple[Any, Any, Any]]:
    """One server by itself, and a pair."""
    with ExitStack() as stack:
        alone = stack.enter_context(Child((str(model_folder), *COMMON)))
        prefill = stack.enter_context(Child((str(model_folder), *COMMON, "--role", "prefill")))
        url = f"http://127.0.0.1:{prefill.client().port}"
        decode = stack.enter_context(
            Child(
                (
                    *(str(model_folder), *COMMON, "--role", "decode", "--prefill-from", url),
                    *("--handoff-min-tokens", "16"),
                )
            )
        )
        yield alone.client(), prefill.client(), decode.client()


def test_the_answer_is_that_of_one_server(servers: tuple[Any, Any, Any]) -> None:
    alone, prefill, decode = servers
    for prompt in (PROMPT, PROMPT[: 3 * PAGE], PROMPT[: 9 * PAGE + 1]):
        expected, found = ask(alone, prompt), ask(decode, prompt)
        assert answer(found) == answer(expected)
    (handoff,) = ask(decode, PROMPT[::-1])["usage"]["handoffs"]
    assert handoff["state"] == "decoding" and handoff["tokens"] == 20 * PAGE
    for client in (prefill, decode):
        report = client.get("/admin/cache").json()
        assert report["violations"] == []


def test_metrics_agree_with_the_reports_of_both_sides(servers: tuple[Any, Any, Any]) -> None:
    ask(servers[2], [3 + number % 70 for number in range(12 * PAGE)])
    sides = [(client.get("/admin/cache").json()["handoff"], scraped(client)) for client in servers]
    (_, none), (sent, out), (received, into) = sides
    assert not any(name.startswith("kvtide_handoff") for name, _ in none), "it has no part"

    def value(samples: dict[Any, float], name: str, **labels: str) -> float:
        return samples[f"kvtide_handoff_{name}", frozenset(labels.items())]

    ended = received["incoming_ended"]["decoding"]
    assert value(into, "ended_total", state="decoding") == ended > 0
    assert value(into, "tokens_total") == received["handed_tokens"] > 0
    assert value(into, "landed_bytes_total") == received["landed_bytes"] > 0
    assert value(into, "quarantined_slots") == 0
    assert value(into, "prefill_servers", state="connected") == 1
    assert value(out, "decode_servers") == 1 and value(out, "refused_peers_total") == 0
    assert value(out, "written_bytes_total") == sent["sender"]["written_bytes"]
    assert value(out, "sender_jobs_ended_total", end="failed") == 0
    assert value(out, "rooms_ended_total", end="handed_over") >= ended - 1, "one may not be over"


# -- usage ----------------------------------------------------------------------------------------

TEXT = "the cat sat on the mat, and then the hat; that is that. "
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": 30 * TEXT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": 31 * TEXT}], "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": 32 * TEXT}], "max_tokens": 4},
    "/v1/responses": {"input": 33 * TEXT, "max_output_tokens": 4, "store": False},
}


@pytest.mark.parametrize("path", ROUTES)
def test_usage_names_the_handoff_on_every_route(servers: tuple[Any, Any, Any], path: str) -> None:
    body = {**ROUTES[path], "temperature": 0, "cache_salt": path}
    reply = servers[2].post(path, {**body, "return_cached_tokens_details": True})
    assert reply.status == 200, reply.text
    (handoff,) = reply.json()["usage"]["handoffs"]
    assert handoff["state"] == "decoding" and handoff["tokens"] > 0
    assert "handoffs" not in servers[2].post(path, body).json()["usage"]


def cached_tokens(found: dict[str, Any]) -> int:
    return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_cached_tokens_are_those_that_neither_side_has_computed(
    servers: tuple[Any, Any, Any],
) -> None:
    """A prefill server computes what it lacks, also what the decode side has."""
    _, prefill, decode = servers
    beginning = [11 + number % 60 for number in range(10 * PAGE)]
    assert cached_tokens(ask(decode, [*beginning, 1])) == 0
    longer = [*beginning, *(5 + number % 40 for number in range(4 * PAGE))]
    found = ask(decode, longer)
    (handoff,) = found["usage"]["handoffs"]
    assert handoff["tokens"] < 5 * PAGE and cached_tokens(found) == 10 * PAGE
    assert handoff["prefill_cached_tokens"] == {"device": 10 * PAGE}
    flush(prefill)
    found = ask(decode, [*longer, *(4 + number % 50 for number in range(2 * PAGE))])
    (handoff,) = found["usage"]["handoffs"]
    assert handoff["state"] == "decoding" and handoff["tokens"] < 4 * PAGE
    assert handoff["prefill_cached_tokens"] == {} and cached_tokens(found) == 0


def flush(client: Any) -> None:
    """Drop all that a server has cached, once nothing of it is in use."""
    deadline = time.monotonic() + 60
    while any(pool["resident_pages"] for pools in tiers(client) for pool in pools.values()):
        assert time.monotonic() < deadline
        assert client.post("/admin/flush?tier=all").status == 200


def tiers(client: Any) -> list[dict[str, Any]]:
    return list(client.get("/admin/cache").json()["tiers"].values())
