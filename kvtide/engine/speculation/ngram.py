"""Prompt lookup: what followed the last tokens where they occurred before is drafted again.

Answers that quote their prompt (edits, summaries with quotes, code) repeat long runs of it. The
drafter has no weights, so every model has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from kvtide.engine.request import Request
from kvtide.engine.speculation.drafter import DraftWish, TokenDrafter

SIZES = (4, 2)
"""How many tokens must recur; the first size that does decides."""
NGRAM_DRAFTS = 7
"""Drafts of a request in a step, by default: quotes are long, and drafts cost little."""
_FEW = 32
"""So many new tokens are hashed one by one, more of them with numpy."""
_FACTOR, _WORD = 0x9E3779B97F4A7C15, 2**64 - 1


class _Occurrences:
    """Where each run of `size` tokens of one request was followed by a token, the last time.

    Runs are looked up by a hash; `find` compares the tokens themselves.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._ends: dict[int, int] = {}
        self._indexed = size

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the runs that end before the last token, which has no successor yet."""
        first, end = self._indexed, len(tokens)
        if end - first > _FEW:
            self._index_many(np.array(tokens[first - self._size : end - 1], np.uint64), first)
        else:
            for place in range(first, end):
                self._ends[_hash(tokens[place - self._size : place])] = place
        self._indexed = max(first, end)

    def _index_many(self, tokens: np.typing.NDArray[np.uint64], first: int) -> None:
        count = len(tokens) - self._size + 1
        hashes = np.zeros(count, np.uint64)
        for place in range(self._size):
            hashes = hashes * np.uint64(_FACTOR) + tokens[place : place + count]
        self._ends.update(zip(hashes.tolist(), range(first, first + count), strict=True))

    def find(self, tokens: Sequence[int]) -> int | None:
        """Where the run at the end of `tokens` was followed by another token."""
        run = tokens[-self._size :]
        end = self._ends.get(_hash(run))
        return end if end is not None and tokens[end - self._size : end] == run else None


class NgramDrafter(TokenDrafter):
    cost = 0.0

    def __init__(self) -> None:
        self._occurrences: WeakKeyDictionary[Request, list[_Occurrences]] = WeakKeyDictionary()

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        return [self._proposed(*wish) for wish in wishes]

    def _proposed(self, request: Request, count: int) -> tuple[int, ...]:
        by_size = self._occurrences.setdefault(request, [_Occurrences(size) for size in SIZES])
        tokens, start = request.tokens, None
        for occurrences in by_size:
            occurrences.extend(tokens)
            if start is None and len(tokens) > max(SIZES):
                start = occurrences.find(tokens)
        if start is None:
            return ()
        drafts = tokens[start : start + count]
        while len(drafts) < count:  # The run reaches the end: it goes on with its own drafts.
            drafts.append(drafts[start + len(drafts) - len(tokens)])
        return tuple(drafts)


def _hash(run: Sequence[int]) -> int:
    value = 0
    for token in run:
        value = (value * _FACTOR + token) & _WORD
    return value
