"""Frames over one TCP connection, with deadlines: what a channel is made of."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from contextlib import suppress
from typing import Any

WireMessage = dict[str, Any]

HELLO, MESSAGE, HEARTBEAT, FAREWELL, REFUSED = b"H", b"M", b"B", b"F", b"R"
"""The kinds of frames."""
MAX_REASON_BYTES = 1000
EVER = float("inf")

_HEAD = struct.Struct(">cI32s")
_NO_CODE = bytes(32)
_FAREWELL_S = 1.0


class ChannelError(RuntimeError):
    """A channel that cannot be had, or a peer that is refused. The message is a sentence."""


class Wire:
    """A connection as frames, with deadlines. One thread reads and one writes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.peer = _peer(connection)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def is_probe(self, deadline: float) -> bool:
        """Wait for a first byte, which stays unread; True if the other end closes without one."""
        self._readable.poll(_milliseconds(max(0.0, deadline - time.monotonic())))
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False  # Neither came in time, which the next read reports.
        except OSError:
            return True

    def read(self, count: int, deadline: float, silence_s: float = EVER) -> bytes:
        """Exactly so many bytes, by the deadline, and never a longer silence between them."""
        parts, missing = [], count
        while missing:
            wait_s = min(silence_s, deadline - time.monotonic())
            if wait_s < 0 or not self._readable.poll(_milliseconds(wait_s)):
                raise ChannelError(
                    f"no sign of life for {silence_s:g} s"
                    if wait_s == silence_s
                    else "it did not come in time"
                )
            try:
                part = self._socket.recv(min(missing, 1 << 20))
            except BlockingIOError:
                continue
            except OSError as error:
                raise ChannelError(f"the connection broke ({error.strerror})") from error
            if not part:
                raise ChannelError("the peer closed the connection")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def write(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            wait_s = deadline - time.monotonic()
            if wait_s < 0 or not self._writable.poll(_milliseconds(wait_s)):
                raise ChannelError("the peer does not read")
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise ChannelError(f"the connection broke ({error.strerror})") from error

    def read_frame(
        self, max_bytes: int, deadline: float, silence_s: float = EVER
    ) -> tuple[bytes, bytes, bytes]:
        """Kind, code and body."""
        kind, length, code = _HEAD.unpack(self.read(_HEAD.size, deadline, silence_s))
        if length > (MAX_REASON_BYTES if kind == REFUSED else max_bytes):
            raise ChannelError(f"a frame of {length:,} B, more than {max_bytes:,} B")
        body = self.read(length, deadline, silence_s)
        if kind == REFUSED:
            raise ChannelError(f"refused by the peer: {printable(body)}")
        return kind, code, body

    def write_frame(self, kind: bytes, code: bytes, body: bytes, deadline: float) -> None:
        self.write(_HEAD.pack(kind, len(body), code) + body, deadline)

    def refuse(self, reason: str) -> None:
        """Give the reason, and close."""
        body, deadline = reason.encode()[:MAX_REASON_BYTES], time.monotonic() + _FAREWELL_S
        with suppress(OSError, ChannelError):
            self.write_frame(REFUSED, _NO_CODE, body, deadline)
            self._socket.shutdown(socket.SHUT_WR)
            # Bytes that were not read would make the end a reset, and the reason would be lost.
            while self._readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                if not self._socket.recv(1 << 16):
                    break
        self.close()

    def wake(self) -> None:
        """End the reads and writes of other threads."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """When no other thread uses it any more."""
        self.wake()
        self._socket.close()


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "gone"


def _milliseconds(wait_s: float) -> float | None:
    return None if wait_s == EVER else wait_s * 1000


def printable(body: bytes) -> str:
    return "".join(c if c.isprintable() else "?" for c in body.decode(errors="replace"))


def encoded(message: WireMessage) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def decoded(body: bytes) -> WireMessage:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ChannelError(f"a frame that is not JSON ({error})") from error
    if not isinstance(message, dict):
        raise ChannelError("a frame that is not a JSON object")
    return message
