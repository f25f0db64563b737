"""A channel: authenticated messages between two processes, over one TCP connection.

Both ends prove that they know a shared secret, without sending it, and each proof covers both
hellos. Every later frame carries a code too, so that a machine between them cannot add, change,
repeat or leave out a message unnoticed. Nothing is encrypted.

    connecting end                                 listening end
    magic, version, nonce        ──────────────▶
                                 ◀──────────────   magic, version, nonce
    hello, HMAC(nonces, hello)   ──────────────▶   checked before a byte of it is parsed
                                 ◀──────────────   hello, HMAC(nonces, both hellos)
    messages and heartbeats      ◀─────────────▶

What always holds:

- `send` never blocks: a thread writes, another one reads. A peer that does not read is closed when
  MAX_UNSENT_BYTES wait for it.
- A peer from which nothing came for `silence_s` is closed: a frozen process, or a connection whose
  other end is gone. Each end sends a heartbeat four times in that time.
- `on_closed` comes exactly once, with a sentence, and no message after it.
- A peer that is refused gets the reason before the connection is closed. One that closes without a
  byte is no peer: routers check that way whether the port is open.
- An empty secret is taken between loopback addresses only.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvtide.transfer.peer.channel_wire import (
    EVER,
    FAREWELL,
    HEARTBEAT,
    HELLO,
    MAX_REASON_BYTES,
    MESSAGE,
    ChannelError,
    Wire,
    WireMessage,
    decoded,
    encoded,
    printable,
)

__all__ = ["Channel", "ChannelError", "Listener", "WireMessage", "check_secret", "connect"]

OnMessage = Callable[[WireMessage], None]
OnClosed = Callable[[str], None]

VERSION = 1
MAX_FRAME_BYTES = 64 << 20
MAX_HELLO_BYTES = 8 << 20
MAX_UNSENT_BYTES = 64 << 20
MAX_HANDSHAKES = 16
"""Connections of which nothing is known yet; more are closed at once."""

HEARTBEATS = 4
"""In the time after which the other end counts as gone."""

_MAGIC = b"kvtide"
_PREFACE = struct.Struct(">6sH32s")
_CONNECTING, _LISTENING = b"hello of the connecting end", b"hello of the listening end"

log = logging.getLogger("kvtide")


# -- the handshake --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Keys:
    """Codes of both directions, which differ, so that no frame can be sent back."""

    sending: bytes
    receiving: bytes


class _Handshake:
    """What both ends have sent so far. All codes cover it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._sent = hashlib.sha256(b"kvtide channel")

    def hear(self, part: bytes) -> None:
        self._sent.update(struct.pack(">Q", len(part)) + part)

    def code(self, purpose: bytes) -> bytes:
        return hmac.digest(self._secret, purpose + self._sent.digest(), "sha256")

    def check(self, purpose: bytes, code: bytes) -> bool:
        return hmac.compare_digest(self.code(purpose), code)

    def keys(self, connecting: bool) -> _Keys:
        ours, theirs = (
            (b"connecting", b"listening") if connecting else (b"listening", b"connecting")
        )
        return _Keys(self.code(b"messages of " + ours), self.code(b"messages of " + theirs))


def _preface(wire: Wire, handshake: _Handshake, deadline: float) -> None:
    """Read the other end's."""
    head = wire.read(_PREFACE.size, deadline)
    magic, version, _ = _PREFACE.unpack(head)
    if magic != _MAGIC:
        raise ChannelError("that is not kvtide's protocol")
    if version != VERSION:
        raise ChannelError(f"the protocol's version is {version} there and {VERSION} here")
    handshake.hear(head)


def _new_preface() -> bytes:
    return _PREFACE.pack(_MAGIC, VERSION, secrets.token_bytes(32))


def _wrapped(hello: WireMessage, silence_s: float) -> bytes:
    return encoded({"silence_s": silence_s, "hello": hello})


def _unwrapped(body: bytes) -> tuple[WireMessage, float]:
    wrapped = decoded(body)
    hello, silence_s = wrapped.get("hello"), wrapped.get("silence_s")
    if not isinstance(hello, dict) or not isinstance(silence_s, int | float) or silence_s <= 0:
        raise ChannelError("a hello without its parts")
    return hello, float(silence_s)


def connect(
    host: str,
    port: int,
    hello: WireMessage,
    *,
    secret: bytes = b"",
    timeout_s: float = 5.0,
    silence_s: float = 5.0,
) -> Channel:
    """Open a channel and say hello; blocks for `timeout_s` at most. Raises ChannelError."""
    check_secret(host, secret)
    deadline = time.monotonic() + timeout_s
    try:
        connection = socket.create_connection((host, port), timeout_s)
    except OSError as error:
        raise ChannelError(f"channel to {host}:{port}: no connection ({error})") from error
    wire = Wire(connection)
    try:
        return _greet(wire, _Handshake(secret), _wrapped(hello, silence_s), silence_s, deadline)
    except ChannelError as error:
        wire.close()
        raise ChannelError(f"channel to {host}:{port}: {error}") from error


def _greet(
    wire: Wire, handshake: _Handshake, hello: bytes, silence_s: float, deadline: float
) -> Channel:
    preface = _new_preface()
    handshake.hear(preface)
    wire.write(preface, deadline)
    _preface(wire, handshake, deadline)
    handshake.hear(hello)
    wire.write_frame(HELLO, handshake.code(_CONNECTING), hello, deadline)
    kind, code, body = wire.read_frame(MAX_HELLO_BYTES, deadline)
    handshake.hear(body)
    if kind != HELLO or not handshake.check(_LISTENING, code):
        raise ChannelError("the peer does not know the secret")
    theirs, their_silence_s = _unwrapped(body)
    pace_s = min(silence_s, their_silence_s) / HEARTBEATS
    return Channel(wire, handshake.keys(connecting=True), theirs, silence_s, pace_s)


MessageHandler = Callable[[WireMessage], WireMessage]
"""From the hello of a peer that knows the secret to one's own; raises ChannelError to refuse."""


def _welcome(
    wire: Wire, handshake: _Handshake, answer: MessageHandler, silence_s: float, timeout_s: float
) -> Channel:
    """The listening end of `_greet`. `answer` takes as long as it needs."""
    deadline = time.monotonic() + timeout_s
    _preface(wire, handshake, deadline)
    preface = _new_preface()
    # The connecting end has sent its preface first; both hear them in one order.
    wire.write(preface, deadline)
    handshake.hear(preface)
    kind, code, body = wire.read_frame(MAX_HELLO_BYTES, deadline)
    handshake.hear(body)
    if kind != HELLO or not handshake.check(_CONNECTING, code):
        raise ChannelError("the secrets differ; start both ends with the same one")
    theirs, their_silence_s = _unwrapped(body)
    hello = _wrapped(answer(theirs), silence_s)
    handshake.hear(hello)
    wire.write_frame(HELLO, handshake.code(_LISTENING), hello, time.monotonic() + timeout_s)
    pace_s = min(silence_s, their_silence_s) / HEARTBEATS
    return Channel(wire, handshake.keys(connecting=False), theirs, silence_s, pace_s)


# -- the channel ----------------------------------------------------------------------------


class Channel:
    """One end. `hello` is the other end's. Nothing is read before `start`."""

    def __init__(
        self, wire: Wire, keys: _Keys, hello: WireMessage, silence_s: float, heartbeat_s: float
    ) -> None:
        self.hello = hello
        self.peer_address = wire.peer
        self._wire = wire
        self._keys = keys
        self._silence_s, self._heartbeat_s = silence_s, heartbeat_s
        self._unsent: deque[tuple[bytes, bytes]] = deque()
        self._unsent_bytes = 0
        self._changed = threading.Condition()
        self._reason: str | None = None
        self._threads: list[threading.Thread] = []

    def start(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Both are called on the channel's own thread; on_closed last, and exactly once.

        A message whose callback raises closes the channel.
        """
        assert not self._threads, "the channel was started"
        reader = threading.Thread(
            target=self._read, args=(on_message, on_closed), name="kvtide-channel-in", daemon=True
        )
        writer = threading.Thread(target=self._write, name="kvtide-channel-out", daemon=True)
        with self._changed:  # `join` waits for threads that run.
            self._threads = [writer, reader]
            for thread in self._threads:
                thread.start()

    def send(self, message: WireMessage) -> bool:
        """Queue a message; never blocks. False: the channel is closed, and it is dropped."""
        return self._queue(MESSAGE, encoded(message))

    @property
    def closed(self) -> bool:
        return self._reason is not None

    def close(self, reason: str = "the channel was closed") -> None:
        """Send what waits, tell the peer the reason, and end; `on_closed` follows. Never blocks."""
        if not self._threads:
            self._reason = self._reason or reason
            self._wire.close()
        elif self._queue(FAREWELL, reason.encode()[:MAX_REASON_BYTES]):
            with self._changed:
                self._reason = self._reason or reason

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads' end after `close`; not for the channel's own callbacks."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            threads = self._threads
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _queue(self, kind: bytes, body: bytes) -> bool:
        assert len(body) <= MAX_FRAME_BYTES, f"a message of {len(body):,} B"
        with self._changed:
            if self._reason is not None:
                return False
            self._unsent.append((kind, body))
            self._unsent_bytes += len(body)
            full = self._unsent_bytes > MAX_UNSENT_BYTES
            self._changed.notify()
        if full:
            self._end("the peer does not read: too much waits for it")
        return not full

    def _end(self, reason: str) -> None:
        """Close at once; the first reason stays."""
        with self._changed:
            self._reason = self._reason or reason
            self._unsent.clear()
            self._changed.notify()
        self._wire.wake()

    # -- the threads --------------------------------------------------------------------------

    def _write(self) -> None:
        number, last = 0, b""
        try:
            while last != FAREWELL:
                with self._changed:
                    if not self._unsent and self._reason is None:
                        self._changed.wait(self._heartbeat_s)
                    if not self._unsent and self._reason is not None:
                        return
                    last, body = self._unsent.popleft() if self._unsent else (HEARTBEAT, b"")
                    self._unsent_bytes -= len(body)
                code = _code(self._keys.sending, number, last, body)
                self._wire.write_frame(last, code, body, time.monotonic() + self._silence_s)
                number += 1
        except ChannelError as error:
            self._end(str(error))
        finally:
            self._wire.wake()

    def _read(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        number = 0
        try:
            while True:
                frame = self._wire.read_frame(MAX_FRAME_BYTES, EVER, self._silence_s)
                kind, code, body = frame
                wanted = _code(self._keys.receiving, number, kind, body)
                if not hmac.compare_digest(wanted, code):
                    raise ChannelError("a frame that the peer did not send, or in another order")
                number += 1
                if kind == FAREWELL:
                    raise ChannelError(f"closed by the peer: {printable(body)}")
                if kind == MESSAGE and self._reason is None:
                    on_message(decoded(body))
        except ChannelError as error:
            self._end(str(error))
        except Exception as error:  # The callback's: the channel ends, with the reason.
            log.exception("a message could not be handled")
            self._end(f"a message could not be handled: {type(error).__name__}: {error}")
        self._threads[0].join()
        self._wire.close()
        assert self._reason is not None
        try:
            on_closed(self._reason)
        except Exception:  # A caller's mistake, on a thread that ends here.
            log.exception("the end of a channel could not be handled")


def _code(key: bytes, number: int, kind: bytes, body: bytes) -> bytes:
    return hmac.digest(key, struct.pack(">Q", number) + kind + body, "sha256")


# -- listening ------------------------------------------------------------------------------


class Listener:
    """Accepts channels, and hands over those whose peer knows the secret.

    answer      one's own hello, for a peer's; raises ChannelError to refuse it with a sentence
    on_channel  takes the channel and starts it; both run on a thread of the handshake
    refused     how many connections were refused
    """

    def __init__(
        self,
        host: str,
        port: int,
        answer: MessageHandler,
        on_channel: Callable[[Channel], None],
        *,
        secret: bytes = b"",
        timeout_s: float = 5.0,
        silence_s: float = 5.0,
    ) -> None:
        """Binds to this address alone; port 0 takes a free one."""
        check_secret(host, secret)
        self._answer, self._on_channel, self._secret = answer, on_channel, secret
        self._timeout_s, self._silence_s = timeout_s, silence_s
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        self.refused = 0
        self.last_refusal = ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ChannelError(f"channel: cannot listen on {host}:{port} ({error})") from error
        self.host = host
        self.port = int(self._socket.getsockname()[1])
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="kvtide-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more; channels stay."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if not self._closed:  # The peer was gone again, or no descriptor is free.
                    time.sleep(0.01)
                continue
            if self._handshakes.acquire(blocking=False):
                threading.Thread(
                    target=self._handshake, args=(connection,), name="kvtide-handshake", daemon=True
                ).start()
            else:
                self._count("too many connections at once")
                connection.close()

    def _handshake(self, connection: socket.socket) -> None:
        wire = Wire(connection)
        handshake = _Handshake(self._secret)
        try:
            if wire.is_probe(time.monotonic() + self._timeout_s):
                wire.close()
                return
            channel = _welcome(wire, handshake, self._answer, self._silence_s, self._timeout_s)
        except ChannelError as error:
            self._count(f"{wire.peer}: {error}")
            wire.refuse(str(error))
            return
        except Exception as error:  # `answer` is the caller's: the peer is refused, others come.
            log.exception("a hello could not be answered")
            self._count(f"{wire.peer}: {type(error).__name__}: {error}")
            wire.refuse("the hello could not be answered, see the log there")
            return
        finally:
            self._handshakes.release()
        self._hand_over(channel)

    def _hand_over(self, channel: Channel) -> None:
        try:
            self._on_channel(channel)
        except Exception as error:  # As above.
            log.exception("a channel could not be taken")
            channel.close(f"the channel could not be taken: {type(error).__name__}: {error}")

    def _count(self, reason: str) -> None:
        self.refused += 1
        self.last_refusal = reason
        log.warning("channel refused: %s", reason)


def check_secret(host: str, secret: bytes) -> None:
    """Refuse an empty secret for addresses that other machines reach."""
    if secret:
        return
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None)} if host else {"0.0.0.0"}
    except OSError as error:
        raise ChannelError(f"channel: {host} is not known ({error})") from error
    if not all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found):
        raise ChannelError(
            f"channel: {host} is reached from other machines, and there is no secret; give both "
            "ends the same one, or use 127.0.0.1"
        )
