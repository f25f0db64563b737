"""The gain of a server's cache in multi-turn conversations: a load, and its figures.

Every user has a conversation, and all share one system prompt. A turn's prompt is the whole history
and a new question; the answer's tokens become history. The same conversations run with the cache
and without it, alternately, on one server: rounds go on, off, off, on, … so that a machine that
slows down does so for both. The caller sends the requests (`Ask`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

IDS = range(32, 200)
"""Token ids that every vocabulary has, and that are special in no known one."""

WARM_UP = -1
"""The round before the first, which is not counted."""


class Phase(Enum):
    ON = "on"
    OFF = "off"


# -- the load ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """`at_once`: how many users wait for an answer at the same time; the others think."""

    users: int
    turns: int
    system_tokens: int
    question_tokens: int
    answer_tokens: int
    at_once: int
    think_s: float = 0.0
    seed: int = 0

    @property
    def longest_tokens(self) -> int:
        """A conversation at its end."""
        return self.system_tokens + self.turns * (self.question_tokens + self.answer_tokens)

    def system(self, round_: int) -> list[int]:
        return self._random_tokens("system", round_, count=self.system_tokens)

    def question(self, round_: int, user: int, turn: int) -> list[int]:
        return self._random_tokens("question", round_, user, turn, count=self.question_tokens)

    def _random_tokens(self, *what: object, count: int) -> list[int]:
        return random.Random(f"{self.seed} {what}").choices(IDS, k=count)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of one user. Turns and rounds count from 0."""

    phase: Phase
    round: int
    user: int
    number: int
    prompt: tuple[int, ...]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Speculation, of one answer or of many."""

    verify_steps: int
    accepted: int
    rejected: int

    @classmethod
    def total(cls, counts: Iterable[DraftCounts | None]) -> DraftCounts | None:
        """Their sums; None if no server speculated."""
        known = [each for each in counts if each is not None]
        if not known:
            return None
        return cls(
            sum(each.verify_steps for each in known),
            sum(each.accepted for each in known),
            sum(each.rejected for each in known),
        )

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer and its times, in seconds of one clock. `by_tier`: cached prompt tokens.

    drafts  None if the server does not speculate
    """

    tokens: tuple[int, ...]
    began_s: float
    first_s: float
    ended_s: float
    by_tier: Mapping[str, int]
    drafts: DraftCounts | None = None


AskTurn = Callable[[Turn], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A turn that was answered. `tpot_ms`, the time per token after the first, needs two."""

    phase: Phase
    round: int
    user: int
    turn: int
    prompt_tokens: int
    generated_tokens: int
    ttft_ms: float
    tpot_ms: float | None
    by_tier: Mapping[str, int]
    drafts: DraftCounts | None = None

    @classmethod
    def of(cls, turn: Turn, reply: Reply) -> StreamEvent:
        count = len(reply.tokens)
        decode_ms = 1e3 * (reply.ended_s - reply.first_s)
        return cls(
            turn.phase,
            turn.round,
            turn.user,
            turn.number,
            len(turn.prompt),
            count,
            1e3 * (reply.first_s - reply.began_s),
            decode_ms / (count - 1) if count > 1 else None,
            dict(reply.by_tier),
            reply.drafts,
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "phase": self.phase.value}


@dataclass(frozen=True, slots=True)
class Held:
    """One phase of one round: its turns, and the seconds from the first question to the end."""

    phase: Phase
    seconds: float
    events: tuple[StreamEvent, ...]


async def measure(
    load: Load,
    rounds: int,
    ask: AskTurn,
    on_event: Callable[[StreamEvent], None] = lambda event: None,
) -> list[Held]:
    """Both phases in every round, after a warm-up of one turn. `on_event` is called per answer."""
    short = replace(load, users=load.at_once, turns=1)
    for phase in Phase:
        await _hold(short, phase, WARM_UP, ask, lambda event: None)
    found = []
    for round_ in range(rounds):
        for phase in reversed(Phase) if round_ % 2 else Phase:
            found.append(await _hold(load, phase, round_, ask, on_event))
    return found


async def _hold(
    load: Load, phase: Phase, round_: int, ask: AskTurn, on_event: Callable[[StreamEvent], None]
) -> Held:
    """All conversations of a round; the first problem ends them all."""
    slots = asyncio.Semaphore(load.at_once)
    events: list[StreamEvent] = []

    async def converse(user: int) -> None:
        history = load.system(round_)
        for number in range(load.turns):
            if number:
                await asyncio.sleep(load.think_s)
            history += load.question(round_, user, number)
            async with slots:
                turn = Turn(phase, round_, user, number, tuple(history), load.answer_tokens)
                reply = await ask(turn)
            history += reply.tokens
            events.append(StreamEvent.of(turn, reply))
            on_event(events[-1])

    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for user in range(load.users):
                group.create_task(converse(user))
    except ExceptionGroup as problems:
        raise problems.exceptions[0] from None
    return Held(phase, time.perf_counter() - began, tuple(events))


# -- the figures ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles, interpolated linearly."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(*map(float, np.percentile(values, (50, 90, 99)))) if values else None


@dataclass(frozen=True, slots=True)
class Figures:
    """One phase, all rounds together. `hits`: the fraction of prompt tokens by tier.

    drafts, accept_length  None if the server does not speculate
    """

    phase: Phase
    requests: int
    seconds: float
    ttft_ms: Spread
    tpot_ms: Spread | None
    ttft_ms_by_turn: tuple[Spread, ...]
    requests_s: float
    prompt_tokens_s: float
    generated_tokens_s: float
    hits: Mapping[str, float]
    drafts: DraftCounts | None
    accept_length: float | None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "phase": self.phase.value}


def figures(phase: Phase, held: Iterable[Held]) -> Figures:
    """The figures of a phase over all its rounds."""
    mine = [one for one in held if one.phase is phase]
    events = [event for one in mine for event in one.events]
    seconds = sum(one.seconds for one in mine)
    prompt = sum(event.prompt_tokens for event in events)
    tiers = dict.fromkeys(tier for event in events for tier in event.by_tier)
    turns = range(1 + max(event.turn for event in events))
    drafts = DraftCounts.total(event.drafts for event in events)
    return Figures(
        phase=phase,
        requests=len(events),
        seconds=seconds,
        ttft_ms=_ttft(events),
        tpot_ms=Spread.of([event.tpot_ms for event in events if event.tpot_ms is not None]),
        ttft_ms_by_turn=tuple(_ttft([e for e in events if e.turn == turn]) for turn in turns),
        requests_s=len(events) / seconds,
        prompt_tokens_s=prompt / seconds,
        generated_tokens_s=sum(event.generated_tokens for event in events) / seconds,
        hits={tier: sum(e.by_tier.get(tier, 0) for e in events) / prompt for tier in tiers},
        drafts=drafts,
        accept_length=None if drafts is None else drafts.accept_length,
    )


def _ttft(events: Sequence[StreamEvent]) -> Spread:
    spread = Spread.of([event.ttft_ms for event in events])
    assert spread is not None, "every turn was answered"
    return spread
