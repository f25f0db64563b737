"""The states of a handoff, as the decode side sees them.

    OFFERED ──slots──▶ RESERVED ──a page lands──▶ STREAMING ──tail──▶ LANDED ──admitted──▶ DECODING
       │                  │                           │                 │
       │                  ├─── refused, late, lost ───┴─────────────────│──▶ FAILED
       ├──────────────────┴────── the request ends ───┴─────────────────┴──▶ ABORTED
       └──── little is missing, or another handoff brought it ─────────────▶ DECLINED

A request waits in the first three states; its first token, which the peer samples before the last
pages and the tail land, may come there. In the others it is admitted like any request, with the
pages that have landed by then; what is missing is prefilled here. A peer that fails costs time and
never text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvtide.cache import Receipt
from kvtide.engine.handoff.handoff_source import HandoffSource
from kvtide.engine.sampling.sampler import SampledToken


class HandoffState(Enum):
    OFFERED = "offered"
    RESERVED = "reserved"
    STREAMING = "streaming"
    LANDED = "landed"
    DECODING = "decoding"
    FAILED = "failed"
    ABORTED = "aborted"
    DECLINED = "declined"


_S = HandoffState
NEXT: dict[HandoffState, tuple[HandoffState, ...]] = {
    _S.OFFERED: (_S.RESERVED, _S.DECLINED, _S.ABORTED),
    _S.RESERVED: (_S.STREAMING, _S.FAILED, _S.ABORTED),
    _S.STREAMING: (_S.LANDED, _S.FAILED, _S.ABORTED),
    _S.LANDED: (_S.DECODING, _S.ABORTED),
    _S.DECODING: (),
    _S.FAILED: (),
    _S.ABORTED: (),
    _S.DECLINED: (),
}
"""Which states follow which. A handoff brings one page at least: without any it is declined. A peer
has no part in it before slots were reserved, nor after all has landed."""

WAITING = frozenset({_S.OFFERED, _S.RESERVED, _S.STREAMING})
"""The request waits for its peer."""
OVER = frozenset(state for state, following in NEXT.items() if not following)


@dataclass(slots=True, eq=False)
class DecodeHandoff:
    """One request's handoff on the decode side.

    receipt  the slots that the peer writes to; they stay quarantined after a failure until the peer
             is silent
    first    the first token of the answer, as the peer sampled it
    is_last  that token is the answer's last: the request ends with the handoff
    whole    the tail has landed and is all that this side needs behind the boundary
    captured what the peer's target captured of the prompt's last token; empty if no draft ran
    cached   tokens that the peer's own tiers had, by tier
    tokens   tokens in pages that have landed
    tried    it has looked for what is missing
    behind   the epoch of another handoff that brings a part of the prompt
    reason   why it failed or was declined
    """

    source: HandoffSource
    state: HandoffState = HandoffState.OFFERED
    receipt: Receipt | None = None
    first: SampledToken | None = None
    is_last: bool = False
    whole: bool = False
    captured: bytes = b""
    cached: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    tried: bool = False
    behind: int | None = None
    reason: str = ""

    @property
    def waits(self) -> bool:
        """The request is not admitted before this ends."""
        return self.state in WAITING

    def move(self, state: HandoffState, reason: str = "") -> None:
        """The only place where the state changes."""
        assert state in NEXT[self.state], f"{self.state.value} is not followed by {state.value}"
        self.state = state
        self.reason = reason or self.reason
