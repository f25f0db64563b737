"""What a session's prompt changed of its last one, in a sentence for `miss_reasons`.

The texts are the caller's own: they stand in its response, and in no log and no metric.
"""

from __future__ import annotations

from typing import Any

from kvtide.cache import PromptChange
from kvtide.models.tokenizer import Tokenizer

POOL = "prompt"
MAX_SHOWN = 48
"""Characters that are shown of a line, before and behind where it changes."""


def change_reason(change: PromptChange, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """An entry of `miss_reasons`."""
    sentence = f"the prompt differs at token {change.at} from this session's last one"
    if tokenizer is not None:
        before, after = _shown(tokenizer.decode(change.before), tokenizer.decode(change.after))
        sentence += f": {before!r} became {after!r}"
    return {"pool": POOL, "at": change.at, "reason": sentence}


def _shown(before: str, after: str) -> tuple[str, str]:
    """The lines in which two texts begin to differ, cut to what can be read at a glance."""
    at = next(
        (n for n, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]),
        min(len(before), len(after)),
    )
    begin = max(before.rfind("\n", 0, at) + 1, at - MAX_SHOWN)
    return _line(before, begin, at), _line(after, begin, at)


def _line(text: str, begin: int, at: int) -> str:
    end = text.find("\n", at)
    return text[begin : min(len(text) if end < 0 else end, at + MAX_SHOWN)]
