"""Connections to a channel's port that are no peers'."""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from kvtide.transfer.peer import channel
from kvtide.transfer.peer.channel import Channel, Listener, WireMessage, connect

SECRET = b"a secret of peers"
MAX_S = 60.0


@pytest.fixture
def taken() -> list[Channel]:
    return []


@pytest.fixture
def listener(taken: list[Channel]) -> Iterator[Listener]:
    def answer(hello: WireMessage) -> WireMessage:
        return {"to": hello["from"]}

    listening = Listener("127.0.0.1", 0, answer, taken.append, secret=SECRET, timeout_s=MAX_S)
    yield listening
    listening.close()
    for one in taken:
        one.close()


def dial(listener: Listener) -> socket.socket:
    return socket.create_connection((listener.host, listener.port), timeout=MAX_S)


def meet(listener: Listener, taken: list[Channel]) -> None:
    """A peer comes; by then the listener has accepted all that came before it."""
    before = len(taken)
    met = connect(listener.host, listener.port, {"from": "a"}, secret=SECRET, timeout_s=MAX_S)
    assert met.hello == {"to": "a"}
    met.close()
    wait(lambda: len(taken) == before + 1)


def wait(wanted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MAX_S
    while not wanted():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.001)


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_closes_without_a_byte_is_not_refused(
    listener: Listener, taken: list[Channel], caplog: pytest.LogCaptureFixture, reset: bool
) -> None:
    """As smg checks for an open port; more of them than handshakes that may run at a time."""
    for number in range(2 * channel.MAX_HANDSHAKES):
        with dial(listener) as probe:
            if reset:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                probe.shutdown(socket.SHUT_WR)
                assert probe.recv(1) == b"", f"connection {number} is closed without a word"
        if reset:
            meet(listener, taken)
    meet(listener, taken)
    assert (listener.refused, listener.last_refusal) == (0, "")
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_a_connection_that_says_something_else_is_refused(
    listener: Listener, taken: list[Channel], caplog: pytest.LogCaptureFixture
) -> None:
    with dial(listener) as stranger:
        stranger.sendall(b"k")
    wait(lambda: listener.refused == 1)
    assert listener.last_refusal == "127.0.0.1: the peer closed the connection"
    with dial(listener) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost:9000\r\nAccept: */*\r\n\r\n")
        wait(lambda: listener.refused == 2)
    assert "not kvtide's protocol" in listener.last_refusal
    assert len([one for one in caplog.records if "channel refused" in one.message]) == 2
    meet(listener, taken)


def test_a_connection_that_stays_silent_is_refused_in_time() -> None:
    listening = Listener("127.0.0.1", 0, dict, lambda _: None, secret=SECRET, timeout_s=0.05)
    try:
        with dial(listening):
            wait(lambda: listening.refused == 1)
        assert listening.last_refusal == "127.0.0.1: it did not come in time"
    finally:
        listening.close()
