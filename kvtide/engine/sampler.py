"""From logits to a token: greedy, or drawn from what the settings leave over.

A request draws from a generator of its own, seeded by its seed and the number of the token, so that
what it draws depends neither on its company nor on how often it was interrupted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

COLDEST = 1e-3
"""Temperatures below take the likeliest token: others' chances are too small to be numbers."""


@dataclass(frozen=True, slots=True)
class Sampling:
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


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Chosen:
    """A generated token, its log-probability by the model, and the likeliest others."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Drawing(NamedTuple):
    """What a choice depends on besides the logits: the settings, the prompt, all tokens so far."""

    sampling: Sampling
    prompt: Sequence[int]
    tokens: Sequence[int]


def choose_all(logits: Tensor, drawings: Sequence[Drawing]) -> list[Chosen]:
    """The next token of each row. Rows are independent; greedy ones are chosen together."""
    if not drawings:
        return []
    logprobs = torch.log_softmax(logits, -1)
    likeliest = logits.argmax(-1)
    picked = [
        int(greedy) if _is_plain(drawing.sampling) else _drawn(row, drawing)
        for row, drawing, greedy in zip(logits, drawings, likeliest.tolist(), strict=True)
    ]
    found = logprobs[torch.arange(len(picked)), picked].tolist()
    return [
        Chosen(token, logprob, _top(row, drawing.sampling.logprobs))
        for token, logprob, row, drawing in zip(picked, found, logprobs, drawings, strict=True)
    ]


def score(logits: Tensor, tokens: Sequence[int], count: int) -> list[Chosen]:
    """How likely each row made the token that followed, beside the `count` likeliest."""
    logprobs = torch.log_softmax(logits, -1)
    found = logprobs[torch.arange(len(tokens)), list(tokens)].tolist()
    return [
        Chosen(token, logprob, _top(row, count))
        for token, logprob, row in zip(tokens, found, logprobs, strict=True)
    ]


def _is_plain(sampling: Sampling) -> bool:
    """Whether the likeliest token is taken as it is."""
    penalised = sampling.presence_penalty or sampling.frequency_penalty
    return sampling.temperature < COLDEST and not penalised and sampling.repetition_penalty == 1.0


def _drawn(logits: Tensor, drawing: Drawing) -> int:
    sampling, prompt, tokens = drawing
    output = tokens[len(prompt) :]
    return _pick(_penalised(logits, sampling, prompt, output), sampling, len(output))


def _top(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def _penalised(
    logits: Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    """Logits less likely to repeat: what was generated, and for repetition also the prompt."""
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}))
        found = logits[seen]
        factor = sampling.repetition_penalty
        logits = logits.index_put((seen,), torch.where(found > 0, found / factor, found * factor))
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(output)
        ids, times = torch.tensor(list(counts)), torch.tensor(list(counts.values()))
        cost = sampling.presence_penalty + sampling.frequency_penalty * times.to(logits.device)
        logits = logits.index_put((ids,), logits[ids] - cost)
    return logits


def _pick(logits: Tensor, sampling: Sampling, step: int) -> int:
    if sampling.temperature < COLDEST:
        return int(logits.argmax())
    chances = torch.softmax(_limited(logits / sampling.temperature, sampling), -1)
    generator = torch.Generator().manual_seed((sampling.seed * 1_000_003 + step) % 2**63)
    return int(torch.multinomial(chances.cpu(), 1, generator=generator))


def _limited(logits: Tensor, sampling: Sampling) -> Tensor:
    """Rule out all but the top k, the top p of probability, and what is p times the likeliest."""
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.min_p:
        chances = torch.softmax(logits, -1)
        logits = logits.masked_fill(chances < sampling.min_p * chances.max(), -torch.inf)
    if sampling.top_p < 1.0:
        ordered, ids = logits.sort(descending=True)
        before = torch.softmax(ordered, -1).cumsum(-1) - torch.softmax(ordered, -1)
        logits = logits.index_fill(0, ids[1:][before[1:] >= sampling.top_p], -torch.inf)
    return logits
