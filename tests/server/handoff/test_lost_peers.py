"""Servers of a handoff that are killed or frozen, and clients that hang up, at every state, over
every transport.

The link is slow, so that a handoff can be caught at any state. Whatever happens to the prefill
server, clients of the decode server get the answer of one server. Whatever happens to either, the
other one serves on, and gives back all that it held for its peer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

from kvtide.server.settings import Settings
from kvtide.transfer.peer.transport_registry import TRANSPORTS
from tests.server.handoff.server_pairs import (
    COMMON,
    LOST,
    Json,
    ServerPair,
    answer,
    ask,
    handoff_of,
    read,
)
from tests.server.serving import PAGE, VOCABULARY, InProcess
from tests.transfer.peer.libraries import needs

STATES = ("offered", "reserved", "streaming", "landed", "decoding")
INFORMED = ("reserved", "streaming")
"""The prefill server knows slots of the decode server, and may write there."""
PAGE_BYTES = 4096
CHUNK_PAGES = 4
CHUNK_S = 0.4
"""How long the pages of a prefill chunk take over the link."""
RATE = int(CHUNK_PAGES * PAGE_BYTES / CHUNK_S)
TIMEOUT_S = 4
FEW, SOME, MANY = 5, 24, 60
"""Pages: of a prompt that goes over at once, of one that takes a second part of the sender's, and
of one that takes seconds."""
LONG = 400

_rng = random.Random(11)


def prompt(pages: int) -> list[int]:
    """A new one, with a tail of half a page."""
    return [_rng.randrange(5, VOCABULARY - 5) for _ in range(pages * PAGE + PAGE // 2)]


@pytest.fixture(scope="module")
def alone(model_folder: Path) -> Iterator[InProcess]:
    """One server, which prefills and decodes."""
    settings = Settings(
        model=str(model_folder), port=0, page_tokens=PAGE, storage="none", deterministic=True
    )
    server = InProcess(settings)
    yield server
    server.close()


def slow_pair(model: Path, transport: str) -> ServerPair:
    timeout = ("--handoff-timeout-seconds", str(TIMEOUT_S))
    chunk = ("--chunk-tokens", str(CHUNK_PAGES * PAGE))
    return ServerPair(
        model,
        prefill_flags=(*timeout, *chunk, "--handoff-bytes-per-second", str(RATE)),
        decode_flags=(*timeout, "--max-running", "2"),
        common=(*COMMON, "--handoff-transport", transport),
    )


slow = pytest.mark.full
CANNOT_REVOKE = ("shm",)
"""A frozen prefill server keeps its slots over these."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "shm" else slow) for name in TRANSPORTS],
)
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    needs(name)
    return name


@pytest.fixture(scope="module")
def servers(model_folder: Path, transport: str) -> Iterator[ServerPair]:
    with slow_pair(model_folder, transport) as pair:
        yield pair


@pytest.fixture
def pair(servers: ServerPair) -> Iterator[ServerPair]:
    servers.restore()
    servers.until_handed_over(lambda: prompt(FEW))
    yield servers
    servers.restore()
    servers.settled()


class Caught:
    """A request of the decode server that has reached a state, and others that keep it there."""

    def __init__(self, pair: ServerPair, state: str) -> None:
        self.pair, self.state = pair, state
        self.count = LONG if state == "decoding" else 8
        self.prompt = prompt({"streaming": MANY, "reserved": SOME}.get(state, FEW))
        self._others = ExitStack()

    def __enter__(self) -> Self:
        decode = self.pair.decode
        if self.state == "offered":  # Others have all the rows for tails.
            for number in (1, 2):
                self._occupy(prompt(MANY))
                decode.until_state("streaming", number)
        if self.state == "reserved":  # All of it is computed, and goes over in one job.
            ask(self.pair.prefill.client, self.prompt, max_tokens=1)
        if self.state == "landed":  # No other may run.
            for number in (1, 2):
                self._occupy(prompt(0), max_tokens=3000)
                decode.until(lambda report, n=number: report["requests"]["running"] == n)
        self.request = self.pair.asking(self.prompt, max_tokens=self.count)
        if self.state == "decoding":
            decode.until(lambda report: report["requests"]["running"])
        else:
            decode.until_state(self.state)
        return self

    def _occupy(self, tokens: list[int], **fields: object) -> None:
        self._others.callback(self.pair.asking(tokens, stream=True, **fields).leave)

    def release(self) -> None:
        """The others hang up."""
        self._others.close()

    def __exit__(self, *_: object) -> None:
        self.release()
        self.request.leave()


def answered(caught: Caught, alone: InProcess) -> Json:
    """The client gets what one server would answer."""
    caught.release()
    found = read(caught.request)
    assert answer(found) == answer(ask(alone.client, caught.prompt, max_tokens=caught.count))
    return found


def served(pair: ServerPair, alone: InProcess) -> Json:
    tokens = prompt(FEW)
    found = ask(pair.decode.client, tokens)
    assert answer(found) == answer(ask(alone.client, tokens))
    return found


# -- clients --------------------------------------------------------------------------------------


@pytest.mark.quick(state=["streaming"])
@pytest.mark.parametrize("state", STATES)
def test_a_client_that_hangs_up_leaves_nothing_behind(
    pair: ServerPair, alone: InProcess, state: str
) -> None:
    with Caught(pair, state) as caught:
        caught.request.leave()
    pair.settled()
    served(pair, alone)


# -- the prefill server ---------------------------------------------------------------------------


@pytest.mark.quick(state=["streaming"])
@pytest.mark.parametrize("state", STATES)
def test_a_prefill_server_that_is_killed_costs_no_answer(
    pair: ServerPair, alone: InProcess, state: str
) -> None:
    with Caught(pair, state) as caught:
        pair.prefill.kill()
        found = answered(caught, alone)
    if state in INFORMED:
        assert handoff_of(found)["state"] == "failed"
    pair.decode.settled()
    served(pair, alone)
    pair.restart_prefill()
    pair.until_handed_over(lambda: prompt(FEW))


@pytest.mark.full
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("ends", ["thawed", "killed"])
def test_a_prefill_server_that_is_frozen_keeps_its_slots_until_it_is_silent(
    pair: ServerPair, alone: InProcess, transport: str, state: str, ends: str
) -> None:
    """It loses its access to them where the transport can revoke it."""
    with Caught(pair, state) as caught:
        pair.prefill.freeze()
        found = answered(caught, alone)
    report = pair.decode.until(lambda report: not report["requests"]["running"])
    assert report["violations"] == []
    if state in INFORMED:
        assert handoff_of(found)["state"] == "failed"
        if transport in CANNOT_REVOKE:
            assert report["handoff"]["quarantined"]["slots"] > 0
        else:
            pair.decode.settled()
    assert handoff_of(served(pair, alone)).get("state") != "decoding"
    if ends == "thawed":
        pair.prefill.thaw()
    else:
        pair.prefill.kill()
        pair.restart_prefill()
    pair.settled()
    pair.until_handed_over(lambda: prompt(FEW))


# -- the decode server ----------------------------------------------------------------------------


@pytest.mark.quick(state=["streaming"])
@pytest.mark.parametrize("state", STATES)
def test_a_decode_server_that_is_killed_leaves_nothing_behind(
    pair: ServerPair, alone: InProcess, state: str
) -> None:
    with Caught(pair, state) as caught:
        pair.decode.kill()
        with pytest.raises(LOST):
            read(caught.request)
    pair.prefill.settled()
    tokens = prompt(FEW)
    assert answer(ask(pair.prefill.client, tokens)) == answer(ask(alone.client, tokens))
    pair.restart_decode()
    pair.until_handed_over(lambda: prompt(FEW))


@pytest.mark.full
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("ends", ["thawed", "killed"])
def test_a_decode_server_that_is_frozen_does_not_hold_the_prefill_server(
    pair: ServerPair, alone: InProcess, state: str, ends: str
) -> None:
    with Caught(pair, state) as caught:
        pair.decode.freeze()
        pair.prefill.settled()
        tokens = prompt(FEW)
        assert answer(ask(pair.prefill.client, tokens)) == answer(ask(alone.client, tokens))
        if ends == "thawed":
            pair.decode.thaw()
            answered(caught, alone)
        else:
            pair.decode.kill()
            with pytest.raises(LOST):
                read(caught.request)
            pair.restart_decode()
    pair.settled()
    pair.until_handed_over(lambda: prompt(FEW))


# -- both -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("state", INFORMED)
def test_slots_of_a_dead_prefill_server_are_revoked_before_they_are_used_again(
    pair: ServerPair, alone: InProcess, transport: str, state: str
) -> None:
    """It dies while the decode server is frozen, and bytes wait in that one's sockets."""
    (address,) = (name for name, peer in peers(pair).items() if peer["connected"])
    before = peers(pair)[address]["revocations"]
    with Caught(pair, state) as caught:
        pair.decode.freeze()
        pair.prefill.kill()
        pair.decode.thaw()
        found = answered(caught, alone)
    assert handoff_of(found)["state"] == "failed"
    pair.decode.settled()
    revoked = peers(pair)[address]["revocations"] - before
    assert revoked == 0 if transport in CANNOT_REVOKE else revoked > 0
    served(pair, alone)


def peers(pair: ServerPair) -> dict[str, Json]:
    """The prefill servers as the decode server sees them, by address."""
    found: dict[str, Json] = pair.decode.handoff()["prefill_servers"]
    return found
