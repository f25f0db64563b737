"""Two servers behind a router: it knows prefixes, or they take turns; with a store, and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.handoff.routers.real_routers import KINDS, Router, RouterKind, install
from tests.server.handoff.server_pairs import ServerProcess
from tests.server.serving import PAGE
from tests.server.talking import Client, Json
from tests.storage.servers import s3_in_memory

pytestmark = pytest.mark.full
ROUTERS = [kind for kind in KINDS if kind.package in ("smg", "vllm-router")]
CONVERSATIONS, TURNS = 3, 5


@dataclass(frozen=True)
class Cached:
    """Prompt tokens that were asked for, and those that a server had."""

    prompt: int
    cached: int

    @property
    def share(self) -> float:
        return self.cached / self.prompt


@pytest.fixture(scope="session")
def routers() -> Path:
    return install()


@contextmanager
def two_servers(model: Path, *words: str) -> Iterator[list[ServerProcess]]:
    """Of one model."""
    with ExitStack() as stack:
        common = (str(model), "--deterministic", "--page-tokens", str(PAGE), "--name", "tiny")
        started = [
            stack.enter_context(closing(ServerProcess((*common, *words), {}))) for _ in range(2)
        ]
        assert [server.client.get("/health").status for server in started] == [200, 200]
        yield started


def converse(client: Client, servers: list[ServerProcess]) -> Cached:
    """Conversations take turns; each turn has all messages before it. What is written to a store
    is there before the next turn."""
    prompt = cached = 0
    messages: list[list[dict[str, object]]] = [[] for _ in range(CONVERSATIONS)]
    for turn in range(TURNS):
        for number, history in enumerate(messages):
            text = f"{number} asks for the {turn}th time: " + "the cat sat on the mat. " * 12
            history.append({"role": "user", "content": text})
            found = ask(client, history)
            message = found["choices"][0]["message"]
            history.append({"role": "assistant", "content": message["content"]})
            prompt += found["usage"]["prompt_tokens"]
            cached += found["usage"]["prompt_tokens_details"]["cached_tokens"]
        for server in servers:
            server.until(is_written)
    return Cached(prompt, cached)


def is_written(report: Json) -> bool:
    return not report["in_flight"] and not report["storage"].get("waiting_pages")


def ask(client: Client, messages: list[dict[str, object]]) -> Json:
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    headers = {"content-type": "application/json"}
    reply = client.send("POST", "/v1/chat/completions", json.dumps(body).encode(), **headers)
    assert reply.status == 200, reply.body
    return reply.json()


def cached_share(
    routers: Path, kind: RouterKind, logs: Path, servers: list[ServerProcess], policy: str
) -> float:
    """Of the prompt tokens of new conversations, with servers that have nothing at first."""
    for server in servers:
        assert server.client.post("/admin/flush?tier=all").status == 200
    with Router.plain(routers, kind, logs, [server.url for server in servers], policy) as router:
        found = converse(router.client(), servers)
    print(f"{kind}, {policy}: {found.cached:,} of {found.prompt:,} prompt tokens cached")
    return found.share


@pytest.mark.parametrize("kind", ROUTERS, ids=str)
def test_a_router_that_knows_prefixes_raises_the_cached_share(
    routers: Path, model_folder: Path, kind: RouterKind, tmp_path: Path
) -> None:
    with two_servers(model_folder, "--storage", "none") as servers:
        turns, aware = (
            cached_share(routers, kind, tmp_path, servers, policy)
            for policy in ("round_robin", "cache_aware")
        )
    assert aware > 1.3 * turns


def test_one_store_below_two_servers_makes_up_for_turns(
    routers: Path, model_folder: Path, tmp_path: Path
) -> None:
    kind = ROUTERS[0]
    with two_servers(model_folder, "--storage", "none") as servers:
        alone = cached_share(routers, kind, tmp_path, servers, "round_robin")
    store = s3_in_memory(tmp_path, "pages", "key", "secret-of-the-key")
    try:
        url = f"s3://key:secret-of-the-key@pages/kv?endpoint=http://127.0.0.1:{store.port}"
        patient = ("--prefetch-policy", "wait_complete", "--prefetch-min-tokens", str(PAGE))
        with two_servers(model_folder, "--storage", url, *patient) as servers:
            shared = cached_share(routers, kind, tmp_path, servers, "round_robin")
    finally:
        store.stop()
    assert shared > 1.3 * alone
