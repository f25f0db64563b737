"""200 questions with one short answer each, behind examples that differ from prompt to prompt."""

from __future__ import annotations

import random
from typing import NamedTuple

EXAMPLES = 3
"""Questions with their answers in front of every question."""

CAPITALS = """
France Paris, Italy Rome, Spain Madrid, Germany Berlin, Japan Tokyo, China Beijing, Egypt Cairo,
Greece Athens, Russia Moscow, Poland Warsaw, Austria Vienna, Portugal Lisbon, Norway Oslo,
Sweden Stockholm, Denmark Copenhagen, Finland Helsinki, Ireland Dublin, Hungary Budapest,
Canada Ottawa, Cuba Havana, Peru Lima, Chile Santiago, Kenya Nairobi, India Delhi, Iran Tehran,
Iraq Baghdad, Turkey Ankara, Thailand Bangkok, Vietnam Hanoi, Australia Canberra, Belgium Brussels,
Ukraine Kyiv, Romania Bucharest, Bulgaria Sofia, Serbia Belgrade, Croatia Zagreb, Nepal Kathmandu,
Syria Damascus, Lebanon Beirut, Jordan Amman
"""
OPPOSITES = """
hot cold, big small, up down, black white, day night, good bad, fast slow, rich poor, open closed,
wet dry, old young, left right, happy sad, high low, hard soft, early late, long short, full empty,
light dark, strong weak, thick thin, clean dirty, loud quiet, true false, first last,
inside outside, above below, near far, love hate, win lose, buy sell, push pull, come go,
start stop, give take, war peace, life death, north south, east west, summer winter
"""
COLOURS = """
snow white, grass green, coal black, blood red, gold yellow, milk white, lemons yellow,
ravens black, tomatoes red, leaves green
"""


class Question(NamedTuple):
    text: str
    answer: str


def _pairs(listed: str) -> list[list[str]]:
    return [pair.split() for pair in listed.split(",")]


def questions() -> list[Question]:
    rng = random.Random(7)
    listed = [
        *(Question(f"What is the capital of {a}?", b) for a, b in _pairs(CAPITALS)),
        *(Question(f"What is the opposite of {a}?", b) for a, b in _pairs(OPPOSITES)),
        *(Question(f"What is the colour of {a}?", b) for a, b in _pairs(COLOURS)),
        *(Question(f"What is {a} + {b}?", str(a + b)) for a in range(1, 8) for b in range(1, 11)),
    ]
    for _ in range(200 - len(listed)):
        low, high = sorted(rng.sample(range(1, 100), 2))
        a, b = rng.sample((low, high), 2)
        listed.append(Question(f"Which is larger, {a} or {b}?", str(high)))
    rng.shuffle(listed)
    return listed


def prompts(asked: list[Question]) -> list[str]:
    """One text per question, which ends where the answer begins."""
    rng = random.Random(8)
    written = []
    for question in asked:
        others = rng.sample([one for one in asked if one != question], EXAMPLES)
        lines = [f"Q: {other.text}\nA: {other.answer}\n" for other in others]
        written.append("".join([*lines, f"Q: {question.text}\nA:"]))
    return written
