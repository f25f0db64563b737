"""Sampling: from logits to the next token, greedy or at a temperature.

A sampled token depends on the logits, the request's seed and the token's position alone: not on the
batch, and not on retraction. The tokens that top-k, min-p and top-p leave over lie side by side on
[0, 1), the most probable first, each as wide as its probability; the request gets the one that its
random number falls on.

Rows are computed together and independently. The host waits for the device once. Few tokens hold
nearly all probability, so only `CANDIDATES` are sorted. Where these do not decide, the row is
sampled again over the whole vocabulary, which takes a second round trip.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtide.engine.device_kernels import DeviceKernels
from kvtide.engine.staging import Staging

COLDEST = 1e-3
"""Lower temperatures are greedy: other probabilities underflow."""

CANDIDATES = 1024
"""Tokens of a row that are sorted first."""

_UNDECIDED = -1

COLUMNS = 6
"""Numbers that say how a row is sampled: those of `Limits`, and whether it is greedy."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The usual parameters. A temperature of 0 is greedy.

    logprobs  how many top tokens are reported beside the sampled one
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
        """What is out of range, in a sentence; None if nothing is."""
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
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                return f"{name} is {value}; use a number from {low:g} to {high:g}"
        return None


GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, its log-probability by the model, and the top tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SamplingInput(NamedTuple):
    """What a sample depends on besides the logits: parameters, the prompt, all tokens so far.

    drafted  drafts behind `tokens`, which the row follows
    """

    sampling: SamplingParams
    prompt: Sequence[int]
    tokens: Sequence[int]
    drafted: Sequence[int] = ()

    @property
    def number(self) -> int:
        """How many tokens of output come before."""
        return len(self.tokens) + len(self.drafted) - len(self.prompt)

    @property
    def output(self) -> list[int]:
        return [*self.tokens[len(self.prompt) :], *self.drafted]


class SamplingBatch:
    """The next token of each row, while the device samples it.

    tokens     the sampled tokens, on the device
    resampled  after `read`: rows whose token is another, as the candidates did not decide
    """

    def __init__(self, logits: Tensor, inputs: Sequence[SamplingInput], staging: Staging) -> None:
        self._logits, self._inputs, self._staging = logits, inputs, staging
        self._facts = _sampled(logits, inputs, min(CANDIDATES, logits.shape[1]), staging)
        self._report = _Report(logits, self._facts, _counts(inputs), staging)
        self.resampled: list[int] = []

    @property
    def tokens(self) -> Tensor:
        return self._facts[:, 0].clamp(min=0).long()

    def keep_logits(self) -> None:
        """Keep them for `read`: a step launched before it overwrites the output buffer."""
        if not all(is_greedy(each.sampling) for each in self._inputs):
            self._logits = self._logits.clone()

    def read(self) -> list[SampledToken]:
        """Wait for the device, and sample undecided rows again."""
        sampled = self._report.read()
        self.resampled = [row for row, one in enumerate(sampled) if one.token == _UNDECIDED]
        if self.resampled:
            logits = self._logits.index_select(0, self._staging.indices(self.resampled))
            rows = [self._inputs[row] for row in self.resampled]
            facts = _sampled(logits, rows, logits.shape[1], self._staging)
            again = _Report(logits, facts, _counts(rows), self._staging).read()
            for row, one in zip(self.resampled, again, strict=True):
                sampled[row] = one
        return sampled


def sample_all(logits: Tensor, inputs: Sequence[SamplingInput]) -> list[SampledToken]:
    """The next token of each row."""
    return SamplingBatch(logits, inputs, Staging(logits.device)).read() if inputs else []


def warm_up_sampling(vocabulary: int, staging: Staging) -> None:
    """Sample once of every kind, which compiles the kernels."""
    kinds = (GREEDY, SamplingParams(temperature=1.0))
    logits = torch.zeros(len(kinds), vocabulary, device=staging.device)
    SamplingBatch(logits, [SamplingInput(kind, (0,), (0,)) for kind in kinds], staging).read()


def score(
    logits: Tensor, tokens: Sequence[int], count: int, staging: Staging
) -> list[SampledToken]:
    """The log-probability of each row's following token, with the `count` top tokens."""
    facts = _greedy(logits, None, staging.kernels)
    following = staging.indices(tokens)[:, None]
    facts[:, :1], facts[:, 1:2] = following, logits.gather(1, following)
    return _Report(logits, facts, [count] * len(tokens), staging).read()


def _counts(inputs: Sequence[SamplingInput]) -> list[int]:
    return [each.sampling.logprobs for each in inputs]


def _sampled(
    logits: Tensor, inputs: Sequence[SamplingInput], candidates: int, staging: Staging
) -> Tensor:
    """Facts as of `_greedy` with the sampled token, or `_UNDECIDED`."""
    facts = _greedy(logits, None, staging.kernels)
    sampled = [row for row, each in enumerate(inputs) if not is_greedy(each.sampling)]
    if sampled:
        rows = staging.indices(sampled)
        tokens = _sampled_tokens(
            logits[rows], [inputs[row] for row in sampled], candidates, staging
        )
        facts[rows, 0] = tokens.double()
        facts[rows, 1] = logits[rows, tokens.clamp(min=0)].double()
    return facts


def is_greedy(sampling: SamplingParams) -> bool:
    """Greedy, without penalties."""
    penalised = sampling.presence_penalty or sampling.frequency_penalty
    return sampling.temperature < COLDEST and not penalised and sampling.repetition_penalty == 1.0


def _greedy(logits: Tensor, scales: Tensor | None, kernels: DeviceKernels | None) -> Tensor:
    """Of each row: argmax, its logit, and log Σ exp(scale · logits); (rows, 3) in fp64."""
    if kernels is not None:
        return kernels.greedy(logits, scales)
    maxima, tokens = logits.max(-1)
    scale = torch.ones_like(maxima) if scales is None else scales.float()
    # Row by row: how a sum is split may depend on the number of rows.
    rests = [torch.exp((logits[n] - maxima[n]) * scale[n]).sum().log() for n in range(len(logits))]
    return torch.stack(
        [tokens.double(), maxima.double(), maxima.double() * scale + torch.stack(rests)], 1
    )


# -- to the host -----------------------------------------------------------------------------


class _Report:
    """Tokens and log-probabilities of all rows on their way to the host, with top tokens."""

    def __init__(
        self, logits: Tensor, facts: Tensor, counts: Sequence[int], staging: Staging
    ) -> None:
        self._counts = counts
        self._groups = {
            count: [row for row, one in enumerate(counts) if one == count]
            for count in sorted({*counts} - {0})
        }
        tops = []
        # One top-k per count: the order of ties may depend on k.
        for count, rows in self._groups.items():
            ours = logits if len(rows) == len(logits) else logits[staging.indices(rows)]
            values, ids = ours.topk(min(count, logits.shape[1]))
            tops.append(torch.stack([ids.double(), values.double()], -1))
        self._coming = staging.read_back([facts, *tops])

    def read(self) -> list[SampledToken]:
        found, *tops = [each.tolist() for each in self._coming()]
        best: list[list[list[float]]] = [[] for _ in self._counts]
        for rows, group in zip(self._groups.values(), tops, strict=True):
            for row, pairs in zip(rows, group, strict=True):
                best[row] = pairs
        return [
            SampledToken(
                int(token), logit - total, tuple((int(i), value - total) for i, value in pairs)
            )
            for (token, logit, total), pairs in zip(found, best, strict=True)
        ]


# -- at a temperature, or with penalties ------------------------------------------------------


class Limits(NamedTuple):
    """Sampling parameters and the random number; a column (rows, 1) in fp64 each.

    Where there is no such limit `top_k` is 0, `top_p` is infinite, `min_p` is 0.
    """

    scale: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


def _sampled_tokens(
    logits: Tensor, inputs: Sequence[SamplingInput], candidates: int, staging: Staging
) -> Tensor:
    """The tokens of rows that are not greedy. Applies penalties to `logits` in place."""
    _penalise(logits, inputs, staging)
    if all(each.sampling.temperature < COLDEST for each in inputs):
        return _greedy(logits, None, staging.kernels)[:, 0].long()
    (columns,) = staging.to_device(sampling_columns(inputs, logits.shape[1]))
    return _by_columns(logits, columns, candidates, staging.kernels)


def sampling_columns(inputs: Sequence[SamplingInput], vocabulary: int) -> NDArray[np.float64]:
    """(COLUMNS, rows): how each row is sampled, penalties aside."""
    cold = [each.sampling.temperature < COLDEST for each in inputs]
    table = [_settings(each, vocabulary) for each in inputs]
    columns = np.array([*zip(*table, strict=True), cold], dtype=np.float64)
    columns[0] = columns[0].astype(np.float32)  # All sums use the same scale, to the bit.
    return columns


def sample_columns(logits: Tensor, columns: Tensor, kernels: DeviceKernels | None) -> Tensor:
    """A token of each row, by `sampling_columns`; the argmax where the candidates do not decide.
    The host waits for nothing."""
    tokens = _by_columns(logits, columns, min(CANDIDATES, logits.shape[1]), kernels)
    return torch.where(tokens < 0, logits.argmax(-1), tokens)


def _by_columns(
    logits: Tensor, columns: Tensor, candidates: int, kernels: DeviceKernels | None
) -> Tensor:
    facts = _greedy(logits, columns[0], kernels)
    if candidates < logits.shape[1]:
        values, ids = logits.topk(candidates)
    else:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
    places = _places(values, facts, columns[:5], logits.shape[1], kernels)
    tokens = torch.where(places < 0, _UNDECIDED, ids.gather(1, places.clamp(min=0)))
    return torch.where(columns[5, :, None] > 0, facts[:, :1].long(), tokens).squeeze(1)


def _settings(each: SamplingInput, vocabulary: int) -> tuple[float, ...]:
    """As `Limits` has them."""
    sampling = each.sampling
    return (
        1 / sampling.temperature if sampling.temperature >= COLDEST else 1.0,
        sampling.top_k if sampling.top_k < vocabulary else 0,
        sampling.top_p if sampling.top_p < 1 else math.inf,
        sampling.min_p,
        _uniform(sampling.seed, each.number),
    )


def _places(
    values: Tensor, facts: Tensor, limits: Tensor, vocabulary: int, kernels: DeviceKernels | None
) -> Tensor:
    if kernels is not None and values.shape[1] < vocabulary:
        return kernels.sample_candidates(values, facts, limits)
    return _sample_candidates(values.double(), facts, Limits(*limits[..., None]), vocabulary)


def _sample_candidates(values: Tensor, facts: Tensor, limits: Limits, vocabulary: int) -> Tensor:
    """Which candidate is sampled, (rows, 1): an index into the sorted logits; negative where the
    candidates do not decide.

    Keeps the top k and ties with the last of them, then what has at least min_p times the highest
    probability, then the top p of the rest. Each keeps a leading run of the sorted tokens, so only
    `more` tells whether tokens beyond the candidates are kept.
    """
    scale, top_k, top_p, min_p, uniform = limits
    count = values.shape[1]
    maximum = values[:, :1]
    weights = torch.exp((values - maximum) * scale)
    kth = values.gather(1, (top_k.long() - 1).clamp(0, count - 1))
    kept = ((values >= kth) | (top_k == 0)) & (weights >= min_p)
    more = kept[:, -1:] & (count < vocabulary)
    weights = torch.where(kept, weights, 0.0)
    cumulative = weights.cumsum(1)
    total = torch.where(more, torch.exp(facts[:, 2:] - maximum * scale), cumulative[:, -1:])
    undecided = more & ((top_k > 0) | (min_p > 0))
    kept = cumulative - weights < top_p * total
    kept[:, 0] = True
    more = more & kept[:, -1:]
    target = uniform * torch.where(more, total, torch.where(kept, cumulative, 0.0).amax(1, True))
    undecided = undecided | (more & ((top_p < 1) | (target >= cumulative[:, -1:])))
    place = (kept & (cumulative <= target)).sum(1, True).clamp(max=count - 1)
    return torch.where(undecided, -1, place)


def _penalise(logits: Tensor, inputs: Sequence[SamplingInput], staging: Staging) -> None:
    """Penalise repetition: of output tokens, and for the repetition penalty of the prompt too."""
    rows: list[int] = []
    tokens: list[int] = []
    factors: list[float] = []
    costs: list[float] = []
    for row, each in enumerate(inputs):
        sampling = each.sampling
        factor, presence = sampling.repetition_penalty, sampling.presence_penalty
        times: Counter[int] = Counter()
        if presence or sampling.frequency_penalty:
            times = Counter(each.output)
        seen = set(times) if factor == 1.0 else {*each.prompt, *each.tokens, *each.drafted}
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
    """In [0, 1): 53 bits of a hash of the seed and the token's number."""
    return (_splitmix64((_splitmix64(seed & _WORD) + number) & _WORD) >> 11) * 2.0**-53


def _splitmix64(word: int) -> int:
    """splitmix64."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)
