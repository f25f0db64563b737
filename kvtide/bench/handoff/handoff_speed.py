"""Times of handoffs beside their alternatives, in rounds of alternating order.

The first round is not counted. A ratio is the median over the rounds of paired ratios.

A time to first token (TTFT) is seen where a server hands tokens to its clients. With a handoff it
comes when the prefill side has sampled it; the second token waits for all pages, and their loads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from kvtide.bench.handoff.handoff_bed import HandoffBed
from kvtide.bench.handoff.served_engine import TimedAnswer
from kvtide.bench.handoff.switched_transport import WHOLE_WAYS, WriteWay

TURN_FRACTION = 0.9
"""Of a second turn's prompt, what the first turn has left on the decode side."""


@dataclass(frozen=True, slots=True)
class TimedToken:
    """Seconds to the first and to the second token: of all rounds."""

    firsts_s: tuple[float, ...]
    seconds_s: tuple[float, ...]

    @property
    def first_s(self) -> float:
        return statistics.median(self.firsts_s)

    @property
    def second_s(self) -> float:
        return statistics.median(self.seconds_s)

    def of(self, other: TimedToken) -> float:
        """The time to the first token as a fraction of another way's."""
        return _median_ratio(self.firsts_s, other.firsts_s)

    def second_of(self, other: TimedToken) -> float:
        """The same of the second token."""
        return _median_ratio(self.seconds_s, other.seconds_s)


def _median_ratio(mine: tuple[float, ...], others: tuple[float, ...]) -> float:
    return statistics.median(own / its for own, its in zip(mine, others, strict=True))


Variants = Mapping[str, Callable[[], TimedAnswer]]


def in_turns(variants: Variants, rounds: int) -> dict[str, TimedToken]:
    """Every variant once in a round."""
    found: dict[str, list[TimedAnswer]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        names = list(variants)
        for name in names if number % 2 else reversed(names):
            answered = variants[name]()
            if number:
                found[name].append(answered)
    return {
        name: TimedToken(
            tuple(each.first_s for each in answers),
            tuple(each.last_s for each in answers),
        )
        for name, answers in found.items()
    }


# -- written straight, staged, and without a handoff ------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteWays:
    """One new prompt in every way.

    alone     the decode server prefills it
    straight  handed over, written to the host
    staged    handed over, through the decode device as a whole
    chunked   the same, write by write
    """

    tokens: int
    page_bytes: int
    alone: TimedToken
    straight: TimedToken
    staged: TimedToken | None
    chunked: TimedToken | None

    @property
    def of_staged(self) -> float | None:
        """How much earlier the second token comes than staged; negative is earlier."""
        return None if self.staged is None else self.straight.second_of(self.staged) - 1

    @property
    def of_chunked(self) -> float | None:
        return None if self.chunked is None else self.straight.second_of(self.chunked) - 1

    @property
    def added(self) -> float:
        """What the handoff adds to the first token of one server."""
        return self.straight.of(self.alone) - 1

    @property
    def added_to_second(self) -> float:
        return self.straight.second_of(self.alone) - 1

    def as_json(self) -> dict[str, Any]:
        names = ("of_staged", "of_chunked", "added", "added_to_second")
        return asdict(self) | {name: getattr(self, name) for name in names}


def write_ways(bed: HandoffBed, tokens: int, rounds: int) -> WriteWays:
    """Pages are staged where the transport is `shm`: others write from the sender's own memory."""

    def alone() -> TimedAnswer:
        bed.flush()
        return bed.alone(bed.prompt(tokens))

    def handed_over(way: WriteWay) -> TimedAnswer:
        bed.flush()
        bed.switch(way)
        before = bed.prefill.sent()
        answered = bed.handed_over(bed.prompt(tokens))
        written.append(bed.prefill.sent().bytes - before.bytes)
        return answered

    written: list[int] = []
    ways = WHOLE_WAYS if bed.case.transport == "shm" else (WriteWay.STRAIGHT,)
    variants: dict[str, Callable[[], TimedAnswer]] = {"alone": alone}
    variants |= {way.value: partial(handed_over, way) for way in ways}
    found = in_turns(variants, rounds)
    bed.switch(WriteWay.STRAIGHT)
    return WriteWays(
        tokens,
        written[-1],
        found["alone"],
        found["straight"],
        found.get("staged"),
        found.get("chunked"),
    )


# -- the link ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Landing:
    """Pages of a computed prompt on their way, beside plain copies in the same process.

    bytes_s       while the sender was writing
    end_to_end_s  from the request to the last page: all messages too
    """

    tokens: int
    written_bytes: int
    bytes_s: float
    plain_bytes_s: float
    end_to_end_s: float
    of_plain: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def landing(bed: HandoffBed, tokens: int, rounds: int) -> Landing:
    """The prompt is computed before, so that nothing but its pages is waited for."""
    speeds, plain, whole, written = [], [], [], 0
    for number in range(rounds + 1):
        bed.flush()
        prompt = bed.prompt(tokens)
        (room,) = bed.prefill.open_rooms([prompt])
        before = bed.prefill.sent()
        answered = bed.handed_over(prompt, 1, room=room)
        after = bed.prefill.sent()
        written = after.bytes - before.bytes
        own = bed.prefill.plain_bytes_s()
        if number:
            speeds.append(written / (after.seconds - before.seconds))
            plain.append(own)
            whole.append(answered.last_s)
    ratios = [speed / own for speed, own in zip(speeds, plain, strict=True)]
    medians = map(statistics.median, (speeds, plain, whole, ratios))
    return Landing(tokens, written, *medians)


# -- a second turn ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SecondTurn:
    """A prompt of which the first turn has left a prefix.

    on_both      on both sides: the rest is computed and sent
    on_decode    on the decode side alone: all is computed, and the rest is sent
    on_prefill   on the prefill side alone: the rest is computed, and all is sent
    on_neither   all is computed and sent
    by_decode    on the decode side, which prefills the rest by itself
    """

    tokens: int
    kept_tokens: int
    on_both: TimedToken
    on_decode: TimedToken
    on_prefill: TimedToken
    on_neither: TimedToken
    by_decode: TimedToken

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def second_turn(bed: HandoffBed, tokens: int, rounds: int) -> SecondTurn:
    page, last = bed.page_tokens, (tokens - 1) // bed.page_tokens
    kept = min(int(tokens * TURN_FRACTION) // page, last - 1) * page

    def turn(*, decode: bool, prefill: bool) -> tuple[int, ...]:
        """A prompt of a second turn, and what the first one left on either side."""
        bed.flush()
        prompt = bed.prompt(tokens)
        if prefill or decode:
            bed.handed_over(prompt[: kept + 1])
            bed.decode.settle()
        if not decode:
            bed.decode.flush()
        if not prefill:
            bed.prefill.flush()
        return prompt

    def handed_over(*, decode: bool, prefill: bool) -> TimedAnswer:
        return bed.handed_over(turn(decode=decode, prefill=prefill))

    variants: dict[str, Callable[[], TimedAnswer]] = {
        "on_both": partial(handed_over, decode=True, prefill=True),
        "on_decode": partial(handed_over, decode=True, prefill=False),
        "on_prefill": partial(handed_over, decode=False, prefill=True),
        "on_neither": partial(handed_over, decode=False, prefill=False),
        "by_decode": lambda: bed.alone(turn(decode=True, prefill=True)),
    }
    return SecondTurn(tokens, kept, **in_turns(variants, rounds))


# -- the tail ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TailWays:
    """What is behind the last whole page of a computed prompt: sent, or computed again.

    tail_tokens  behind the last whole page
    tail_bytes   of the row that they travel in
    """

    tokens: int
    tail_tokens: int
    tail_bytes: int
    sent: TimedToken
    recomputed: TimedToken

    @property
    def saved_s(self) -> float:
        """How much earlier the second token comes if the tail is sent."""
        pairs = zip(self.recomputed.seconds_s, self.sent.seconds_s, strict=True)
        return statistics.median(recomputed - sent for recomputed, sent in pairs)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"saved_s": self.saved_s}


def tail_ways(bed: HandoffBed, tokens: int, rounds: int) -> TailWays:
    """The prompt is computed before, and ends in the middle of a page."""
    memory, behind = bed.decode.engine.cache.memory, bed.page_tokens // 2

    def sent() -> TimedAnswer:
        bed.flush()
        prompt = bed.prompt(tokens + behind)
        (room,) = bed.prefill.open_rooms([prompt])
        return bed.handed_over(prompt, room=room)

    def recomputed() -> TimedAnswer:
        with bed.without_tails():
            return sent()

    found = in_turns({"sent": sent, "recomputed": recomputed}, rounds)
    size = sum(memory.slot_bytes(anchor.name) for anchor in memory.anchors)
    return TailWays(tokens, behind, size, found["sent"], found["recomputed"])
