"""A prefill engine and a decode engine of one family, which hand prompts over in one process.

Messages pass through queues, as JSON, when `deliver` is called; pages are written by the real page
sender over real shared memory.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtide.cache import CacheConfig, Layout, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams, SampledToken
from kvtide.engine.handoff.handoff_source import HandoffSource
from kvtide.engine.handoff.messages import Ask, Message, from_json, to_json
from kvtide.engine.handoff.own_memory import source_memory, target_memory
from kvtide.engine.handoff.page_writer import PageWriter
from kvtide.engine.handoff.reports import RankReports
from kvtide.engine.handoff.request_fields import asked_params
from kvtide.engine.speculation.drafter import Drafter
from kvtide.models import Model
from kvtide.transfer.peer.page_sender import PageSender
from kvtide.transfer.peer.transport import Transport
from kvtide.transfer.peer.transport_registry import open_transport
from tests.engine.restoring import SAMPLING, family_of, model_of

PEER = "prefill:1"
DEADLINE_S = 60.0


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
    """`to_prefill` and `to_decode` are messages on their way."""

    prefill: Engine
    decode: Engine
    transport: Transport
    receiver: Transport
    writer: PageWriter
    to_prefill: deque[str] = field(default_factory=deque)
    to_decode: deque[str] = field(default_factory=deque)
    log: list[Message] = field(default_factory=list)
    rooms: int = 0

    # -- serving ----------------------------------------------------------------------------

    def submit(self, tokens: Sequence[int], count: int = 4, **options: Any) -> Request:
        self.rooms += 1
        source = HandoffSource(PEER, f"room-{self.rooms}", asks=True)
        params = {"sampling": SAMPLING, "handoff_from": source} | options
        return self.decode.submit(RequestParams(tuple(tokens), count, **params))

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step both engines until all requests have ended, or `until` holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not (until() if until else self.decode.idle and self.prefill.idle):
            self.step()
            assert time.monotonic() < deadline, self.state()

    def answer(self, tokens: Sequence[int], count: int = 4, **options: Any) -> Request:
        request = self.submit(tokens, count, **options)
        self.run(lambda: request.finish is not None)
        return request

    def step(self) -> None:
        self.deliver()
        for engine in (self.prefill, self.decode):
            engine.step()
            assert engine.cache.validate() == []

    def deliver(self) -> None:
        """Everything that was sent arrives."""
        while self.to_prefill:
            self.at_prefill(from_json(json.loads(self.to_prefill.popleft())))
        while self.to_decode:
            message = from_json(json.loads(self.to_decode.popleft()))
            self.log.append(message)
            self.decode.handoffs.receive(PEER, message)

    def at_prefill(self, message: Message) -> None:
        self.log.append(message)
        if isinstance(message, Ask):
            self.prefill.submit(asked_params(message.room, message.request))
        else:
            self.prefill.handoffs.receive("decode", message)

    def state(self) -> str:
        incoming = self.decode.handoffs.incoming
        rooms = self.prefill.handoffs.outgoing.rooms
        return f"{dict(incoming.by_state)}, rooms {list(rooms)}, {self.log[-6:]}"

    def settle(self) -> None:
        """Nothing is held any more that a running request would hold."""

        def quiet() -> bool:
            held = self.prefill.handoffs.outgoing.rooms or self.prefill.cache.index.leases
            mine = self.decode.handoffs.incoming.quarantined or self.decode.cache.index.leases
            on_its_way = self.to_prefill or self.to_decode
            return not (held or mine or on_its_way or self.decode.cache.busy)

        self.run(quiet)
        assert not self.decode.cache.index.imports
        rows = self.decode.cache.config.tail_rows
        assert self.decode.cache.receiving.free_tail_rows == rows

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
    transport, receiver = open_transport("shm"), open_transport("shm")
    sender = PageSender(bytes_per_s=bytes_per_s)
    writer = PageWriter([source.manifest], 0, source.regions, transport, sender)
    writer.add_peer("decode", [target.manifest], [receiver.expose(target.regions)])
    pair = Pair(here, there, transport, receiver, writer)
    reports = RankReports(
        1, lambda room, message: pair.to_decode.append(json.dumps(to_json(message)))
    )
    outgoing = here.handoffs.outgoing
    outgoing.writer, outgoing.report, outgoing.on_first = writer, reports.add, reports.first
    there.handoffs.incoming.outbox = lambda peer, message: pair.to_prefill.append(
        json.dumps(to_json(message))
    )
    return pair


def family_pair(
    name: str, *, host_layout: Layout = Layout.PAGE_FIRST_DIRECT, **options: Any
) -> Pair:
    """The decode side has the family's residency; the prefill side keeps all on its device."""
    sampled = options.pop("tails", 4)
    prefill, decode = model_of(family_of(name).model), model_of(name)
    return pair_of(
        cache_of(prefill),
        cache_of(decode, tails=sampled, host_layout=host_layout),
        (prefill, decode),
        **options,
    )


def tokens_of(request: Request) -> tuple[SampledToken, ...]:
    return tuple(request.output)
