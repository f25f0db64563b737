"""What it costs that drafts of models with recurrent states end with their page.

One request is answered with drafts of which a chosen part is right, over pages of 64 tokens and
over a single page. Which tokens are drafted right depends on their position alone, so that both
runs have the same luck. Models are those of the tests; steps are counted, nothing is timed:

    PYTHONPATH=. python bench/page_ends.py
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import cache

import torch

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams
from kvtide.engine.speculation.drafter import DraftWish, TokenDrafter
from tests.models import tiny

FAMILIES = ("falcon_h1",)
PAGE, ANSWER = 64, 1024
PROMPT = tuple(tiny.prompt(40))
RIGHT, DRAFTS = (0.55, 0.8, 1.0), (3, 7)


class LuckyDrafter(TokenDrafter):
    """Knows the answer, and drafts each position right with a chance."""

    def __init__(self, answer: Sequence[int], right: float) -> None:
        self._tokens = [*PROMPT, *answer]
        self._right = [random.Random(n).random() < right for n in range(len(self._tokens))]

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        return [
            tuple(self._drafted(n) for n in range(r.length, min(r.length + k, len(self._tokens))))
            for r, k in wishes
        ]

    def _drafted(self, position: int) -> int:
        token: int = self._tokens[position]
        return token if self._right[position] else (token + 1) % tiny.VOCABULARY


def answered(family: str, page: int, drafter: TokenDrafter | None, drafts: int) -> list[list[int]]:
    """The tokens that every step gave."""
    model = tiny.ours(family, page_tokens=page)
    cached = TieredCache(model.memory, CacheConfig(Tokens(8 * 2048), None))
    options = {} if drafter is None else {"drafter": drafter, "draft_tokens": drafts}
    engine = Engine(model, cached, fixed_drafts=True, **options)  # type: ignore[arg-type]
    engine.submit(RequestParams(PROMPT, ANSWER))
    steps = []
    while not engine.idle:
        steps.append([update.sampled.token for update in engine.step() if update.sampled])
    cached.close()
    return [given for given in steps if given]


@cache
def answer(family: str) -> list[int]:
    return [token for given in answered(family, PAGE, None, 0) for token in given]


def main() -> None:
    torch.set_num_threads(1)
    header = "| family | drafts | right | tokens per step, one page | pages of 64 | lost |"
    print(f"{header}\n|---|---:|---:|---:|---:|---:|")
    for family in sys.argv[1:] or FAMILIES:
        for drafts in DRAFTS:
            for right in RIGHT:
                drafter = LuckyDrafter(answer(family), right)
                one, many = (
                    ANSWER / len(answered(family, page, drafter, drafts)) for page in (2048, PAGE)
                )
                row = f"{one:.2f} | {many:.2f} | {1 - many / one:.1%}"
                print(f"| {family} | {drafts} | {right:.0%} | {row} |", flush=True)


if __name__ == "__main__":
    main()
