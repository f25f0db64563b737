"""Lines of prompts: a session's main conversation, its sub-agents, its side requests.

A client may send all of these under one name. Prompts of which each continues the one before are a
line. A prompt goes to the line whose last prompt

- it repeats up to the last whole page of the shorter one, or else
- it repeats mostly, but for a change of the front: `PromptChange` says where.

A prompt that does neither begins a line. Of too many lines, those go first that had one prompt
only, the least recently used ones first: side requests come once, a conversation comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvtide.index import IndexLease as IndexLease
from kvtide.index import Prompt
from kvtide.index.keys import TOKEN_BYTES

MAX_LINES = 8
"""Of a session."""
SHOWN_BEFORE, SHOWN_AFTER = 16, 24
"""Tokens around a change that are kept to name it."""
SAMPLES, SAMPLE_TOKENS = 16, 16
MIN_REPEATED = 12
"""So many samples of a last prompt, of those behind the change, are in the next one."""


class PromptChange(NamedTuple):
    """A prompt differs from its line's last one where whole pages could have been reused.

    at      the first token that differs
    before  tokens of the last prompt around there, `after` of this one
    """

    at: int
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(slots=True, eq=False)
class PromptLine:
    """asked: the last prompt, packed; `prompt`: the same with its answer, once there is one.

    prompts  so far, without those that were sent again
    used     which of its session's prompts was the last one
    """

    asked: bytes = b""
    prompt: Prompt | None = None
    lease: IndexLease | None = None
    prompts: int = 0
    used: int = 0

    @property
    def last(self) -> bytes:
        """What the next prompt is compared with."""
        return self.asked or (b"" if self.prompt is None else self.prompt.packed)

    @property
    def whole(self) -> bytes:
        """The last prompt, with its answer where there is one."""
        return self.asked if self.prompt is None else self.prompt.packed

    @property
    def remembered(self) -> int:
        answered = 0 if self.prompt is None else self.prompt.tokens
        return len(self.asked) // TOKEN_BYTES + answered


def find_line(
    lines: Sequence[PromptLine], packed: bytes, page_tokens: int
) -> tuple[PromptLine | None, PromptChange | None]:
    """The line that a prompt continues, and what it changed at its front; None for no line."""
    repeated = [(_repeated(line.last, packed), line) for line in lines]
    continued = [
        (tokens, number)
        for number, (tokens, line) in enumerate(repeated)
        if _continues(tokens, line.last, packed, page_tokens)
    ]
    if continued:
        return lines[max(continued)[1]], None
    changed = [
        (_samples(line.last, packed, tokens), tokens, number)
        for number, (tokens, line) in enumerate(repeated)
    ]
    found, at, number = max(changed, default=(0, 0, 0))
    if found < MIN_REPEATED:
        return None, None
    return lines[number], _change(lines[number].last, packed, at)


def first_to_go(lines: Sequence[PromptLine]) -> PromptLine:
    """Of lines, least recently used first."""
    return next((line for line in lines if line.prompts < 2), lines[0])


def _repeated(before: bytes, after: bytes) -> int:
    """With how many tokens both prompts begin."""
    length = min(len(before), len(after)) // TOKEN_BYTES
    old, new = (np.frombuffer(packed, "<i4", length) for packed in (before, after))
    differing = old != new
    return int(differing.argmax()) if differing.any() else length


def _continues(tokens: int, before: bytes, after: bytes, page_tokens: int) -> bool:
    """Whether two prompts that begin with the same tokens are one conversation. Templates change
    the end of a prompt; a shorter one repeats a turn."""
    shorter = min(len(before), len(after)) // TOKEN_BYTES
    return tokens >= shorter // page_tokens * page_tokens and 2 * tokens >= shorter > 0


def _samples(before: bytes, after: bytes, at: int) -> int:
    """How many samples of what follows token `at` are behind it in the other prompt, wherever.

    A shorter prompt has as much of it as it has room for. It takes a bounded number of searches, on
    the engine's thread.
    """
    rest = min(len(before), len(after)) // TOKEN_BYTES - at
    size = min(SAMPLE_TOKENS, rest // 4)
    if size < 1:
        return 0
    missing = 0
    for number in range(SAMPLES):
        begin = at + (rest - size) * number // (SAMPLES - 1)
        sample = before[begin * TOKEN_BYTES : (begin + size) * TOKEN_BYTES]
        missing += not _contains(after, sample, at)
        if missing > SAMPLES - MIN_REPEATED:
            return 0
    return SAMPLES - missing


def _contains(packed: bytes, sample: bytes, begin: int) -> bool:
    """Whether a prompt has these tokens behind token `begin`."""
    at = packed.find(sample, begin * TOKEN_BYTES)
    while at % TOKEN_BYTES and at >= 0:
        at = packed.find(sample, at + 1)
    return at >= 0


def _change(before: bytes, after: bytes, at: int) -> PromptChange:
    shown = slice(max(0, at - SHOWN_BEFORE), at + SHOWN_AFTER)
    old, new = (np.frombuffer(packed, "<i4")[shown].tolist() for packed in (before, after))
    return PromptChange(at, tuple(old), tuple(new))
