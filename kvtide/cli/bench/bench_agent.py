"""`kvtide bench serve --agent`: a session of tool calls, each turn with the cache and without."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from kvtide.bench.conversations import Phase
from kvtide.bench.tool_loop import (
    TOOLS,
    AgentLoad,
    AgentTurn,
    CallReply,
    NoCallError,
    TurnPair,
    joined_calls,
    session,
)
from kvtide.cli.client import DETAILS, CutError, Json, ServerClient, ServerError, Usage
from kvtide.cli.console import CommandError, table

PARTS = 5
"""The session's turns are shown in so many parts."""
TOKENS_PER_WORD = 2
"""At the most, for the tiers' sizes."""
TOKENS_PER_CALL = 64
"""Of most calls, for the same; one of them may be as long as the load allows."""


def longest_tokens(load: AgentLoad) -> int:
    """A context that is longer than any of the session."""
    words = load.system_words + 200 + load.turns * (load.result_words + 16)
    return TOKENS_PER_WORD * words + load.turns * TOKENS_PER_CALL + load.call_tokens + 1024


def measure(client: ServerClient, load: AgentLoad, on_turn: Callable[[], object]) -> Json:
    """The model's name and the session's figures."""
    name, pairs = asyncio.run(_session(client, load, on_turn))
    return {"model": name, "load": asdict(load), **figures(pairs)}


async def _session(
    client: ServerClient, load: AgentLoad, on_turn: Callable[[], object]
) -> tuple[str, list[TurnPair]]:
    salt = secrets.token_hex(8)

    async def ask(turn: AgentTurn) -> CallReply:
        return await _ask(client, turn, load.call_tokens, salt)

    try:
        async with client:
            return await client.model(), await session(load, ask, on_turn)
    except NoCallError as error:
        raise CommandError(f"{error}; serve a model with a chat template") from None
    except ServerError as error:
        raise CommandError(str(error)) from None


async def _ask(client: ServerClient, turn: AgentTurn, call_tokens: int, salt: str) -> CallReply:
    body = {
        "messages": list(turn.messages),
        "tools": list(TOOLS),
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": call_tokens,
        "temperature": 0,
        "cache_salt": salt,
        "recompute": turn.phase is Phase.OFF,
        **DETAILS,
    }
    deltas: list[Json] = []
    first: float | None = None
    usage: Usage | None = None
    began = time.perf_counter()
    async for chunk in client.stream("/v1/chat/completions", body):
        for choice in chunk["choices"]:
            deltas += choice["delta"].get("tool_calls") or ()
        if chunk.get("usage"):
            usage = Usage.read(chunk["usage"])
            if usage.first_token_ms is not None:
                first = began + usage.first_token_ms / 1e3
    ended = time.perf_counter()
    if usage is None or first is None:
        raise CutError("it has no usage; use a server that `kvtide serve` started")
    calls = joined_calls(deltas)
    return CallReply(calls, began, first, ended, usage.prompt_tokens, usage.by_tier)


# -- figures ----------------------------------------------------------------------------------


def figures(pairs: Sequence[TurnPair]) -> Json:
    prompt = sum(pair.on.prompt_tokens for pair in pairs)
    cached = sum(sum(pair.on.by_tier.values()) for pair in pairs)
    seconds = {
        phase: sum(getattr(pair, phase).seconds for pair in pairs) for phase in ("on", "off")
    }
    return {
        "turns": len(pairs),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": cached / prompt,
        "seconds": seconds,
        "off_to_on": seconds["off"] / seconds["on"],
        "parts": [_part(pairs, part) for part in _parts(len(pairs))],
    }


def _parts(turns: int) -> list[range]:
    edges = [turns * part // PARTS for part in range(PARTS + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges) if a < b]


def _part(pairs: Sequence[TurnPair], turns: range) -> Json:
    ours = [pairs[turn] for turn in turns]
    ttft = {
        phase: statistics.median(1e3 * getattr(pair, phase).ttft_s for pair in ours)
        for phase in ("on", "off")
    }
    return {
        "turns": [turns.start + 1, turns.stop],
        "prompt_tokens": statistics.median(pair.on.prompt_tokens for pair in ours),
        "ttft_ms": ttft,
        "off_to_on": statistics.median(pair.off.ttft_s / pair.on.ttft_s for pair in ours),
    }


def report(result: Json) -> str:
    seconds = result["seconds"]
    rows = [
        (
            f"{part['turns'][0]}–{part['turns'][1]}",
            f"{part['prompt_tokens']:,.0f}",
            f"{part['ttft_ms']['on']:,.0f}",
            f"{part['ttft_ms']['off']:,.0f}",
            f"{part['off_to_on']:.1f}×",
        )
        for part in result["parts"]
    ]
    return "\n".join(
        [
            "",
            *filter(None, [result.get("command"), result.get("served")]),
            f"{result['turns']} turns with a tool call each: {result['prompt_tokens']:,} prompt "
            f"tokens, {result['cached_share']:.1%} of them cached; {seconds['on']:.1f} s with the "
            f"cache, {seconds['off']:.1f} s without: {result['off_to_on']:.1f}×",
            "",
            table(("turns", "prompt tokens", "TTFT ms, on", "off", "off/on"), rows),
        ]
    )
