"""Several decode servers and several prefill servers, which all know each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtide.server.settings import Settings
from tests.server.handoff.server_pairs import Json, answer, ask, handoff_of
from tests.server.serving import PAGE, VOCABULARY, InProcess

PAGES = 4
Serve = Callable[..., InProcess]

_rng = random.Random(5)


def new_prompts(count: int) -> list[list[int]]:
    return [
        [_rng.randrange(5, VOCABULARY - 5) for _ in range(PAGES * PAGE + 3)] for _ in range(count)
    ]


def handoff(server: InProcess) -> Json:
    found: Json = server.client.get("/admin/cache").json()["handoff"]
    return found


def handed_over(server: InProcess) -> int:
    return int(handoff(server)["outgoing_ended"].get("handed_over", 0))


class Stage:
    """Two of each, and one by itself."""

    def __init__(self, serve: Serve, model: Path) -> None:
        common = {"model": str(model), "port": 0, "page_tokens": PAGE, "storage": "none"}
        self.mortal = InProcess(Settings(role="prefill", deterministic=True, **common))
        self.prefill = [self.mortal, serve(role="prefill", deterministic=True)]
        urls = ",".join(one.url for one in self.prefill)
        receives = {"role": "decode", "prefill_from": urls, "handoff_min_tokens": 16}
        self.decode = [serve(deterministic=True, **receives) for _ in range(2)]
        self.alone = serve(deterministic=True)

    def asked(self, count: int = 4) -> list[str]:
        """How handoffs of new prompts end; every answer is that of one server."""
        prompts = new_prompts(count)
        servers = [self.decode[number % 2] for number in range(count)]
        with ThreadPoolExecutor(2) as clients:
            found = list(clients.map(lambda s, p: ask(s.client, p), servers, prompts))
        expected = [answer(ask(self.alone.client, prompt)) for prompt in prompts]
        assert [answer(one) for one in found] == expected
        return [str(handoff_of(one).get("state")) for one in found]


def test_decode_servers_share_prefill_servers_and_outlive_one(
    serve: Serve, model_folder: Path
) -> None:
    on = Stage(serve, model_folder)
    counts = [0, 0]
    while not all(counts):
        assert on.asked() == ["decoding"] * 4 and sum(counts) < 80
        for server in (*on.prefill, *on.decode):
            server.settled()
        before, counts = counts, [handed_over(one) for one in on.prefill]
        assert sum(counts) == sum(before) + 4
    on.mortal.close()
    on.asked()
    assert on.asked() == ["decoding"] * 4
    for server in (on.prefill[1], *on.decode):
        server.settled()
