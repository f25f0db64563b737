"""Real models answer 200 questions through a prefill and a decode server as one server does."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvtide.models.default_model import default_model
from tests.gemma3_file import gemma3_file
from tests.server.handoff.question_set import Question, prompts, questions
from tests.server.handoff.server_pairs import (
    COMMON,
    Json,
    ServerPair,
    ServerProcess,
    answer,
    ask,
    handoff_of,
)
from tests.server.talking import Client

CLIENTS = 2
RIGHT = {"smollm2": 60, "gemma3": 20}
"""Answers that must be right: models of this size know some. SmolLM2 gives 69, Gemma 3 gives 28."""


def answers(client: Client, texts: list[str]) -> list[Json]:
    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(lambda text: ask(client, text, max_tokens=6, stop=["\n"]), texts))


def right(found: list[Json], asked: list[Question]) -> int:
    pairs = zip(found, asked, strict=True)
    return sum(one["choices"][0]["text"].strip().startswith(q.answer) for one, q in pairs)


@pytest.mark.full
@pytest.mark.parametrize("name", RIGHT)
def test_a_pair_of_servers_is_as_right_as_one(name: str, pytestconfig: pytest.Config) -> None:
    model: Path = default_model() if name == "smollm2" else gemma3_file(pytestconfig)
    asked = questions()
    assert len(asked) == len(set(asked)) == 200
    texts = prompts(asked)
    plain = (*COMMON, "--speculate", "none")
    with closing(ServerProcess((str(model), *plain), {})) as alone:
        expected = answers(alone.client, texts)
    with ServerPair(model, common=plain) as pair:
        found = answers(pair.decode.client, texts)
        states = Counter(handoff_of(one).get("state", "none") for one in found)
        pair.settled()
    count = right(expected, asked)
    print(f"{name}: {count} of 200 right; handoffs {dict(states)}")
    assert [answer(one) for one in found] == [answer(one) for one in expected]
    assert count >= RIGHT[name] and count == right(found, asked)
    assert states["decoding"] >= 150 and not states["failed"], states
