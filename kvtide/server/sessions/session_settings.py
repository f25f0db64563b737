"""The defaults of a request's session, and its fields in a body."""

from __future__ import annotations

from typing import NamedTuple

from kvtide.engine import RequestError
from kvtide.server.sessions.stable_prefix import NO_RULES, StableRules

MAX_TTL_S = 30 * 86400.0
MAX_ID_LENGTH = 512


class SessionSettings(NamedTuple):
    """`ttl_s`: how long a session outlives its last request, unless that says otherwise."""

    ttl_s: float = 3600.0
    stable: StableRules = NO_RULES

    def ttl(self, given: float) -> float:
        """A request's `session_ttl_seconds`, checked."""
        if not 0 <= given <= MAX_TTL_S:
            raise RequestError(
                f"session_ttl_seconds is {given:g}; send 0 to {MAX_TTL_S:g}",
                param="session_ttl_seconds",
            )
        return given


def checked_id(session: str) -> str | None:
    """A `session_id`; None for an empty one."""
    if len(session) > MAX_ID_LENGTH:
        raise RequestError(
            f"session_id has {len(session)} characters; send at most {MAX_ID_LENGTH}",
            param="session_id",
        )
    return session or None
