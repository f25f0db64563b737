"""Engine commands of sessions. All ranks apply them in the same order, at the leader's time."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from kvtide.cache import Namespace, Prefetch, SessionTurn
from kvtide.index import Prompt
from kvtide.server.engine_rank import EngineRank


class UnknownSessionError(Exception):
    """There is no such session, or there is none any more."""


@dataclass(frozen=True, slots=True)
class ReleaseSession:
    """End a session by its name in the cache; False if there is none."""

    name: str
    now: float

    def apply(self, rank: EngineRank) -> bool:
        sessions = rank.engine.cache.sessions
        sessions.tick(self.now)
        return sessions.forget(self.name)


@dataclass(frozen=True, slots=True)
class BeginPrefetch:
    """Begin to bring a prompt's prefix up; None if too many prefetches are open.

    tokens   the prompt, packed, in base64; empty: the session's last prompt and its answer
    session  the name in the cache of the session that pins what comes; empty for none
    limit_s  how long storage may take
    now      the leader's time
    """

    number: int
    tokens: str
    cache_salt: str
    session: str
    priority: int
    ttl_s: float
    limit_s: float
    now: float

    def apply(self, rank: EngineRank) -> Prefetch | None:
        cache = rank.engine.cache
        cache.sessions.tick(self.now)
        prompt: Prompt | None
        if self.tokens:
            prompt = cache.prompt(
                base64.b64decode(self.tokens), Namespace(cache_salt=self.cache_salt)
            )
        else:
            prompt = cache.sessions.prompt_of(self.session)
        if prompt is None:
            raise UnknownSessionError
        turn = SessionTurn(self.session, self.priority, self.ttl_s) if self.session else None
        prefetch = cache.prefetches.begin(prompt, self.limit_s, turn)
        if prefetch is not None:
            rank.prefetches[self.number] = prefetch
        return prefetch


@dataclass(frozen=True, slots=True)
class EndPrefetch:
    """End a prefetch by its number, wherever it is; one that is over stays as it is."""

    number: int

    def apply(self, rank: EngineRank) -> None:
        prefetch = rank.prefetches.pop(self.number, None)
        if prefetch is not None:
            rank.engine.cache.prefetches.end(prefetch)


SESSION_COMMANDS: tuple[Any, ...] = (ReleaseSession, BeginPrefetch, EndPrefetch)
