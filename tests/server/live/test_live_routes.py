"""The live page's stream: what a frame says, who may read it, and that it costs nothing unread."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.cache.cache_stats import TransferQueue
from kvtide.server.live import engine_snapshot, stored_branches
from kvtide.server.live.live_routes import HERE, page
from tests.server.live.watching import frame, frames, hybrid, until
from tests.server.serving import PAGE, InProcess
from tests.server.talking import Client

SHAPE_MARKS = 1
"""A store has an object by which a shape of ranks is known."""


def test_the_page_is_one_file_that_asks_no_other_server(client: Client) -> None:
    reply = client.get("/")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "connect-src 'self'" in reply.headers["content-security-policy"]
    text = reply.body.decode()
    assert text == page()
    assert "uPlot" in text and "/* uPlot" not in text
    assert not re.findall(r"(?:src|href|action)\s*=\s*[\"'](?!data:)", text)
    assert not re.findall(r"@import|url\(", text)


def test_the_library_comes_with_its_licence() -> None:
    assert "MIT License" in (HERE / "uplot" / "LICENSE").read_text()
    assert "v1.6" in (HERE / "uplot" / "uPlot.iife.min.js").read_text()[:400]


def test_the_page_needs_no_key_and_its_stream_the_admin_key(watched: Any) -> None:
    server = watched(api_key="for clients", admin_key="for me")

    def status(path: str, key: str | None) -> int:
        asked = Client(server.address, server.port, key).open("GET", path)
        found = asked.answer().status
        asked.leave()
        return found

    assert status("/", None) == 200
    for path in ("/admin/live", "/admin/cache"):
        assert [status(path, key) for key in (None, "for clients", "for me")] == [401, 401, 200]


def test_other_pages_get_nothing_from_a_server_without_a_key(client: Client) -> None:
    assert client.send("GET", "/admin/live", Origin="http://elsewhere").status == 403


def test_a_frame_of_a_hybrid_has_every_anchor_with_its_sidecars_and_the_hot_buffers(
    watched: Any, tmp_path: Path
) -> None:
    server = hybrid(watched, tmp_path)
    seen = frame(server)
    pools = {(one["tier"], one["pool"]): one for one in seen["occupancy"]}
    assert {*pools} == {
        *(("device", "kv"), ("device", "swa"), ("host", "kv"), ("host", "swa"), ("host", "c4"))
    }
    assert pools["device", "kv"]["sidecars"] == ["c4_index", "c16"]
    assert "c4_state" in pools["host", "swa"]["sidecars"] and not pools["host", "c4"]["sidecars"]
    assert all(one["resident"] and one["page_bytes"] for one in pools.values())
    assert seen["hot"] == {"pools": ["c4"], "in_use": 0, "rows": 3}
    asked = {"prompt": [3] * 40, "max_tokens": 150, "ignore_eos": True}
    running = server.client.start("/v1/completions", **asked)
    assert frame(server, lambda one: one["hot"]["in_use"] == 1)
    running.leave()
    server.settled()


def test_transfers_that_wait_for_the_next_step_are_shown_beside_those_in_flight() -> None:
    stats: Any = SimpleNamespace(
        moved_bytes={"load": 1, "backup": 2},
        queues={"load": TransferQueue(reserved=3, in_flight=4), "backup": TransferQueue()},
        storage=None,
    )
    flows = engine_snapshot._flows(stats)
    assert flows["load"] == {"bytes": 1, "queue": 4, "unit": "in flight", "reserved": 3}


def test_branches_that_a_store_has_are_told_apart(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_branches, "ASK_EVERY_S", 0.0)
    server = watched(device_tokens=512, host_tokens=1024, storage="memory:")
    server.client.complete([7] * (4 * PAGE), max_tokens=1)
    server.settled()

    def tiers(seen: Any) -> list[list[str]]:
        return [branch["tiers"] for branch in seen["tree"]["branches"]]

    frame(server, lambda seen: tiers(seen) == [["device", "host", "storage"]])
    server.client.post("/admin/storage/clear")
    frame(server, lambda seen: tiers(seen) == [["device", "host"]])


def test_a_frame_agrees_with_the_report(watched: Any) -> None:
    server = watched(device_tokens=512, host_tokens=1024)
    for _ in range(2):
        server.client.complete([5] * (3 * PAGE + 1), max_tokens=2)
    report = server.settled()
    seen = frame(server)
    assert {(one["tier"], one["pool"]): one["resident"] for one in seen["occupancy"]} == {
        (tier, pool): count["resident_pages"]
        for tier, pools in report["tiers"].items()
        for pool, count in pools.items()
    }
    cached = report["tokens"]["from_device"]
    assert seen["tokens"]["device"] == cached == 3 * PAGE
    assert sum(seen["tokens"].values()) == report["tokens"]["prompt"]
    assert seen["flows"]["backup"]["bytes"] == report["moved_bytes"]["backup"] > 0
    assert seen["server"]["model"] == server.serving.name
    assert seen["finished"] == 2
    assert seen["misses"]["counts"] == report["misses"]


def test_the_tree_shows_hits_tiers_and_sessions(watched: Any) -> None:
    server = watched(device_tokens=512, host_tokens=1024)
    stem = [7] * (4 * PAGE)
    for word in (8, 9):
        server.client.complete([*stem, *[word] * PAGE, 0], max_tokens=1, session_id=f"chat {word}")
    server.settled()
    seen = frame(server, lambda seen: seen["tree"]["nodes"] == 3)
    tree = seen["tree"]
    first, *others = tree["branches"]
    assert (first["parent"], first["start"], first["tokens"]) == (-1, 0, len(stem))
    assert tree["width"] == first["width"] == len(stem) + 2 * PAGE
    assert [(one["parent"], one["start"], one["width"]) for one in others] == [
        (0, len(stem), PAGE)
    ] * 2
    assert first["tiers"] == ["device", "host"]
    assert (first["sessions"], sorted(first["names"])) == (2, ["chat 8", "chat 9"])
    assert first["hits"] >= 1
    assert abs(seen["time"] - first["used"]) < 60


def test_misses_say_why(watched: Any) -> None:
    server = watched(device_tokens=512, host_tokens=1024)
    server.client.complete([5] * (2 * PAGE) + [6] * 2 * PAGE, max_tokens=1)
    server.client.complete([5] * (2 * PAGE) + [7] * 2 * PAGE, max_tokens=1)
    seen = frame(server, lambda seen: seen["finished"] == 2)
    second, first = seen["misses"]["last"]
    assert second["number"] > first["number"]
    assert (second["cached"], second["prompt"]) == (2 * PAGE, 4 * PAGE)
    assert second["pools"] == [
        {"pool": "kv", "at": 2 * PAGE, "reason": "no prompt with these tokens was kept"}
    ]


def test_requests_are_seen_with_their_state(watched: Any) -> None:
    server = watched(max_running=1)
    asked = {"prompt": [3] * 40, "max_tokens": 2000, "ignore_eos": True}
    running = server.client.start("/v1/completions", **asked)
    until(lambda: server.client.get("/admin/cache").json()["requests"]["running"] == 1)
    waiting = server.client.start("/v1/completions", **{**asked, "prompt": [4] * 40})
    seen = frame(server, lambda seen: seen["requests"]["states"] == {"decode": 1, "queued": 1})
    first, second = seen["requests"]["rows"]
    assert (first["state"], first["prompt"], first["computed"]) == ("decode", 40, 40)
    assert (second["state"], second["output"], second["max_tokens"]) == ("queued", 0, 2000)
    running.leave()
    waiting.leave()
    server.settled()


TEXT = "the cat sat on the mat and then the hat "


def test_no_frame_has_text_of_prompts(watched: Any) -> None:
    server = watched()
    shown = _frame_with_text(server)
    assert "the cat" not in json.dumps(shown)
    assert not shown["server"]["shows_text"]


def test_text_is_shown_if_the_server_may(watched: Any) -> None:
    shown = _frame_with_text(watched(show_text=True))
    assert shown["server"]["shows_text"]
    assert TEXT.startswith(shown["tree"]["branches"][0]["text"][:20])
    assert "the hat" in shown["requests"]["rows"][0]["text"]
    assert any("the cat" in miss["change"] for miss in shown["misses"]["last"] if miss["change"])


def _frame_with_text(server: InProcess) -> Any:
    """A session's second prompt breaks its first one and is running."""
    ask = {"session_id": "chat", "ignore_eos": True}
    server.client.complete(TEXT * 4 + "that is that", max_tokens=1, **ask)
    broken = TEXT * 2 + "that " + TEXT * 2
    running = server.client.start("/v1/completions", prompt=broken, max_tokens=1500, **ask)
    seen = frame(
        server,
        lambda seen: (
            seen["requests"]["rows"]
            and seen["requests"]["rows"][0]["state"] == "decode"
            and seen["tree"]["branches"]
        ),
    )
    assert any(miss["change"] for miss in seen["misses"]["last"])
    running.leave()
    server.settled()
    return seen


def test_storage_and_its_flows_are_seen(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_snapshot, "STATUS_EVERY_S", 0.0)
    server = watched(device_tokens=512, host_tokens=1024, storage="memory:", prefetch_min_tokens=1)
    prompt = [11] * (6 * PAGE + 1)
    server.client.complete(prompt, max_tokens=1)
    seen = frame(server, lambda seen: seen["flows"]["store"]["bytes"] > 0)
    assert seen["storage"]["answers"] and seen["storage"]["state"] == "attached"
    server.settled()
    server.client.post("/admin/flush")
    server.client.complete(prompt, max_tokens=1)
    seen = frame(server, lambda seen: seen["tokens"]["storage"] == 6 * PAGE)
    assert seen["flows"]["fetch"]["bytes"] > 0
    assert seen["ttft"]["origins"]["storage"]["samples"] == 1
    assert seen["saved"]["tokens"] == 6 * PAGE
    assert seen["saved"]["loading_s"] > 0
    frame(server, lambda seen: seen["store"].get("objects") == 6 + SHAPE_MARKS)


def test_viewers_get_the_same_frames_and_a_snapshot_is_taken_once(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = watched()
    snapshots = server.app.live.publisher.snapshots
    taken: list[float] = []
    take = snapshots.take

    def counted(engine: Any) -> Any:
        taken.append(0.0)
        return take(engine)

    monkeypatch.setattr(snapshots, "take", counted)
    with frames(server) as one, frames(server) as other:
        for _ in range(3):
            next(one)
        times = {next(one)["time"] for _ in range(20)}
        seen = {next(other)["time"] for _ in range(20)}
        assert times & seen
        assert next(one)["server"]["viewers"] == 2
    assert len(taken) < 60


def test_nothing_is_computed_without_a_viewer(watched: Any) -> None:
    server = watched()
    frame(server)
    publisher = server.app.live.publisher
    assert publisher.viewers == 0
    server.client.get("/admin/cache")  # Behind all that was still in the engine's inbox.
    before = publisher.snapshots.engine_s
    server.client.complete([5] * 40, max_tokens=20)
    assert publisher.snapshots.engine_s == before


def test_a_stream_ends_with_the_server(serve: Any) -> None:
    server = serve()
    with frames(server) as events:
        next(events)
        server.on_loop(server.service.close)
        for _ in events:
            pass


def test_the_package_has_the_page_and_its_library() -> None:
    root = HERE.parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = declared["tool"]["setuptools"]["package-data"]["kvtide"]
    files = {one.relative_to(root / "kvtide").as_posix() for one in HERE.rglob("*.*")}
    for name in {one for one in files if not one.endswith((".py", ".pyc"))} | {
        "server/live/uplot/LICENSE"
    }:
        assert any(fnmatch(name, pattern) for pattern in patterns), name
