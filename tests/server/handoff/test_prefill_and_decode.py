"""A prefill server and a decode server, each a process of its own, over HTTP and shared memory."""

from __future__ import annotations

import json
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
