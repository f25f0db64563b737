"""An engine behind its service, in an event loop of its own, called from a plain thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from kvtide.engine import Engine, Request, RequestParams
from kvtide.engine.rank_topology import RankTopology
from kvtide.server.engine_commands import CloseCache, Leader
from kvtide.server.engine_rank import EngineRank
from kvtide.server.handoff.handoff_settings import HandoffSettings
from kvtide.server.handoff.rank_handoff import RankHandoff
from kvtide.server.handoff.server_handoff import ServerHandoff
from kvtide.server.service import ResponseStream, Service, StreamGroup
from kvtide.spec import Tier
from kvtide.transfer.peer.transport import Transport

T = TypeVar("T")
MAX_WAITING = 1024
SETTLE_S = 120.0
POLL_S = 0.001


class TimedAnswer(NamedTuple):
    """Seconds from submission to the first token and to the last one."""

    first_s: float
    last_s: float
    request: Request


class _GivenTransport(RankHandoff):
    """A rank that writes through a transport of the caller's."""

    def __init__(self, engine: Engine, settings: HandoffSettings, transport: Transport) -> None:
        self._given = transport
        super().__init__(engine, RankTopology(), settings)

    def _transport(self) -> Transport:
        return self._given


class ServedEngine:
    """A server without HTTP. Without a `transport` the settings' own is opened."""

    def __init__(
        self, engine: Engine, settings: HandoffSettings, transport: Transport | None = None
    ) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        handoff: RankHandoff
        if transport is None:
            handoff = RankHandoff(engine, RankTopology(), settings)
        else:
            handoff = _GivenTransport(engine, settings, transport)
        self._rank = EngineRank(engine, handoff=handoff)
        self._service = self._wait(self._open())
        self.handoff = ServerHandoff(self._service, self._rank, settings)

    async def _open(self) -> Service:
        return Service(Leader(self._rank), MAX_WAITING)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function on the engine's thread."""
        return self._wait(self._service.call(function))

    # -- requests ---------------------------------------------------------------------------

    def begin(self, requests: Sequence[RequestParams]) -> StreamGroup:
        """Submit requests and return at once."""
        checked = [self._service.check(params) for params in requests]
        return self._wait(self._service.submit(checked))

    def answer(self, params: RequestParams) -> TimedAnswer:
        """Submit a request and wait for its end."""
        group = self.begin([params])
        self._wait(group.whole())
        (stream,) = group.streams
        assert stream.first is not None and stream.ended is not None
        return TimedAnswer(stream.first - stream.began, stream.ended - stream.began, stream.request)

    def generated(self, streams: Sequence[ResponseStream]) -> tuple[float, int]:
        """The time between two steps, and all tokens of these streams by then."""
        return self.call(
            lambda _: (time.perf_counter(), sum(len(each.request.output) for each in streams))
        )

    def abort(self, streams: Sequence[ResponseStream]) -> None:
        self._loop.call_soon_threadsafe(self._service.abort, streams)
        self.settle()

    # -- the cache --------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until no request runs, no page moves and no room is open."""
        self.wait_until(
            lambda engine: (
                engine.idle
                and not engine.cache.busy
                and not engine.handoffs.prefill.rooms
                and not engine.handoffs.decode.open
            )
        )

    def wait_until(self, holds: Callable[[Engine], bool]) -> None:
        deadline = time.monotonic() + SETTLE_S
        while not self.call(holds):
            assert time.monotonic() < deadline, f"this did not come true in {SETTLE_S:g} s"
            time.sleep(POLL_S)

    def flush(self) -> None:
        """Empty both tiers, once all is at rest."""
        self.settle()
        self.call(lambda engine: [engine.cache.flush(tier) for tier in (Tier.DEVICE, Tier.HOST)])

    def close(self) -> None:
        self.handoff.close()
        self._wait(self._service.close())
        Leader(self._rank).run(CloseCache(10.0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
