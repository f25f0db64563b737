"""Engine commands of handoffs: what peers say reaches all ranks in the same order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtide.engine.handoff.messages import from_json
from kvtide.server.engine_rank import EngineRank

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """A message of a peer, by the name of its connection."""

    peer: str
    message: Json

    def apply(self, rank: EngineRank) -> None:
        rank.engine.handoffs.receive(self.peer, from_json(self.message))


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A decode server's connection has ended."""

    peer: str

    def apply(self, rank: EngineRank) -> None:
        rank.engine.handoffs.peer_lost(self.peer)


@dataclass(frozen=True, slots=True)
class ExpireRooms:
    """Let go of prompts that no decode server came for within `timeout_s`, by the leader's time."""

    now: float
    timeout_s: float

    def apply(self, rank: EngineRank) -> None:
        rank.engine.handoffs.prefill.expire(self.now, self.timeout_s)


@dataclass(frozen=True, slots=True)
class ExposeMemory:
    """Let a peer write to the host memory of all ranks."""

    peer: str

    def apply(self, rank: EngineRank) -> list[Json]:
        assert rank.handoff is not None
        return rank.handoff.expose(self.peer)


@dataclass(frozen=True, slots=True)
class RevokeMemory:
    """End a peer's writes for good; None where that is not possible."""

    peer: str

    def apply(self, rank: EngineRank) -> list[Json] | None:
        assert rank.handoff is not None
        return rank.handoff.revoke(self.peer)


@dataclass(frozen=True, slots=True)
class ConcealMemory:
    """Let a peer that is gone no longer write, and forget it."""

    peer: str

    def apply(self, rank: EngineRank) -> None:
        assert rank.handoff is not None
        rank.handoff.conceal(self.peer)


@dataclass(frozen=True, slots=True)
class PairWith:
    """Pair with a decode server: None, or the sentence that refuses it."""

    peer: str
    manifests: list[Json]
    descriptors: list[Json]

    def apply(self, rank: EngineRank) -> str | None:
        assert rank.handoff is not None
        return rank.handoff.pair(self.peer, self.manifests, self.descriptors)


PEER_COMMANDS = (
    *(PeerSaid, PeerLost, ExpireRooms, PairWith),
    *(ExposeMemory, RevokeMemory, ConcealMemory),
)
