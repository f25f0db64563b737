"""Sessions of coding agents: the `agent` workload.

A session sends its whole conversation with every request. Nearly always the prompt is the one
before with an answer and a tool's result at its end. The others:

  compaction   the conversation is full: a summary takes its place behind the instructions
  sub-agent    requests with instructions and a conversation of their own, then the session's again
  edit         earlier results are cut away, and the conversation continues from there

`_Conversation` is a prompt that grows. The quantiles below are those of recorded traffic of coding
agents, as factors of the median that an option sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvtide.planner.synthetic_texts import (
    Author,
    Floats,
    Quantiles,
    RequestPlan,
    SyntheticText,
    option,
)

_REQUESTS = Quantiles(((0.0, 0.05), (0.1, 0.16), (0.5, 1.0), (0.9, 3.86), (1.0, 9.5)))
_EXTENSION = Quantiles(((0.0, 0.06), (0.1, 0.3125), (0.5, 1.0), (0.9, 4.84), (1.0, 25.0)))
_GAP = Quantiles(((0.0, 0.2), (0.1, 0.5), (0.5, 1.0), (0.9, 8.06), (0.99, 150.0), (1.0, 220.0)))
_START = Quantiles(((0.0, 0.17), (0.1, 0.33), (0.5, 1.0), (0.9, 2.8), (1.0, 5.0)))
_CONTEXT = Quantiles(((0.0, 0.7), (0.1, 0.8), (0.5, 1.0), (0.9, 1.3), (1.0, 1.7)))
_SUMMARY = Quantiles(((0.0, 0.04), (0.1, 0.05), (0.5, 0.1), (0.9, 0.2), (1.0, 0.3)))
"""Of the context."""

_TILT = 0.12
"""Makes gaps of short sessions longer, and of long sessions shorter."""
_SUB_AGENT_REQUESTS = 12
"""On average."""
_MIN_KEPT = 0.35
"""Of a conversation by an edit."""
_MAX_STEP = 0.25
"""Of the context, by one request: so that a compaction always leaves room."""


@dataclass(frozen=True, slots=True)
class Agent:
    """Coding agents: sessions whose requests extend the one before. Lengths are medians."""

    sessions: int = option(48, 1, "sessions")
    requests: int = option(44, 1, "median requests of a session")
    system: int = option(16000, 1, "tokens of instructions and tool schemas that all share")
    start: int = option(25000, 1, "median tokens behind these in a session's first prompt")
    extension: int = option(640, 1, "median tokens by which a request extends the one before")
    context: int = option(275000, 64, "median tokens behind the instructions at a compaction")
    sub_agent_percent: float = option(0.9, 0.0, "requests in a hundred that begin a sub-agent", 100)
    edit_percent: float = option(1.0, 0.0, "requests in a hundred that cut earlier results", 100)
    gap_s: float = option(16.0, 0.0, "median seconds between two requests of a session")
    sessions_per_minute: float = option(0.5, 0.001, "sessions that begin per minute")
    seed: int = option(0, 0, "the same seed gives the same trace")


def plan(options: Agent) -> list[RequestPlan]:
    author = Author(options.seed)
    instructions = author.write(options.system), author.write(-(-options.system // 2))
    starts_s = author.poisson_s(options.sessions_per_minute, options.sessions)
    counts = _REQUESTS.values(options.requests, author.fractions(options.sessions))
    contexts = _CONTEXT.values(options.context, author.fractions(options.sessions))
    first = _START.values(options.start, author.fractions(options.sessions))
    plans: list[RequestPlan] = []
    for number in range(options.sessions):
        session = _Session(options, author, instructions, int(contexts[number]), int(first[number]))
        count = max(1, round(counts[number]))
        arrivals_s = starts_s[number] + _since_start_s(options, author, count)
        prompts = zip(arrivals_s.tolist(), session.prompts(count), strict=True)
        for arrival_s, (texts, output) in prompts:
            plans.append(RequestPlan(arrival_s, texts, output, f"agent-{number}"))
    return plans


def _since_start_s(options: Agent, author: Author, count: int) -> Floats:
    """When the requests of a session arrive. Short sessions wait longer for their user."""
    tilt = (count / (3 * options.requests)) ** _TILT
    gaps_s = _GAP.values(options.gap_s, author.fractions(count - 1) ** tilt)
    return np.cumsum(np.concatenate([[0.0], gaps_s]))


@dataclass(slots=True)
class _Conversation:
    """The texts it begins with, and how much it shows of one more.

    That text is as long as the context has room for.
    """

    before: tuple[SyntheticText, ...]
    text: SyntheticText
    tokens: int

    def has_room(self, tokens: int) -> bool:
        return self.tokens + tokens <= self.text.tokens

    def shown(self) -> tuple[SyntheticText, ...]:
        return (*self.before, self.text.shown(self.tokens))


class _Session:
    """One session; `instructions` are its own and those of its sub-agents."""

    def __init__(
        self,
        options: Agent,
        author: Author,
        instructions: tuple[SyntheticText, SyntheticText],
        context: int,
        start: int,
    ) -> None:
        self._options = options
        self._author = author
        self._instructions, self._sub_instructions = instructions
        self._context = max(64, context)
        self._main = self._conversation(self._instructions, start)
        self._sub_agent: _Conversation | None = None
        self._sub_requests = 0

    def prompts(self, count: int) -> Iterator[tuple[tuple[SyntheticText, ...], int]]:
        """The texts of every prompt, and the tokens of its answer."""
        fractions = self._author.fractions(count)
        extensions = _EXTENSION.values(self._options.extension, fractions)
        steps = np.clip(np.rint(extensions), 1, int(_MAX_STEP * self._context)).astype(int).tolist()
        answered = self._author.rng.uniform(0.1, 0.5, count).tolist()
        for number, (step, fraction) in enumerate(zip(steps, answered, strict=True)):
            current = self._next(step) if number else self._main
            yield current.shown(), max(1, int(fraction * step))

    def _next(self, step: int) -> _Conversation:
        """The conversation that the next request sends, longer by `step` tokens."""
        chance = 100 * self._author.rng.random()
        if self._sub_agent is not None:
            self._sub_requests -= 1
            if self._sub_requests > 0 and self._sub_agent.has_room(step):
                self._sub_agent.tokens += step
                return self._sub_agent
            self._sub_agent = None
        elif chance < self._options.sub_agent_percent:
            self._sub_requests = int(self._author.rng.geometric(1 / _SUB_AGENT_REQUESTS))
            self._sub_agent = self._conversation(self._sub_instructions, self._draw_start() // 2)
            return self._sub_agent
        elif chance > 100 - self._options.edit_percent:
            self._edit()
        if not self._main.has_room(step):
            self._main = self._conversation(self._instructions, self._draw_summary())
        else:
            self._main.tokens += step
        return self._main

    def _edit(self) -> None:
        """Cut the conversation's end away; what follows is new."""
        kept = self._author.rng.uniform(_MIN_KEPT, 1.0)
        main = self._main
        left = max(1, int(kept * main.tokens))
        before = (*main.before, main.text.shown(left))
        self._main = _Conversation(before, self._author.write(main.text.tokens - left), 0)

    def _conversation(self, instructions: SyntheticText, tokens: int) -> _Conversation:
        shown = min(max(1, tokens), self._context // 2)
        return _Conversation((instructions,), self._author.write(self._context), shown)

    def _draw_start(self) -> int:
        return int(_START.values(self._options.start, self._author.rng.random(1))[0])

    def _draw_summary(self) -> int:
        return int(_SUMMARY.values(self._context, self._author.rng.random(1))[0])
