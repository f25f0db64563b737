"""Over HTTP, with the server as a process of its own: what is restored is what was computed.

The conversations of `tests/engine/test_restore.py`, as clients would hold them: three groups of
three branches, three requests at a time, on a device so small that pages go to the host and come
back. Every log-probability is compared, to the last bit, with an engine that keeps nothing.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtide.engine import Ask, Engine, Sampling
from kvtide.server.client import serving
from kvtide.server.opening import open_engine
from kvtide.server.settings import Settings
from tests.models.tiny import VOCABULARY, oracle

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_oss", "falcon_h1")
PAGE = 16
ANSWER = 6
LIKELIEST = 3

Json = dict[str, Any]
Told = list[tuple[int, float, dict[str, float]]]


def post(url: str, body: Json) -> Json:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: Json = json.load(response)
    return answer


def get(url: str) -> Json:
    with urllib.request.urlopen(url, timeout=60) as response:
        answer: Json = json.load(response)
    return answer


def complete(url: str, tokens: Sequence[int]) -> Json:
    return post(
        f"{url}/v1/completions",
        {
            "prompt": list(tokens),
            "max_tokens": ANSWER,
            "temperature": 0,
            "logprobs": LIKELIEST,
            "return_token_ids": True,
            "return_cached_tokens_details": True,
        },
    )


def told(answer: Json) -> Told:
    (choice,) = answer["choices"]
    said = choice["logprobs"]
    return list(zip(choice["token_ids"], said["token_logprobs"], said["top_logprobs"], strict=True))


def computed(engine: Engine, tokens: Sequence[int]) -> Told:
    """What an engine says that uses nothing it has kept."""
    sampling = Sampling(logprobs=LIKELIEST)
    request = engine.submit(Ask(tuple(tokens), ANSWER, sampling, recompute=True))
    while not engine.idle:
        engine.step()
    return [
        (chosen.token, chosen.logprob, {f"token_id:{i}": p for i, p in chosen.top})
        for chosen in request.output
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_over_http_are_answered_as_if_nothing_were_kept(
    family: str, tmp_path: Path
) -> None:
    oracle(family).save_pretrained(tmp_path)
    flags = f"--deterministic --page-tokens {PAGE} --device-tokens 384 --host-ratio 8 "
    flags += "--tokens-per-checkpoint 64 --chunk-tokens 64"
    alone = open_engine(
        Settings(model=str(tmp_path), page_tokens=PAGE, deterministic=True, host_ratio=0.0)
    ).engine
    rng = random.Random(7)

    def text(count: int) -> list[int]:
        return [rng.randrange(1, VOCABULARY) for _ in range(count)]

    roots = [text(70) for _ in range(3)]
    branches = [root + text(11) for root in roots for _ in range(3)]
    found = {"device": 0, "host": 0, "storage": 0}
    with serving([str(tmp_path), *flags.split()]) as server, ThreadPoolExecutor(3) as clients:
        for _ in range(2):
            order = rng.sample(range(9), 9)
            for numbers in (order[:3], order[3:6], order[6:]):
                prompts = [branches[number] for number in numbers]
                answers = clients.map(lambda tokens: complete(server.url, tokens), prompts)
                for number, answer in zip(numbers, answers, strict=True):
                    said = told(answer)
                    assert said == computed(alone, branches[number]), (family, number)
                    branches[number] += [token for token, *_ in said] + text(9)
                    for tier, tokens in answer["usage"]["cached_tokens_details"].items():
                        found[tier] += tokens
        report = get(f"{server.url}/admin/cache")
    assert server.process.returncode == 0
    assert found["host"] > 0 and report["moved_bytes"]["load"] > 0, "nothing came from the host"
    assert report["violations"] == [] and report["requests"]["running"] == 0
    alone.cache.close()
