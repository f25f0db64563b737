"""One connection that speaks RESP2, the language of Redis, without copying what it carries.

Objects are received straight into the memory where they belong and sent straight from it. Every
call has a deadline (`time.monotonic`). A connection on which anything went wrong may hold half a
reply: its owner closes it and never uses it again.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Buffer = bytes | bytearray | memoryview
RedisReply = Any

_BUFFER_BYTES = 64 << 10
_MAX_PARTS = 512
"""How many pieces of memory a single send takes; the limit of Linux is 1024."""


class ProtocolError(ConnectionError):
    """What came is not RESP2."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error that the server replied with; the connection is fine."""

    text: str

    @property
    def code(self) -> str:
        return self.text.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    tls: ssl.SSLContext | None = None


class Connection:
    """Requests go out with `send`; as many replies must be taken, in order, by the other calls."""

    def __init__(self, address: Address, deadline: float) -> None:
        left = _left(deadline)
        plain = socket.create_connection((address.host, address.port), timeout=left)
        self._tls = address.tls is not None
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = _wrapped(plain, address)
        except BaseException:
            plain.close()
            raise
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0

    def close(self) -> None:
        self._socket.close()

    # -- out --------------------------------------------------------------------------------

    def send(self, parts: Sequence[Buffer], deadline: float) -> None:
        if self._tls:
            for part in parts:
                self._arm(deadline)
                self._socket.sendall(part)
            return
        for start in range(0, len(parts), _MAX_PARTS):
            self._send_together(
                [memoryview(p) for p in parts[start : start + _MAX_PARTS]], deadline
            )

    def _send_together(self, parts: list[memoryview], deadline: float) -> None:
        first = 0
        while first < len(parts):
            self._arm(deadline)
            sent = self._socket.sendmsg(parts[first:])
            while first < len(parts) and sent >= len(parts[first]):
                sent -= len(parts[first])
                first += 1
            if sent:
                parts[first] = parts[first][sent:]

    # -- in ---------------------------------------------------------------------------------

    def lines(self, count: int, deadline: float) -> list[bytes]:
        """So many replies that are a line each: numbers, states, errors, absent objects."""
        found = bytearray(self._view[self._start : self._end])
        self._start = self._end = 0
        lines = found.count(b"\r\n")
        while lines < count:
            self._arm(deadline)
            size = _some(self._socket.recv_into(self._view))
            # A line may end where the buffer begins: look at the last byte that was there again.
            looked_at = max(0, len(found) - 1)
            found += self._view[:size]
            lines += found.count(b"\r\n", looked_at)
        *all_lines, rest = bytes(found).split(b"\r\n")
        if rest or len(all_lines) != count:
            raise ProtocolError("more replies came than there were requests")
        return all_lines

    def object_into(self, target: memoryview, deadline: float) -> int | ErrorReply | None:
        """An object's length; None if there is none, or it is longer than the target."""
        line = self._line(deadline)
        if line.startswith(b"-"):
            return ErrorReply(line[1:].decode(errors="replace"))
        length = _number(line, b"$")
        if length < 0:
            return None
        fits = length <= len(target)
        if fits:
            self._fill(target[:length], deadline)
        else:
            self._skip(length, deadline)
        self._expect_end(deadline)
        return length if fits else None

    def reply(self, deadline: float) -> RedisReply:
        """Any reply, as a value."""
        line = self._line(deadline)
        match line[:1]:
            case b"+":
                return line[1:]
            case b"-":
                return ErrorReply(line[1:].decode(errors="replace"))
            case b":":
                return _number(line, b":")
            case b"$":
                return self._bulk(_number(line, b"$"), deadline)
            case b"*":
                return [self.reply(deadline) for _ in range(_number(line, b"*"))]
        raise ProtocolError(f"a reply begins with {line[:20]!r}")

    def _bulk(self, length: int, deadline: float) -> bytes | None:
        if length < 0:
            return None
        content = bytearray(length)
        self._fill(memoryview(content), deadline)
        self._expect_end(deadline)
        return bytes(content)

    def _line(self, deadline: float) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._more(deadline)
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def _more(self, deadline: float) -> None:
        waiting = self._end - self._start
        if waiting == _BUFFER_BYTES:
            raise ProtocolError("a reply has a line without an end")
        self._buffer[:waiting] = self._buffer[self._start : self._end]
        self._arm(deadline)
        size = _some(self._socket.recv_into(self._view[waiting:]))
        self._start, self._end = 0, waiting + size

    def _fill(self, target: memoryview, deadline: float) -> None:
        """Take from the buffer what it has; the rest is received where it belongs."""
        done = min(len(target), self._end - self._start)
        target[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < len(target):
            self._arm(deadline)
            done += self._receive(target[done:])

    def _receive(self, target: memoryview) -> int:
        """What follows the object lands in the buffer, which is empty now."""
        if self._tls:
            return _some(self._socket.recv_into(target))
        size = _some(self._socket.recvmsg_into([target, self._buffer])[0])
        self._start, self._end = 0, max(0, size - len(target))
        return min(size, len(target))

    def _skip(self, length: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(length, 1 << 20)))
        while length:
            size = min(length, len(scratch))
            self._fill(scratch[:size], deadline)
            length -= size

    def _expect_end(self, deadline: float) -> None:
        end = bytearray(2)
        self._fill(memoryview(end), deadline)
        if end != b"\r\n":
            raise ProtocolError("an object is longer than its length says")

    def _arm(self, deadline: float) -> None:
        self._socket.settimeout(_left(deadline))


def command(*words: bytes) -> bytes:
    parts = [b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)]
    return b"".join(parts)


def _wrapped(plain: socket.socket, address: Address) -> socket.socket:
    if address.tls is None:
        return plain
    try:
        return address.tls.wrap_socket(plain, server_hostname=address.host)
    except TimeoutError:
        # A server without TLS waits for the rest of what it takes for a command.
        raise ssl.SSLError("no answer to the TLS greeting") from None


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _some(size: int) -> int:
    if size == 0:
        raise ConnectionResetError("the server closed the connection")
    return size


def _number(line: bytes, kind: bytes) -> int:
    try:
        if line[:1] == kind:
            return int(line[1:])
    except ValueError:
        pass
    raise ProtocolError(f"a reply is {line[:20]!r}")
