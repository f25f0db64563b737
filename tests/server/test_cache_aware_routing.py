"""Routers that know prefixes, in front of two servers, find more in their caches than turns do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.handoff.routers import KINDS, Router, RouterKind, install
from tests.server.handoff.server_pairs import COMMON, ServerProcess
from tests.server.talking import Client, Json

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


@pytest.fixture
def servers(model_folder: Path) -> Iterator[list[ServerProcess]]:
    """Two of one model, without a store between them."""
    with ExitStack() as stack:
        words = (str(model_folder), *COMMON, "--name", "tiny")
        started = [stack.enter_context(closing(ServerProcess(words, {}))) for _ in range(2)]
        assert [server.client.get("/health").status for server in started] == [200, 200]
        yield started


def converse(client: Client) -> Cached:
    """Conversations take turns; each turn has all messages before it."""
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
    return Cached(prompt, cached)


def ask(client: Client, messages: list[dict[str, object]]) -> Json:
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    headers = {"content-type": "application/json"}
    reply = client.send("POST", "/v1/chat/completions", json.dumps(body).encode(), **headers)
    assert reply.status == 200, reply.body
    return reply.json()


@pytest.mark.parametrize("kind", ROUTERS, ids=str)
def test_a_router_that_knows_prefixes_raises_the_cached_share(
    routers: Path, servers: list[ServerProcess], kind: RouterKind, tmp_path: Path
) -> None:
    urls, shares = [server.url for server in servers], {}
    for policy in ("round_robin", "cache_aware"):
        for server in servers:
            assert server.client.post("/admin/flush?tier=all").status == 200
        with Router.plain(routers, kind, tmp_path, urls, policy) as router:
            found = converse(router.client())
        shares[policy] = found.share
        print(f"{kind}, {policy}: {found.cached:,} of {found.prompt:,} prompt tokens cached")
    assert shares["cache_aware"] > 1.3 * shares["round_robin"], shares
