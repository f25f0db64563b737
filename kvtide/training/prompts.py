"""Prompts from text files.

A file with an empty line in it has a prompt in every paragraph; any other file has one in every
line. A prompt is a user's message where the model has a chat template, else the beginning of a
text. The name of the file is the name of its category.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtide.models.chat import Conversation
from kvtide.models.tokenizer import Tokenizer

_PARAGRAPHS = re.compile(r"\n[ \t]*\n\s*")


class TrainingError(Exception):
    """What cannot be trained, in a sentence that names the remedy."""


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The prompts of one file, by its name without the suffix."""

    category: str
    prompts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EncodedPrompts:
    """Prompts as the target takes them."""

    category: str
    prompts: tuple[tuple[int, ...], ...]


def read_prompts(path: Path) -> PromptFile:
    """The prompts in this file."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as flaw:
        raise TrainingError(
            f"{path}: not readable as text ({flaw}); pass a UTF-8 file with a prompt in every line"
        ) from None
    parts = _PARAGRAPHS.split(text) if _PARAGRAPHS.search(text) else text.splitlines()
    prompts = tuple(part.strip() for part in parts if part.strip())
    if not prompts:
        raise TrainingError(f"{path}: there is no prompt in it; put one in every line")
    return PromptFile(path.stem, prompts)


def encode_prompts(file: PromptFile, tokenizer: Tokenizer, max_tokens: int) -> EncodedPrompts:
    """The tokens of every prompt; one of more than `max_tokens` is refused."""
    encoded = []
    for prompt in file.prompts:
        tokens = _encoded(prompt, tokenizer)
        if len(tokens) > max_tokens:
            raise TrainingError(
                f"{file.category}: the prompt that begins with {prompt[:40]!r} is {len(tokens)} "
                f"tokens, and {max_tokens} fit beside an answer; shorten it, or give answers fewer "
                "tokens"
            )
        encoded.append(tokens)
    return EncodedPrompts(file.category, tuple(encoded))


def _encoded(prompt: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    if tokenizer.chat is None:
        return tuple(tokenizer.encode(prompt))
    return tuple(tokenizer.encode_chat(Conversation([{"role": "user", "content": prompt}])))


def overlapping(training: Sequence[PromptFile], held_out: Sequence[PromptFile]) -> set[str]:
    """Prompts in both: a measurement with them would say nothing."""
    seen = {prompt for file in training for prompt in file.prompts}
    return {prompt for file in held_out for prompt in file.prompts} & seen
