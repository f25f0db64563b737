"""A request: what was asked, and how far it has come.

WAITING ──admitted──▶ RUNNING ──stop, length, abort──▶ FINISHED
   ▲                     │
   └─────retracted───────┘     its pages stay in the cache, so that it goes on where it was
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvtide.cache import Lease, Namespace
from kvtide.engine.sampler import GREEDY, Chosen, Sampling
from kvtide.index import DEFAULT_NAMESPACE, Prompt, Stop
from kvtide.spec import Tier


class RequestError(ValueError):
    """A request that can never be served. The message names the remedy."""


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Finish(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Ask:
    """What somebody wants: tokens in, so many tokens out.

    stop_ids  generation ends when one of these comes; it is part of the output
    session   pins the conversation's prefix until its next turn
    """

    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    namespace: Namespace = DEFAULT_NAMESPACE
    priority: int = 0
    session: str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """`computed` of its tokens have their state in the lease's pages; `output` was generated.

    tokens   the prompt's, then the generated ones
    slowest  how far down its prefix may lie: the device alone after a load that failed
    by_tier  where the prompt's first admission found its tokens
    why      per pool, what kept it from finding more
    """

    number: int
    ask: Ask
    prompt: Prompt
    tokens: list[int]
    output: list[Chosen] = field(default_factory=list)
    state: State = State.WAITING
    finish: Finish | None = None
    lease: Lease | None = None
    computed: int = 0
    admissions: int = 0
    slowest: Tier = Tier.HOST
    by_tier: dict[Tier, int] = field(default_factory=dict)
    why: tuple[Stop, ...] = ()

    @property
    def length(self) -> int:
        return len(self.tokens)

    def generated(self, chosen: Chosen) -> None:
        """The model said one more token."""
        self.output.append(chosen)
        self.tokens.append(chosen.token)
        self.prompt.extend([chosen.token])

    @property
    def most_length(self) -> int:
        """How long it can become."""
        return len(self.ask.tokens) + self.ask.max_tokens

    @property
    def held(self) -> Lease:
        assert self.lease is not None, "only a running request has a lease"
        return self.lease
