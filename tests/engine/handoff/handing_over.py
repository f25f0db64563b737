"""A prefill engine and a decode engine of one family, which hand prompts over in one process.

Messages pass through queues, as JSON, when `deliver` is called; pages are written by the real page
sender over real shared memory. `Pair.held` names everything that a handoff can leave behind.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache as cached
from random import Random
from types import MappingProxyType
from typing import Any, TypeVar

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams, SampledToken, SamplingParams
from kvtide.engine.handoff.handoff_source import HandoffSource
from kvtide.engine.handoff.messages import Ask, HandoffMessage, from_json, to_json
from kvtide.engine.handoff.own_memory import source_memory, target_memory
from kvtide.engine.handoff.page_writer import PageWriter
from kvtide.engine.handoff.reports import RankReports
from kvtide.engine.handoff.request_fields import asked_params, for_prefill
from kvtide.engine.speculation.drafter import Drafter
from kvtide.models import Model
from kvtide.transfer.peer.page_sender import PageSender
from kvtide.transfer.peer.transport import Transport
from kvtide.transfer.peer.transport_registry import open_transport
from tests.engine.restoring import SAMPLING, family_of, model_of, text

PEER, DECODE = "prefill:1", "decode"
DEADLINE_S = 60.0
Kind = TypeVar("Kind")


def cache_of(
    model: Model, *, tokens: int = 1024, host: int = 4096, tails: int = 0, **options: Any
) -> TieredCache:
    settings = {"fingerprint": b"weights", "tokens_per_checkpoint": 32} | options
    shared = {"tail_rows": tails, "shared_host": tails > 0}
    return TieredCache(
        model.memory, CacheConfig(Tokens(tokens), Tokens(host), **settings, **shared)
    )


@dataclass
class Pair:
    """`to_prefill` and `to_decode` are messages on their way.

    passes   which of them arrive now; the others wait, and those behind them
    checked  both caches are validated after every step
    """

    prefill: Engine
    decode: Engine
    transport: Transport
    receiver: Transport
    writer: PageWriter
    to_prefill: deque[str] = field(default_factory=deque)
    to_decode: deque[str] = field(default_factory=deque)
    log: list[HandoffMessage] = field(default_factory=list)
    rooms: int = 0
    passes: Callable[[HandoffMessage], bool] = lambda message: True
    checked: bool = True
    random: Random = field(default_factory=lambda: Random(5))

    def __post_init__(self) -> None:
        self.reports = RankReports(
            1, lambda room, message: self.to_decode.append(json.dumps(to_json(message)))
        )
        outgoing = self.prefill.handoffs.prefill
        outgoing.writer = self.writer
        outgoing.report, outgoing.on_computed = self.reports.add, self.reports.computed
        self.decode.handoffs.decode.outbox = lambda peer, message: self.to_prefill.append(
            json.dumps(to_json(message))
        )

    def lent(self) -> Iterator[Pair]:
        """To one test of many: with nothing under way before and after."""
        self.log, self.passes = [], lambda message: True
        yield self
        self.passes = lambda message: True
        self.settle()

    def fresh(self, length: int) -> tuple[int, ...]:
        """A prompt that neither side has seen."""
        return text(self.random, length)

    # -- serving ----------------------------------------------------------------------------

    def submit(self, tokens: Sequence[int], count: int = 4, **options: Any) -> Request:
        """The decode side asks the prefill side by itself."""
        self.rooms += 1
        source = HandoffSource(PEER, f"room-{self.rooms}", asks=True)
        params = {"sampling": SAMPLING, "handoff_from": source} | options
        return self.decode.submit(RequestParams(tuple(tokens), count, **params))

    def route(
        self, tokens: Sequence[int], count: int = 4, **options: Any
    ) -> tuple[Callable[[], Request], Callable[[], Request]]:
        """A router sends the request to both sides: how the prefill side gets it, and the other."""
        self.rooms += 1
        room = f"room-{self.rooms}"
        given = {"sampling": SAMPLING} | options
        params = RequestParams(tuple(tokens), count, **given)
        routed = replace(params, handoff_from=HandoffSource(PEER, room))
        return (
            lambda: self.prefill.submit(for_prefill(params, room)),
            lambda: self.decode.submit(routed),
        )

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step both engines until all requests have ended, or `until` holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not (until() if until else self.decode.idle and self.prefill.idle):
            self.step()
            assert time.monotonic() < deadline, self.state()

    def answer(self, tokens: Sequence[int], count: int = 4, **options: Any) -> Request:
        request = self.submit(tokens, count, **options)
        self.finish(request)
        return request

    def finish(self, request: Request) -> None:
        self.run(lambda: request.finish is not None)

    def step(self) -> None:
        self.deliver()
        for engine in (self.prefill, self.decode):
            engine.step()
            if self.checked:
                assert engine.cache.validate() == []

    def deliver(self) -> None:
        """What was sent arrives, in order, as far as it `passes`."""
        while (message := self._next(self.to_prefill)) is not None:
            self.at_prefill(message)
        while (message := self._next(self.to_decode)) is not None:
            self.at_decode(message)

    def _next(self, queue: deque[str]) -> HandoffMessage | None:
        message = from_json(json.loads(queue[0])) if queue else None
        if message is None or not self.passes(message):
            return None
        queue.popleft()
        return message

    def at_prefill(self, message: HandoffMessage) -> None:
        self.log.append(message)
        if isinstance(message, Ask):
            self.prefill.submit(asked_params(message.room, message.request))
        else:
            self.prefill.handoffs.receive(DECODE, message)

    def at_decode(self, message: HandoffMessage) -> None:
        self.log.append(message)
        self.decode.handoffs.receive(PEER, message)

    def sent(self, kind: type[Kind]) -> list[Kind]:
        """The messages of a kind that have arrived."""
        return [message for message in self.log if isinstance(message, kind)]

    # -- looking ----------------------------------------------------------------------------

    def state(self) -> str:
        incoming = self.decode.handoffs.decode
        return f"{dict(incoming.by_state)}, held {self.held()}, {self.log[-6:]}"

    def held(self) -> dict[str, int]:
        """What a handoff holds anywhere, by name; empty when nothing is left of any."""
        incoming, outgoing = self.decode.handoffs.decode, self.prefill.handoffs.prefill
        decode, prefill = self.decode.cache, self.prefill.cache
        counts = {
            "messages": len(self.to_prefill) + len(self.to_decode),
            "rooms": len(outgoing.rooms),
            "early reservations": len(outgoing._early),
            "rooms of the sender": len(self.writer.sender._rooms),
            "reported epochs": len(self.reports._epochs),
            "prefill leases": len(prefill.index.leases),
            "prefill events": len(prefill._events),
            "open handoffs": len(incoming.open),
            "epochs": len(incoming._by_epoch),
            "unsent reservations": len(incoming._unsent),
            "quarantined": len(incoming.quarantined) + len(decode.receiving.quarantined),
            "decode leases": len(decode.index.leases),
            "decode events": len(decode._events),
            "imports": len(decode.index.imports),
            "tail rows": decode.config.tail_rows - decode.receiving.free_tail_rows,
        }
        return {name: count for name, count in counts.items() if count}

    def settle(self) -> None:
        """Wait until nothing is held any more, and every slot is free or has a page."""
        deadline = time.monotonic() + DEADLINE_S
        while self._is_busy():
            self.step()
            assert time.monotonic() < deadline, self.state()
        for engine in (self.prefill, self.decode):
            assert engine.cache.validate() == []
            for count in engine.cache.stats().pages.values():
                assert count.free + count.resident == count.capacity

    def wait_for_sender(self) -> None:
        """It has done all commands that it was given."""
        done = threading.Event()
        self.writer.sender.run(done.set)
        assert done.wait(DEADLINE_S)

    def _is_busy(self) -> bool:
        """After the sender has done all its jobs."""
        self.wait_for_sender()
        return bool(self.held()) or self.decode.cache.busy or self.prefill.cache.busy

    def close(self) -> None:
        self.writer.close(10.0)
        self.receiver.close()
        self.prefill.cache.close()
        self.decode.cache.close()


def pair_of(
    prefill: TieredCache,
    decode: TieredCache,
    models: tuple[Model, Model],
    *,
    chunks: tuple[int, int] = (64, 48),
    min_tokens: int = 1,
    drafters: tuple[Drafter | None, Drafter | None] = (None, None),
    bytes_per_s: float | None = None,
    transport: Transport | None = None,
    **options: Any,
) -> Pair:
    here = Engine(models[0], prefill, chunk_tokens=chunks[0], drafter=drafters[0], **options)
    there = Engine(
        models[1],
        decode,
        chunk_tokens=chunks[1],
        drafter=drafters[1],
        handoff_min_tokens=min_tokens,
        **options,
    )
    source, target = source_memory(prefill), target_memory(decode)
    transport, receiver = transport or open_transport("shm"), open_transport("shm")
    sender = PageSender(bytes_per_s=bytes_per_s)
    writer = PageWriter([source.manifest], 0, source.regions, transport, sender)
    writer.add_peer(DECODE, [target.manifest], [receiver.expose(target.regions)])
    return Pair(here, there, transport, receiver, writer)


def family_pair(
    name: str,
    *,
    prefill_name: str | None = None,
    prefill_cache: Mapping[str, Any] = MappingProxyType({}),
    decode_cache: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Pair:
    """The decode side has the family's residency; the prefill side keeps all on its device, unless
    it is another one of the same model."""
    prefill, decode = model_of(prefill_name or family_of(name).model), model_of(name)
    return pair_of(
        cache_of(prefill, **prefill_cache),
        cache_of(decode, **{"tails": 4, **decode_cache}),
        (prefill, decode),
        **options,
    )


@cached
def _fresh_engine(model: str) -> Engine:
    built = model_of(model)
    cache = TieredCache(built.memory, CacheConfig(Tokens(2048), None, tokens_per_checkpoint=16))
    return Engine(built, cache, chunk_tokens=1024)


@cached
def expected(
    family: str, tokens: tuple[int, ...], count: int = 4, sampling: SamplingParams = SAMPLING
) -> tuple[SampledToken, ...]:
    """The answer of one engine that computes the prompt without its cache."""
    engine = _fresh_engine(family_of(family).model)
    request = engine.submit(RequestParams(tokens, count, sampling, recompute=True))
    while not engine.idle:
        engine.step()
    assert request.by_tier == {}
    return tuple(request.output)


def tokens_of(request: Request) -> tuple[SampledToken, ...]:
    return tuple(request.output)
