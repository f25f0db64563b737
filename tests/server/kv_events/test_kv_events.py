"""A server with `--kv-events`: its flags, its consumers, its metrics."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvtide
from kvtide.index import Namespace
from kvtide.server.kv_events import publisher
from kvtide.server.kv_events.block_hashes import VllmHashes
from kvtide.server.kv_events.kv_event_settings import KVEventSettings, parse_endpoint
from kvtide.server.kv_events.publisher import Publisher
from kvtide.server.setting_values import SettingsError
from kvtide.server.settings import Settings
from tests.index.building import build
from tests.index.memories import FULL
from tests.processes import free_port
from tests.server.kv_events.consuming import Consumer, held, published, until
from tests.server.serving import PAGE, ForkedChild, InProcess

LOCAL = "tcp://127.0.0.1:0"
PUBLISHES = {"kv_events": LOCAL, "kv_events_replay": LOCAL}


def consumer_of(server: InProcess) -> Consumer:
    assert server.events is not None
    return Consumer(server.events.endpoint, server.events.replay_endpoint)


def metric(server: InProcess, name: str) -> float:
    text = server.client.get("/metrics").body.decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)
    assert found is not None, name
    return float(found[1])


def test_a_consumer_knows_what_a_server_has(serve: Callable[..., InProcess]) -> None:
    server = serve(**PUBLISHES)
    with consumer_of(server) as consumer:
        consumer.connected()
        for number in range(3):
            body = {"prompt": f"{number} says: " + "the cat sat on the mat. " * 20, "max_tokens": 4}
            assert server.client.post("/v1/completions", body).status == 200
        server.settled()
        consumer.until(lambda: held(server.engine.cache.index))
        assert consumer.complaints == []
        assert set(consumer.known) == {("GPU", 0), ("CPU", 0)}
        until(lambda: metric(server, "kvtide_kv_events_waiting") == 0)
        assert metric(server, 'kvtide_kv_events_total{type="BlockStored"}') > 0
        assert metric(server, "kvtide_kv_events_dropped_total") == 0
        assert server.client.post("/admin/flush?tier=all").status == 200
        consumer.until(dict)


@pytest.mark.quick(flags=[()])
@pytest.mark.parametrize("flags", [(), ("--tp", "2"), ("--pp", "2")], ids=" ".join)
def test_a_server_names_what_its_folder_has_until_it_is_killed(
    flags: tuple[str, ...], model_folder: Path, tmp_path: Path
) -> None:
    """A block is there when the objects of all ranks are."""
    live, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    url = f"file://{tmp_path / 'pages'}?cap=1GB&floor=1MB"
    words = ("--port", "0", "--page-tokens", str(PAGE), "--storage", url, *flags)
    tokens = [number % 250 + 3 for number in range(8 * PAGE + 1)]
    stored = {("STORAGE", 0): vllm_numbers(tokens)}
    with Consumer(live, replay) as consumer:
        for life in range(2):
            with ForkedChild(
                (str(model_folder), *words, "--kv-events", live, "--kv-events-replay", replay)
            ) as child:
                client = child.client()
                client.complete(tokens, max_tokens=1)
                flush = partial(client.post, "/admin/flush?tier=all")
                consumer.until(lambda: stored, flush)
                assert consumer.complaints == []
                if life == 0:
                    child.process.kill()
                    consumer.until(dict)
                else:
                    assert client.post("/admin/storage/clear").json()["over"]
                    consumer.until(dict)


def vllm_numbers(tokens: list[int]) -> set[Any]:
    """The hashes of all whole pages, as vLLM publishes them."""
    hashes, names = VllmHashes(), list[bytes]()
    for start in range(0, len(tokens) // PAGE * PAGE, PAGE):
        parent = names[-1] if names else None
        names.append(hashes.of(b"", parent, tuple(tokens[start : start + PAGE]), Namespace()))
    return {published(hashes, name) for name in names}


def test_salted_prompts_are_told_apart(serve: Callable[..., InProcess]) -> None:
    server = serve(**PUBLISHES)
    with consumer_of(server) as consumer:
        consumer.connected()
        for salt in ("one", "two"):
            body = {"prompt": "the cat sat on the mat. " * 20, "max_tokens": 1, "cache_salt": salt}
            assert server.client.post("/v1/completions", body).status == 200
        server.settled()
        consumer.until(lambda: held(server.engine.cache.index))
        assert {event.get("cache_salt") for event in consumer.events} >= {"one", "two"}


def test_without_the_flag_nothing_is_published(server: InProcess) -> None:
    assert server.events is None
    assert not server.engine.cache.index.tree.events.listeners
    assert b"kvtide_kv_events" not in server.client.get("/metrics").body


# -- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["5557", "tcp://host", "udp://host:1", "tcp://h:70000", "tcp://:1"]
)
def test_an_endpoint_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"is '{value}'; use tcp://ADDRESS:PORT")):
        parse_endpoint(value)


@pytest.mark.parametrize("value", ["tcp://*:5557", "tcp://[::1]:5557", "tcp://0.0.0.0:0"])
def test_endpoints_are_addresses_with_a_port(value: str) -> None:
    assert parse_endpoint(value) == value


def test_replays_have_the_next_port_unless_told() -> None:
    assert KVEventSettings("tcp://*:5557").replay_endpoint == "tcp://*:5558"
    assert KVEventSettings("tcp://*:0").replay_endpoint == "tcp://*:0"
    assert KVEventSettings("tcp://*:5557", "tcp://*:9").replay_endpoint == "tcp://*:9"
    with pytest.raises(SettingsError, match="--kv-events-replay"):
        Settings(kv_events="tcp://*:65535")


def test_a_replay_endpoint_alone_is_refused() -> None:
    with pytest.raises(SettingsError, match="which is not given; give both, or drop it"):
        Settings(kv_events_replay=LOCAL)


# -- libraries ------------------------------------------------------------------------------------


def test_only_the_publishers_process_needs_zmq_and_msgpack() -> None:
    """So the cache, the engine and a server that does not publish work without them."""
    importers, users = set(), set()
    for path in Path(kvtide.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if re.search(r"^\s*(import|from) (zmq|msgpack)\b", text, re.M):
            importers.add(path.stem)
        if re.search(r"^\s*from \S+\.(publisher_process|broadcast|event_encoding)\b", text, re.M):
            users.add(path.stem)
    assert importers == {"broadcast", "publisher_process", "event_encoding", "kv_event_cost"}
    assert users == {"broadcast", "publisher_process", "kv_event_cost"}


def test_the_process_does_without_torch() -> None:
    """It starts in a moment, and takes little memory."""
    loads = "import sys, kvtide.server.kv_events.publisher_process; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True).stdout
    assert "zmq" in loaded.split() and "torch" not in loaded.split()


def test_a_server_that_cannot_publish_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "LIBRARIES", ("zmq", "no_such_library"))
    with pytest.raises(SettingsError, match=r"install kvtide\[events\]"):
        Publisher(KVEventSettings(LOCAL, LOCAL), build(FULL), lambda: None)
