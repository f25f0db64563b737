"""Prompts that cannot be answered from memory: a random table, and a walk through it.

    BEGIN k v , k v , … k v , ASK x          answer: f(x) f(f(x)) f(f(f(x))) …

f is a random cycle over some of the symbols, another one for every prompt. Every token of an answer
is the value of the token before it, which stands in the prompt once: a model finds it by attention
to the prompt or not at all. A table may be given several times, for long prompts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SYMBOLS = 64
BEGIN, COMMA, ASK = SYMBOLS, SYMBOLS + 1, SYMBOLS + 2
VOCABULARY = 72
"""The symbols, the marks, and some that no prompt has."""


@dataclass(frozen=True, slots=True)
class Walk:
    """A prompt, and the answer up to where it would begin anew."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def walk(rng: random.Random, pairs: int, repeated: int = 1) -> Walk:
    """A table of so many pairs, each time in another order, and a walk from one of its keys."""
    cycle = rng.sample(range(SYMBOLS), pairs)
    table = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    prompt = [BEGIN]
    for _ in range(repeated):
        for key, value in rng.sample(table, pairs):
            prompt += [key, value, COMMA]
    return Walk((*prompt, ASK, cycle[0]), (*cycle[1:], cycle[0]))


def repetitive_walk(rng: random.Random, tokens: int, pairs: int) -> Walk:
    """As `walk`: one table over and over, in one order, cut to a prompt of so many tokens."""
    once = walk(rng, pairs)
    table, end = once.prompt[1:-2], once.prompt[-2:]
    assert len(table) <= tokens - 3, "the prompt has the whole table at least once"
    filled = (table * (tokens // len(table) + 1))[: tokens - 3]
    return Walk((BEGIN, *filled, *end), once.answer)
