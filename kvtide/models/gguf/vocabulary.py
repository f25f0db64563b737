"""The tokenizer that a GGUF file's metadata describes, built with the `tokenizers` package.

There are two kinds. `gpt2` is byte-level BPE: it lists its merges, but only names the rule that
cuts a text into words, so the rules are a table here and an unknown one is refused. `llama` is
SentencePiece's BPE: it lists scores, and the two neighbours merge first that make the piece with
the highest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from kvtide.models.gguf.metadata import Metadata
from kvtide.models.token_bytes import SPACE

END_OF_TURN = frozenset({
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|end|>",
    "<end_of_turn>", "<eos>", "</s>", "<|return|>", "<|call|>",
})  # fmt: skip
"""Control tokens after which a model has nothing more to say. Metadata names only one or two."""


class TokenKind(IntEnum):
    """What a token is, in the metadata's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, and what else the metadata says of them."""

    metadata: Metadata
    tokens: Sequence[str]
    kinds: Sequence[int]

    @classmethod
    def of(cls, metadata: Metadata) -> Vocabulary | None:
        """None where a file has no tokenizer."""
        if metadata.text("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
            return None
        tokens = metadata.texts("tokenizer.ggml.tokens")
        kinds: Sequence[int] = [TokenKind.NORMAL] * len(tokens)
        if metadata.has("tokenizer.ggml.token_type"):
            kinds = [int(kind) for kind in metadata.numbers("tokenizer.ggml.token_type")]
        if len(kinds) != len(tokens):
            raise metadata.refusal(
                f"the tokenizer has {len(tokens)} tokens and {len(kinds)} token types; "
                "download the file again"
            )
        return cls(metadata, tokens, kinds)

    def of_kind(self, *kinds: TokenKind) -> dict[int, str]:
        wanted = set(kinds)
        return {i: self.tokens[i] for i, kind in enumerate(self.kinds) if kind in wanted}

    @property
    def special(self) -> dict[int, str]:
        """Tokens that are no text."""
        return self.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN)

    def named(self, role: str) -> int | None:
        """The id of a role such as `bos`, if this vocabulary has one."""
        key = f"tokenizer.ggml.{role}_token_id"
        if not self.metadata.has(key):
            return None
        token_id = self.metadata.count(key)
        return token_id if token_id < len(self.tokens) else None

    @property
    def byte_level(self) -> bool:
        return self.metadata.text("tokenizer.ggml.model") == "gpt2"

    @property
    def leading_space(self) -> bool:
        return not self.byte_level and self.metadata.flag("tokenizer.ggml.add_space_prefix", True)

    def stop_ids(self) -> frozenset[int]:
        named = {self.named(role) for role in ("eos", "eot", "eom")}
        known = {i for i, token in self.special.items() if token in END_OF_TURN}
        return frozenset({token_id for token_id in named if token_id is not None} | known)


def build(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer, with the special tokens and the frame that the model expects."""
    kind = vocabulary.metadata.text("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise vocabulary.metadata.refusal(
            f"a tokenizer of kind {kind} is not read from GGUF here; use the model's folder with "
            "its tokenizer.json"
        )
    tokenizer = _BUILDERS[kind](vocabulary)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in vocabulary.special.values()]
    )
    _frame(tokenizer, vocabulary)
    return tokenizer


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        return Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    except Exception as flaw:  # The package raises nothing more precise.
        raise vocabulary.metadata.refusal(
            f"the tokenizer's merges do not fit its tokens ({flaw}); download the file again"
        ) from None


def _cut_out_user_defined(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """These come before any merge. They are written as in a text, a space as a space."""
    added = vocabulary.of_kind(TokenKind.USER_DEFINED).values()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])


def _frame(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """What goes before and after a text that stands alone."""
    begins = _framed(vocabulary, "bos", _begins_by_default(vocabulary))
    ends = _framed(vocabulary, "eos", by_default=False)
    if begins or ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(token for token, _ in begins), "$A", *(token for token, _ in ends)],
            special_tokens=[*begins, *ends],
        )


def _begins_by_default(vocabulary: Vocabulary) -> bool:
    return not vocabulary.byte_level or _cut(vocabulary).begins


def _framed(vocabulary: Vocabulary, role: str, by_default: bool) -> list[tuple[str, int]]:
    token_id = vocabulary.named(role)
    wanted = vocabulary.metadata.flag(f"tokenizer.ggml.add_{role}_token", by_default)
    return [(vocabulary.tokens[token_id], token_id)] if wanted and token_id is not None else []


# -- byte-level BPE ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cut:
    """How a text is cut into words, within which tokens lie.

    normal       how a text is rewritten before.
    whole_words  a word that is a token is that token, whatever the merges make of it.
    begins       texts begin with the `bos` token where the metadata does not say.
    """

    words: pre_tokenizers.PreTokenizer
    normal: normalizers.Normalizer | None = None
    whole_words: bool = False
    begins: bool = False


def _cut_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, as_bytes])


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_SINGLE_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = {
    "gpt-2": Cut(_GPT2),
    "llama-bpe": Cut(_cut_by(_LLAMA3), whole_words=True, begins=True),
    "qwen2": Cut(_cut_by(_LLAMA3.replace("{1,3}", "")), normal=normalizers.NFC()),
    "smollm": Cut(pre_tokenizers.Sequence([_SINGLE_DIGITS, _GPT2])),
}


def _cut(vocabulary: Vocabulary) -> Cut:
    rule = vocabulary.metadata.text("tokenizer.ggml.pre", "default")
    if rule not in _CUTS:
        raise vocabulary.metadata.refusal(
            f"the tokenizer cuts words by the rule {rule}, and only {', '.join(_CUTS)} are read "
            "from GGUF here; use the model's folder with its tokenizer.json"
        )
    return _CUTS[rule]


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    cut = _cut(vocabulary)
    listed = (merge.partition(" ") for merge in vocabulary.metadata.texts("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in listed]
    tokenizer = _bpe(vocabulary, merges, ignore_merges=cut.whole_words)
    if cut.normal is not None:
        tokenizer.normalizer = cut.normal
    tokenizer.pre_tokenizer = cut.words
    tokenizer.decoder = decoders.ByteLevel()
    _cut_out_user_defined(tokenizer, vocabulary)
    return tokenizer


# -- SentencePiece BPE -------------------------------------------------------------------------


def _pieces(vocabulary: Vocabulary) -> Tokenizer:
    unknown = vocabulary.named("unknown")
    tokenizer = _bpe(
        vocabulary,
        _merges(vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = [normalizers.Prepend(SPACE)] if vocabulary.leading_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    read = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.leading_space else []
    tokenizer.decoder = decoders.Sequence([*read, *strip])
    _cut_out_user_defined(tokenizer, vocabulary)
    return tokenizer


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a piece out of two, the pieces with the highest scores first."""
    scores = vocabulary.metadata.numbers("tokenizer.ggml.scores")
    normal = vocabulary.of_kind(TokenKind.NORMAL)
    if len(scores) != len(vocabulary.tokens):
        raise vocabulary.metadata.refusal(
            f"the tokenizer has {len(vocabulary.tokens)} tokens and {len(scores)} scores; "
            "download the file again"
        )
    known = set(normal.values())
    return [
        (piece[:cut], piece[cut:])
        for token_id, piece in sorted(normal.items(), key=lambda item: -scores[item[0]])
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]


_BUILDERS = {"gpt2": _byte_level, "llama": _pieces}
