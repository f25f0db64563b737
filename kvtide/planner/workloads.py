"""Built-in workloads: synthetic traffic for the planner.

  chat    multi-turn conversations behind one system prompt
  agent   coding agents: long sessions whose requests extend each other (`agent_sessions`)
  rag     questions about a few popular documents of a fixed corpus

A workload is planned first: the arrival times, and the texts that make up each prompt
(`synthetic_texts`). A conversation is one text of which every turn shows a longer prefix. The same
options and seed give the same trace.

`parse("chat:users=64,turns=5")` is `make("chat", users=64, turns=5)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np

from kvtide.planner import agent_sessions
from kvtide.planner.agent_sessions import Agent
from kvtide.planner.synthetic_texts import (
    Author,
    Counts,
    Floats,
    RequestPlan,
    SyntheticText,
    option,
)
from kvtide.planner.traces import Trace, TraceError, TraceRequest

_SECONDS_PER_OUTPUT_TOKEN = 0.02


# -- options --------------------------------------------------------------------------------
# Lengths of questions, answers and documents are medians of log-normal lengths.


@dataclass(frozen=True, slots=True)
class Chat:
    """Multi-turn conversations. An answer becomes part of the next prompt."""

    users: int = option(150, 1, "conversations")
    turns: int = option(10, 1, "turns of each conversation")
    system: int = option(1500, 0, "tokens of the system prompt that all share")
    question: int = option(150, 1, "median tokens of a question")
    answer: int = option(350, 1, "median tokens of an answer")
    users_per_minute: float = option(6.0, 0.001, "conversations that begin per minute")
    think_s: float = option(30.0, 0.0, "median seconds between an answer and the next question")
    seed: int = option(0, 0, "the same seed gives the same trace")


@dataclass(frozen=True, slots=True)
class Rag:
    """Questions, each behind some documents of a fixed corpus, most relevant first."""

    requests: int = option(1200, 1, "questions")
    documents: int = option(400, 1, "documents in the corpus")
    retrieved: int = option(5, 1, "documents in each prompt")
    system: int = option(800, 0, "tokens of the system prompt that all share")
    document: int = option(1500, 1, "median tokens of a document")
    question: int = option(60, 1, "median tokens of a question")
    answer: int = option(250, 1, "median tokens of an answer")
    zipf: float = option(1.2, 0.0, "how uneven the documents' popularity is; 0 is even", 10)
    requests_per_minute: float = option(60.0, 0.001, "questions that arrive per minute")
    seed: int = option(0, 0, "the same seed gives the same trace")


# -- conversations --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opening:
    """A conversation's start, and the texts before its first turn."""

    session: str
    start_s: float
    preamble: tuple[SyntheticText, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Input and output tokens turn by turn, and the pause before the next."""

    inputs: Counts
    outputs: Counts
    pauses_s: Floats


def _dialogue(author: Author, opening: Opening, turns: Turns) -> list[RequestPlan]:
    """One plan per turn; the conversation is a single text of which each turn shows more."""
    ends = np.cumsum(turns.inputs + turns.outputs)
    conversation = author.write(int(ends[-1]))
    took_s = turns.outputs * _SECONDS_PER_OUTPUT_TOKEN + turns.pauses_s
    arrivals_s = opening.start_s + np.cumsum(took_s) - took_s
    columns = (arrivals_s.tolist(), ends.tolist(), turns.outputs.tolist())
    return [
        RequestPlan(
            arrival_s,
            (*opening.preamble, conversation.shown(end - answer)),
            answer,
            opening.session,
        )
        for arrival_s, end, answer in zip(*columns, strict=True)
    ]


# -- chat and rag ---------------------------------------------------------------------------


def _chat(options: Chat) -> list[RequestPlan]:
    author = Author(options.seed)
    system = author.write(options.system)
    starts_s = author.poisson_s(options.users_per_minute, options.users)
    plans: list[RequestPlan] = []
    for user, start_s in enumerate(starts_s.tolist()):
        turns = Turns(
            inputs=author.lengths(options.question, options.turns),
            outputs=author.lengths(options.answer, options.turns),
            pauses_s=author.pauses_s(options.think_s, options.turns),
        )
        plans += _dialogue(author, Opening(f"user-{user}", start_s, (system,)), turns)
    return plans


def _rag(options: Rag) -> list[RequestPlan]:
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
        plans.append(RequestPlan(arrivals_s[number], texts, answers[number], f"question-{number}"))
    return plans


# -- by name --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of traffic: call it with options by keyword to get a trace."""

    name: str
    options: type[Chat | Agent | Rag]
    plan: Callable[[Any], list[RequestPlan]]

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
        "agent": Workload("agent", Agent, agent_sessions.plan),
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


def _requests(plans: Sequence[RequestPlan]) -> Iterator[TraceRequest]:
    for plan in plans:
        yield plan.request()
