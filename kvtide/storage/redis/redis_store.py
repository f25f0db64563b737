"""`redis://user:password@host:port/db?timeout=5&connections=4`: a Redis or Valkey server.

`rediss://` is the same over TLS; `?ca=FILE` names the certificate to trust if it is one's own.

An object is the value of `kvtide:<space>:<key>`, both in hexadecimal, without an expiry. What was
acknowledged outlives the server only as far as the server is set up to save it. Let the server
evict: `maxmemory 100gb` and `maxmemory-policy allkeys-lru`. With `noeviction` it refuses pages
once it is full, and policies called `volatile-…` never evict ours; `status` notes both.

    call ──► slices of the batch ──► a thread each ──► a connection each ──► pipelined commands

The calling thread takes the first slice. `connections` keeps the connections, `resp` is the wire
protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvtide.storage.redis.connections import Connections, RedisThreadPool, batch_slices
from kvtide.storage.redis.reading import commands_for, read
from kvtide.storage.redis.resp import Connection, ErrorReply, command
from kvtide.storage.store import Removed, StoreError, StoreStatus
from kvtide.storage.url import StoreURL

T = TypeVar("T")

CONNECTIONS = 4
MIN_SLICE_BYTES = 4 << 20
"""Less than this is not worth another thread."""
SCAN_KEYS = 1000


class RedisStore:
    def __init__(self, url: StoreURL, space: bytes) -> None:
        url.only("timeout", "connections", "ca")
        self.name = str(url)
        self._prefix = b"kvtide:%b:" % space.hex().encode()
        self._timeout_s = url.seconds()
        count = url.count("connections", CONNECTIONS)
        self._server = Connections(url, count)
        # A call leaves half of the connections to others: look-ups do not wait for pages.
        self._threads = RedisThreadPool(max(1, count // 2), "redis")
        self._refused = 0
        try:
            self._one([command(b"PING")], self._deadline())
        except BaseException:
            self.close()
            raise

    def lend(self, block: memoryview) -> None:
        """Nothing to register."""

    def close(self) -> None:
        self._threads.close()
        self._server.close()

    # -- objects ----------------------------------------------------------------------------

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        if not keys:
            return []
        lines = self._lines(self._commands(b"EXISTS", keys), self._deadline())
        return [line == b":1" for line in lines]

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        deadline = self._deadline()
        batch = [commands_for(self._name(key), t) for key, t in zip(keys, targets, strict=True)]

        def read_slice(part: slice) -> Callable[[], tuple[list[int], ErrorReply | None]]:
            commands = batch[part]
            return lambda: self._server.use(
                lambda connection: read(connection, commands, deadline), deadline
            )

        runs = self._slices([len(target) for target in targets])
        found = self._together([*map(read_slice, runs)], deadline)
        for _, fault in found:
            if fault is not None:
                raise self._server.refusal(fault)
        return [length for lengths, _ in found for length in lengths]

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[bool]:
        deadline = self._deadline()
        heads = self._commands(b"SET", keys, b"*4")

        def write_slice(part: slice) -> Callable[[], list[bytes]]:
            parts = list(_interleave(heads[part], sources[part]))
            count = part.stop - part.start

            def exchange(connection: Connection) -> list[bytes]:
                connection.send(parts, deadline)
                return connection.lines(count, deadline)

            return lambda: self._server.use(exchange, deadline)

        runs = self._slices([len(source) for source in sources])
        lines = [n for run in self._together([*map(write_slice, runs)], deadline) for n in run]
        return self._written(keys, lines, deadline)

    def _written(self, keys: Sequence[bytes], lines: list[bytes], deadline: float) -> list[bool]:
        """`+OK`: written. `$-1`: it existed. A full server does not check: EXISTS asks it."""
        full = [n for n, line in enumerate(lines) if line.startswith(b"-OOM")]
        for line in lines:
            if line.startswith(b"-") and not line.startswith(b"-OOM"):
                raise self._server.refusal(ErrorReply(line[1:].decode(errors="replace")))
        written = [True] * len(lines)
        if full:
            asked = self._lines(self._commands(b"EXISTS", [keys[n] for n in full]), deadline)
            for n, line in zip(full, asked, strict=True):
                written[n] = line == b":1"
            self._refused += written.count(False)
        return written

    def remove(self, keys: Sequence[bytes]) -> int:
        if not keys:
            return 0
        return self._lines(self._commands(b"UNLINK", keys), self._deadline()).count(b":1")

    # -- the space --------------------------------------------------------------------------

    def clear(self) -> Removed:
        """The time-out applies to every thousand scanned keys, not to all of them."""
        removed: list[int] = []
        cursor = b"0"
        while True:
            deadline = self._deadline()
            scan = (b"SCAN", cursor, b"MATCH", self._prefix + b"*", b"COUNT", b"%d" % SCAN_KEYS)
            [page] = self._one([command(*scan)], deadline)
            cursor, names = _scanned(page)
            removed += self._unlink(names, deadline)
            if cursor == b"0":
                return Removed(len(removed), sum(removed))

    def _unlink(self, names: list[bytes], deadline: float) -> list[int]:
        """The lengths of what was there; a scan may return a key twice."""
        if not names:
            return []
        verbs = (b"STRLEN", b"UNLINK")
        lines = self._lines([command(verb, name) for name in names for verb in verbs], deadline)
        pairs = zip(lines[::2], lines[1::2], strict=True)
        return [int(length[1:]) for length, gone in pairs if gone == b":1"]

    def status(self) -> StoreStatus:
        memory, stats, count = self._one(
            [command(b"INFO", b"memory"), command(b"INFO", b"stats"), command(b"DBSIZE")],
            self._deadline(),
        )
        facts = _facts(memory) | _facts(stats)
        limit = int(facts.get("maxmemory", 0)) or None
        return StoreStatus(
            all_bytes=int(facts.get("used_memory", 0)),
            capacity_bytes=limit,
            notes=tuple(self._notes(facts, count, limit)),
        )

    def _notes(self, facts: dict[str, str], count: object, limit: int | None) -> Iterator[str]:
        yield f"the database holds {count} keys of all users"
        policy = facts.get("maxmemory_policy", "noeviction")
        if limit is None:
            yield "no maxmemory is set, so it grows until its machine is full; set maxmemory"
        if not policy.startswith("allkeys-"):
            yield f"maxmemory-policy {policy} evicts no pages when it is full; set allkeys-lru"
        if evicted := int(facts.get("evicted_keys", 0)):
            yield f"it evicted {evicted:,} keys since it started"
        if self._refused:
            yield f"it was full and refused {self._refused:,} objects of this store"

    # -- requests ---------------------------------------------------------------------------

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _together(self, pieces: list[Callable[[], T]], deadline: float) -> list[T]:
        try:
            return self._threads.run(pieces, deadline)
        except TimeoutError as error:
            raise self._server.failure(error) from error

    def _slices(self, sizes: Sequence[int]) -> list[slice]:
        return batch_slices(sizes, self._threads.threads, MIN_SLICE_BYTES) if sizes else []

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _commands(self, verb: bytes, keys: Sequence[bytes], words: bytes = b"*2") -> list[bytes]:
        name_bytes = len(self._prefix) + 64
        head = b"%b\r\n$%d\r\n%b\r\n$%d\r\n%b" % (words, len(verb), verb, name_bytes, self._prefix)
        return [b"%b%b\r\n" % (head, key.hex().encode()) for key in keys]

    def _lines(self, requests: Sequence[bytes], deadline: float) -> list[bytes]:
        """Send commands that are answered with a line each; an error fails them all."""

        def exchange(connection: Connection) -> list[bytes]:
            connection.send([b"".join(requests)], deadline)
            return connection.lines(len(requests), deadline)

        lines = self._server.use(exchange, deadline)
        for line in lines:
            if line.startswith(b"-"):
                raise self._server.refusal(ErrorReply(line[1:].decode(errors="replace")))
        return lines

    def _one(self, requests: Sequence[bytes], deadline: float) -> list[object]:
        """Send a few commands with replies of any kind."""

        def exchange(connection: Connection) -> list[object]:
            connection.send(requests, deadline)
            return [connection.reply(deadline) for _ in requests]

        replies = self._server.use(exchange, deadline)
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise self._server.refusal(reply)
        return replies


def _interleave(
    heads: Sequence[bytes], sources: Sequence[memoryview]
) -> Iterator[bytes | memoryview]:
    """SET commands: heads and tails around objects that are sent from where they lie."""
    tail = b""
    for head, source in zip(heads, sources, strict=True):
        yield b"%b%b$%d\r\n" % (tail, head, len(source))
        yield source
        tail = b"\r\n$2\r\nNX\r\n"
    yield tail


def _scanned(page: object) -> tuple[bytes, list[bytes]]:
    match page:
        case [bytes(cursor), [*names]]:
            return cursor, [name for name in names if isinstance(name, bytes)]
    raise StoreError(f"a reply to SCAN is {page!r:.60}; this is no Redis server")


def _facts(reply: object) -> dict[str, str]:
    """`INFO` as a dictionary."""
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}
