"""Response formatting: the engine's updates → OpenAI's JSON, in one piece or in chunks.

Completions and chats differ in the shape of a choice and of its logprobs. An `Update` carries a
sampled token, some text, both or neither. A chat's text arrives as events (`tools.output_events`).
Other shapes of the API implement `Formatter` too.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtide.engine import Finish, Request, SampledToken, Update
from kvtide.engine.handoff.handoff_state import HandoffState
from kvtide.models.tokenizer import Detokenizer, Tokenizer
from kvtide.server.error_responses import error_object
from kvtide.server.rate_estimate import RateEstimate
from kvtide.server.request_parsing import ParsedRequest
from kvtide.server.service import ResponseStream
from kvtide.server.sessions.prompt_changes import change_reason
from kvtide.server.tools.output_events import (
    CallArguments,
    CallBegin,
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    TextDelta,
)
from kvtide.spec import Tier

Json = dict[str, Any]


@dataclass(slots=True)
class Delta:
    """A piece of a choice: sampled tokens, the events of their text, and with `echo` the prompt.

    text       the generated text as it is
    reasoning  how many of the tokens gave reasoning
    scored     the prompt's tokens with their log-probabilities
    """

    text: str = ""
    events: list[OutputEvent] = field(default_factory=list)
    sampled: list[SampledToken] = field(default_factory=list)
    reasoning: int = 0
    scored: list[SampledToken] = field(default_factory=list)
    prompt: tuple[int, ...] = ()
    finish: Finish | None = None

    def add(self, update: Update, parser: OutputParser) -> None:
        self.text += update.text
        found = parser.feed(update.text)
        self.events += found
        thinks = any(isinstance(event, ReasoningDelta) for event in found)
        self.reasoning += thinks and update.sampled is not None
        self.sampled += [update.sampled] if update.sampled else []
        self.finish = update.finish
        if update.finish is not None:
            self.events += parser.finish()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a formatter knows beside the parsed request.

    name   the model's name in the API
    usage  the usage object of now: prompt tokens count from the first update on
    """

    name: str
    tokenizer: Tokenizer | None
    streams: Sequence[ResponseStream]
    usage: Callable[[], Json]


class Formatter(Protocol):
    """One shape of the API. A stream is `opening` and chunks of each choice, then `closing`."""

    def prompt_delta(self, stream: ResponseStream) -> Delta:
        """The piece before the first update."""

    def opening(self, number: int) -> bytes:
        """What a stream sends before the first update of a choice."""

    def chunk(self, number: int, delta: Delta) -> bytes:
        """What a stream sends for a piece of one choice."""

    def closing(self) -> bytes:
        """What a stream sends after the last piece of all choices."""

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The response in one piece."""

    def error(self, status: int, message: str) -> bytes:
        """What an open stream sends for an error."""


FormatterFactory = Callable[[ParsedRequest, Answer], Formatter]

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def server_sent(chunk: Json, event: str | None = None) -> bytes:
    """A server-sent event."""
    named = "" if event is None else f"event: {event}\n"
    return f"{named}data: {_ENCODER.encode(chunk)}\n\n".encode("utf-8", "replace")


class Offsets:
    """Where in a choice's text its tokens begin; generated text follows the echoed prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._at = 0
        self._prompt = tokenizer.detokenizer()
        self._generated = tokenizer.detokenizer(prompt)

    def of_prompt(self, tokens: Sequence[int]) -> list[int]:
        """The offsets of a whole prompt."""
        offsets = [self._next(self._prompt, token) for token in tokens]
        self._at += len(self._prompt.finish())
        return offsets

    def of_generated(self, tokens: Sequence[int]) -> list[int]:
        """The offsets of the next generated tokens."""
        return [self._next(self._generated, token) for token in tokens]

    def _next(self, detokenizer: Detokenizer, token: int) -> int:
        begin = self._at
        self._at += len(detokenizer.feed([token]))
        return begin


class ResponseFormatter:
    """The JSON of one response: its frame, and the shape of its choices."""

    def __init__(self, parsed: ParsedRequest, answer: Answer) -> None:
        kind = "chat.completion" if parsed.chat else "text_completion"
        tokenizer = answer.tokenizer
        self._parsed = parsed
        self._answer = answer
        self._tokenizer = tokenizer
        self._kind = kind
        self._called = [False] * len(parsed.choices)
        self._offsets = [
            Offsets(tokenizer, choice.params.tokens) for choice in parsed.choices if tokenizer
        ]
        self._frame = {
            "id": f"{'chatcmpl' if parsed.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": answer.name,
        }
        streamed = {**self._frame, "object": kind + ".chunk" if parsed.chat else kind}
        # Most of an event is the same in all events of a response: it is encoded once.
        self._head = f'data: {_ENCODER.encode(streamed)[:-1]},"choices":['
        self._tail = ',"usage":null}\n\n' if parsed.stream_usage else "}\n\n"

    def prompt_delta(self, stream: ResponseStream) -> Delta:
        """The piece before the first update: the prompt with `echo`, else nothing."""
        if not self._parsed.echo:
            return Delta()
        tokens = stream.request.params.tokens
        text = self._tokenizer.decode(tokens) if self._tokenizer else ""
        return Delta(text=text, prompt=tokens, scored=list(stream.request.scores))

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """A response in one piece."""
        chat = self._parsed.chat
        choices = [
            self._choice(
                number, delta, {"message": message(delta.events)} if chat else {"text": delta.text}
            )
            for number, delta in enumerate(deltas)
        ]
        usage = self._answer.usage()
        return {**self._frame, "object": self._kind, "choices": choices, "usage": usage}

    def chunk(self, number: int, delta: Delta) -> bytes:
        """A chunk of a stream with a piece of one choice; none while a marker is incomplete."""
        if self._parsed.tools.callable and not self._tells(delta):
            return b""
        content = {"delta": piece(delta.events)} if self._parsed.chat else {"text": delta.text}
        return self._event(self._choice(number, delta, content))

    def _tells(self, delta: Delta) -> bool:
        parsed = self._parsed
        shows_tokens = bool(delta.sampled) and (parsed.token_ids or parsed.logprobs is not None)
        return bool(delta.events) or delta.finish is not None or shows_tokens

    def opening(self, number: int) -> bytes:
        """The first chunk of a chat's choice, which names the role; none for a completion."""
        if not self._parsed.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return self._event({"index": number, "delta": delta, "finish_reason": None})

    def closing(self) -> bytes:
        """The last events of a stream: the usage, where it is asked for, and the end."""
        end = b"data: [DONE]\n\n"
        if not (self._parsed.stream_usage or self._parsed.cache_details):
            return end
        usage = _ENCODER.encode(self._answer.usage())
        return f'{self._head}],"usage":{usage}}}\n\n'.encode("utf-8", "replace") + end

    def error(self, status: int, message: str) -> bytes:
        return server_sent(error_object(status, message))

    def _event(self, choice: Json) -> bytes:
        """A chunk with one choice."""
        event = f"{self._head}{_ENCODER.encode(choice)}]{self._tail}"
        return event.encode("utf-8", "replace")

    def _choice(self, number: int, delta: Delta, content: Json) -> Json:
        """A choice; `content`: its text, its message, or a piece of one."""
        choice = {
            "index": number,
            **content,
            "logprobs": self._logprobs(number, delta),
            "finish_reason": self._finish_reason(number, delta),
        }
        if self._parsed.token_ids:
            choice["token_ids"] = [*delta.prompt, *(sampled.token for sampled in delta.sampled)]
        return choice

    def _finish_reason(self, number: int, delta: Delta) -> str | None:
        self._called[number] |= any(isinstance(event, CallBegin) for event in delta.events)
        if delta.finish is Finish.STOP and self._called[number]:
            return "tool_calls"
        return delta.finish.value if delta.finish else None

    # -- logprobs ---------------------------------------------------------------------------

    def _logprobs(self, number: int, delta: Delta) -> Json | None:
        if self._parsed.logprobs is None:
            return None
        if self._parsed.chat:
            return {"content": [self._chat_logprobs(t) for t in delta.sampled], "refusal": None}
        first = [SampledToken(delta.prompt[0], 0.0)] if delta.prompt else []
        tokens = [*first, *delta.scored, *delta.sampled]
        offsets = [0] * len(tokens)
        if self._offsets:
            generated = [sampled.token for sampled in delta.sampled]
            offsets = self._offsets[number].of_prompt(delta.prompt)
            offsets += self._offsets[number].of_generated(generated)
        unknown = len(first)  # A prompt's first token follows nothing: it has no logprob.
        return {
            "tokens": [self._name(sampled.token) for sampled in tokens],
            "token_logprobs": [None] * unknown + [sampled.logprob for sampled in tokens[unknown:]],
            "top_logprobs": [None] * unknown
            + [{self._name(i): p for i, p in sampled.top} for sampled in tokens[unknown:]],
            "text_offset": offsets,
        }

    def _chat_logprobs(self, sampled: SampledToken) -> Json:
        return {
            **self._named(sampled.token, sampled.logprob),
            "top_logprobs": [self._named(token, logprob) for token, logprob in sampled.top],
        }

    def _named(self, token: int, logprob: float) -> Json:
        spelled = list(self._tokenizer.token_bytes(token)) if self._tokenizer else None
        return {"token": self._name(token), "logprob": logprob, "bytes": spelled}

    def _name(self, token: int) -> str:
        """A token's text, its bytes where they are no text, its id where there are none: unique."""
        spelled = self._tokenizer.token_bytes(token) if self._tokenizer else b""
        if not spelled:
            return f"token_id:{token}"
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def message(events: Sequence[OutputEvent]) -> Json:
    """A whole answer. `content` is null where there are calls and no text."""
    fields = piece(events)
    calls = [
        {key: call[key] for key in ("id", "type", "function")}
        for call in fields.get("tool_calls", [])
    ]
    text: str | None = fields.pop("content", "") or (None if calls else "")
    whole: Json = {"role": "assistant", "content": text, **fields}
    return whole | {"tool_calls": calls} if calls else whole


def piece(events: Sequence[OutputEvent]) -> Json:
    """A delta: text, reasoning and pieces of calls; an empty text where there are none."""
    delta: Json = {}
    calls: dict[int, Json] = {}
    for event in events:
        match event:
            case TextDelta():
                delta["content"] = delta.get("content", "") + event.text
            case ReasoningDelta():
                delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
            case CallBegin():
                calls[event.index] = {
                    "index": event.index,
                    "id": event.id,
                    "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }
            case CallArguments():
                empty = {"index": event.index, "function": {"arguments": ""}}
                call = calls.setdefault(event.index, empty)
                call["function"]["arguments"] += event.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta or {"content": ""}


def usage(
    streams: Sequence[ResponseStream],
    n: int,
    rate: RateEstimate,
    *,
    details: bool,
    drafts: bool,
    tokenizer: Tokenizer | None = None,
) -> Json:
    """The usage object. The `n` choices of a prompt count its tokens once.

    details  of the cache, and of verify steps
    drafts   the server speculates: count accepted and rejected drafts
    tokenizer  for the texts of what a prompt changed
    """
    requests = [stream.request for stream in streams]
    firsts = requests[::n]  # One per prompt.
    prompt = sum(len(request.params.tokens) for request in firsts)
    generated = sum(len(request.output) for request in requests)
    cached = sum(_cached_tokens(request) for request in firsts)
    counted: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if drafts:
        counted["completion_tokens_details"] = {
            "accepted_prediction_tokens": sum(request.accepted_drafts for request in requests),
            "rejected_prediction_tokens": sum(request.rejected_drafts for request in requests),
        }
        if details:
            counted["speculation"] = _speculation(requests)
    if details:
        counted["cached_tokens_details"] = {
            tier.name.lower(): sum(request.by_tier.get(tier, 0) for request in firsts)
            for tier in Tier
        }
        counted["miss_reasons"] = _miss_reasons(firsts, tokenizer)
        counted["storage_fetches"] = [
            {"outcome": request.fetch.outcome, "tokens": request.fetch.tokens}
            for request in firsts
            if request.fetch is not None
        ]
        counted["handoffs"] = [
            {
                "state": request.handoff.state.value,
                "tokens": request.handoff.tokens,
                "prefill_cached_tokens": request.handoff.cached,
                "reason": request.handoff.reason,
            }
            for request in firsts
            if request.handoff is not None
        ]
        counted["timing"] = _timing(streams, cached, rate)
    return counted


def _miss_reasons(requests: Sequence[Request], tokenizer: Tokenizer | None) -> list[Json]:
    """Per pool what kept the match from going deeper; what the prompts of sessions changed."""
    stops = [
        {"pool": stop.pool, "at": stop.at, "reason": stop.reason}
        for request in requests
        for stop in request.why
    ]
    changes = (request.prompt_change for request in requests)
    return [*stops, *(change_reason(each, tokenizer) for each in changes if each is not None)]


def _cached_tokens(request: Request) -> int:
    """Prompt tokens that neither this server nor a prefill server computed.

    A prefill server computes all that its own tiers lack, be it here or not. After a handoff that
    failed, this server has computed what it lacks too.
    """
    here, handoff = sum(request.by_tier.values()), request.handoff
    if handoff is None or handoff.first is None:
        return here
    there = sum(handoff.cached.values())
    failed = handoff.state is HandoffState.FAILED
    return min(there, here + handoff.tokens) if failed else there


def _speculation(requests: Sequence[Request]) -> Json:
    """Verify steps, and the tokens that one gave on average."""
    steps = sum(request.verify_steps for request in requests)
    given = steps + sum(request.accepted_drafts for request in requests)
    return {"verify_steps": steps, "accept_length": round(given / steps, 3) if steps else None}


def _timing(streams: Sequence[ResponseStream], cached: int, rate: RateEstimate) -> Json:
    """Milliseconds; `saved_ms` is estimated from the prefill rate of recent steps."""
    ttft_s = [s.first - s.began for s in streams if s.first is not None]
    return {
        "time_to_first_token_ms": round(1000 * min(ttft_s), 3) if ttft_s else None,
        "saved_ms": round(1000 * rate.saved_s(cached), 3),
    }
