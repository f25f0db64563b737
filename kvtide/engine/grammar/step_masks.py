"""The tokens that each row of a step may sample.

A row's mask depends on all tokens before it, so the host computes it once the step before is read.
The device computes the step's logits meanwhile: only sampling waits for masks.

Behind a draft the mask is that of the text with the draft. A draft that the grammar refuses is not
in its row's mask, so it is never sampled, and rows behind it are never accepted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor

from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.grammar.token_mask import TokenMask
from kvtide.engine.grammar.token_matcher import TokenMatcher
from kvtide.engine.sampler import SamplingInput

MAX_THREADS = 8
_ALL = 2**32 - 1


class StepMasks:
    """Masks of a vocabulary, on threads of its own that start with the first grammar.

    steps, seconds  with constrained requests, and the time that their masks took
    """

    def __init__(self, vocabulary: int) -> None:
        self.steps, self.seconds = 0, 0.0
        self._end = divmod(vocabulary, 32)
        self._threads: LLExecutor | None = None

    def sampling_inputs(self, chunks: Sequence[ScheduledChunk]) -> list[SamplingInput]:
        """Of the row after each chunk's last token, and of a row after every draft."""
        constrained = [chunk for chunk in chunks if chunk.request.matcher is not None]
        masks: dict[ScheduledChunk, TokenMask] = {}
        if constrained:
            started = time.perf_counter()
            masks = dict(zip(constrained, self._masks(constrained), strict=True))
            self.seconds += time.perf_counter() - started
            self.steps += 1
        inputs = []
        for chunk in chunks:
            params, drafts = chunk.request.params, chunk.drafts
            of_rows = masks.get(chunk)
            for row in range(1 + len(drafts)):
                mask = None if of_rows is None else of_rows[row]
                inputs.append(
                    SamplingInput(
                        *(params.sampling, params.tokens, chunk.request.tokens, drafts[:row], mask)
                    )
                )
        return inputs

    def _masks(self, chunks: Sequence[ScheduledChunk]) -> list[TokenMask]:
        """Of each chunk, (1 + drafts, words)."""
        counts = [1 + len(chunk.drafts) for chunk in chunks]
        firsts = np.cumsum(counts) - counts
        words = np.full((sum(counts), self._end[0] + 1), _ALL, np.uint32)
        rows = [
            (matcher, int(first), list(chunk.drafts))
            for chunk, first in zip(chunks, firsts, strict=True)
            if (matcher := chunk.request.matcher) is not None and not matcher.failed
        ]
        self._compute(rows, words)
        for matcher, row, _ in rows:
            if matcher.state.is_error():
                matcher.failed, words[row] = True, _ALL
        masks = [words[first : first + n] for first, n in zip(firsts, counts, strict=True)]
        for chunk, mask in zip(chunks, masks, strict=True):
            self._allow_stop_ids(mask, chunk.request.params.stop_ids)
        return masks

    def _compute(
        self, rows: Sequence[tuple[TokenMatcher, int, list[int]]], words: TokenMask
    ) -> None:
        plain = [(matcher.state, row) for matcher, row, drafts in rows if not drafts]
        drafted = [(matcher.state, row, drafts) for matcher, row, drafts in rows if drafts]
        if self._threads is None:
            self._threads = LLExecutor(max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2)))
        place = words.ctypes.data, words.shape[1] * 4, len(words)
        if plain:
            self._threads.unsafe_compute_mask_ptr(plain, *place)
        if drafted:
            self._threads.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)

    def _allow_stop_ids(self, mask: TokenMask, stop_ids: frozenset[int]) -> None:
        """Where the text may end the request's stop ids are allowed, not the end itself."""
        word, bit = self._end
        end = np.uint32(1 << bit)
        ending = (mask[:, word] & end) != 0
        mask[:, word] &= ~end
        for token in stop_ids:
            if 0 <= token < word * 32 + bit:
                mask[ending, token // 32] |= np.uint32(1 << token % 32)


def cut_drafts(matcher: TokenMatcher | None, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts before the first that the grammar refuses."""
    return drafts if matcher is None else drafts[: matcher.allowed_run(drafts)]
