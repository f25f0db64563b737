"""Built-in workloads: synthetic traffic for the planner.

  chat    multi-turn conversations behind one system prompt
  agent   coding agents: tool turns over shared instructions and repositories, with sub-agents
  rag     questions about a few popular documents of a fixed corpus

A workload is planned first: the arrival times, and the texts that make up each prompt. A
`SyntheticText` is a prefix of a fixed run of random tokens, so a conversation is one text of which
every turn shows a longer prefix. Tokens are made while the trace is walked. The same options and
seed give the same trace.

`parse("chat:users=64,turns=5")` is `make("chat", users=64, turns=5)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.planner.traces import (
    BLOCK_TOKENS,
    Tokens,
    Trace,
    TraceError,
    TraceRequest,
    block_tokens,
)

Number = TypeVar("Number", int, float)

_SECONDS_PER_OUTPUT_TOKEN = 0.02


def _option(default: Number, minimum: Number, help: str, maximum: int = 1 << 20) -> Number:
    bounds = {"minimum": minimum, "maximum": maximum, "help": help}
    option: Number = field(default=default, metadata=bounds)
    return option


# -- options --------------------------------------------------------------------------------
# Lengths of questions, answers, tool results and documents are medians of log-normal lengths.


@dataclass(frozen=True, slots=True)
class Chat:
    """Multi-turn conversations. An answer becomes part of the next prompt."""

    users: int = _option(150, 1, "conversations")
    turns: int = _option(10, 1, "turns of each conversation")
    system: int = _option(1500, 0, "tokens of the system prompt that all share")
    question: int = _option(150, 1, "median tokens of a question")
    answer: int = _option(350, 1, "median tokens of an answer")
    users_per_minute: float = _option(6.0, 0.001, "conversations that begin per minute")
    think_s: float = _option(30.0, 0.0, "median seconds between an answer and the next question")
    seed: int = _option(0, 0, "the same seed gives the same trace")


@dataclass(frozen=True, slots=True)
class Agent:
    """Coding agents: instructions and tools, a repository, then one tool result after another."""

    sessions: int = _option(24, 1, "agents")
    turns: int = _option(24, 1, "tool turns of each agent")
    system: int = _option(4000, 0, "tokens of instructions and tool schemas that all share")
    repositories: int = _option(6, 1, "repositories the agents work on")
    repository: int = _option(8000, 0, "tokens of repository context that its agents share")
    task: int = _option(300, 1, "median tokens of a task")
    result: int = _option(500, 1, "median tokens of a tool result")
    output: int = _option(150, 1, "median tokens of a model turn")
    branch_percent: float = _option(4.0, 0.0, "turns in a hundred that start a sub-agent", 100)
    branch_turns: int = _option(6, 1, "tool turns of each sub-agent")
    sessions_per_minute: float = _option(2.0, 0.001, "agents that begin per minute")
    tool_s: float = _option(4.0, 0.0, "median seconds a tool runs")
    seed: int = _option(0, 0, "the same seed gives the same trace")


@dataclass(frozen=True, slots=True)
class Rag:
    """Questions, each behind some documents of a fixed corpus, most relevant first."""

    requests: int = _option(1200, 1, "questions")
    documents: int = _option(400, 1, "documents in the corpus")
    retrieved: int = _option(5, 1, "documents in each prompt")
    system: int = _option(800, 0, "tokens of the system prompt that all share")
    document: int = _option(1500, 1, "median tokens of a document")
    question: int = _option(60, 1, "median tokens of a question")
    answer: int = _option(250, 1, "median tokens of an answer")
    zipf: float = _option(1.2, 0.0, "how uneven the documents' popularity is; 0 is even", 10)
    requests_per_minute: float = _option(60.0, 0.001, "questions that arrive per minute")
    seed: int = _option(0, 0, "the same seed gives the same trace")


# -- texts and plans ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SyntheticText:
    """The first `tokens` tokens of the text that begins at a block number."""

    first_block: int
    tokens: int

    def shown(self, tokens: int) -> SyntheticText:
        return SyntheticText(self.first_block, tokens)

    def token_ids(self) -> Tokens:
        blocks = np.arange(math.ceil(self.tokens / BLOCK_TOKENS), dtype=np.int64)
        return block_tokens(self.first_block + blocks, self.tokens)


class Author:
    """Hands out texts that share no block, and draws every random number of a workload."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._next_block = 0

    def write(self, tokens: int) -> SyntheticText:
        text = SyntheticText(self._next_block, tokens)
        self._next_block += math.ceil(tokens / BLOCK_TOKENS)
        return text

    def lengths(self, median: int, count: int, sigma: float = 0.8) -> npt.NDArray[np.int64]:
        """Log-normal lengths of at least 1, the far tail cut at twenty medians."""
        samples: npt.NDArray[np.float64] = np.exp(sigma * self.rng.standard_normal(count))
        return np.clip(np.rint(median * samples), 1, 20 * median).astype(np.int64)

    def pauses_s(self, median_s: float, count: int) -> npt.NDArray[np.float64]:
        samples: npt.NDArray[np.float64] = np.exp(self.rng.standard_normal(count))
        return median_s * samples

    def poisson_s(self, per_minute: float, count: int) -> npt.NDArray[np.float64]:
        """Arrival times of a Poisson process that begins at 0."""
        return np.cumsum(self.rng.exponential(60 / per_minute, count))


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """One request before its tokens are made."""

    arrival_s: float
    texts: tuple[SyntheticText, ...]
    output_tokens: int
    session: str

    @property
    def prompt_tokens(self) -> int:
        return sum(text.tokens for text in self.texts)

    def request(self) -> TraceRequest:
        prompt = np.concatenate([text.token_ids() for text in self.texts])
        return TraceRequest(self.arrival_s, prompt, self.output_tokens, self.session)


@dataclass(frozen=True, slots=True)
class Opening:
    """A conversation's start, and the texts before its first turn."""

    session: str
    start_s: float
    preamble: tuple[SyntheticText, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Input and output tokens turn by turn, and the pause before the next."""

    inputs: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]
    pauses_s: npt.NDArray[np.float64]


def _dialogue(author: Author, opening: Opening, turns: Turns) -> list[TurnPlan]:
    """One plan per turn; the conversation is a single text of which each turn shows more."""
    ends = np.cumsum(turns.inputs + turns.outputs)
    conversation = author.write(int(ends[-1]))
    took_s = turns.outputs * _SECONDS_PER_OUTPUT_TOKEN + turns.pauses_s
    arrivals_s = opening.start_s + np.cumsum(took_s) - took_s
    columns = (arrivals_s.tolist(), ends.tolist(), turns.outputs.tolist())
    return [
        TurnPlan(
            arrival_s,
            (*opening.preamble, conversation.shown(end - answer)),
            answer,
            opening.session,
        )
        for arrival_s, end, answer in zip(*columns, strict=True)
    ]


# -- the three workloads --------------------------------------------------------------------


def _chat(options: Chat) -> list[TurnPlan]:
    author = Author(options.seed)
    system = author.write(options.system)
    starts_s = author.poisson_s(options.users_per_minute, options.users)
    plans: list[TurnPlan] = []
    for user, start_s in enumerate(starts_s.tolist()):
        turns = Turns(
            inputs=author.lengths(options.question, options.turns),
            outputs=author.lengths(options.answer, options.turns),
            pauses_s=author.pauses_s(options.think_s, options.turns),
        )
        plans += _dialogue(author, Opening(f"user-{user}", start_s, (system,)), turns)
    return plans


def _agent(options: Agent) -> list[TurnPlan]:
    author = Author(options.seed)
    system = author.write(options.system)
    repositories = [author.write(options.repository) for _ in range(options.repositories)]
    used = author.rng.integers(options.repositories, size=options.sessions)
    starts_s = author.poisson_s(options.sessions_per_minute, options.sessions)
    plans: list[TurnPlan] = []
    for number, (start_s, which) in enumerate(zip(starts_s.tolist(), used, strict=True)):
        opening = Opening(f"agent-{number}", start_s, (system, repositories[which]))
        main = _dialogue(author, opening, _tool_turns(options, author, options.turns))
        plans += main
        for turn in range(options.turns):
            if author.rng.random() * 100 < options.branch_percent:
                branch = _branch(author, main, turn)
                plans += _dialogue(
                    author, branch, _tool_turns(options, author, options.branch_turns)
                )
    return plans


def _tool_turns(options: Agent, author: Author, turns: int) -> Turns:
    inputs = author.lengths(options.result, turns)
    inputs[0] = author.lengths(options.task, 1)[0]
    return Turns(
        inputs, author.lengths(options.output, turns), author.pauses_s(options.tool_s, turns)
    )


def _branch(author: Author, main: Sequence[TurnPlan], turn: int) -> Opening:
    """A sub-agent starts after the output of `turn`, with the prompt of that or an earlier turn."""
    parent = main[turn]
    start_s = parent.arrival_s + parent.output_tokens * _SECONDS_PER_OUTPUT_TOKEN
    known = main[int(author.rng.integers(turn + 1))]
    return Opening(f"{parent.session}-{turn}", start_s, known.texts)


def _rag(options: Rag) -> list[TurnPlan]:
    if options.retrieved > options.documents:
        raise TraceError(
            f"rag: retrieved={options.retrieved} documents of a corpus of {options.documents}; "
            f"use retrieved={options.documents} or less"
        )
    author = Author(options.seed)
    system = author.write(options.system)
    lengths = author.lengths(options.document, options.documents)
    corpus = [author.write(tokens) for tokens in lengths.tolist()]
    weights = np.arange(1, options.documents + 1, dtype=np.float64) ** -options.zipf
    popularity = weights / weights.sum()
    arrivals_s = author.poisson_s(options.requests_per_minute, options.requests).tolist()
    questions = author.lengths(options.question, options.requests).tolist()
    answers = author.lengths(options.answer, options.requests).tolist()
    plans = []
    for number in range(options.requests):
        found = author.rng.choice(
            options.documents, size=options.retrieved, replace=False, p=popularity
        )
        texts = (system, *(corpus[i] for i in found), author.write(questions[number]))
        plans.append(TurnPlan(arrivals_s[number], texts, answers[number], f"question-{number}"))
    return plans


# -- by name --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of traffic: call it with options by keyword to get a trace."""

    name: str
    options: type[Chat | Agent | Rag]
    plan: Callable[[Any], list[TurnPlan]]

    def __call__(self, **options: int | float) -> Trace:
        known = self.known()
        for name, value in options.items():
            self._check(known.get(name), name, value)
        make_options: Callable[..., Any] = self.options
        plans = self.plan(make_options(**options))
        plans.sort(key=lambda plan: plan.arrival_s)
        return Trace(
            name=_written(self.name, options),
            requests=len(plans),
            prompt_tokens=sum(plan.prompt_tokens for plan in plans),
            longest_tokens=max((plan.prompt_tokens for plan in plans), default=0),
            source=lambda: _requests(plans),
        )

    def known(self) -> dict[str, Field[Any]]:
        """The options by name, with their defaults; `metadata` holds bounds and help."""
        return {option.name: option for option in fields(self.options)}

    def _check(self, option: Field[Any] | None, name: str, value: int | float) -> None:
        if option is None:
            raise TraceError(f"{self.name}: no option {name}; use {self._listed()}")
        low, high = option.metadata["minimum"], option.metadata["maximum"]
        whole = type(option.default) is int
        if type(value) is bool or not isinstance(value, int if whole else (int, float)):
            wanted = "a whole number" if whole else "a number"
            raise TraceError(f"{self.name}: {name} must be {wanted}, got {value!r}")
        if not low <= value <= high:
            raise TraceError(f"{self.name}: {name} must be from {low} to {high:,}, got {value}")

    def _listed(self) -> str:
        return ", ".join(f"{name} ({option.default})" for name, option in self.known().items())


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "chat": Workload("chat", Chat, _chat),
        "agent": Workload("agent", Agent, _agent),
        "rag": Workload("rag", Rag, _rag),
    }
)


def make(name: str, **options: int | float) -> Trace:
    """The trace of a built-in workload; options left out take their defaults."""
    if name not in WORKLOADS:
        raise TraceError(f"no workload named {name!r}; use {', '.join(WORKLOADS)}")
    return WORKLOADS[name](**options)


def parse(text: str) -> Trace:
    """A workload as it is written on a command line: 'rag' or 'chat:users=64,turns=10'."""
    name, _, rest = text.partition(":")
    options: dict[str, int | float] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise TraceError(f"{text}: {part!r} is not an option; write it as name=number")
        options[key.strip()] = _number(text, part, value.strip())
    return make(name.strip(), **options)


def _number(text: str, part: str, value: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise TraceError(f"{text}: {part!r} needs a number after the '='")


def _written(name: str, options: Mapping[str, int | float]) -> str:
    listed = ",".join(f"{key}={value}" for key, value in options.items())
    return f"{name}:{listed}" if listed else name


def _requests(plans: Sequence[TurnPlan]) -> Iterator[TraceRequest]:
    for plan in plans:
        yield plan.request()
