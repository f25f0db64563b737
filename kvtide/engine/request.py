"""A request: its parameters, and how far it has come.

WAITING ──admitted──▶ RUNNING ──stop, length, abort──▶ FINISHED
   ▲                     │
   └─────retracted───────┘     its pages stay in the cache, so that it goes on where it was
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvtide.cache import Fetch, Lease, Namespace, PromptChange, Supplement
from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.grammar.token_matcher import CompiledGrammar, TokenMatcher
from kvtide.engine.handoff.handoff_source import HandoffSource, HandoffTarget
from kvtide.engine.handoff.handoff_state import DecodeHandoff
from kvtide.engine.sampling.sampler import SampledToken
from kvtide.engine.sampling.sampling_params import GREEDY, SamplingParams
from kvtide.engine.text import OutputText
from kvtide.index import DEFAULT_NAMESPACE, Prompt, Stop
from kvtide.index.keys import highest, pack
from kvtide.models.tokenizer import Tokenizer
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


class Activity(Enum):
    """What a request does or waits for: the first four of WAITING, the others of RUNNING."""

    QUEUED = "queued"
    """It waits for slots, or for a place in the batch."""
    FETCHING = "fetching"
    """It waits for pages from storage."""
    HANDOFF = "handoff"
    """It waits for pages that a prefill server writes."""
    SHARING = "sharing"
    """It waits for a prefix that a running request computes."""
    LOADING = "loading"
    """Its prefix is on the way from the host to the device."""
    PREFILL = "prefill"
    """More than one of its tokens is not computed."""
    DECODE = "decode"


class Finish(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """A limit of its grammar was exceeded."""


def session_name(namespace: Namespace, session: str) -> str:
    """A session's name in the cache: two namespaces never share one."""
    return json.dumps([*namespace, session])


@dataclass(frozen=True, slots=True)
class RequestParams:
    """A prompt, and how to answer it; `max_tokens` of 0 computes the prompt alone.

    stop_ids   decoding ends at one of these, which is in the output and not in the text
    stop       decoding ends when the text has one of these, and the text ends before it
    keep_special  special tokens that are text in the output: markers, which its parser reads
    recompute  the prompt is prefilled without the cache: no prefix is matched, no page is kept
    score      log-probabilities of all prompt tokens, with so many top tokens each; this recomputes
               the prompt
    session    pins the conversation's prefix until its next turn, or until `session_ttl_s` after
               this one; for ever without a TTL
    speculate  tokens may be drafted, if the engine speculates
    grammar    the output is a text of it
    handoff_from  another server prefills the prompt for this one
    handoff_to    the prompt is prefilled for another server
    """

    tokens: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    keep_special: frozenset[int] = frozenset()
    recompute: bool = False
    score: int | None = None
    namespace: Namespace = DEFAULT_NAMESPACE
    priority: int = 0
    session: str | None = None
    session_ttl_s: float | None = None
    speculate: bool = True
    grammar: Grammar | None = None
    handoff_from: HandoffSource | None = None
    handoff_to: HandoffTarget | None = None

    @property
    def pin(self) -> str | None:
        """The session's name in the cache; None without one, or for a request that runs alone."""
        if self.session is None or self.alone:
            return None
        return session_name(self.namespace, self.session)

    def output_text(self, tokenizer: Tokenizer) -> OutputText:
        """The text of an output, before its first token."""
        return OutputText(tokenizer.detokenizer(self.tokens, self.keep_special), self.stop)

    @property
    def alone(self) -> bool:
        """It neither uses the cache nor leaves anything in it."""
        return self.recompute or self.score is not None


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """Parameters that `Engine.check` has accepted, and the prompt's tokens, packed.

    compiled  its grammar; None without one, and on ranks that have yet to compile it
    """

    params: RequestParams
    packed: bytes
    compiled: CompiledGrammar | None = field(default=None, compare=False)


class PrefixOwner(NamedTuple):
    """A running request that is about to compute pages which this one shares, up to page `end`."""

    request: Request
    end: int

    @property
    def over(self) -> bool:
        """These pages can be found, or will not come from there."""
        lease = self.request.lease
        return lease is None or lease.hidden or lease.committed_pages >= self.end


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """`computed` of its tokens have their state in the lease's pages.

    tokens        the prompt's, then the sampled ones
    text          detokenizes the output, where the engine has a tokenizer
    output        the sampled tokens
    scores        log-probabilities of prompt tokens after the first, as far as computed
    slowest_tier  how far down its prefix may lie: the device alone after a failed load
    fetch         brings what storage has of its prompt, if that pays
    supplement    brings the draft's pages to pages of its prompt that are kept without them
    prefix_owner  computes a prefix that this request shares and therefore waits for
    prefix_waits  how often it has waited for one
    by_tier       where the first admission found the prompt's tokens
    why           per pool, what kept the match from going deeper
    reported      those two are final
    prompt_change what the prompt changed of its session's last one
    drafts        proposed tokens that the next step verifies; the lease has slots for them
    accepted_drafts, rejected_drafts  of all steps
    verify_steps  steps that verified drafts
    matcher       how far it has come in its grammar
    handoff       brings pages of its prompt from a prefill server
    is_quiet      no thread reads its pages any more; None where none does
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
    slowest_tier: Tier = Tier.HOST
    fetch: Fetch | None = None
    supplement: Supplement | None = None
    prefix_owner: PrefixOwner | None = None
    prefix_waits: int = 0
    by_tier: dict[Tier, int] = field(default_factory=dict)
    why: tuple[Stop, ...] = ()
    reported: bool = False
    prompt_change: PromptChange | None = None
    drafts: tuple[int, ...] = ()
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    verify_steps: int = 0
    matcher: TokenMatcher | None = None
    handoff: DecodeHandoff | None = None
    is_quiet: Callable[[], bool] | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def settled(self) -> bool:
        """Nothing of its prompt is being fetched from storage."""
        return self.fetch is None or self.fetch.over

    @property
    def ready(self) -> bool:
        """It waits for slots alone."""
        handed = self.handoff is None or not self.handoff.waits
        return self.settled and handed and (self.prefix_owner is None or self.prefix_owner.over)

    @property
    def activity(self) -> Activity:
        """Of a request that has not finished."""
        if self.lease is not None:
            if self.lease.loading:
                return Activity.LOADING
            return Activity.PREFILL if self.length - self.computed > 1 else Activity.DECODE
        if not self.settled:
            return Activity.FETCHING
        if self.handoff is not None and self.handoff.waits:
            return Activity.HANDOFF
        return Activity.QUEUED if self.ready else Activity.SHARING

    def found_here(self, lease: Lease) -> dict[Tier, int]:
        """Tokens that each tier gave, without those that a peer has just written to the host."""
        found = dict(lease.by_tier)
        if self.handoff is not None and self.handoff.tokens:
            found[Tier.HOST] = max(0, found.get(Tier.HOST, 0) - self.handoff.tokens)
        return {tier: count for tier, count in found.items() if count}

    @property
    def given(self) -> Mapping[Tier, int]:
        """Tokens that each tier gave at the last admission; of one that does not run, `by_tier`."""
        return self.by_tier if self.lease is None else self.found_here(self.lease)

    def append(self, sampled: SampledToken) -> None:
        """One more token of output."""
        self.output.append(sampled)
        self.tokens.append(sampled.token)
        self.prompt.extend([sampled.token])

    @property
    def max_length(self) -> int:
        """Tokens of prompt and output at the most."""
        return len(self.params.tokens) + self.params.max_tokens

    @property
    def held(self) -> Lease:
        assert self.lease is not None, "only a running request has a lease"
        return self.lease


# -- what is refused --------------------------------------------------------------------------


class ServedLimits(NamedTuple):
    """vocabulary     tokens are below it
    longest        tokens of a prompt and its answer, at the most
    has_tokenizer  text can be searched for stop strings
    """

    vocabulary: int
    longest: int
    has_tokenizer: bool


def check_request(params: RequestParams, limits: ServedLimits) -> CheckedRequest:
    """Pack the prompt, and raise `RequestError` for what can never be served."""
    packed = _packed(params.tokens, limits.vocabulary)
    if problem := params.sampling.problem():
        raise RequestError(problem)
    if any(not 0 <= token < limits.vocabulary for token, _ in params.sampling.logit_bias):
        raise RequestError(
            f"token ids of logit_bias must lie in 0..{limits.vocabulary - 1}", param="logit_bias"
        )
    if params.max_tokens < 0:
        raise RequestError(
            f"max_tokens is {params.max_tokens}; ask for 0 or more", param="max_tokens"
        )
    if params.stop and not limits.has_tokenizer:
        raise RequestError(
            "stop strings need a tokenizer, and this model came without one; use the ids of "
            "tokens to stop at",
            param="stop",
        )
    if not all(params.stop):
        raise RequestError("a stop string is empty; leave it out", param="stop")
    total = len(params.tokens) + params.max_tokens
    if total > limits.longest:
        raise RequestError(
            f"a prompt of {len(params.tokens)} tokens and an answer of up to {params.max_tokens} "
            f"are {total}; this engine serves {limits.longest}: shorten one of them",
            code="context_length_exceeded",
        )
    return CheckedRequest(params, packed)


def _packed(tokens: tuple[int, ...], vocabulary: int) -> bytes:
    if not tokens:
        raise RequestError("the prompt has no tokens; send at least one", param="prompt")
    try:
        packed = pack(tokens)
        known = highest(packed) < vocabulary
    except ValueError:
        known = False
    if not known:
        raise RequestError(f"token ids must lie in 0..{vocabulary - 1}", param="prompt")
    return packed
