"""What changes an engine, as values: the leader says each to all ranks, and all do it.

    HTTP ──▶ leader ──order──▶ every rank: the same call on its own engine

So ranks are given the same calls in the same order. What is only looked at (metrics, reports) is
looked at where it is asked for, on the leader. An order that is refused is refused by all alike,
for it is refused by what they agree on. Orders travel as JSON: nothing that is heard is ever run.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

from kvtide.cache import Namespace, TierError
from kvtide.engine import (
    Engine,
    RankTopology,
    Request,
    RequestError,
    RequestParams,
    SamplingParams,
    Update,
)
from kvtide.server.store_setup import beside, let_go, open_link
from kvtide.spec import Tier
from kvtide.storage import Removed, StoreError
from kvtide.transfer.store_link import StoreLink

log = logging.getLogger("kvtide")

T_co = TypeVar("T_co", covariant=True)


@dataclass(slots=True)
class Post:
    """A rank at its work: its engine, its topology, and stores that it is opening, by number."""

    engine: Engine
    topology: RankTopology = field(default_factory=RankTopology)
    openings: dict[int, Future[StoreLink]] = field(default_factory=dict)


class EngineCommand(Protocol[T_co]):
    def done(self, post: Post) -> T_co:
        """Do it on one rank, while all others do it on theirs."""


@dataclass(frozen=True, slots=True)
class Submit:
    """`token_s` is how long a prompt's token takes on the leader: clocks of ranks differ."""

    params: RequestParams
    token_s: float

    def done(self, post: Post) -> Request:
        post.engine.token_s = self.token_s
        return post.engine.submit(self.params)


@dataclass(frozen=True, slots=True)
class Abort:
    """Of a request by its number; nothing if it is finished."""

    number: int

    def done(self, post: Post) -> None:
        request = post.engine.find(self.number)
        if request is not None:
            post.engine.abort(request)


@dataclass(frozen=True, slots=True)
class RunStep:
    def done(self, post: Post) -> list[Update]:
        return post.engine.step()


@dataclass(frozen=True, slots=True)
class Flush:
    tier: int

    def done(self, post: Post) -> int:
        return post.engine.cache.flush(Tier(self.tier))


@dataclass(frozen=True, slots=True)
class Open:
    """Begin to open a store; nobody waits for it here."""

    number: int
    url: str

    def done(self, post: Post) -> None:
        cache = post.engine.cache
        post.openings[self.number] = beside(lambda: open_link(self.url, cache))


@dataclass(frozen=True, slots=True)
class IsOpen:
    """Whether every rank knows how its opening ended."""

    number: int

    def done(self, post: Post) -> bool:
        opening = post.openings[self.number]
        return all(post.engine.cache.agreement.all_true([opening.done()]))


@dataclass(frozen=True, slots=True)
class LetGo:
    """A store that is being opened is not wanted any more."""

    number: int

    def done(self, post: Post) -> None:
        if (opening := post.openings.pop(self.number, None)) is not None:
            let_go(opening)


@dataclass(frozen=True, slots=True)
class Attach:
    """Attach what was opened, if it could be on every rank; another store is left."""

    number: int
    timeout_s: float

    def done(self, post: Post) -> None:
        opening = post.openings.pop(self.number)
        post.engine.cache.storage.attach_opened(opening, self.timeout_s)


@dataclass(frozen=True, slots=True)
class Detach:
    timeout_s: float

    def done(self, post: Post) -> bool:
        return post.engine.cache.storage.detach(self.timeout_s)


@dataclass(frozen=True, slots=True)
class Clear:
    """Every rank asks its store to remove its pages; what the leader's says is the answer."""

    def done(self, post: Post) -> Future[Removed] | None:
        return post.engine.cache.storage.ask(lambda store: store.clear())


@dataclass(frozen=True, slots=True)
class Close:
    """The last one. False if a store has not let go."""

    timeout_s: float

    def done(self, post: Post) -> bool:
        return post.engine.cache.close(self.timeout_s)


ORDERS: dict[str, Any] = {
    order.__name__: order
    for order in (
        *(Submit, Abort, RunStep, Flush, Close),
        *(Open, IsOpen, LetGo, Attach, Detach, Clear),
    )
}
REFUSALS = (RequestError, StoreError, TierError)


# -- as words ---------------------------------------------------------------------------------


def written(order: object) -> bytes:
    said = [type(order).__name__, _fields(order)]
    return json.dumps(said, default=_plain, separators=(",", ":")).encode()


def read(words: bytes) -> EngineCommand[object]:
    name, said = json.loads(words)
    if name == Submit.__name__:
        said["params"] = _params(said["params"])
    order: EngineCommand[object] = ORDERS[name](**said)
    return order


def _fields(value: Any) -> dict[str, object]:
    return {row.name: getattr(value, row.name) for row in fields(value)}


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else _fields(value)


def _params(said: dict[str, Any]) -> RequestParams:
    return RequestParams(
        **{
            **said,
            "tokens": tuple(said["tokens"]),
            "sampling": SamplingParams(**said["sampling"]),
            "stop_ids": frozenset(said["stop_ids"]),
            "stop": tuple(said["stop"]),
            "namespace": Namespace(*said["namespace"]),
        }
    )


# -- giving and following ---------------------------------------------------------------------


class Leader:
    """Says every order to the other ranks, if there are any, and does it too.

    `parted`: what stopped an order here that others may have carried out. It is no refusal, which
    all meet alike, so the ranks can no longer be trusted to have done the same.
    """

    def __init__(self, post: Post) -> None:
        self.engine, self.topology = post.engine, post.topology
        self.parted: Exception | None = None
        self._post = post

    def do(self, order: EngineCommand[T_co]) -> T_co:
        if self.topology.ranks == 1:
            return order.done(self._post)
        self.topology.broadcast_command(written(order))
        try:
            return order.done(self._post)
        except REFUSALS:
            raise
        except Exception as error:
            self.parted = error
            raise


def follow(post: Post) -> bool:
    """Do what the leader says, to the end; False if a store has not let go then."""
    while True:
        order = read(post.topology.receive_command())
        try:
            outcome = order.done(post)
        except REFUSALS as refusal:
            # The leader is refused as well, and tells whoever asked.
            log.warning("rank %d: %s", post.topology.rank, refusal)
            continue
        if isinstance(order, Close):
            return bool(outcome)
