"""What clients get: an answer's JSON, whole or in pieces, as OpenAI's API has it.

Completions and chats differ in the shape of a choice and of its logprobs, and in nothing else;
`Shape` is that difference. What was generated is told token by token: an `Update` may carry text,
a token, both or neither.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtide.engine import Finish, SampledToken, Update
from kvtide.models.tokenizer import Detokenizer, Tokenizer
from kvtide.server.rate_estimate import RateEstimate
from kvtide.server.request_parsing import ParsedRequest
from kvtide.server.service import ResponseStream
from kvtide.spec import Tier

Json = dict[str, Any]


@dataclass(slots=True)
class Delta:
    """Some of a choice: text, and the tokens it came with. `scored` tokens are the prompt's."""

    text: str = ""
    chosen: list[SampledToken] = field(default_factory=list)
    scored: list[SampledToken] = field(default_factory=list)
    prompt: tuple[int, ...] = ()
    finish: Finish | None = None

    def add(self, update: Update) -> None:
        self.text += update.text
        self.chosen += [update.sampled] if update.sampled else []
        self.finish = update.finish


class Offsets:
    """Where in a choice's text its tokens begin; an answer's text follows its prompt's."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._at = 0
        self._prompt = tokenizer.detokenizer()
        self._answer = tokenizer.detokenizer(prompt)

    def of_prompt(self, tokens: Sequence[int]) -> list[int]:
        """Called with all of a prompt that is shown."""
        offsets = [self._next(self._prompt, token) for token in tokens]
        self._at += len(self._prompt.finish())
        return offsets

    def of_answer(self, tokens: Sequence[int]) -> list[int]:
        """Called with an answer's tokens as they come."""
        return [self._next(self._answer, token) for token in tokens]

    def _next(self, detokenizer: Detokenizer, token: int) -> int:
        begin = self._at
        self._at += len(detokenizer.feed([token]))
        return begin


class Answer:
    """The frame of one answer, and its choices' shapes."""

    def __init__(self, wanted: ParsedRequest, name: str, tokenizer: Tokenizer | None) -> None:
        kind = "chat.completion" if wanted.chat else "text_completion"
        self._wanted = wanted
        self._tokenizer = tokenizer
        self._kind = kind
        self._offsets = [Offsets(tokenizer, params.tokens) for params in wanted.asks if tokenizer]
        self._frame = {
            "id": f"{'chatcmpl' if wanted.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
        }

    def prompt_piece(self, stream: ResponseStream) -> Delta:
        """What comes before the first update: the prompt, where it is to be echoed."""
        if not self._wanted.echo:
            return Delta()
        tokens = stream.request.params.tokens
        text = self._tokenizer.decode(tokens) if self._tokenizer else ""
        return Delta(text=text, prompt=tokens, scored=list(stream.request.scores))

    def whole(self, pieces: Sequence[Delta], usage: Json) -> Json:
        """An answer in one piece."""
        choices = [self._choice(number, piece, "message") for number, piece in enumerate(pieces)]
        return {**self._frame, "object": self._kind, "choices": choices, "usage": usage}

    def chunk(self, number: int, piece: Delta) -> Json:
        """A piece of a choice's answer."""
        return self._chunk([self._choice(number, piece, "delta")])

    def opening(self, number: int) -> Json | None:
        """What a choice begins with in a stream: who speaks, in a chat."""
        if not self._wanted.chat:
            return None
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": number, "delta": delta, "finish_reason": None}])

    def closing(self, usage: Json) -> Json:
        """The last chunk of a stream whose client wants to know what was used."""
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[Json]) -> Json:
        kind = self._kind + ".chunk" if self._wanted.chat else self._kind
        usage = {"usage": None} if self._wanted.stream_usage else {}
        return {**self._frame, "object": kind, "choices": choices, **usage}

    def _choice(self, number: int, piece: Delta, said: str) -> Json:
        choice: Json = {"index": number}
        if self._wanted.chat:
            role = {"role": "assistant"} if said == "message" else {}
            choice[said] = {**role, "content": piece.text}
        else:
            choice["text"] = piece.text
        choice["logprobs"] = self._logprobs(number, piece)
        choice["finish_reason"] = piece.finish.value if piece.finish else None
        if self._wanted.token_ids:
            choice["token_ids"] = [*piece.prompt, *(chosen.token for chosen in piece.chosen)]
        return choice

    # -- logprobs ---------------------------------------------------------------------------

    def _logprobs(self, number: int, piece: Delta) -> Json | None:
        if self._wanted.logprobs is None:
            return None
        if self._wanted.chat:
            return {"content": [self._told(chosen) for chosen in piece.chosen], "refusal": None}
        first = [SampledToken(piece.prompt[0], 0.0)] if piece.prompt else []
        tokens = [*first, *piece.scored, *piece.chosen]
        offsets = [0] * len(tokens)
        if self._offsets:
            generated = [chosen.token for chosen in piece.chosen]
            offsets = self._offsets[number].of_prompt(piece.prompt)
            offsets += self._offsets[number].of_answer(generated)
        unknown = len(first)  # Nothing comes before the first token, so nothing made it likely.
        return {
            "tokens": [self._name(chosen.token) for chosen in tokens],
            "token_logprobs": [None] * unknown + [chosen.logprob for chosen in tokens[unknown:]],
            "top_logprobs": [None] * unknown
            + [{self._name(i): p for i, p in chosen.top} for chosen in tokens[unknown:]],
            "text_offset": offsets,
        }

    def _told(self, chosen: SampledToken) -> Json:
        return {
            **self._named(chosen.token, chosen.logprob),
            "top_logprobs": [self._named(token, logprob) for token, logprob in chosen.top],
        }

    def _named(self, token: int, logprob: float) -> Json:
        spelled = list(self._tokenizer.token_bytes(token)) if self._tokenizer else None
        return {"token": self._name(token), "logprob": logprob, "bytes": spelled}

    def _name(self, token: int) -> str:
        """No two tokens have the same: those that are no characters are told by their bytes."""
        spelled = self._tokenizer.token_bytes(token) if self._tokenizer else b""
        if not spelled:
            return f"token_id:{token}"
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def usage(
    streams: Sequence[ResponseStream], choices: int, pace: RateEstimate, *, details: bool
) -> Json:
    """What an answer took. Choices of one prompt count its tokens once."""
    requests = [stream.request for stream in streams]
    prompt = sum(len(request.params.tokens) for request in requests[::choices])
    generated = sum(len(request.output) for request in requests)
    cached = sum(sum(request.by_tier.values()) for request in requests[::choices])
    said: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if details:
        said["cached_tokens_details"] = {
            tier.name.lower(): sum(request.by_tier.get(tier, 0) for request in requests[::choices])
            for tier in Tier
        }
        said["miss_reasons"] = [
            {"pool": stop.pool, "at": stop.at, "reason": stop.reason}
            for request in requests[::choices]
            for stop in request.why
        ]
        said["storage_fetches"] = [
            {"outcome": request.fetch.outcome, "tokens": request.fetch.tokens}
            for request in requests[::choices]
            if request.fetch is not None
        ]
        said["timing"] = _timing(streams, cached, pace)
    return said


def _timing(streams: Sequence[ResponseStream], cached: int, pace: RateEstimate) -> Json:
    """Milliseconds; what was saved is an estimate from how long prompts took of late."""
    firsts = [s.first - s.began for s in streams if s.first is not None]
    return {
        "time_to_first_token_ms": round(1000 * min(firsts), 3) if firsts else None,
        "saved_ms": round(1000 * pace.saved_s(cached), 3),
    }
