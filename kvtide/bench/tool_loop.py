"""An agent's session: every turn calls a tool, whose result makes the context longer.

Each turn is asked twice with the same messages: with the cache, and computed anew. The second
leaves no page behind (`recompute`), so that the first finds what it would find without it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtide.bench.conversations import Phase

Json = dict[str, Any]

WORDS = (
    "cache", "page", "host", "device", "token", "prefix", "tree", "slot", "batch", "step",
    "queue", "layer", "weight", "kernel", "stream", "store", "block", "index", "window",
    "state", "draft", "lease", "chunk", "table", "graph", "sample", "verify", "commit", "evict",
)  # fmt: skip
FILES = tuple(f"src/{word}.py" for word in WORDS[:8])
TOOLS: tuple[Json, ...] = (
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Some lines of a file.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "enum": list(FILES)},
                    "first_line": {"type": "integer", "minimum": 1, "maximum": 999},
                },
                "required": ["path", "first_line"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run_tests",
            "description": "Runs the tests of a file.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "enum": list(FILES)}},
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    },
)


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """`system_words` come first; every tool's result has `result_words`."""

    turns: int = 50
    system_words: int = 192
    result_words: int = 64
    call_tokens: int = 192
    seed: int = 0


@dataclass(frozen=True, slots=True)
class AgentTurn:
    messages: tuple[Json, ...]
    phase: Phase


@dataclass(frozen=True, slots=True)
class CallReply:
    """A turn's calls, as the next turn's messages have them, and seconds of one clock."""

    calls: tuple[Json, ...]
    began: float
    first: float
    ended: float
    prompt_tokens: int
    by_tier: Mapping[str, int] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        return self.first - self.began

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class TurnPair:
    """One turn, with the cache and without it."""

    on: CallReply
    off: CallReply


AskModel = Callable[[AgentTurn], Awaitable[CallReply]]


class NoCallError(Exception):
    """An answer without a whole tool call."""


async def session(load: AgentLoad, ask: AskModel, on_turn: Callable[[], object]) -> list[TurnPair]:
    rng = random.Random(load.seed)
    messages: list[Json] = [
        {"role": "system", "content": "You repair code. " + _words(rng, load.system_words)},
        {"role": "user", "content": "Find out why the tests fail."},
    ]
    pairs: list[TurnPair] = []
    for number in range(load.turns):
        on, off = [await ask(AgentTurn(tuple(messages), phase)) for phase in Phase]
        if not on.calls:
            raise NoCallError(f"turn {number + 1} has no tool call")
        pairs.append(TurnPair(on, off))
        messages.append({"role": "assistant", "content": None, "tool_calls": list(on.calls)})
        messages += [_result(rng, call, load.result_words) for call in on.calls]
        on_turn()
    return pairs


def _result(rng: random.Random, call: Json, words: int) -> Json:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        raise NoCallError("a tool call was cut") from None
    text = f"{arguments['path']}: {_words(rng, words)}"
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def joined_calls(deltas: Sequence[Json]) -> tuple[Json, ...]:
    """The calls of a stream's `delta.tool_calls`."""
    calls: dict[int, Json] = {}
    for delta in deltas:
        call = calls.setdefault(
            delta["index"],
            {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
        )
        call["id"] = call["id"] or delta.get("id") or ""
        function = delta.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""
    return tuple(calls[index] for index in sorted(calls))
