"""Peers that prove no secret or have other memory, garbage on the port, and prompts kept apart.

A prefill server that is a process of its own, and decode servers in this one. A peer that is
refused learns why: the sentence is in the log and in `/admin/cache`, and prompts are prefilled
where they are decoded.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.server.handoff.server_pairs import (
    COMMON,
    Json,
    ServerProcess,
    answer,
    ask,
    body_of,
    handoff_of,
    read,
)
from tests.server.serving import PAGE, VOCABULARY, InProcess, save_model, save_tokenizer

SECRET = "a secret of the tests that is long enough"
PAGES = 5
Serve = Callable[..., InProcess]

_rng = random.Random(23)
_rooms = itertools.count(1)


def prompt() -> list[int]:
    return [_rng.randrange(5, VOCABULARY - 5) for _ in range(PAGES * PAGE + 3)]


@pytest.fixture(scope="module")
def prefill(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("secrets") / "secret"
    file.write_text(SECRET)
    words = (str(model_folder), *COMMON, "--role", "prefill", "--handoff-secret-file", str(file))
    server = ServerProcess(words, {})
    yield server
    server.close()


@pytest.fixture
def decode(serve: Serve, prefill: ServerProcess, tmp_path: Path) -> Callable[..., InProcess]:
    """A decode server that knows the secret, by default."""

    def opened(secret: str | None = SECRET, **settings: Any) -> InProcess:
        file = tmp_path / "secret"
        file.write_text(secret or "")
        assert prefill.client.get("/health").status == 200
        chosen = {
            "role": "decode",
            "prefill_from": prefill.url,
            "deterministic": True,
            "handoff_min_tokens": 16,
            "handoff_secret_file": str(file) if secret else None,
        }
        return serve(**{**chosen, **settings})

    return opened


def peer_of(server: InProcess) -> Json:
    """What a decode server says of the prefill server."""
    (peer,) = server.client.get("/admin/cache").json()["handoff"]["prefill_servers"].values()
    return dict(peer)


# -- who is let in --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same shapes with other weights."""
    folder = save_tokenizer(save_model(tmp_path_factory.mktemp("models") / "other"))
    file = folder / "model.safetensors"
    weights = {name: tensor * 1.01 for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        ({"secret": "another secret that is long enough"}, "the secrets differ"),
        ({"secret": None}, "the secrets differ"),
        ({"model": "other"}, "fingerprint"),
        ({"page_tokens": 2 * PAGE}, "page"),
        ({"kv_dtype": "bf16"}, "dtype"),
        ({"handoff_transport": "mooncake"}, "transport"),
    ],
    ids=["secret", "no-secret", "weights", "page", "dtype", "transport"],
)
def test_a_peer_that_does_not_fit_is_refused_in_a_sentence(
    decode: Callable[..., InProcess],
    prefill: ServerProcess,
    other_model: str,
    differs: dict[str, Any],
    sentence: str,
) -> None:
    if differs.get("model"):
        differs = {"model": other_model}
    server = decode(**differs)
    refused = prefill.handoff()["decode_servers"]["refused"]
    found = ask(server.client, prompt())
    handoff = handoff_of(found)
    assert handoff["state"] == "failed" and sentence in handoff["reason"]
    peer = peer_of(server)
    assert not peer["connected"] and sentence in peer["last_error"]
    there = prefill.handoff()["decode_servers"]
    assert there["refused"] == refused + 1 and sentence in there["last_error"]
    assert f"channel refused: 127.0.0.1: {there['last_error'].partition(': ')[2]}" in (
        prefill.child.printed
    )
    assert there["connected"] == 0
    server.settled()


def test_garbage_on_the_port_keeps_no_peer_out(
    decode: Callable[..., InProcess], prefill: ServerProcess
) -> None:
    """Bytes that are no hello, halves of one, and more idle connections than handshakes."""
    info = prefill.client.get("/server_info").json()["handoff"]
    place = info["host"], info["port"]
    before = prefill.handoff()["decode_servers"]["refused"]
    with ExitStack() as stack:

        def connected() -> socket.socket:
            return stack.enter_context(socket.create_connection(place, timeout=30))

        web = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n"
        for garbage in (web, os.urandom(4096), b"kvtide" + bytes(100)):
            one = connected()
            one.sendall(garbage)
            with suppress(ConnectionError):
                while one.recv(1 << 16):
                    pass
        for _ in range(40):
            connected().sendall(b"kvt")
        prefill.until(lambda report: report["handoff"]["decode_servers"]["refused"] > before + 3)
    server = decode()
    for _ in range(50):
        found = ask(server.client, prompt())
        if handoff_of(found).get("state") == "decoding":
            break
    else:
        raise AssertionError(f"{peer_of(server)}\n{prefill.child.printed}")
    server.settled()
    assert prefill.settled()["handoff"]["decode_servers"]["connected"] == 1


# -- what is kept apart ---------------------------------------------------------------------------


def test_salts_keep_prompts_apart_on_both_sides(
    decode: Callable[..., InProcess], prefill: ServerProcess
) -> None:
    server, tokens = decode(), prompt()
    whole = PAGES * PAGE

    def asked(**fields: Any) -> tuple[str, int, int]:
        """The state, and the tokens that were handed over and that the prefill server had."""
        found = ask(server.client, tokens, **fields)
        handoff = handoff_of(found)
        cached = sum(handoff["prefill_cached_tokens"].values())
        return handoff["state"], handoff["tokens"], cached

    assert asked(cache_salt="a") == ("decoding", whole, 0)
    assert asked(cache_salt="b") == ("decoding", whole, 0)
    assert asked() == ("decoding", whole, 0)
    assert asked(cache_salt="a") == ("declined", 0, 0)
    assert server.client.post("/admin/flush").status == 200
    assert asked(cache_salt="b") == ("decoding", whole, whole)
    assert asked(cache_salt="c") == ("decoding", whole, 0)
    server.settled()
    prefill.settled()


def routed(prefill: ServerProcess, room: int | None = None) -> Json:
    """The fields of a router."""
    info = prefill.client.get("/server_info").json()["handoff"]
    return {
        "bootstrap_host": info["host"],
        "bootstrap_port": info["port"],
        "bootstrap_room": next(_rooms) if room is None else room,
    }


@pytest.mark.parametrize("differs", [{"prompt": [7] * (PAGES * PAGE + 3)}, {"cache_salt": "x"}])
def test_a_room_of_another_prompt_hands_nothing_over(
    decode: Callable[..., InProcess], prefill: ServerProcess, differs: Json
) -> None:
    """Whatever a client says: it gets no page of a prompt that it does not have."""
    server, tokens = decode(), prompt()
    fields = routed(prefill)
    ask(prefill.client, tokens, **fields)
    asked = {"prompt": tokens, **differs}
    handoff = handoff_of(ask(server.client, asked.pop("prompt"), **asked, **fields))
    assert handoff["state"] == "failed" and "another prompt or namespace" in handoff["reason"]
    assert handoff["tokens"] == 0
    server.settled()
    prefill.settled()


def test_a_router_may_send_a_room_again(
    decode: Callable[..., InProcess], prefill: ServerProcess
) -> None:
    """The same requests once more, before, while and after the handoff."""
    server, tokens = decode(), prompt()
    expected = answer(ask(server.client, tokens, cache_salt="alone"))
    fields = routed(prefill)
    body = body_of(tokens, **fields)
    waiting = [server.client.start("/v1/completions", **body) for _ in range(2)]
    server.until(lambda report: report["requests"]["waiting"] == 2)
    first = prefill.client.post("/v1/completions", {**body, "max_tokens": 1})
    assert first.status == 200
    assert [answer(read(each)) for each in waiting] == [expected] * 2
    again = ask(server.client, tokens, **fields)
    assert answer(again) == expected and handoff_of(again)["state"] == "declined"
    prefill.settled()
    server.settled()


def test_a_room_that_waits_for_its_peer_takes_no_second_request(
    decode: Callable[..., InProcess], prefill: ServerProcess
) -> None:
    server, tokens, fields = decode(), prompt(), routed(prefill)
    ask(prefill.client, tokens, **fields)
    refused = prefill.client.post("/v1/completions", body_of(tokens, **fields))
    assert refused.status == 400 and "is in use by another request" in refused.problem
    found = ask(server.client, tokens, **fields)
    assert handoff_of(found)["state"] == "decoding"
    server.settled()
    prefill.settled()
