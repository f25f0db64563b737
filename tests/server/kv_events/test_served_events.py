"""Servers whose events an indexer follows: it knows which server has a prompt, and how much."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtide.spec import Tier
from tests.server.kv_events.indexing import MAX_S, Indexer, install
from tests.server.serving import PAGE, VOCABULARY, InProcess

pytestmark = pytest.mark.full
LOCAL = "tcp://127.0.0.1:0"
SMALL = {"device_tokens": 1024, "host_tokens": 2048}


def matched(server: InProcess, tokens: list[int]) -> int:
    """The prompt's tokens on the device, by the server's own cache."""

    def match(engine: object) -> int:
        cache = server.engine.cache
        return cache.match(cache.prompt([*tokens, 0]), Tier.DEVICE).tokens

    found: int = server.on_loop(lambda: server.service.call(match))
    return found


def test_an_indexer_knows_which_server_has_a_prompt(
    serve: Callable[..., InProcess], tmp_path: Path
) -> None:
    """Small tiers, so that much is evicted meanwhile."""
    chance = random.Random(0)
    servers = [serve(kv_events=LOCAL, kv_events_replay=LOCAL, **SMALL) for _ in range(2)]
    with Indexer(install(), tmp_path) as indexer:
        for number, server in enumerate(servers):
            assert server.events is not None
            indexer.register(number, server.events.endpoint, server.events.replay_endpoint, PAGE)
        prompts: list[list[int]] = []
        for _ in range(40):
            known = chance.choice(prompts)[: chance.randrange(200)] if prompts else []
            prompts.append([*known, *chance.choices(range(3, VOCABULARY), k=chance.randrange(200))])
            body = {"prompt": [*prompts[-1], 5], "max_tokens": 2, "ignore_eos": True}
            assert chance.choice(servers).client.post("/v1/completions", body).status == 200
        for server in servers:
            server.settled()
        wanted = [[matched(server, prompt) for prompt in prompts] for server in servers]
        assert len({count for counts in wanted for count in counts}) > 5
        deadline = time.monotonic() + MAX_S
        while True:
            answers = [
                [indexer.cached(number, prompt) for prompt in prompts] for number in range(2)
            ]
            if [[device for device, _, _ in rows] for rows in answers] == wanted:
                break
            assert time.monotonic() < deadline, indexer.printed[-3000:]
            time.sleep(0.1)
        assert any(host > device for rows in answers for device, host, _ in rows)
