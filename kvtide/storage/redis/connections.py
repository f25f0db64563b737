"""The connections to a Redis server, and the thread pool whose threads use them.

`Connections` opens a limited number when needed and keeps them while they work. A caller that finds
none free waits, first come, first served. A connection that failed is closed. If the server had
closed an old one meanwhile, as after a restart, its requests are sent once more on a new one: every
request of this store may be sent twice.

`RedisThreadPool` splits a batch over a few threads. The memory of a call is its caller's again when
it returns, so no piece of work outlives the call: pieces end by the deadline, and those that have
not begun by then never do.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from kvtide.storage.redis.resp import Address, Connection, ErrorReply, ProtocolError, command
from kvtide.storage.store import StoreError
from kvtide.storage.url import StoreURL

T = TypeVar("T")

PORT = 6379

_REMEDIES = {
    "NOAUTH": "it wants a password; write redis://:password@host or redis://user:password@host",
    "WRONGPASS": "it refused the password; check the user and password in the URL",
    "NOPERM": "the user may not do this; allow it ~kvtide:* and +get +getrange +strlen +set "
    "+exists +unlink +scan +info +dbsize +select +ping",
    "READONLY": "it is a replica; give the address of the primary",
    "LOADING": "it is still loading its data; try again in a while",
    "MISCONF": "it cannot save to its disk and refuses to write; see its log",
    "MOVED": "it is a node of a cluster; give the address of a single server or a proxy",
    "CLUSTERDOWN": "it is a node of a cluster; give the address of a single server or a proxy",
}


class Connections:
    """At most `max_open` connections, all alike."""

    def __init__(self, url: StoreURL, max_open: int) -> None:
        self._name = str(url)
        self._timeout_s = url.seconds()
        self._max_open = max_open
        self._greeting = list(_greeting(url))
        self._address = Address(url.host or "localhost", url.port or PORT, _tls(url))
        self._lock = threading.Lock()
        self._waiters: deque[Future[Connection | None]] = deque()
        self._idle: list[Connection] = []
        self._open = 0
        self._closed = False

    def use(self, exchange: Callable[[Connection], T], deadline: float) -> T:
        """Run an exchange on a connection of its own; failures become a StoreError."""
        try:
            connection, is_new = self._take(deadline)
            try:
                return self._run(connection, exchange)
            except (TimeoutError, ProtocolError):
                raise
            except OSError:
                if is_new:
                    raise
                self._close_idle()  # The other idle ones are as old.
                connection, _ = self._take(deadline)
                return self._run(connection, exchange)
        except OSError as error:
            raise self.failure(error) from error

    def _run(self, connection: Connection, exchange: Callable[[Connection], T]) -> T:
        try:
            result = exchange(connection)
        except StoreError:
            # All replies were read, and one of them was an error.
            self._put(connection)
            raise
        except BaseException:
            connection.close()
            self._put(None)
            raise
        self._put(connection)
        return result

    def _take(self, deadline: float) -> tuple[Connection, bool]:
        """A connection, and whether it is a new one."""
        waiter: Future[Connection | None] | None = None
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
            if self._open < self._max_open:
                self._open += 1
            else:
                self._waiters.append(waiter := Future())
        connection = self._wait(waiter, deadline) if waiter is not None else None
        if connection is not None:
            return connection, False
        try:
            return self._connect(deadline), True
        except BaseException:
            self._put(None)
            raise

    def _wait(self, waiter: Future[Connection | None], deadline: float) -> Connection | None:
        """None: a connection was closed, and a new one may be opened in its place."""
        try:
            return waiter.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
            if waiter.done():  # It arrived at the last moment: pass it on.
                self._put(waiter.result())
            raise

    def _put(self, connection: Connection | None) -> None:
        """Give a connection back, or None in place of one that was closed."""
        with self._lock:
            if self._waiters:
                self._waiters.popleft().set_result(connection)
                return
            kept = connection is not None and not self._closed
            if connection is not None and kept:
                self._idle.append(connection)
            else:
                self._open -= 1
        if connection is not None and not kept:
            connection.close()

    def _connect(self, deadline: float) -> Connection:
        connection = Connection(self._address, deadline)
        try:
            for words in self._greeting:
                connection.send([command(*words)], deadline)
                reply = connection.reply(deadline)
                if isinstance(reply, ErrorReply):
                    raise self.refusal(reply)
        except BaseException:
            connection.close()
            raise
        return connection

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._open -= len(idle)
        for connection in idle:
            connection.close()

    def close(self) -> None:
        self._closed = True
        self._close_idle()

    def refusal(self, reply: ErrorReply) -> StoreError:
        if "DB index" in reply.text:
            remedy = "there is no such database; most servers have 0 to 15"
        elif "without any password" in reply.text:
            remedy = "it knows no password; leave it out of the URL"
        else:
            remedy = _REMEDIES.get(reply.code, "see the log of the server")
        return StoreError(f"storage {self._name}: the server says '{reply.text}': {remedy}")

    def failure(self, error: OSError) -> StoreError:
        return StoreError(f"storage {self._name}: {self._sentence(error)}")

    def _sentence(self, error: OSError) -> str:
        match error:
            case TimeoutError():
                return (
                    f"no answer within {self._timeout_s:g} s; see whether the server is stuck, or "
                    "write ?timeout= with more seconds if it is only slow"
                )
            case ssl.SSLError():
                return f"no TLS with this server ({error}); write ?ca=FILE, or redis:// without TLS"
            case ProtocolError():
                return f"this is no Redis server ({error}); check host and port, or use rediss://"
        return f"cannot be reached ({error}); start the server, or check host and port"


def _greeting(url: StoreURL) -> Iterator[tuple[bytes, ...]]:
    """The commands that open a connection."""
    if url.password:
        user = [url.user.encode()] if url.user else []
        yield (b"AUTH", *user, url.password.encode())
    database = url.path.strip("/") or "0"
    if not database.isdecimal():
        raise StoreError(f"storage {url}: the database is a number, as in redis://host:6379/0")
    if database != "0":
        yield (b"SELECT", database.encode())


def _tls(url: StoreURL) -> ssl.SSLContext | None:
    if url.scheme != "rediss":
        if "ca" in url.settings:
            raise StoreError(f"storage {url}: ca is for TLS; write rediss:// to use TLS")
        return None
    try:
        return ssl.create_default_context(cafile=url.settings.get("ca"))
    except OSError as error:
        raise StoreError(
            f"storage {url}: ca={url.settings.get('ca')} cannot be read ({error}); name a PEM file"
        ) from None


# -- threads --------------------------------------------------------------------------------


class RedisThreadPool:
    """The calling thread works too, so that a call of one piece needs no other thread."""

    def __init__(self, threads: int, name: str) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix=name)

    def run(self, pieces: Sequence[Callable[[], T]], deadline: float) -> list[T]:
        """The results of all pieces, in order. Raises what the first of them raised.

        Pieces must end by the deadline themselves (`time.monotonic`). TimeoutError: not all had
        begun by then.
        """
        if not pieces:
            return []
        others = [self._pool.submit(piece) for piece in pieces[1:]]
        try:
            own = pieces[0]()
        finally:
            _settle(others, deadline)
        if any(other.cancelled() for other in others):
            raise TimeoutError("not all threads were free in time")
        return [own, *(other.result() for other in others)]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _settle(futures: Sequence[Future[T]], deadline: float) -> None:
    _, late = wait(futures, max(0.0, deadline - time.monotonic()))
    begun = [future for future in late if not future.cancel()]
    wait(begun)


def batch_slices(weights: Sequence[int], max_slices: int, min_weight: int) -> list[slice]:
    """Cut a batch into at most `max_slices` runs of similar weight, about `min_weight` or more."""
    total = sum(weights)
    count = max(1, min(max_slices, total // min_weight, len(weights)))
    cuts, run, sum_so_far = [0], 1, 0
    for n, weight in enumerate(weights):
        if run < count and sum_so_far >= total * run / count and n > cuts[-1]:
            cuts.append(n)
            run += 1
        sum_so_far += weight
    return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], len(weights)], strict=True)]
