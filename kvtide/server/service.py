"""The engine on a thread of its own, for callers that live in an event loop.

    submit ──▶ inbox ──▶ engine thread: step, step, … ──▶ one message per step ──▶ streams

The thread alone touches engine and cache. Everything else is left in its inbox as a call, and runs
between two steps; whatever changes something is an order (`orders`), which all ranks carry out.
What a step brought goes to the event loop in one piece.

A stream ends with its request's last update, with `ServiceEndedError`, or by `abort`, which is also
what becomes of it when whoever reads it goes away.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvtide.engine import Engine, Request, RequestParams, Update
from kvtide.server.engine_commands import Abort, EngineCommand, Leader, RunStep, Submit
from kvtide.server.rate_estimate import RateEstimate

T = TypeVar("T")

IDLE_S = 0.0005
"""How long to sleep when requests wait for a transfer and there is nothing to compute."""
CALM_S = 0.005
"""How long to wait for calls when nothing but storage is at work."""

log = logging.getLogger("kvtide")


class OverloadedError(Exception):
    """Too many are there already; come again in `retry_s` seconds."""

    def __init__(self, requests: int, retry_s: int) -> None:
        super().__init__(f"{requests} requests run or wait here; try again in {retry_s} s")
        self.retry_s = retry_s


class ServiceEndedError(Exception):
    """The service takes no more requests: it is draining, or its engine broke."""


@dataclass(eq=False)
class ResponseStream:
    """One request's updates, as they come. Times are seconds of `time.monotonic`."""

    request: Request
    began: float
    updates: asyncio.Queue[Update | ServiceEndedError] = field(default_factory=asyncio.Queue)
    first: float | None = None
    ended: float | None = None

    async def __aiter__(self) -> AsyncIterator[Update]:
        finish = None
        while finish is None:
            update = await self.updates.get()
            if isinstance(update, ServiceEndedError):
                raise update
            yield update
            finish = update.finish

    def put(self, update: Update, now: float) -> None:
        self.first = self.first or now
        if update.finish is not None:
            self.ended = now
        self.updates.put_nowait(update)


class Service:
    """`max_requests` run or wait at a time; `listeners` are told of every stream that ended."""

    def __init__(self, leader: Leader, max_requests: int) -> None:
        self.max_requests = max_requests
        self.broken: Exception | None = None
        self.pace = RateEstimate()
        self.listeners: list[Callable[[ResponseStream], None]] = []
        self._leader, self._engine = leader, leader.engine
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._streams: dict[Request, ResponseStream] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._thread = threading.Thread(target=self._work, name="kvtide-engine", daemon=True)
        self._thread.start()

    # -- from the event loop ----------------------------------------------------------------

    async def submit(self, asks: Sequence[RequestParams]) -> list[ResponseStream]:
        """Queue requests, all of them or none; raises what the engine says against them."""
        began = time.monotonic()
        streams: list[ResponseStream] = []
        try:
            await self.call(lambda engine: self._accept(engine, asks, began, streams))
        except asyncio.CancelledError:
            # They may be queued by now, or be about to: the inbox is in order.
            self._inbox.put(lambda: self._forget(streams))
            raise
        return streams

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Have the engine's thread do something between two steps."""
        if self.broken is not None or not self._thread.is_alive():
            raise self._ended()
        answer: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(answer)
        answer.add_done_callback(self._calls.discard)
        self._inbox.put(lambda: self._answer(answer, function))
        return await answer

    async def order(self, order: EngineCommand[T]) -> T:
        """Have all ranks do something between two steps; what came of it here."""
        return await self.call(lambda engine: self._leader.do(order))

    def leave(self, order: EngineCommand[object]) -> None:
        """Have all ranks do something that nobody waits for."""
        self._inbox.put(lambda: self._leader.do(order))

    def abort(self, streams: Sequence[ResponseStream]) -> None:
        """Whoever wanted these has gone: their pages come back at the next step."""
        for stream in streams:
            if self._streams.pop(stream.request, None) is not None:
                self.leave(Abort(stream.request.number))
                self._tell(stream)

    async def close(self, patient: Callable[[], bool] = lambda: True) -> bool:
        """End the thread after the step it is in; streams that are open end with an error.

        False if patience ended first: a step may wait for a rank that does not answer.
        """
        self._inbox.put(None)
        while self._thread.is_alive() and patient():
            await asyncio.sleep(CALM_S)
        self._end_all()
        return not self._thread.is_alive()

    def give_up(self, error: Exception) -> None:
        """The engine will not come back, whatever its thread waits for."""
        self.broken = self.broken or error
        self._end_all()

    def _end_all(self) -> None:
        """The thread is gone: nobody waits for it any longer."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.updates.put_nowait(self._ended())
        for answer in [*self._calls]:
            if not answer.done():
                answer.set_exception(self._ended())

    def _ended(self) -> ServiceEndedError:
        if self.broken is not None:
            return ServiceEndedError("the engine has stopped; restart the server")
        return ServiceEndedError("the server is shutting down; ask another one")

    def _tell(self, stream: ResponseStream) -> None:
        for listener in self.listeners:
            listener(stream)

    def _deliver(self, updates: Sequence[Update], now: float) -> None:
        for update in updates:
            stream = self._streams.get(update.request)
            if stream is None:
                continue
            stream.put(update, now)
            if update.finish is not None:
                del self._streams[update.request]
                self.pace.ended()
                self._tell(stream)

    # -- on the engine's thread -------------------------------------------------------------

    def _accept(
        self,
        engine: Engine,
        asks: Sequence[RequestParams],
        began: float,
        streams: list[ResponseStream],
    ) -> None:
        """Queue them. Their streams are known to the loop before any update can reach it."""
        for params in asks:
            engine.check(params)
        waiting = engine.scheduler.waiting
        present = waiting + len(engine.scheduler.running)
        if present and present + len(asks) > self.max_requests:
            raise OverloadedError(present, self.pace.retry_s(waiting))
        orders = [Submit(params, engine.token_s) for params in asks]
        streams += [ResponseStream(self._leader.do(order), began) for order in orders]
        self._loop.call_soon_threadsafe(
            self._streams.update, {stream.request: stream for stream in streams}
        )

    def _forget(self, streams: Sequence[ResponseStream]) -> None:
        self._loop.call_soon_threadsafe(self.abort, streams)

    def _answer(self, answer: asyncio.Future[T], function: Callable[[Engine], T]) -> None:
        """Hand over the outcome, whatever it is, unless whoever asked has gone."""

        def settle(use: Callable[[], None]) -> None:
            self._loop.call_soon_threadsafe(lambda: None if answer.done() else use())

        try:
            found = function(self._engine)
        except Exception as error:
            settle(lambda error=error: answer.set_exception(error))  # type: ignore[misc]
        else:
            settle(lambda: answer.set_result(found))

    def _work(self) -> None:
        """The thread's life. An engine that raises cannot be trusted any further."""
        try:
            while self._do_inbox():
                self._step()
        except Exception as error:
            log.exception("the engine broke")
            self.broken = error
            self._loop.call_soon_threadsafe(self._end_all)

    def _do_inbox(self) -> bool:
        """Run what was left here; wait for it if there is nothing else to do. False to end."""
        cache = self._engine.cache
        idle = self._engine.idle and not cache.busy
        limit_s = CALM_S if cache.unsettled else None
        while True:
            try:
                call = self._inbox.get(block=idle, timeout=limit_s)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            if self._leader.parted is not None:
                raise self._leader.parted
            idle = False

    def _step(self) -> None:
        engine = self._engine
        began = time.monotonic()
        updates = self._leader.do(RunStep())
        now = time.monotonic()
        self.pace.stepped(engine.computed, now - began, len(updates))
        engine.token_s = self.pace.prefill_token_s
        if updates:
            self._loop.call_soon_threadsafe(self._deliver, updates, now)
        elif not engine.computed:
            time.sleep(IDLE_S)
