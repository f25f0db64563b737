"""The tokens that each row of a step may sample.

A row's mask depends on all tokens before it, so the host computes it once the step before is read.
The device computes the step's logits meanwhile, and the engine's thread ends the step before and
prepares sampling: only sampling itself waits for masks.

Behind a draft the mask is that of the text with the draft. A draft that the grammar refuses is not
in its row's mask, so it is never sampled, and rows behind it are never accepted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLExecutor
from torch import Tensor

from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.grammar.token_mask import RowMask, TokenMasks
from kvtide.engine.grammar.token_matcher import TokenMatcher
from kvtide.engine.request import Request
from kvtide.engine.sampler import SamplingInput
from kvtide.engine.staging import Staging

MAX_THREADS = 16
_ALL = 2**32 - 1


class _Masked(NamedTuple):
    """Whose mask it is, and what it follows: so many tokens of output, and drafts behind them."""

    matcher: TokenMatcher
    consumed: int
    drafts: tuple[int, ...]
    stop_ids: frozenset[int]

    @classmethod
    def of(cls, request: Request, drafts: tuple[int, ...]) -> _Masked:
        assert request.matcher is not None
        return cls(request.matcher, request.matcher.consumed, drafts, request.params.stop_ids)

    @property
    def rows(self) -> int:
        return 1 + len(self.drafts)


class StepMasks:
    """Masks of a vocabulary, on threads of its own that start with the first grammar.

    steps, seconds  with constrained requests, and the time that their masks took
    """

    def __init__(self, vocabulary: int, staging: Staging) -> None:
        self.steps, self.seconds = 0, 0.0
        self._end = divmod(vocabulary, 32)
        self._staging = staging
        self._words = torch.empty(0, self._end[0] + 1, dtype=torch.int32)
        self._rows: dict[_Masked, int] = {}
        self._begun: Future[Tensor] | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._threads: LLExecutor | None = None

    def begin_early(self, requests: Iterable[Request]) -> None:
        """Compute the masks of these requests' next tokens, before their step is known.

        Masks are written where the last ones were: tokens that were sampled with these have been
        read, so that the device is done with them.
        """
        self._compute_beside([_Masked.of(each, ()) for each in requests if each.matcher])

    def begin(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Compute the masks of a step, unless all of them were begun early."""
        wanted = [
            _Masked.of(chunk.request, chunk.drafts)
            for chunk in chunks
            if chunk.completes and chunk.request.matcher
        ]
        if not all(each in self._rows for each in wanted):
            self._compute_beside(wanted)

    def _compute_beside(self, wanted: Sequence[_Masked]) -> None:
        """On the worker's thread; each call follows the one before."""
        self._rows, first = {}, 0
        for each in wanted:
            self._rows[each] = first
            first += each.rows
        if wanted:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "kvtide-masks")
            self._begun = self._worker.submit(self._masks, self._rows)

    def sampling_inputs(self, chunks: Sequence[ScheduledChunk]) -> list[SamplingInput]:
        """Of the row after each chunk's last token, and of a row after every draft; `begin` was
        called with these chunks."""
        inputs = list[SamplingInput]()
        for chunk in chunks:
            request, drafts, mask = chunk.request, chunk.drafts, None
            if request.matcher:
                assert self._begun is not None, "masks are begun before"
                mask = RowMask(self._begun.result, self._rows[_Masked.of(request, drafts)])
            params = request.params
            for row in range(1 + len(drafts)):
                after = None if mask is None else mask._replace(row=mask.row + row)
                inputs.append(
                    SamplingInput(
                        params.sampling, params.tokens, request.tokens, drafts[:row], after
                    )
                )
        return inputs

    def _masks(self, wanted: Mapping[_Masked, int]) -> Tensor:
        """(1 + drafts, words) of each request, from its first row on."""
        started = time.perf_counter()
        stop_ids = [each.stop_ids for each in wanted for _ in range(each.rows)]
        if len(self._words) < len(stop_ids):
            self._words = self._staging.pinned(len(stop_ids), self._words.shape[1])
        found = self._words[: len(stop_ids)]
        words: TokenMasks = found.numpy().view(np.uint32)
        self._compute({each: row for each, row in wanted.items() if not each.matcher.failed}, words)
        for each, row in wanted.items():
            each.matcher.failed = each.matcher.failed or each.matcher.state.is_error()
            if each.matcher.failed:
                words[row : row + each.rows] = _ALL
        self._allow_stop_ids(words, stop_ids)
        self.seconds += time.perf_counter() - started
        self.steps += 1
        return found

    def _compute(self, wanted: Mapping[_Masked, int], words: TokenMasks) -> None:
        rows = [(each.matcher.state, row, list(each.drafts)) for each, row in wanted.items()]
        plain = [(state, row) for state, row, drafts in rows if not drafts]
        drafted = [row for row in rows if row[2]]
        if self._threads is None:
            self._threads = LLExecutor(max(1, min(MAX_THREADS, (os.cpu_count() or 1) - 2)))
        place = words.ctypes.data, words.shape[1] * 4, len(words)
        if plain:
            self._threads.unsafe_compute_mask_ptr(plain, *place)
        if drafted:
            self._threads.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)

    def _allow_stop_ids(self, words: TokenMasks, stop_ids: Sequence[frozenset[int]]) -> None:
        """Where the text may end the row's stop ids are allowed, not the end itself."""
        word, bit = self._end
        end = np.uint32(1 << bit)
        ending = np.flatnonzero(words[:, word] & end)
        words[:, word] &= ~end
        for row in ending.tolist():
            for token in stop_ids[row]:
                if 0 <= token < word * 32 + bit:
                    words[row, token // 32] |= np.uint32(1 << token % 32)


def cut_drafts(matcher: TokenMatcher | None, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts before the first that the grammar refuses."""
    return drafts if matcher is None else drafts[: matcher.allowed_run(drafts)]
