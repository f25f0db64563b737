"""From logits to a token: greedy, or drawn from what the settings leave over.

A request's draw is a number from its seed and the number of the token, so that what it draws
depends neither on its company nor on how often it was interrupted. The tokens that it may get lie
side by side, the likeliest first, each as wide as its chance: it gets the one that the number falls
on.

Rows are computed together and independent all the same. The host waits for the device once: what
it needs comes over in one piece. Few tokens have nearly all of the chances, so only `CANDIDATES`
are put in order; where a draw falls beyond them, or what is ruled out cannot be told from
them, all are, which takes the device a second time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvtide.engine.staging import Staging

COLDEST = 1e-3
"""Temperatures below take the likeliest token: others' chances are too small to be numbers."""

CANDIDATES = 1024
"""How many tokens of a row are put in order, as long as they will do."""

_BEYOND = -1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The usual settings. A temperature of 0 takes the likeliest token.

    logprobs  how many of the likeliest tokens to report beside the chosen one
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = 0

    def problem(self) -> str | None:
        """What cannot be drawn from, in a sentence; None if all is well."""
        ranges = {
            "temperature": (0.0, 100.0),
            "top_p": (0.0, 1.0),
            "top_k": (0, math.inf),
            "min_p": (0.0, 1.0),
            "presence_penalty": (-100.0, 100.0),
            "frequency_penalty": (-100.0, 100.0),
            "repetition_penalty": (0.01, 100.0),
            "logprobs": (0, math.inf),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not least <= value <= most:
                return f"{name} is {value}; use a number from {least:g} to {most:g}"
        return None


GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A generated token, its log-probability by the model, and the likeliest others."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SamplingInput(NamedTuple):
    """What a choice depends on besides the logits: the settings, the prompt, all tokens so far."""

    sampling: SamplingParams
    prompt: Sequence[int]
    tokens: Sequence[int]


class SamplingBatch:
    """The next token of each row, while a device chooses it. Rows are independent.

    tokens   what the device knows of it
    belated  of which rows it was something else, once `read`
    """

    def __init__(self, logits: Tensor, drawings: Sequence[SamplingInput], staging: Staging) -> None:
        self._logits, self._drawings, self._staging = logits, drawings, staging
        self._facts = _chosen(logits, drawings, min(CANDIDATES, logits.shape[1]), staging)
        self._report = _Report(logits, self._facts, _counts(drawings), staging)
        self.belated: list[int] = []

    @property
    def tokens(self) -> Tensor:
        return self._facts[:, 0].clamp(min=0).long()

    def keep(self) -> None:
        """The logits are not left alone until it is read."""
        if not all(_is_plain(each.sampling) for each in self._drawings):
            self._logits = self._logits.clone()

    def read(self) -> list[SampledToken]:
        """Waits for the device."""
        chosen = self._report.read()
        self.belated = [row for row, one in enumerate(chosen) if one.token == _BEYOND]
        if self.belated:
            logits = self._logits.index_select(0, self._staging.indices(self.belated))
            rows = [self._drawings[row] for row in self.belated]
            facts = _chosen(logits, rows, logits.shape[1], self._staging)
            again = _Report(logits, facts, _counts(rows), self._staging).read()
            for row, one in zip(self.belated, again, strict=True):
                chosen[row] = one
        return chosen


def sample_all(logits: Tensor, drawings: Sequence[SamplingInput]) -> list[SampledToken]:
    """The next token of each row."""
    return SamplingBatch(logits, drawings, Staging(logits.device)).read() if drawings else []


def warm_up(vocabulary: int, staging: Staging) -> None:
    """Choose once of every kind: on a device, programs are compiled for it."""
    kinds = (GREEDY, SamplingParams(temperature=1.0))
    logits = torch.zeros(len(kinds), vocabulary, device=staging.device)
    SamplingBatch(logits, [SamplingInput(kind, (0,), (0,)) for kind in kinds], staging).read()


def score(
    logits: Tensor, tokens: Sequence[int], count: int, staging: Staging
) -> list[SampledToken]:
    """How likely each row made the token that followed, beside the `count` likeliest."""
    facts = _likeliest(logits)
    said = staging.indices(tokens)[:, None]
    facts[:, :1], facts[:, 1:2] = said, logits.gather(1, said)
    return _Report(logits, facts, [count] * len(tokens), staging).read()


def _counts(drawings: Sequence[SamplingInput]) -> list[int]:
    return [each.sampling.logprobs for each in drawings]


def _chosen(
    logits: Tensor, drawings: Sequence[SamplingInput], candidates: int, staging: Staging
) -> Tensor:
    """As `_likeliest` gives them, by so many candidates; `_BEYOND` where these do not tell."""
    facts = _likeliest(logits)
    bent = [row for row, each in enumerate(drawings) if not _is_plain(each.sampling)]
    if bent:
        rows = staging.indices(bent)
        tokens = _bent(logits[rows], [drawings[row] for row in bent], candidates, staging)
        facts[rows, 0] = tokens.double()
        facts[rows, 1] = logits[rows, tokens.clamp(min=0)].double()
    return facts


def _is_plain(sampling: SamplingParams) -> bool:
    """Whether the likeliest token is taken as it is."""
    penalised = sampling.presence_penalty or sampling.frequency_penalty
    return sampling.temperature < COLDEST and not penalised and sampling.repetition_penalty == 1.0


def _likeliest(logits: Tensor, scales: Tensor | None = None) -> Tensor:
    """Of each row: the likeliest token, its logit, log Σ exp(scale · logits); (rows, 3) in fp64."""
    if logits.is_cuda:
        from kvtide.layers.kernels.sampling import greedy

        return greedy(logits, scales)
    peaks, tokens = logits.max(-1)
    steep = torch.ones_like(peaks) if scales is None else scales.float()
    # Each row by itself: how a sum is taken apart may depend on how many there are.
    rests = [torch.exp((logits[n] - peaks[n]) * steep[n]).sum().log() for n in range(len(logits))]
    return torch.stack(
        [tokens.double(), peaks.double(), peaks.double() * steep + torch.stack(rests)], 1
    )


# -- to the host -----------------------------------------------------------------------------


class _Report:
    """Tokens and their logits, as facts say, with each row's so many likeliest."""

    def __init__(
        self, logits: Tensor, facts: Tensor, counts: Sequence[int], staging: Staging
    ) -> None:
        self._counts = counts
        self._groups = {
            count: [row for row, one in enumerate(counts) if one == count]
            for count in sorted({*counts} - {0})
        }
        tops = []
        # Not together for the largest count: which of equals come first may depend on it.
        for count, rows in self._groups.items():
            ours = logits if len(rows) == len(logits) else logits[staging.indices(rows)]
            values, ids = ours.topk(min(count, logits.shape[1]))
            tops.append(torch.stack([ids.double(), values.double()], -1))
        self._coming = staging.read_back([facts, *tops])

    def read(self) -> list[SampledToken]:
        found, *likeliest = [each.tolist() for each in self._coming()]
        best: list[list[list[float]]] = [[] for _ in self._counts]
        for rows, group in zip(self._groups.values(), likeliest, strict=True):
            for row, pairs in zip(rows, group, strict=True):
                best[row] = pairs
        return [
            SampledToken(
                int(token), logit - total, tuple((int(i), value - total) for i, value in pairs)
            )
            for (token, logit, total), pairs in zip(found, best, strict=True)
        ]


# -- other than the likeliest ----------------------------------------------------------------


class Limits(NamedTuple):
    """What is drawn from, and where the draw falls; a column (rows, 1) in fp64 each.

    Where there is no such limit `top_k` is 0, `top_p` is infinite, `min_p` is 0.
    """

    scale: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    draw: Tensor


def _bent(
    logits: Tensor, drawings: Sequence[SamplingInput], candidates: int, staging: Staging
) -> Tensor:
    """The tokens of rows with settings. What is given is penalised in place."""
    _penalise(logits, drawings, staging)
    cold = [each.sampling.temperature < COLDEST for each in drawings]
    if all(cold):
        return _likeliest(logits)[:, 0].long()
    table = [_settings(each, logits.shape[1]) for each in drawings]
    told = np.array([*zip(*table, strict=True), cold], dtype=np.float64)
    told[0] = told[0].astype(np.float32)  # All sums are made with the same scale, to the bit.
    (columns,) = staging.to_device(told)
    facts = _likeliest(logits, columns[0])
    if candidates < logits.shape[1]:
        values, ids = logits.topk(candidates)
    else:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
    places = _places(values, facts, columns[:5], logits.shape[1])
    tokens = torch.where(places < 0, _BEYOND, ids.gather(1, places.clamp(min=0)))
    return torch.where(columns[5, :, None] > 0, facts[:, :1].long(), tokens).squeeze(1)


def _settings(drawing: SamplingInput, vocabulary: int) -> tuple[float, ...]:
    """As `Limits` has them."""
    sampling, prompt, tokens = drawing
    return (
        1 / sampling.temperature if sampling.temperature >= COLDEST else 1.0,
        sampling.top_k if sampling.top_k < vocabulary else 0,
        sampling.top_p if sampling.top_p < 1 else math.inf,
        sampling.min_p,
        _uniform(sampling.seed, len(tokens) - len(prompt)),
    )


def _places(values: Tensor, facts: Tensor, limits: Tensor, vocabulary: int) -> Tensor:
    if values.is_cuda and values.shape[1] < vocabulary:
        from kvtide.layers.kernels.sampling import sample_candidates

        return sample_candidates(values, facts, limits)
    return _drawn(values.double(), facts, Limits(*limits[..., None]), vocabulary)


def _drawn(values: Tensor, facts: Tensor, limits: Limits, vocabulary: int) -> Tensor:
    """Which of the candidates it is, (rows, 1): of descending logits, by place; negative where
    they do not tell.

    Rules out all but the top k and those as high as the last of them, then what is less than min_p
    times as likely as the likeliest, then what comes after the top p of what is left. What each of
    them leaves comes before what it does not, so only `more` may be left among those after the
    candidates.
    """
    scale, top_k, top_p, min_p, draw = limits
    count = values.shape[1]
    peak = values[:, :1]
    chances = torch.exp((values - peak) * scale)
    least = values.gather(1, (top_k.long() - 1).clamp(0, count - 1))
    kept = ((values >= least) | (top_k == 0)) & (chances >= min_p)
    more = kept[:, -1:] & (count < vocabulary)
    chances = torch.where(kept, chances, 0.0)
    reached = chances.cumsum(1)
    total = torch.where(more, torch.exp(facts[:, 2:] - peak * scale), reached[:, -1:])
    unknown = more & ((top_k > 0) | (min_p > 0))
    kept = reached - chances < top_p * total
    kept[:, 0] = True
    more = more & kept[:, -1:]
    target = draw * torch.where(more, total, torch.where(kept, reached, 0.0).amax(1, True))
    unknown = unknown | (more & ((top_p < 1) | (target >= reached[:, -1:])))
    place = (kept & (reached <= target)).sum(1, True).clamp(max=count - 1)
    return torch.where(unknown, -1, place)


def _penalise(logits: Tensor, drawings: Sequence[SamplingInput], staging: Staging) -> None:
    """Makes repeating less likely: what was generated, and for repetition also the prompt."""
    rows: list[int] = []
    tokens: list[int] = []
    factors: list[float] = []
    costs: list[float] = []
    for row, (sampling, prompt, said) in enumerate(drawings):
        factor, presence = sampling.repetition_penalty, sampling.presence_penalty
        times: Counter[int] = Counter()
        if presence or sampling.frequency_penalty:
            times = Counter(said[len(prompt) :])
        seen = set(times) if factor == 1.0 else {*prompt, *said}
        rows += [row] * len(seen)
        tokens += seen
        factors += [factor] * len(seen)
        costs += [
            presence + sampling.frequency_penalty * times[token] if token in times else 0.0
            for token in seen
        ]
    if rows:
        (table,) = staging.to_device(np.array([rows, tokens, factors, costs], dtype=np.float64))
        at = tuple(table[:2].long())
        factor, cost = table[2:].float()
        found = logits[at]
        logits[at] = torch.where(found > 0, found / factor, found * factor) - cost


_WORD = 2**64 - 1


def _uniform(seed: int, number: int) -> float:
    """From 0 up to 1: 53 bits of what the seed and the token's number are mixed to."""
    return (_mixed((_mixed(seed & _WORD) + number) & _WORD) >> 11) * 2.0**-53


def _mixed(word: int) -> int:
    """Any bit of the word changes about half of those that come out (splitmix64)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)
