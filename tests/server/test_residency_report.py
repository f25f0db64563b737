"""A server whose latents live on the host says how often selected ones were on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtide.engine.residency.hot_counts import HotCounts
from kvtide.engine.staging import Staging
from kvtide.spec.residency import HotShape, served_hot
from kvtide.tiers import HotBuffers
from tests.models.tiny import oracle, ours
from tests.server.serving import PAGE
from tests.server.test_admin import scraped

NAME, HOT = "deepseek_v32", 32
Serve = Callable[..., Any]


@pytest.fixture
def sparse(serve: Serve, tmp_path: Path) -> Any:
    oracle(NAME).save_pretrained(tmp_path)
    sizes = {"device_tokens": 512, "host_tokens": 1024, "max_running": 2}
    return serve(model=str(tmp_path), resident=f"hot:{HOT}", **sizes)


def test_metrics_and_report_agree_on_hits_and_misses(sparse: Any) -> None:
    client = sparse.client
    for last in (100, 120):  # The second prompt gathers what the first has left.
        client.complete(list(range(1, last)), max_tokens=8, ignore_eos=True)
    report = sparse.settled()
    pools = {pool["name"]: pool for pool in report["pools"]}
    assert (pools["index"]["home"], pools["index"]["hot"]) == ("device", None)
    assert pools["kv"]["home"] == "host"
    hot = pools["kv"]["hot"]
    assert hot["entries"] == HOT and hot["rows"] == {"in_use": 0, "capacity": 2}
    assert hot["misses"] > 0 and hot["hits"] > 0 and hot["gathered"] > 0
    assert hot["hit_rate"] == hot["hits"] / (hot["hits"] + hot["misses"] + hot["gathered"])
    memory = sparse.engine.cache.memory
    swapped_in = hot["misses"] + hot["gathered"]
    assert hot["swapped_bytes"] == swapped_in * memory.pool("kv").entry.bytes
    found = scraped(client)
    for count in ("hits", "misses", "gathered"):
        labels = [{("pool", "kv"), ("layer", str(n))} for n in memory.pool("kv").layers]
        by_layer = [found[f"kvtide_hot_{count}_total", frozenset(each)] for each in labels]
        assert sum(by_layer) == hot[count] and min(by_layer) > 0
    swapped = found["kvtide_hot_swapped_bytes_total", frozenset({("pool", "kv")})]
    assert swapped == hot["swapped_bytes"]
    assert found["kvtide_hot_rows", frozenset({("state", "in_use")})] == 0
    assert found["kvtide_hot_rows", frozenset({("state", "capacity")})] == 2
    slots = {"in_use": 0, "capacity": 2 * HOT * len(memory.pool("kv").layers)}
    assert hot["slots"] == slots
    for state, count in slots.items():
        assert found["kvtide_hot_slots", frozenset({("pool", "kv"), ("state", state)})] == count


def test_slots_of_a_running_request_are_in_use(sparse: Any) -> None:
    asked = {"prompt": list(range(1, 40)), "max_tokens": 400, "ignore_eos": True}
    request = sparse.client.start("/v1/completions", stream=True, **asked)
    next(request.events())
    found = scraped(sparse.client)
    request.leave()
    in_use = found["kvtide_hot_slots", frozenset({("pool", "kv"), ("state", "in_use")})]
    assert in_use == HOT * len(sparse.engine.cache.memory.pool("kv").layers)


def test_without_hot_pools_nothing_is_reported_of_them(server: Any, client: Any) -> None:
    assert {(p["home"], p["hot"]) for p in server.settled()["pools"]} == {("device", None)}
    assert not [name for name, _ in scraped(client) if "hot" in name]


def test_counts_are_copied_once_a_second() -> None:
    memory = served_hot(ours(NAME, page_tokens=PAGE).memory, HOT)
    pool, cpu = memory.pool("kv"), torch.device("cpu")
    hot = HotBuffers(pool, HotShape.of(pool, PAGE, 2, 8), PAGE, cpu)
    now = [100.0]
    counts = HotCounts({"kv": hot}, Staging(cpu), lambda: now[0])
    assert counts.last["kv"].hit_rate is None
    first = pool.layers[0]
    for seconds, seen in ((0.0, 0), (0.5, 0), (0.6, 1), (0.1, 1), (1.0, 3)):
        hot.counts += 1
        now[0] += seconds
        counts.sample()
        assert counts.last["kv"].hits[first] == counts.last["kv"].misses[first] == seen
    counts.read_now()
    assert counts.last["kv"].hits == dict.fromkeys(pool.layers, 5)
    assert counts.last["kv"].hit_rate == 1 / 3
