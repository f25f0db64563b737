"""A prompt is packed and checked once, off the engine thread, however many choices share it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvtide.engine import request as request_module
from kvtide.index import keys
from kvtide.server.request_parsing import RequestParser, read_json
from tests.server.serving import InProcess
from tests.server.talking import Client

ENGINE_THREAD = "kvtide-engine"


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Every packing of more than one token id: how many, and on which thread."""
    seen: list[tuple[int, str]] = []
    pack = keys.pack

    def counted(tokens: Any) -> bytes:
        if not isinstance(tokens, bytes) and len(tokens) > 1:
            seen.append((len(tokens), threading.current_thread().name))
        return pack(tokens)

    monkeypatch.setattr(keys, "pack", counted)
    monkeypatch.setattr(request_module, "pack", counted)
    return seen


@pytest.mark.parametrize("n", [1, 4])
def test_a_prompt_is_packed_once_off_the_engine_thread(
    client: Client, packings: list[tuple[int, str]], n: int
) -> None:
    assert len(client.complete([5, 6, 7], n=n, max_tokens=2)["choices"]) == n
    assert [count for count, _ in packings] == [3]
    assert ENGINE_THREAD not in {thread for _, thread in packings}


def test_every_prompt_is_packed_once(client: Client, packings: list[tuple[int, str]]) -> None:
    client.complete([[5] * 20, [6] * 30], n=2, max_tokens=1, echo=True, logprobs=1)
    assert [count for count, _ in packings] == [20, 30]
    packings.clear()
    client.chat("the cat", n=4, max_tokens=1)
    assert len(packings) == 1


def test_the_engine_thread_checks_nothing_again(
    server: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    check = server.engine.check

    def noted(params: Any) -> Any:
        threads.append(threading.current_thread().name)
        return check(params)

    monkeypatch.setattr(server.engine, "check", noted)
    server.client.complete([5, 6, 7], n=4, max_tokens=1)
    assert len(threads) == 1 and threads[0] != ENGINE_THREAD


def test_choices_share_the_packed_tokens_and_differ_in_their_seeds(server: InProcess) -> None:
    parser = RequestParser(server.engine, "tiny-0.1", seeded=True)
    parsed = parser.completion(read_json(b'{"prompt": [[5, 6], [7]], "n": 3}'))
    assert [choice.params.tokens for choice in parsed.choices] == [(5, 6)] * 3 + [(7,)] * 3
    first, *others = parsed.choices[:3]
    assert all(choice.packed is first.packed for choice in others)
    assert [choice.params.sampling.seed for choice in parsed.choices] == [0, 1, 2, 0, 1, 2]
