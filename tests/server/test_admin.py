"""Routes for people and machines that look after a server."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.serving import PAGE, InProcess
from tests.server.talking import Client


def scraped(client: Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample; a text that Prometheus does not read fails here."""
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(reply.body.decode()))
    names = [family.name for family in families]
    assert len(names) == len({*names}), "a metric is reported twice"
    assert all(family.documentation and family.type != "unknown" for family in families)
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def grown(client: Client, before: dict[Any, float], name: str, **labels: str) -> float:
    key = (name, frozenset(labels.items()))
    return scraped(client)[key] - before.get(key, 0.0)


def test_health_says_that_requests_are_taken(client: Client) -> None:
    reply = client.get("/health")
    assert (reply.status, reply.json()) == (200, {"status": "ok", "model": "tiny-0.1"})
    assert client.send("HEAD", "/health").status == 200


def test_the_model_is_listed(client: Client) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [(model["id"], model["object"]) for model in listed["data"]] == [("tiny-0.1", "model")]


def test_metrics_count_requests_and_tokens(client: Client) -> None:
    before = scraped(client)
    prompt = [77] * (2 * PAGE + 1)
    for _ in range(2):
        client.complete(prompt, max_tokens=4, ignore_eos=True, cache_salt="metrics")
    client.complete(prompt, max_tokens=4, temperature=0, stop_token_ids=list(range(320)))
    assert grown(client, before, "kvtide_requests_total", finish="length") == 2
    assert grown(client, before, "kvtide_requests_total", finish="stop") == 1
    assert grown(client, before, "kvtide_prompt_tokens_total") == 3 * len(prompt)
    assert grown(client, before, "kvtide_generated_tokens_total") == 9
    assert grown(client, before, "kvtide_cached_tokens_total", tier="device") == 2 * PAGE
    assert grown(client, before, "kvtide_time_to_first_token_seconds_count") == 3
    assert grown(client, before, "kvtide_time_per_output_token_seconds_count") == 2
    now = scraped(client)
    assert now["kvtide_requests_running", frozenset()] == 0
    assert now["kvtide_requests_waiting", frozenset()] == 0


def test_metrics_agree_with_the_report(server: InProcess, client: Client) -> None:
    report, metrics = server.settled(), scraped(client)
    for tier, pools in report["tiers"].items():
        for pool, count in pools.items():
            for state in ("capacity", "resident", "free"):
                labels = frozenset({("tier", tier), ("pool", pool), ("state", state)})
                assert metrics["kvtide_pages", labels] == count[f"{state}_pages"]
            cell = frozenset({("tier", tier), ("pool", pool)})
            assert metrics["kvtide_page_bytes", cell] == count["page_bytes"] > 0


def test_metrics_show_transfers_their_time_and_pages_by_pool(serve: Any) -> None:
    server = serve(device_tokens=256, host_tokens=512)
    client = server.client
    client.complete([5] * (3 * PAGE + 1), max_tokens=1)
    server.settled()
    client.post("/admin/flush?tier=device")
    client.complete([5] * (3 * PAGE + 1), max_tokens=1)
    server.settled()
    now = scraped(client)

    def sample(name: str, **labels: str) -> float:
        return now[f"kvtide_{name}", frozenset(labels.items())]

    for way in ("load", "backup"):
        assert sample("transfer_seconds_count", way=way) == 1
        assert sample("transfer_seconds_bucket", way=way, le="+Inf") == 1
        assert sample("transfer_seconds_sum", way=way) > 0
        assert sample("moved_pages_total", way=way, pool="kv") == 3
        assert sample("transfer_queue_pages", way=way) == 0
        assert sample("transfer_queue", way=way, state="reserved") == 0
        assert sample("transfer_queue", way=way, state="in_flight") == 0
    assert sample("evicted_pages_total", tier="device", pool="kv") == 3
    assert sample("evicted_pages_total", tier="host", pool="kv") == 0
    assert sample("pages", tier="device", pool="kv", state="pinned") == 0


def test_metrics_show_what_requests_do(server: InProcess, client: Client) -> None:
    def states() -> dict[str, float]:
        return {
            dict(labels)["state"]: value
            for (name, labels), value in scraped(client).items()
            if name == "kvtide_request_states"
        }

    assert states() == dict.fromkeys(
        ("queued", "fetching", "handoff", "sharing", "loading", "prefill", "decode"), 0
    )
    asked = {"prompt": [9] * 40, "max_tokens": 2000, "ignore_eos": True}
    running = client.start("/v1/completions", **asked)
    server.until(lambda report: report["requests"]["running"] > 0)
    deadline = time.monotonic() + 60
    while states()["decode"] != 1:
        assert time.monotonic() < deadline
    assert sum(states().values()) == 1
    running.leave()


def test_the_report_says_how_the_cache_stands(serve: Any) -> None:
    server = serve(device_tokens=256, host_tokens=512, eviction="lru", max_running=2)
    client = server.client
    client.complete([5] * (3 * PAGE), max_tokens=1)
    report = server.settled()
    assert (report["page_tokens"], report["requests"]["max_sequence_tokens"]) == (PAGE, 256)
    assert report["settings"]["eviction"] == "lru"
    assert report["tiers"]["device"]["kv"]["capacity_pages"] == 16
    assert report["tiers"]["device"]["kv"]["resident_pages"] == 3
    assert report["tiers"]["host"]["kv"]["capacity_pages"] == 32
    assert report["tiers"]["host"]["kv"]["resident_pages"] == 3
    assert report["tokens"]["prompt"] == 3 * PAGE
    (pool,) = report["pools"]
    assert (pool["name"], pool["layers"], pool["reach"]) == ("kv", 2, "all")


def test_flushing_drops_what_no_request_needs(serve: Any) -> None:
    server = serve(device_tokens=256, host_tokens=512)
    client = server.client

    def resident() -> tuple[int, ...]:
        tiers = server.settled()["tiers"]
        return tuple(tiers[tier]["kv"]["resident_pages"] for tier in ("device", "host"))

    def fill() -> None:
        client.complete([5] * (3 * PAGE), max_tokens=1)
        assert resident() == (3, 3)

    for tier, dropped, left in (
        ("device", {"device": 3}, (0, 3)),
        ("host", {"host": 3}, (3, 0)),
        ("all", {"device": 3, "host": 3}, (0, 0)),
    ):
        fill()
        reply = client.post(f"/admin/flush?tier={tier}")
        assert reply.json() == {"dropped_pages": dropped}
        assert resident() == left
        client.post("/admin/flush")
        assert resident() == (0, 0)


@pytest.mark.parametrize("tier", ["storage", "", "DEVICE", "device,host"])
def test_flushing_a_tier_that_is_none_is_refused(client: Client, tier: str) -> None:
    reply = client.post(f"/admin/flush?tier={tier}")
    assert reply.status == 400
    assert reply.problem == f"there is no tier '{tier}'; use device, host, all"


def test_flushing_leaves_requests_that_run_alone(server: InProcess, client: Client) -> None:
    asked = {"prompt": [9] * 40, "max_tokens": 300, "seed": 1, "ignore_eos": True}
    expected = client.complete(**asked)["choices"][0]["text"]
    running = client.start("/v1/completions", **asked)
    server.until(lambda report: report["requests"]["running"] > 0)
    for _ in range(5):
        assert client.post("/admin/flush?tier=all").status == 200
    answer = running.answer()
    assert answer.status == 200 and expected in answer.read().decode("unicode-escape", "replace")
    running.leave()
