"""A tokenizer of 256 bytes and some special tokens."""

from __future__ import annotations

import tokenizers

from kvtide.models.chat import ChatTemplate
from kvtide.models.token_bytes import Spelling, byte_level
from kvtide.models.tokenizer import SpecialTokens, Tokenizer


def tokenizer(template: str | None, special: tuple[str, ...] = ()) -> Tokenizer:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_special_tokens(list(special))
    silent = frozenset(core.token_to_id(text) for text in special)
    return Tokenizer(
        core,
        Spelling(core.id_to_token, byte_level, silent),
        SpecialTokens(None, None, frozenset()),
        None if template is None else ChatTemplate(template, {}),
    )
