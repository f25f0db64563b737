"""Conversations that clients hold with a server over HTTP, and what has to be heard.

Three groups of three branches, three requests at a time. Every log-probability is compared, to the
last bit, with an engine that keeps nothing; and of models that keep the whole history, each turn
has to find all whole pages of the turn before, wherever that was served.
"""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvtide.engine import Engine, RequestParams, SamplingParams
from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import open_engine
from kvtide.spec import ALL
from tests.models.tiny import VOCABULARY

PAGE = 16
ANSWER = 6
TOP_LOGPROBS = 3
FLAGS = (
    f"--deterministic --page-tokens {PAGE} --device-tokens 384 --host-ratio 8 "
    "--tokens-per-checkpoint 64 --chunk-tokens 64 "
    "--prefetch-policy wait_complete --prefetch-min-tokens 1"
).split()
"""A device so small that pages go to the host and come back; requests that wait for storage."""

Json = dict[str, Any]
Scored = list[tuple[int, float, dict[str, float]]]


def post(url: str, body: Json) -> Json:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: Json = json.load(response)
    return answer


def get(url: str) -> Json:
    with urllib.request.urlopen(url, timeout=60) as response:
        answer: Json = json.load(response)
    return answer


def complete(url: str, tokens: Sequence[int], count: int = ANSWER) -> Json:
    return post(
        f"{url}/v1/completions",
        {
            "prompt": list(tokens),
            "max_tokens": count,
            "temperature": 0,
            "logprobs": TOP_LOGPROBS,
            "return_token_ids": True,
            "return_cached_tokens_details": True,
        },
    )


def scored(answer: Json) -> Scored:
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    return list(
        zip(choice["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )


def computed(engine: Engine, tokens: Sequence[int], count: int = ANSWER) -> Scored:
    """What an engine says that uses nothing it has kept."""
    sampling = SamplingParams(logprobs=TOP_LOGPROBS)
    request = engine.submit(RequestParams(tuple(tokens), count, sampling, recompute=True))
    while not engine.idle:
        engine.step()
    return [
        (chosen.token, chosen.logprob, {f"token_id:{i}": p for i, p in chosen.top})
        for chosen in request.output
    ]


class Talks:
    """Three groups of three conversations, each a turn further with every round.

    found    tokens of their prompts by where they were found
    fetches  how often storage was asked for a prompt, by what came of it
    """

    def __init__(self, family: str, folder: Path) -> None:
        self.found: Counter[str] = Counter()
        self.fetches: Counter[str] = Counter()
        self._rng = random.Random(7)
        roots = [self.text(70) for _ in range(3)]
        self._branches = [root + self.text(11) for root in roots for _ in range(3)]
        self._known = [0] * len(self._branches)
        self._family = family
        settings = Settings(model=str(folder), page_tokens=PAGE, deterministic=True, host_ratio=0.0)
        self._alone = open_engine(settings).engine
        anchors = self._alone.cache.memory.anchors
        self._histories = all(anchor.reuse.reach is ALL for anchor in anchors)

    def text(self, count: int) -> list[int]:
        return [self._rng.randrange(1, VOCABULARY) for _ in range(count)]

    def round(self, url: str, clients: ThreadPoolExecutor) -> None:
        """A turn of every conversation, three at a time."""
        order = self._rng.sample(range(9), 9)
        for numbers in (order[:3], order[3:6], order[6:]):
            prompts = [self._branches[number] for number in numbers]
            answers = clients.map(lambda tokens: complete(url, tokens), prompts)
            for number, answer in zip(numbers, answers, strict=True):
                self._heard(number, answer)

    def _heard(self, number: int, answer: Json) -> None:
        tokens, prompt = scored(answer), self._branches[number]
        assert tokens == computed(self._alone, prompt), (self._family, number)
        usage = answer["usage"]
        found = Counter(usage["cached_tokens_details"])
        outcomes = {fetch["outcome"] for fetch in usage["storage_fetches"]}
        assert outcomes <= {"fetched", "nothing", "declined"}
        if self._histories and "declined" not in outcomes:
            # A branch may find more than its own: what it has in common with another.
            assert found.total() >= self._known[number], "not all whole pages were found"
        self.found += found
        self.fetches.update(outcomes)
        # The last generated token was never computed.
        self._known[number] = (len(prompt) + len(tokens) - 1) // PAGE * PAGE
        self._branches[number] = prompt + [token for token, *_ in tokens] + self.text(9)

    def close(self) -> None:
        self._alone.cache.close()


def acknowledged(url: str) -> Json:
    """The cache's report once all that was computed has been stored."""
    deadline = time.monotonic() + 60
    while True:
        report = get(f"{url}/admin/cache")
        if not (report["in_flight"] or report["storage"]["waiting_pages"]):
            return report
        assert time.monotonic() < deadline, report
        time.sleep(0.01)
