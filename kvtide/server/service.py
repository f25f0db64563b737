"""The engine on a thread of its own, for callers in an event loop.

    submit ──▶ inbox ──▶ engine thread: step, step, … ──▶ one message per step ──▶ streams

The engine thread alone touches engine and cache. The event loop puts calls into its inbox, which
run between two steps; a call that changes state is an engine command, which all ranks apply. The
updates of a step reach the event loop in one message, while the engine thread waits for the device
in the next step: the two threads share one interpreter.

A stream ends with its request's last update, with `ServiceEndedError`, or by `abort`; a client that
disconnects is aborted.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtide.engine import (
    CheckedRequest,
    Engine,
    Request,
    RequestError,
    RequestParams,
    Update,
)
from kvtide.server.engine_commands import Abort, EngineCommand, Leader, RunStep, Submit
from kvtide.server.rate_estimate import RateEstimate

T = TypeVar("T")

TRANSFER_POLL_S = 0.0005
"""The engine thread sleeps this long when requests wait for transfers and nothing can run."""
STORAGE_POLL_S = 0.005
"""The engine thread waits this long for calls when only storage has work."""

log = logging.getLogger("kvtide")


class OverloadedError(Exception):
    """Too many requests run or wait; the client retries after `retry_s` seconds."""

    def __init__(self, requests: int, retry_s: int) -> None:
        super().__init__(f"{requests} requests run or wait here; try again in {retry_s} s")
        self.retry_s = retry_s


class ServiceEndedError(Exception):
    """The service accepts no more requests: it is draining, or its engine failed."""


@dataclass(eq=False, slots=True)
class ResponseStream:
    """One request of a response. Times are seconds of `time.monotonic`.

    number  among the streams of its response
    """

    request: Request
    number: int
    began: float
    first: float | None = None
    ended: float | None = None


class StreamGroup:
    """The streams of one response, with one reader for all.

    Updates that come while the reader writes wait here, and are read together: a client that reads
    slowly holds up neither the engine nor other clients.
    """

    def __init__(self, streams: Sequence[ResponseStream]) -> None:
        self.streams = tuple(streams)
        self._came: list[tuple[ResponseStream, Update]] = []
        self._left = len(self.streams)
        self._error: ServiceEndedError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._at_end = False

    @property
    def open(self) -> bool:
        """More updates come, or have come and are not read."""
        return bool(self._came) or self._left > 0

    async def take(self) -> list[tuple[ResponseStream, Update]]:
        """What has come since, in order; waits until something has."""
        if not self._came:
            await self._wait()
        came, self._came = self._came, []
        return came

    async def whole(self) -> list[tuple[ResponseStream, Update]]:
        """All updates, once every stream has ended: the reader is woken once."""
        self._at_end = True
        if self._left:
            await self._wait()
        return self._came

    def put(self, stream: ResponseStream, update: Update, now: float) -> None:
        stream.first = stream.first or now
        self._came.append((stream, update))
        if update.finish is not None:
            stream.ended = now
            self._left -= 1
        if self._left == 0 or not self._at_end:
            self._wake()

    def fail(self, error: ServiceEndedError) -> None:
        """No more updates come; the reader gets the error behind those that have."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _wait(self) -> None:
        if self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._error is not None and (self._at_end or not self._came):
            raise self._error


class Service:
    """Beside a full batch `max_waiting` requests may wait.

    broken      the error that stopped the engine
    rate        the engine's prefill and completion rates
    listeners   called with every stream that has ended
    """

    def __init__(self, leader: Leader, max_waiting: int) -> None:
        self.max_requests = leader.engine.scheduler.max_running + max_waiting
        self.broken: Exception | None = None
        self.rate = RateEstimate()
        self.listeners: list[Callable[[ResponseStream], None]] = []
        self._leader, self._engine = leader, leader.engine
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._streams: dict[Request, tuple[StreamGroup, ResponseStream]] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._held: Sequence[Update] = ()
        self._held_since = 0.0
        self._engine.on_waiting = self._release
        self._thread = threading.Thread(target=self._work, name="kvtide-engine", daemon=True)
        self._thread.start()

    # -- from the event loop ----------------------------------------------------------------

    async def submit(self, requests: Sequence[CheckedRequest]) -> StreamGroup:
        """Queue all of these requests, or raise `OverloadedError` and queue none."""
        began = time.monotonic()
        streams: list[ResponseStream] = []
        try:
            return await self.call(lambda engine: self._accept(engine, requests, began, streams))
        except asyncio.CancelledError:
            # The requests are queued by now or soon: the inbox keeps the order.
            self._inbox.put(lambda: self._abandon(streams))
            raise

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function on the engine thread between two steps."""
        if self.broken is not None or not self._thread.is_alive():
            raise self._ended()
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._inbox.put(lambda: self._resolve(future, function))
        return await future

    async def command(self, command: EngineCommand[T]) -> T:
        """Apply a command on all ranks between two steps; the leader's result."""
        return await self.call(lambda engine: self._leader.run(command))

    def command_nowait(self, command: EngineCommand[object]) -> None:
        """Apply a command on all ranks between two steps, without its result."""
        self._inbox.put(lambda: self._leader.run(command))

    # -- from other threads -----------------------------------------------------------------

    def call_from_thread(self, function: Callable[[Engine], object]) -> None:
        """Run a function on the engine thread between two steps, without its result."""
        self._inbox.put(lambda: function(self._engine))

    def run_from_thread(self, command: EngineCommand[T], timeout_s: float) -> T:
        """Apply a command on all ranks between two steps, and wait for the leader's result."""
        done: Future[T] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(self._leader.run(command))
                except Exception as error:
                    done.set_exception(error)

        self._inbox.put(run)
        try:
            return done.result(timeout_s)
        except FutureTimeoutError:
            done.cancel()
            raise TimeoutError("the engine is busy; try again") from None

    def check(self, params: RequestParams) -> CheckedRequest:
        """What `Engine.check` says; from any thread."""
        return self._engine.check(params)

    def submit_from_thread(
        self, request: CheckedRequest, on_refused: Callable[[Exception], None]
    ) -> None:
        """Queue a request whose output no client reads; a refusal comes on the engine thread."""

        def submit() -> None:
            try:
                self._admit(self._engine, 1)
                self._leader.run(Submit(request, self._engine.token_s, time.monotonic()))
            except (OverloadedError, RequestError) as error:
                on_refused(error)

        self._inbox.put(submit)

    @property
    def has_rooms(self) -> bool:
        """Whether prompts are kept for peers."""
        return bool(self._engine.handoffs.prefill.rooms)

    # -- from the event loop ----------------------------------------------------------------

    def abort(self, streams: Sequence[ResponseStream]) -> None:
        """Abort the requests of these streams: the next step frees their pages."""
        for stream in streams:
            if self._streams.pop(stream.request, None) is not None:
                self.command_nowait(Abort(stream.request.number))
                self._notify(stream)

    async def close(self, patient: Callable[[], bool] = lambda: True) -> bool:
        """End the engine thread after its current step; open streams end with an error.

        False if `patient` turned false first: a step may wait for a rank that does not answer.
        """
        self._inbox.put(None)
        while self._thread.is_alive() and patient():
            await asyncio.sleep(STORAGE_POLL_S)
        self._end_all()
        return not self._thread.is_alive()

    def give_up(self, error: Exception) -> None:
        """End all streams and calls, whatever the engine thread waits for."""
        self.broken = self.broken or error
        self._end_all()

    def _end_all(self) -> None:
        streams, self._streams = self._streams, {}
        for group, _ in streams.values():
            group.fail(self._ended())
        for future in [*self._calls]:
            if not future.done():
                future.set_exception(self._ended())

    def _ended(self) -> ServiceEndedError:
        if self.broken is not None:
            return ServiceEndedError("the engine has stopped; restart the server")
        return ServiceEndedError("the server is shutting down; ask another one")

    def _notify(self, stream: ResponseStream) -> None:
        for listener in self.listeners:
            listener(stream)

    def _deliver(self, updates: Sequence[Update], now: float) -> None:
        for update in updates:
            found = self._streams.get(update.request)
            if found is None:
                continue
            group, stream = found
            group.put(stream, update, now)
            if update.finish is not None:
                del self._streams[update.request]
                self.rate.finished()
                self._notify(stream)

    # -- on the engine's thread -------------------------------------------------------------

    def _accept(
        self,
        engine: Engine,
        requests: Sequence[CheckedRequest],
        began: float,
        streams: list[ResponseStream],
    ) -> StreamGroup:
        """Queue the requests. The loop knows their streams before an update can reach it."""
        self._admit(engine, len(requests))
        now = time.monotonic()
        for number, request in enumerate(requests):
            submitted = self._leader.run(Submit(request, engine.token_s, now))
            streams.append(ResponseStream(submitted, number, began))
        group = StreamGroup(streams)
        self._loop.call_soon_threadsafe(
            self._streams.update, {stream.request: (group, stream) for stream in streams}
        )
        return group

    def _admit(self, engine: Engine, count: int) -> None:
        waiting = engine.scheduler.waiting
        present = waiting + len(engine.scheduler.running)
        if present and present + count > self.max_requests:
            raise OverloadedError(present, self.rate.retry_s(waiting))

    def _abandon(self, streams: Sequence[ResponseStream]) -> None:
        self._loop.call_soon_threadsafe(self.abort, streams)

    def _resolve(self, future: asyncio.Future[T], function: Callable[[Engine], T]) -> None:
        """Resolve a call's future with its result or its error, unless it was cancelled."""

        def settle(resolve: Callable[[], None]) -> None:
            self._loop.call_soon_threadsafe(lambda: None if future.done() else resolve())

        try:
            result = function(self._engine)
        except Exception as error:
            settle(lambda error=error: future.set_exception(error))  # type: ignore[misc]
        else:
            settle(lambda: future.set_result(result))

    def _work(self) -> None:
        """The engine thread's loop. It ends when the engine raises: its state may be corrupt."""
        try:
            while self._run_inbox():
                self._step()
            self._release()
        except Exception as error:
            log.exception("the engine broke")
            self.broken = error
            self._release()
            self._loop.call_soon_threadsafe(self._end_all)

    def _run_inbox(self) -> bool:
        """Run all calls of the inbox; wait for one if the engine is idle. False to end."""
        cache = self._engine.cache
        idle = self._engine.idle and not cache.busy
        limit_s = STORAGE_POLL_S if cache.unsettled else self._until_expiry()
        while True:
            try:
                call = self._inbox.get(block=idle, timeout=limit_s)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            if self._leader.diverged is not None:
                raise self._leader.diverged
            idle = False

    def _until_expiry(self) -> float | None:
        """Seconds until a session may have expired; None for never."""
        expiry = self._engine.cache.sessions.next_expiry
        return None if expiry is None else max(0.0, expiry - time.monotonic())

    def _step(self) -> None:
        engine = self._engine
        began = time.monotonic()
        updates = self._leader.run(RunStep(began))
        now = time.monotonic()
        self.rate.stepped(engine.computed, now - began, len(updates))
        engine.token_s = self.rate.prefill_token_s
        self._release()
        self._held, self._held_since = updates, now
        if engine.idle or not engine.computed:
            self._release()
        if not updates and not engine.computed:
            time.sleep(TRANSFER_POLL_S)

    def _release(self) -> None:
        """Send the updates of the last step to the event loop.

        Writing them, and reading what clients ask next, keeps the event loop busy for a while. This
        thread needs the interpreter between two steps, when the device idles, and not while it
        waits for the device: so updates are held until then, if another step follows.
        """
        updates, self._held = self._held, ()
        if updates:
            self._loop.call_soon_threadsafe(self._deliver, updates, self._held_since)
