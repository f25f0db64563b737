"""A vocabulary of a few tokens, and masks as lists of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvtide.engine import Request, RequestParams
from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.grammar.grammar_compiler import GrammarCompiler
from kvtide.engine.grammar.step_masks import StepMasks
from kvtide.engine.grammar.token_matcher import TokenMatcher
from kvtide.engine.staging import Staging


@dataclass
class SmallVocabulary:
    """What a compiler asks of a tokenizer. Tokens beyond `spelt` are padding."""

    spelt: list[bytes]
    special_ids: frozenset[int] = frozenset()
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.spelt)

    def token_bytes(self, token: int) -> bytes:
        return self.spelt[token] if token < self.size else b""


class Walk:
    """One request's output, token by token, under a grammar."""

    def __init__(
        self, spelt: SmallVocabulary, grammar: Grammar, stop_ids: Sequence[int], vocabulary: int
    ) -> None:
        tokenizer: Any = spelt
        compiled = GrammarCompiler(tokenizer, vocabulary).compile(grammar)
        params = RequestParams((0,), 99, stop_ids=frozenset(stop_ids), grammar=grammar)
        prompt: Any = None
        self.request = Request(1, params, prompt, [0], matcher=TokenMatcher(compiled))
        self._masks, self._vocabulary = (
            StepMasks(vocabulary, Staging(torch.device("cpu"))),
            vocabulary,
        )

    @property
    def matcher(self) -> TokenMatcher:
        assert self.request.matcher is not None
        return self.request.matcher

    def allowed(self, drafts: Sequence[int] = ()) -> list[set[int]]:
        """Of the next row, and of the rows behind each draft."""
        chunk = ScheduledChunk(self.request, 1, tuple(drafts))
        rows = []
        self._masks.begin([chunk])
        for each in self._masks.sampling_inputs([chunk]):
            assert each.mask is not None
            words = each.mask.wait()[each.mask.row].numpy().view(np.uint32)
            tokens = range(self._vocabulary)
            rows.append({t for t in tokens if int(words[t // 32]) >> t % 32 & 1})
            beyond = range(self._vocabulary, 32 * len(words))
            assert not any(int(words[t // 32]) >> t % 32 & 1 for t in beyond[:1])
        return rows


def texts(alphabet: str, longest: int) -> list[str]:
    """All texts of up to so many letters."""
    counts = range(longest + 1)
    return ["".join(each) for n in counts for each in itertools.product(alphabet, repeat=n)]
