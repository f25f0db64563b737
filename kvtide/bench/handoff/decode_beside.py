"""Decode speed of a running batch, while pages land and while prompts are prefilled.

Both hand over prompts that the prefill side has computed before: with one GPU for both sides, a
prefill would take time from the decode batch, which two machines do not.

`threshold` sends prompts of growing length, one after another, to a server that decodes. They are
prefilled there, or handed over: it shows how long each holds up the batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kvtide.bench.handoff.handoff_bed import HandoffBed
from kvtide.engine import RequestParams
from kvtide.server.service import ResponseStream

MIN_QUIET_S = 0.2
"""Of a window without other work: some steps."""


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Requests that decode, with contexts of so many tokens and answers of so many."""

    requests: int
    context: int
    answer: int

    @property
    def tokens(self) -> int:
        return self.requests * (self.context + self.answer)


@contextmanager
def decoding(bed: HandoffBed, batch: DecodeBatch) -> Iterator[Sequence[ResponseStream]]:
    """The batch runs, all of it decoding; its requests end with the context."""
    prompts = [bed.prompt(batch.context) for _ in range(batch.requests)]
    group = bed.decode.begin([RequestParams(prompt, batch.answer) for prompt in prompts])
    streams = group.streams
    try:
        bed.decode.wait_until(lambda _: all(len(each.request.output) > 1 for each in streams))
        yield streams
        ended = sum(each.request.finish is not None for each in streams)
        assert not ended, f"{ended} requests of the batch have ended; give them longer answers"
    finally:
        bed.decode.abort(streams)


class _Window:
    """Seconds and tokens of the batch between two moments."""

    def __init__(self, bed: HandoffBed, streams: Sequence[ResponseStream]) -> None:
        self._bed, self._streams = bed, streams
        self._begun, self._tokens = bed.decode.generated(streams)

    def end(self) -> tuple[float, int]:
        ended, tokens = self._bed.decode.generated(self._streams)
        return ended - self._begun, tokens - self._tokens


def _quiet(bed: HandoffBed, streams: Sequence[ResponseStream], seconds: float) -> float:
    """Tokens per second of the batch alone."""
    window = _Window(bed, streams)
    time.sleep(max(seconds, MIN_QUIET_S))
    lasted, tokens = window.end()
    return tokens / lasted


# -- pages that land --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodeBeside:
    """Tokens per second of a batch, alone and while prompts land one after another.

    answers  tokens of each of their answers: with one they only land, with more they are loaded to
             the device and join the batch
    """

    answers: int
    batch: int
    context: int
    quiet_tokens_s: float
    landing_tokens_s: float
    landed_bytes_s: float
    handoffs: int
    relative_speed: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def decode_while_landing(
    bed: HandoffBed, batch: DecodeBatch, tokens: int, answers: int, prompts: int, rounds: int
) -> DecodeBeside:
    """In every round so many prompts land, then the batch decodes as long alone."""
    bed.flush()
    quiet, beside, landed, handoffs = [], [], [], 0
    with decoding(bed, batch) as streams:
        for number in range(rounds + 1):
            given = [bed.prompt(tokens) for _ in range(prompts)]
            rooms = bed.prefill.open_rooms(given)
            before, window = bed.prefill.sent(), _Window(bed, streams)
            for prompt, room in zip(given, rooms, strict=True):
                bed.handed_over(prompt, answers, room=room)
            seconds, generated = window.end()
            written = bed.prefill.sent().bytes - before.bytes
            bed.decode.wait_until(lambda engine: not engine.cache.busy)
            alone = _quiet(bed, streams, seconds)
            if number:
                handoffs += prompts
                quiet.append(alone)
                beside.append(generated / seconds)
                landed.append(written / seconds)
    return DecodeBeside(
        answers,
        batch.requests,
        batch.context,
        quiet_tokens_s=statistics.median(quiet),
        landing_tokens_s=statistics.median(beside),
        landed_bytes_s=statistics.median(landed),
        handoffs=handoffs,
        relative_speed=statistics.median(a / b for a, b in zip(beside, quiet, strict=True)),
    )


# -- handing over, or not ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptCost:
    """What a new prompt costs a server that decodes.

    second_s until its second token: all of its prompt is on the device
    delay_s  how long it holds up the running batch
    """

    second_s: float
    delay_s: float


@dataclass(frozen=True, slots=True)
class HandoffOrNot:
    tokens: int
    batch: int
    alone: PromptCost
    handed_over: PromptCost

    @property
    def saved_s(self) -> float:
        """How much less a handoff holds the batch up than a prefill."""
        return self.alone.delay_s - self.handed_over.delay_s

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"saved_s": self.saved_s}


def threshold(
    bed: HandoffBed, batch: DecodeBatch, lengths: Sequence[int], prompts: int, rounds: int
) -> Iterator[HandoffOrNot]:
    for tokens in lengths:
        bed.flush()
        alone, handed = list[PromptCost](), list[PromptCost]()
        with decoding(bed, batch) as streams:
            for number in range(rounds + 1):
                costs = [
                    _cost(bed, streams, tokens, prompts, hand_over=hand_over)
                    for hand_over in ((False, True) if number % 2 else (True, False))
                ]
                if number:
                    here, there = costs if number % 2 else costs[::-1]
                    alone.append(here)
                    handed.append(there)
        yield HandoffOrNot(tokens, batch.requests, _median(alone), _median(handed))


def _cost(
    bed: HandoffBed,
    streams: Sequence[ResponseStream],
    tokens: int,
    prompts: int,
    *,
    hand_over: bool,
) -> PromptCost:
    """Of prompts one after another; the batch alone decodes as long before them."""
    given = [bed.prompt(tokens) for _ in range(prompts)]
    rooms = bed.prefill.open_rooms(given) if hand_over else []
    window = _Window(bed, streams)
    if hand_over:
        pairs = zip(given, rooms, strict=True)
        answers = [bed.handed_over(prompt, 2, room=room) for prompt, room in pairs]
    else:
        answers = [bed.alone(prompt, 2) for prompt in given]
    seconds, generated = window.end()
    quiet_tokens_s = _quiet(bed, streams, seconds)
    delay_s = (seconds - generated / quiet_tokens_s) / prompts
    return PromptCost(statistics.median(each.last_s for each in answers), delay_s)


def _median(costs: Sequence[PromptCost]) -> PromptCost:
    return PromptCost(
        statistics.median(each.second_s for each in costs),
        statistics.median(each.delay_s for each in costs),
    )


def shortest_worth(found: Sequence[HandoffOrNot]) -> int | None:
    """The shortest prompt from which on handing over holds up the batch less than a prefill."""
    worth = None
    for each in sorted(found, key=lambda one: -one.tokens):
        if each.saved_s <= 0:
            break
        worth = each.tokens
    return worth
