"""The tokens that each row of a step may sample.

A row's mask depends on all tokens before it, so the host computes it once the step before is read.
The device computes the step's logits meanwhile, and the engine's thread commits pages and prepares
sampling: only sampling itself waits for masks.

Behind a draft the mask is that of the text with the draft. A draft that the grammar refuses is not
in its row's mask, so it is never sampled, and rows behind it are never accepted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLExecutor
from torch import Tensor

from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.grammar.token_mask import RowMask, TokenMasks
from kvtide.engine.grammar.token_matcher import TokenMatcher
from kvtide.engine.sampling.sampler import SamplingInput
from kvtide.engine.staging import Staging

MAX_THREADS = 16
_ALL = 2**32 - 1


class StepMasks:
    """Masks of a vocabulary, on threads of its own that start with the first grammar.

    steps, seconds  with constrained requests, and the time that their masks took
    """

    def __init__(self, vocabulary: int, staging: Staging) -> None:
        self.steps, self.seconds = 0, 0.0
        self._end = divmod(vocabulary, 32)
        self._staging = staging
        self._words = torch.empty(0, self._end[0] + 1, dtype=torch.int32)
        self._rows: dict[ScheduledChunk, int] = {}
        self._begun: Future[Tensor] | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._threads: LLExecutor | None = None

    def begin(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Compute the masks of a step on the worker's thread.

        They are written where those of the last step were: its tokens have been read, so that the
        device is done with them.
        """
        self._rows, first = {}, 0
        for chunk in chunks:
            if chunk.completes and chunk.request.matcher is not None:
                self._rows[chunk] = first
                first += 1 + len(chunk.drafts)
        if self._rows:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "kvtide-masks")
            self._begun = self._worker.submit(self._masks, self._rows, first)

    def sampling_inputs(self, chunks: Sequence[ScheduledChunk]) -> list[SamplingInput]:
        """Of the row after each chunk's last token, and of a row after every draft; masks were
        begun for these chunks."""
        inputs = list[SamplingInput]()
        for chunk in chunks:
            request, drafts, mask = chunk.request, chunk.drafts, None
            params = request.params
            for row in range(1 + len(drafts)):
                if request.matcher is not None:
                    assert self._begun is not None
                    mask = RowMask(self._begun.result, self._rows[chunk] + row)
                inputs.append(
                    SamplingInput(
                        params.sampling, params.tokens, request.tokens, drafts[:row], mask
                    )
                )
        return inputs

    def _masks(self, rows: Mapping[ScheduledChunk, int], count: int) -> Tensor:
        """(rows, words); of each chunk those from its own row on."""
        started = time.perf_counter()
        if len(self._words) < count:
            self._words = self._staging.pinned(count, self._words.shape[1])
        found = self._words[:count]
        words: TokenMasks = found.numpy().view(np.uint32)
        matchers = {c: m for c in rows if (m := c.request.matcher) is not None}
        live = [(m, rows[c], list(c.drafts)) for c, m in matchers.items() if not m.failed]
        self._compute(live, words)
        for chunk, matcher in matchers.items():
            own = words[rows[chunk] : rows[chunk] + 1 + len(chunk.drafts)]
            matcher.failed = matcher.failed or matcher.state.is_error()
            if matcher.failed:
                own[:] = _ALL
            self._allow_stop_ids(own, chunk.request.params.stop_ids)
        self.seconds += time.perf_counter() - started
        self.steps += 1
        return found

    def _compute(
        self, rows: Sequence[tuple[TokenMatcher, int, list[int]]], words: TokenMasks
    ) -> None:
        plain = [(matcher.state, row) for matcher, row, drafts in rows if not drafts]
        drafted = [(matcher.state, row, drafts) for matcher, row, drafts in rows if drafts]
        if self._threads is None:
            self._threads = LLExecutor(max(1, min(MAX_THREADS, (os.cpu_count() or 1) - 2)))
        place = words.ctypes.data, words.shape[1] * 4, len(words)
        if plain:
            self._threads.unsafe_compute_mask_ptr(plain, *place)
        if drafted:
            self._threads.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)

    def _allow_stop_ids(self, words: TokenMasks, stop_ids: frozenset[int]) -> None:
        """Where the text may end the request's stop ids are allowed, not the end itself."""
        word, bit = self._end
        end = np.uint32(1 << bit)
        ending = np.flatnonzero(words[:, word] & end)
        if not len(ending):
            return
        words[:, word] &= ~end
        for token in stop_ids:
            if 0 <= token < word * 32 + bit:
                words[ending, token // 32] |= np.uint32(1 << token % 32)


def cut_drafts(matcher: TokenMatcher | None, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts before the first that the grammar refuses."""
    return drafts if matcher is None else drafts[: matcher.allowed_run(drafts)]
