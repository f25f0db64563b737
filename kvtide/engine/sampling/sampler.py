"""Sampling: from logits to the next token, greedy or at a temperature.

A sampled token depends on the logits, the request's seed and the token's position alone: not on the
batch, and not on retraction. Gumbel-max: of the tokens that top-k, min-p and top-p leave over, the
one with the highest scaled logit plus noise. The noise of a token, -log(-log u), comes from a hash
of seed, position and token. So a draft that is sampled with the same noise mostly agrees.

Rows are computed together and independently. The host waits for the device once. A row without
top-k, min-p and top-p needs no order. In others few tokens hold nearly all probability, so only
`CANDIDATES` are sorted. Where more tokens are left over, the row is sampled again over the whole
vocabulary, which takes a second round trip.

Penalties, the logit bias and a grammar's mask change what is sampled, in this order. Reported
log-probabilities are the model's own, before all of these.
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
from kvtide.engine.grammar.token_mask import RowMask, apply_masks
from kvtide.engine.sampling.sampling_params import GREEDY, SamplingParams
from kvtide.engine.staging import Staging

CANDIDATES = 1024
"""Tokens of a row that are sorted first."""

_UNDECIDED = -1


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, its log-probability by the model, and the top tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SamplingInput(NamedTuple):
    """What a sample depends on besides the logits: parameters, the prompt, all tokens so far.

    drafted  drafts behind `tokens`, which the row follows
    mask     the tokens that a grammar allows; None without one
    """

    sampling: SamplingParams
    prompt: Sequence[int]
    tokens: Sequence[int]
    drafted: Sequence[int] = ()
    mask: RowMask | None = None

    @property
    def is_greedy(self) -> bool:
        """The token is the argmax of the model's own logits."""
        return self.mask is None and self.sampling.is_greedy

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

    @property
    def certain(self) -> bool:
        """The candidates decide every row: `read` gives the tokens that the device has. Only ties
        of as many logits as there are candidates break this."""
        vocabulary = self._logits.shape[1]
        return not any(_may_leave_more(each.sampling, vocabulary) for each in self._inputs)

    def keep_logits(self) -> None:
        """Keep them for `read`: a step launched before it overwrites the output buffer."""
        if any(each.sampling.is_limited for each in self._inputs):
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
    kinds = (GREEDY, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5))
    inputs = [SamplingInput(kind, (0,), (0,)) for kind in kinds]
    words = staging.pinned(len(inputs), vocabulary // 32 + 1).fill_(-1)
    inputs += [each._replace(mask=RowMask(lambda: words, n)) for n, each in enumerate(inputs)]
    logits = torch.zeros(len(inputs), vocabulary, device=staging.device)
    SamplingBatch(logits, inputs, staging).read()


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
    sampled = [row for row, each in enumerate(inputs) if not each.is_greedy]
    if sampled:
        rows = staging.indices(sampled)
        tokens = _sampled_tokens(
            logits[rows], [inputs[row] for row in sampled], candidates, staging
        )
        facts[rows, 0] = tokens.double()
        facts[rows, 1] = logits[rows, tokens.clamp(min=0)].double()
    return facts


def _may_leave_more(sampling: SamplingParams, vocabulary: int) -> bool:
    """As many tokens as there are candidates may be left over, and others beside them."""
    left = sampling.top_k or vocabulary
    return sampling.is_limited and vocabulary > CANDIDATES and left >= CANDIDATES


def _greedy(logits: Tensor, scales: Tensor | None, kernels: DeviceKernels | None) -> Tensor:
    """Of each row: argmax, its logit, and log Σ exp(scale · logits); (rows, 3) in fp64."""
    if kernels is not None:
        return kernels.greedy(logits, scales)
    maxima, tokens = logits.max(-1)
    scale = torch.ones_like(maxima) if scales is None else scales.float()
    weights = torch.exp((logits - maxima[:, None]) * scale[:, None])
    # Row by row: how a sum is split may depend on the number of rows.
    rests = torch.stack([row.sum() for row in weights]).log()
    return torch.stack([tokens.double(), maxima.double(), maxima.double() * scale + rests], 1)


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
    """How rows are sampled, penalties aside; a column (rows, 1) in fp64 each.

    Where there is no such limit `top_k` is 0, `top_p` is infinite, `min_p` is 0.

    word  53 bits of a hash of the seed and the token's number
    cold  1 if the row takes its argmax, else 0
    """

    scale: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    word: Tensor
    cold: Tensor


COLUMNS = len(Limits._fields)
"""Numbers that say how a row is sampled."""


def _sampled_tokens(
    logits: Tensor, inputs: Sequence[SamplingInput], candidates: int, staging: Staging
) -> Tensor:
    """The tokens of rows that are not greedy. Changes `logits` in place."""
    _penalise(logits, inputs, staging)
    _bias(logits, inputs, staging)
    apply_masks(logits, [each.mask for each in inputs], staging)
    tokens = torch.empty(len(inputs), dtype=torch.int64, device=logits.device)
    kinds = [each.sampling.kind for each in inputs]
    for kind in sorted({*kinds}):
        numbers = [row for row, one in enumerate(kinds) if one == kind]
        rows = staging.indices(numbers)
        some = logits if len(numbers) == len(inputs) else logits[rows]
        if kind == "greedy":
            tokens[rows] = _greedy(some, None, staging.kernels)[:, 0].long()
            continue
        table = sampling_columns([inputs[number] for number in numbers], logits.shape[1])
        (columns,) = staging.to_device(table)
        if kind == "limited":
            tokens[rows] = _by_candidates(some, columns, None, candidates, staging.kernels)
        else:
            tokens[rows] = _sample_rows(some, columns, None, staging.kernels)
    return tokens


def sampling_columns(inputs: Sequence[SamplingInput], vocabulary: int) -> NDArray[np.float64]:
    """(COLUMNS, rows): how each row is sampled, as `Limits` has it."""
    table = np.array([_settings(each.sampling, vocabulary) for each in inputs], dtype=np.float64)
    scale, *limits, cold = table.T
    scale = scale.astype(np.float32)  # All sums use the same scale, to the bit.
    return np.stack([scale, *limits, _words(inputs), cold])


def _settings(sampling: SamplingParams, vocabulary: int) -> tuple[float, ...]:
    """As `Limits` has them, without `word`."""
    cold = sampling.is_cold
    return (
        1.0 if cold else 1 / sampling.temperature,
        sampling.top_k if sampling.top_k < vocabulary else 0,
        sampling.top_p if sampling.top_p < 1 else math.inf,
        sampling.min_p,
        cold,
    )


def sample_columns(
    logits: Tensor, columns: Tensor, ids: Tensor | None, kernels: DeviceKernels | None
) -> Tensor:
    """The sampled column of each row, by `sampling_columns`. Where more tokens than the candidates
    are left over, none is ruled out. The host waits for nothing.

    ids  which token a column is of; None if the column's own number
    """
    free = _sample_rows(logits, columns, ids, kernels)
    candidates = min(CANDIDATES, logits.shape[1])
    found = _by_candidates(logits, columns, ids, candidates, kernels)
    return torch.where((found < 0) | (columns[5] > 0), free, found)


def _sample_rows(
    logits: Tensor, columns: Tensor, ids: Tensor | None, kernels: DeviceKernels | None
) -> Tensor:
    """The sampled column of each row, of all columns."""
    if kernels is not None:
        return kernels.sample_rows(logits, columns, ids)
    if ids is None:
        ids = torch.arange(logits.shape[1], device=logits.device)
    best = []
    # Row by row: how a tensor is split may depend on the number of rows.
    for row, (scale, _, _, _, word, cold) in zip(logits, columns.T, strict=True):
        scores = row if cold > 0 else row.double() * scale + gumbel_noise(word, ids)
        best.append(scores.argmax())
    return torch.stack(best)


def _by_candidates(
    logits: Tensor,
    columns: Tensor,
    ids: Tensor | None,
    candidates: int,
    kernels: DeviceKernels | None,
) -> Tensor:
    """The sampled column of each row, of the columns that are left over; `_UNDECIDED` where these
    are more than the candidates."""
    facts = _greedy(logits, columns[0], kernels)
    if candidates < logits.shape[1]:
        values, order = logits.topk(candidates)
    else:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
    tokens = order if ids is None else ids[order]
    if kernels is not None and candidates < logits.shape[1]:
        places = kernels.sample_candidates(values, tokens, facts, columns)
    else:
        limits = Limits(*columns[..., None])
        places = _sample_candidates(values.double(), tokens, facts, limits, logits.shape[1])
    return torch.where(places < 0, _UNDECIDED, order.gather(1, places.clamp(min=0))).squeeze(1)


def _sample_candidates(
    values: Tensor, tokens: Tensor, facts: Tensor, limits: Limits, vocabulary: int
) -> Tensor:
    """Which candidate is sampled, (rows, 1): an index into the sorted logits; negative where more
    tokens may be left over.

    Keeps the top k and ties with the last of them, then what has at least min_p times the highest
    probability, then the top p of the rest; never a token that is ruled out. Each keeps a leading
    run of the sorted tokens, so only `more` tells whether tokens beyond the candidates are kept.
    """
    scale, top_k, top_p, min_p, words, _ = limits
    count = values.shape[1]
    maximum = values[:, :1]
    weights = torch.exp((values - maximum) * scale)
    kth = values.gather(1, (top_k.long() - 1).clamp(0, count - 1))
    kept = ((values >= kth) | (top_k == 0)) & (weights >= min_p) & (values > -torch.inf)
    more = kept[:, -1:] & (count < vocabulary)
    weights = torch.where(kept, weights, 0.0)
    cumulative = weights.cumsum(1)
    total = torch.where(more, torch.exp(facts[:, 2:] - maximum * scale), cumulative[:, -1:])
    undecided = more & ((top_k > 0) | (min_p > 0))
    kept &= cumulative - weights < top_p * total
    kept[:, 0] = True
    undecided |= more & kept[:, -1:]
    # Row by row, as in `_sample_rows`.
    noise = torch.stack([gumbel_noise(*each) for each in zip(words, tokens, strict=True)])
    place = torch.where(kept, values * scale + noise, -torch.inf).argmax(1, True)
    return torch.where(undecided, -1, place)


def _penalise(logits: Tensor, inputs: Sequence[SamplingInput], staging: Staging) -> None:
    """Penalise repetition: of output tokens, and for the repetition penalty of the prompt too."""
    rows, tokens = list[int](), list[int]()
    factors, costs = list[float](), list[float]()
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


def _bias(logits: Tensor, inputs: Sequence[SamplingInput], staging: Staging) -> None:
    triples = [
        (row, token, bias)
        for row, each in enumerate(inputs)
        for token, bias in each.sampling.logit_bias
    ]
    if triples:
        (table,) = staging.to_device(np.array(triples, dtype=np.float64).T.copy())
        logits[tuple(table[:2].long())] += table[2].float()


# -- noise -----------------------------------------------------------------------------------


def gumbel_noise(words: Tensor, tokens: Tensor) -> Tensor:
    """-log(-log u) in fp64, with 52 bits of a hash of word and token as u, inside (0, 1)."""
    hashed = _splitmix64((words.long() << 11) + tokens)
    uniform = (_shifted(hashed, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _words(inputs: Sequence[SamplingInput]) -> NDArray[np.float64]:
    """As `Limits` has them."""
    seeds = torch.tensor([_signed(each.sampling.seed) for each in inputs])
    numbers = torch.tensor([each.number for each in inputs])
    words: NDArray[np.float64] = _shifted(_splitmix64(_splitmix64(seeds) + numbers), 11).numpy()
    return words.astype(np.float64)


def _splitmix64(words: Tensor) -> Tensor:
    """splitmix64, of words in int64."""
    words = words + _signed(0x9E3779B97F4A7C15)
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    shifted: Tensor = (words >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _signed(word: int) -> int:
    """The lowest 64 bits, as int64 has them."""
    return (word + 2**63) % 2**64 - 2**63
