"""Channels: both ends prove the secret, no call blocks, and a peer that is gone is noticed."""

from __future__ import annotations

import hashlib
import hmac
import json
import multiprocessing as mp
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvtide.transfer.peer import channel as channels
from kvtide.transfer.peer.channel import Channel, ChannelError, Listener, WireMessage, connect
from tests.processes import freeze

SECRET = b"two know it"
DEADLINE_S = 60.0


class End:
    """What a channel brought to one of its ends."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.messages: list[WireMessage] = []
        self.reasons: list[str] = []
        self.closed = threading.Event()
        self.changed = threading.Condition()

    def take(self, channel: Channel) -> None:
        self.channel = channel
        channel.start(self.on_message, self.on_closed)

    def on_message(self, message: WireMessage) -> None:
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def on_closed(self, reason: str) -> None:
        self.reasons.append(reason)
        self.closed.set()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.messages) >= count, DEADLINE_S)


class Server:
    """A listener that takes every channel."""

    def __init__(self, secret: bytes = SECRET, silence_s: float = 30.0, **given: object) -> None:
        self.ends: list[End] = []
        self.hellos: list[WireMessage] = []
        self.taken = threading.Semaphore(0)
        given = {"answer": self._answer, "timeout_s": 30.0, **given}
        self.listener = Listener(
            "127.0.0.1", 0, on_channel=self._take, secret=secret, silence_s=silence_s, **given
        )

    def _answer(self, hello: WireMessage) -> WireMessage:
        self.hellos.append(hello)
        if hello.get("page") == 3:
            raise ChannelError("page size 3 there and 16 here")
        if hello.get("page") == 4:
            raise ZeroDivisionError
        return {"server": 1}

    def _take(self, channel: Channel) -> None:
        end = End()
        end.take(channel)
        self.ends.append(end)
        self.taken.release()

    def connect(self, **given: object) -> tuple[End, End]:
        """Both ends of a new channel."""
        given = {
            "secret": SECRET,
            "hello": {"client": 1},
            "timeout_s": 30.0,
            "silence_s": 30.0,
        } | given
        near = End()
        near.take(connect("127.0.0.1", self.listener.port, **given))
        assert self.taken.acquire(timeout=DEADLINE_S)
        return near, self.ends[-1]

    def close(self) -> None:
        self.listener.close()
        for end in self.ends:
            end.channel.close()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


def until(holds) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- messages -------------------------------------------------------------------------------


def test_messages_arrive_in_order_both_ways(server: Server) -> None:
    near, far = server.connect()
    assert near.channel.hello == {"server": 1}
    assert far.channel.hello == {"client": 1} == server.hellos[0]
    for number in range(500):
        assert near.channel.send({"number": number, "text": "ä" * number})
        assert far.channel.send({"number": -number})
    near.wait(500)
    far.wait(500)
    assert far.messages == [{"number": n, "text": "ä" * n} for n in range(500)]
    assert [one["number"] for one in near.messages] == [-n for n in range(500)]


def test_a_message_may_be_large(server: Server) -> None:
    near, far = server.connect()
    near.channel.send({"text": "x" * (8 << 20)})
    far.wait(1)
    assert len(far.messages[0]["text"]) == 8 << 20


def test_what_was_sent_before_the_end_arrives_and_the_reason_with_it(server: Server) -> None:
    near, far = server.connect()
    for number in range(100):
        near.channel.send({"number": number})
    near.channel.close("the server stops")
    assert far.closed.wait(DEADLINE_S)
    assert near.closed.wait(DEADLINE_S)
    assert len(far.messages) == 100
    assert far.reasons == ["closed by the peer: the server stops"]
    assert near.reasons == ["the server stops"]
    assert not near.channel.send({})
    near.channel.close()
    assert near.channel.join(DEADLINE_S)
    assert near.reasons == ["the server stops"]


def test_a_callback_that_raises_closes_the_channel_with_the_reason(server: Server) -> None:
    broken = End()
    broken.on_message = lambda message: message["missing"]
    broken.take(connect("127.0.0.1", server.listener.port, {"client": 2}, secret=SECRET))
    assert server.taken.acquire(timeout=DEADLINE_S)
    server.ends[-1].channel.send({"number": 1})
    assert broken.closed.wait(DEADLINE_S)
    assert "could not be handled: KeyError" in broken.reasons[0]


def test_a_peer_that_does_not_read_blocks_no_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_UNSENT_BYTES", 4 << 20)
    server = Server()
    stuck = threading.Event()
    reader = End()
    reader.on_message = lambda message: stuck.wait(DEADLINE_S)
    reader.take(connect("127.0.0.1", server.listener.port, {}, secret=SECRET, silence_s=30.0))
    assert server.taken.acquire(timeout=DEADLINE_S)
    far = server.ends[-1]
    start, sent = time.monotonic(), 0
    while far.channel.send({"text": "x" * (256 << 10)}):
        sent += 1
        assert sent < 10_000
    assert time.monotonic() - start < DEADLINE_S / 2
    assert far.closed.wait(DEADLINE_S)
    assert far.reasons == ["the peer does not read: too much waits for it"]
    stuck.set()
    server.close()


# -- who may speak --------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [b"another", b"", SECRET + b" "])
def test_a_wrong_secret_is_refused_with_a_sentence(server: Server, secret: bytes) -> None:
    with pytest.raises(ChannelError, match="refused by the peer: the secrets differ"):
        connect("127.0.0.1", server.listener.port, {"client": 1}, secret=secret)
    assert server.hellos == []
    assert server.listener.refused == 1


def test_a_hello_that_does_not_fit_is_refused_with_the_reason(server: Server) -> None:
    for page, reason in ((3, "page size 3 there and 16 here"), (4, "could not be answered")):
        with pytest.raises(ChannelError, match=reason):
            connect("127.0.0.1", server.listener.port, {"page": page}, secret=SECRET)
    server.connect()


def test_a_server_that_takes_every_secret_does_not_pass() -> None:
    """It copies the client's own proof, as it cannot make one."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pose() -> None:
            there, _ = listening.accept()
            with there:
                there.recv(40, socket.MSG_WAITALL)
                there.sendall(struct.pack(">6sH32s", b"kvtide", channels.VERSION, bytes(32)))
                kind, length, code = struct.unpack(">cI32s", there.recv(37, socket.MSG_WAITALL))
                body = there.recv(length, socket.MSG_WAITALL)
                there.sendall(struct.pack(">cI32s", kind, length, code) + body)
                there.recv(1)

        thread = threading.Thread(target=pose)
        thread.start()
        with pytest.raises(ChannelError, match="the peer does not know the secret"):
            connect("127.0.0.1", listening.getsockname()[1], {}, secret=SECRET)
        thread.join()


@pytest.mark.parametrize("host", ["0.0.0.0", "", "192.0.2.7"])
def test_an_empty_secret_stays_on_the_machine(host: str) -> None:
    with pytest.raises(ChannelError, match="there is no secret"):
        Listener(host, 0, lambda hello: {}, lambda channel: None)
    with pytest.raises(ChannelError, match="there is no secret"):
        connect(host, 1, {})


def test_an_empty_secret_is_fine_on_loopback() -> None:
    server = Server(secret=b"")
    near, _ = server.connect(secret=b"")
    assert near.channel.hello == {"server": 1}
    server.close()


def test_a_listener_binds_to_its_address_alone(server: Server) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.listener.port), DEADLINE_S)
    with pytest.raises(ChannelError, match=r"cannot listen on 127\.0\.0\.1"):
        Listener("127.0.0.1", server.listener.port, lambda hello: {}, lambda channel: None)


# -- strangers ------------------------------------------------------------------------------


def _answer_to(server: Server, hello: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.listener.port)) as one:
        one.settimeout(DEADLINE_S)
        one.sendall(hello)
        parts = []
        while part := one.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def _preface(magic: bytes = b"kvtide", version: int = channels.VERSION) -> bytes:
    return struct.pack(">6sH32s", magic, version, bytes(32))


def test_garbage_is_refused_with_a_sentence(server: Server) -> None:
    assert b"not kvtide's protocol" in _answer_to(server, b"GET / HTTP/1.1\r\n\r\n" * 10)
    server.connect()


def test_another_version_is_refused_with_both_numbers(server: Server) -> None:
    wrong = channels.VERSION + 1
    reason = f"version is {wrong} there and {channels.VERSION} here".encode()
    assert reason in _answer_to(server, _preface(version=wrong))


def test_an_oversized_hello_is_refused_before_it_is_read(server: Server) -> None:
    head = struct.pack(">cI32s", b"H", (1 << 32) - 1, bytes(32))
    assert b"a frame of 4,294,967,295 B, more than" in _answer_to(server, _preface() + head)


def test_a_hello_is_not_parsed_before_its_proof(server: Server) -> None:
    body = b"[" * 100_000
    head = struct.pack(">cI32s", b"H", len(body), bytes(32))
    assert b"the secrets differ" in _answer_to(server, _preface() + head + body)


def test_a_slow_stranger_is_closed_and_others_are_served() -> None:
    server = Server(timeout_s=1.0)
    slow = socket.create_connection(("127.0.0.1", server.listener.port))
    slow.sendall(_preface()[:7])
    server.connect()
    slow.settimeout(DEADLINE_S)
    answer = b""
    while part := slow.recv(1 << 12):
        answer += part
    assert b"did not come in time" in answer
    slow.close()
    server.close()


def test_too_many_strangers_at_once_are_closed(server: Server) -> None:
    address = ("127.0.0.1", server.listener.port)
    strangers = [socket.create_connection(address) for _ in range(channels.MAX_HANDSHAKES + 8)]
    until(lambda: server.listener.refused >= 8)
    for one in strangers:
        with suppress(OSError):  # Eight are closed there.
            one.sendall(b"?")
        one.close()
    until(lambda: server.listener.refused == len(strangers))
    server.connect()


class Forger:
    """A stranger on the wire, which sees every frame of a channel and may change them."""

    def __init__(self, port: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._target = port
        self.change = lambda data: data
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self._listening.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        threading.Thread(target=self._pass, args=(far, near, lambda d: d), daemon=True).start()
        self._pass(near, far, lambda data: self.change(data))

    def _pass(self, source, target, change) -> None:
        try:
            while data := source.recv(1 << 20):
                target.sendall(change(data))
        except OSError:
            pass
        target.close()


@pytest.mark.parametrize("what", ["changes", "repeats"])
def test_a_stranger_between_the_ends_cannot_change_or_repeat_a_message(
    server: Server, what: str
) -> None:
    forger = Forger(server.listener.port)
    near = End()
    near.take(connect("127.0.0.1", forger.port, {}, secret=SECRET, silence_s=30.0))
    assert server.taken.acquire(timeout=DEADLINE_S)
    far = server.ends[-1]
    near.channel.send({"pages": 1})
    far.wait(1)
    if what == "changes":
        forger.change = lambda data: data.replace(b'"pages":1', b'"pages":9')
    else:
        forger.change = lambda data: data + data
    near.channel.send({"pages": 1})
    assert far.closed.wait(DEADLINE_S)
    assert far.reasons == ["a frame that the peer did not send, or in another order"]
    assert [one["pages"] for one in far.messages] in ([1], [1, 1])
    assert (len(far.messages) == 2) == (what == "repeats")


def test_the_secret_never_travels(server: Server) -> None:
    seen = []
    forger = Forger(server.listener.port)
    forger.change = lambda data: seen.append(data) or data
    near = connect("127.0.0.1", forger.port, {"client": 1}, secret=SECRET)
    wire = b"".join(seen)
    assert json.dumps({"client": 1}, separators=(",", ":")).encode() in wire
    assert SECRET not in wire
    assert hashlib.sha256(SECRET).digest() not in wire
    assert hmac.digest(SECRET, b"", "sha256") not in wire
    near.close()


# -- peers that go --------------------------------------------------------------------------


def _other_process(port: int) -> None:
    """Connects, answers every message, and lives until it is killed."""
    channel = connect("127.0.0.1", port, {}, secret=SECRET, silence_s=1.0)
    channel.start(lambda message: channel.send(message) and None, lambda reason: os._exit(3))
    threading.Event().wait()


@pytest.fixture
def other() -> Iterator[tuple[Server, End, mp.Process]]:
    server = Server(silence_s=1.0)
    process = mp.get_context("forkserver").Process(
        target=_other_process, args=(server.listener.port,), daemon=True
    )
    process.start()
    assert server.taken.acquire(timeout=DEADLINE_S)
    yield server, server.ends[-1], process
    process.kill()
    process.join()
    server.close()


def test_heartbeats_keep_an_idle_channel_open(other) -> None:
    _, far, process = other
    time.sleep(3.0)
    assert not far.channel.closed
    far.channel.send({"still": "there"})
    far.wait(1)
    assert process.is_alive()


def test_a_killed_peer_is_noticed(other) -> None:
    _, far, process = other
    process.kill()
    assert far.closed.wait(DEADLINE_S)
    assert "closed the connection" in far.reasons[0] or "broke" in far.reasons[0]


def test_a_frozen_peer_is_noticed_and_learns_of_its_end(other) -> None:
    _, far, process = other
    freeze(process.pid)
    assert far.closed.wait(DEADLINE_S)
    assert far.reasons == ["no sign of life for 1 s"]
    os.kill(process.pid, signal.SIGCONT)
    process.join(DEADLINE_S)
    assert process.exitcode == 3


def test_a_connection_whose_other_end_vanished_is_noticed() -> None:
    """As after a cable was pulled: the connection stays open, and nothing comes any more."""
    server = Server(silence_s=0.5)
    cable = Forger(server.listener.port)
    near = connect("127.0.0.1", cable.port, {}, secret=SECRET, silence_s=30.0)
    near.start(lambda message: None, lambda reason: None)
    assert server.taken.acquire(timeout=DEADLINE_S)
    far = server.ends[-1]
    assert near.send({"plugged": "in"})
    far.wait(1)
    cable.change = lambda data: b""
    assert far.closed.wait(DEADLINE_S)
    assert far.reasons == ["no sign of life for 0.5 s"]
    near.close()
    server.close()
