"""Engine commands: every change to an engine as a value, which all ranks apply in the same order.

    HTTP ──▶ leader ──command──▶ every rank: the same call on its own engine

The leader broadcasts a command and applies it too. Reads (metrics, reports) need no command: the
leader's engine answers them. All ranks refuse the same commands, since a refusal depends only on
state that the ranks agree on. Commands travel as JSON; a rank never unpickles what it receives.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import numpy as np

from kvtide.cache import Namespace, TierError
from kvtide.engine import (
    CheckedRequest,
    Request,
    RequestError,
    RequestParams,
    SamplingParams,
    Update,
)
from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.handoff.handoff_source import HandoffSource, HandoffTarget
from kvtide.server.engine_rank import EngineRank
from kvtide.server.handoff.peer_commands import PEER_COMMANDS
from kvtide.server.sessions.session_commands import SESSION_COMMANDS, UnknownSessionError
from kvtide.server.setup.store_setup import close_when_open, in_thread, open_link
from kvtide.spec import Tier
from kvtide.storage import Removed, StoreError

log = logging.getLogger("kvtide")

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class EngineCommand(Protocol[T_co]):
    def apply(self, rank: EngineRank) -> T_co:
        """Apply the command to one rank; all other ranks apply it to theirs."""


# -- requests ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """`token_s` is the leader's prefill time per token: the ranks' own measurements differ. So do
    their clocks: `now` is the leader's."""

    request: CheckedRequest
    token_s: float
    now: float = 0.0

    def apply(self, rank: EngineRank) -> Request:
        rank.engine.cache.sessions.tick(self.now)
        rank.engine.token_s = self.token_s
        return rank.engine.submit_checked(self.request)


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort a request by its number; a finished one stays as it is."""

    number: int

    def apply(self, rank: EngineRank) -> None:
        request = rank.engine.find(self.number)
        if request is not None:
            rank.engine.abort(request)


@dataclass(frozen=True, slots=True)
class RunStep:
    """`now` is the leader's time, by which sessions expire."""

    now: float = 0.0

    def apply(self, rank: EngineRank) -> list[Update]:
        with rank.clock:
            rank.engine.cache.sessions.tick(self.now)
            return rank.engine.step()


# -- the cache and its store ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flush:
    tier: int

    def apply(self, rank: EngineRank) -> int:
        return rank.engine.cache.flush(Tier(self.tier))


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Start to open a store, without waiting for it."""

    number: int
    url: str

    def apply(self, rank: EngineRank) -> None:
        cache = rank.engine.cache
        rank.openings[self.number] = in_thread(lambda: open_link(self.url, cache))


@dataclass(frozen=True, slots=True)
class IsStoreOpen:
    """Whether the opening has succeeded or failed on every rank."""

    number: int

    def apply(self, rank: EngineRank) -> bool:
        opening = rank.openings[self.number]
        return all(rank.engine.cache.agreement.all_true([opening.done()]))


@dataclass(frozen=True, slots=True)
class AbandonStore:
    """Close a store as soon as it is open, instead of attaching it."""

    number: int

    def apply(self, rank: EngineRank) -> None:
        if (opening := rank.openings.pop(self.number, None)) is not None:
            close_when_open(opening)


@dataclass(frozen=True, slots=True)
class AttachStore:
    """Attach an open store in place of the present one, if it is open on every rank."""

    number: int
    timeout_s: float

    def apply(self, rank: EngineRank) -> None:
        opening = rank.openings.pop(self.number)
        rank.engine.cache.storage.attach_opened(opening, self.timeout_s)


@dataclass(frozen=True, slots=True)
class DetachStore:
    timeout_s: float

    def apply(self, rank: EngineRank) -> bool:
        return rank.engine.cache.storage.detach(self.timeout_s)


@dataclass(frozen=True, slots=True)
class ClearStore:
    """Every rank's store removes the pages of that rank. The leader's result is reported."""

    def apply(self, rank: EngineRank) -> Future[Removed] | None:
        return rank.engine.cache.storage.ask(lambda store: store.clear())


@dataclass(frozen=True, slots=True)
class CloseCache:
    """The last command. False if the store has not closed in time."""

    timeout_s: float

    def apply(self, rank: EngineRank) -> bool:
        if rank.handoff is not None:
            rank.handoff.close()
        return rank.engine.cache.close(self.timeout_s)


COMMANDS: dict[str, Any] = {
    command.__name__: command
    for command in (
        *(Submit, Abort, RunStep, Flush, CloseCache),
        *(OpenStore, IsStoreOpen, AbandonStore, AttachStore, DetachStore, ClearStore),
        *PEER_COMMANDS,
        *SESSION_COMMANDS,
    )
}
REFUSALS = (RequestError, StoreError, TierError, UnknownSessionError)


# -- encoding ---------------------------------------------------------------------------------


def encode(command: object) -> bytes:
    """A command as JSON. A prompt travels packed: its token ids are not written out as numbers."""
    if isinstance(command, Submit):
        request = command.request
        packed = base64.b64encode(request.packed).decode()
        params = _fields(request.params) | {"tokens": packed}
        values = _fields(command) | {"request": params}
    else:
        values = _fields(command)
    message = [type(command).__name__, values]
    return json.dumps(message, default=_plain, separators=(",", ":")).encode()


def decode(message: bytes) -> EngineCommand[object]:
    name, values = json.loads(message)
    if name == Submit.__name__:
        values["request"] = _request(values["request"])
    command: EngineCommand[object] = COMMANDS[name](**values)
    return command


def _fields(value: Any) -> dict[str, object]:
    return {row.name: getattr(value, row.name) for row in fields(value)}


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else _fields(value)


def _request(values: dict[str, Any]) -> CheckedRequest:
    packed = base64.b64decode(values["tokens"])
    params = RequestParams(
        **{
            **values,
            "tokens": tuple(np.frombuffer(packed, "<i4").tolist()),
            "sampling": _sampling(values["sampling"]),
            "stop_ids": frozenset(values["stop_ids"]),
            "keep_special": frozenset(values["keep_special"]),
            "stop": tuple(values["stop"]),
            "namespace": Namespace(*values["namespace"]),
            "grammar": None if values["grammar"] is None else Grammar(**values["grammar"]),
            "handoff_from": _optional(HandoffSource, values["handoff_from"]),
            "handoff_to": _optional(HandoffTarget, values["handoff_to"]),
        }
    )
    return CheckedRequest(params, packed)


def _sampling(values: dict[str, Any]) -> SamplingParams:
    bias = tuple((token, value) for token, value in values["logit_bias"])
    return SamplingParams(**{**values, "logit_bias": bias})


def _optional(kind: Callable[..., T], values: Sequence[object] | None) -> T | None:
    return None if values is None else kind(*values)


# -- leading and following --------------------------------------------------------------------


class Leader:
    """Broadcasts every command to the other ranks, if there are any, and applies it too.

    `diverged`: the error that stopped a command here which other ranks may have applied. It is no
    refusal, which all ranks raise alike: the ranks' states can no longer be assumed to be equal.
    """

    def __init__(self, rank: EngineRank) -> None:
        self.engine, self.topology = rank.engine, rank.topology
        self.diverged: Exception | None = None
        self._rank = rank

    def run(self, command: EngineCommand[T_co]) -> T_co:
        if self.topology.ranks == 1:
            return command.apply(self._rank)
        self.topology.broadcast_command(encode(command))
        try:
            return command.apply(self._rank)
        except REFUSALS:
            raise
        except Exception as error:
            self.diverged = error
            raise


def follow(rank: EngineRank) -> bool:
    """Apply the leader's commands up to `CloseCache`; False if the store has not closed then."""
    while True:
        command = decode(rank.topology.receive_command())
        try:
            result = command.apply(rank)
        except REFUSALS as refusal:
            # The leader meets the same refusal and reports it to the client.
            log.warning("rank %d: %s", rank.topology.rank, refusal)
            continue
        if isinstance(command, CloseCache):
            return bool(result)
