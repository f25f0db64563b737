"""A request: what was asked, and how far it has come.

WAITING ──admitted──▶ RUNNING ──stop, length, abort──▶ FINISHED
   ▲                     │
   └─────retracted───────┘     its pages stay in the cache, so that it goes on where it was
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvtide.cache import Fetch, Lease, Namespace
from kvtide.engine.sampler import GREEDY, SampledToken, SamplingParams
from kvtide.engine.text import OutputText
from kvtide.index import DEFAULT_NAMESPACE, Prompt, Stop
from kvtide.spec import Tier


class RequestError(ValueError):
    """A request that can never be served. The message names the remedy.

    code   the name of the error in OpenAI's API, where it has one
    param  the field at fault, where it is one
    """

    def __init__(
        self, message: str, code: str | None = "invalid_value", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Finish(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class RequestParams:
    """What somebody wants: tokens in, so many tokens out; none if only the prompt is of interest.

    stop_ids   generation ends when one of these comes; it is part of the output, not of the text
    stop       generation ends when the text has one of these; the text ends before it
    recompute  the prompt is computed anew: nothing that is kept is used, and nothing is kept
    score      every token of the prompt is given its log-probability, beside so many of the
               likeliest; the prompt is recomputed for that
    session    pins the conversation's prefix until its next turn
    """

    tokens: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    recompute: bool = False
    score: int | None = None
    namespace: Namespace = DEFAULT_NAMESPACE
    priority: int = 0
    session: str | None = None

    @property
    def pin(self) -> str | None:
        """What its session is called in the cache: two namespaces never share one."""
        return None if self.session is None else json.dumps([*self.namespace, self.session])

    @property
    def alone(self) -> bool:
        """Whether it has nothing to do with what is kept."""
        return self.recompute or self.score is not None


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """Parameters that `Engine.check` has accepted, and the prompt's tokens, packed."""

    params: RequestParams
    packed: bytes


class Ahead(NamedTuple):
    """Another request that is about to compute pages that this one shares, up to page `end`."""

    request: Request
    end: int

    @property
    def over(self) -> bool:
        """Whether these pages can be found, or will not come from there."""
        lease = self.request.lease
        return lease is None or lease.inner.hidden or lease.inner.boundary >= self.end


@dataclass(slots=True, eq=False)
class Request:
    """`computed` of its tokens have their state in the lease's pages; `output` was generated.

    tokens   the prompt's, then the generated ones
    text     turns what is generated into text, where the engine has a tokenizer
    scores   of the prompt's tokens after the first, as far as they were asked for and computed
    slowest  how far down its prefix may lie: the device alone after a load that failed
    fetch    brings what storage has of its prompt, if that is worth it
    ahead    computes what this one shares, which therefore waits
    waits    how often it has waited for somebody ahead
    by_tier  where the first admission found the prompt's tokens, and they came
    why      per pool, what kept it from finding more
    noted    whether those two are known
    """

    number: int
    params: RequestParams
    prompt: Prompt
    tokens: list[int]
    text: OutputText | None = None
    output: list[SampledToken] = field(default_factory=list)
    scores: list[SampledToken] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    finish: Finish | None = None
    lease: Lease | None = None
    computed: int = 0
    admissions: int = 0
    slowest: Tier = Tier.HOST
    fetch: Fetch | None = None
    ahead: Ahead | None = None
    waits: int = 0
    by_tier: dict[Tier, int] = field(default_factory=dict)
    why: tuple[Stop, ...] = ()
    noted: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way to it from storage."""
        return self.fetch is None or self.fetch.over

    @property
    def ready(self) -> bool:
        """Whether it waits for nothing but room."""
        return self.settled and (self.ahead is None or self.ahead.over)

    def generated(self, chosen: SampledToken) -> None:
        """The model said one more token."""
        self.output.append(chosen)
        self.tokens.append(chosen.token)
        self.prompt.extend([chosen.token])

    @property
    def max_length(self) -> int:
        """How long it can become."""
        return len(self.params.tokens) + self.params.max_tokens

    @property
    def held(self) -> Lease:
        assert self.lease is not None, "only a running request has a lease"
        return self.lease
