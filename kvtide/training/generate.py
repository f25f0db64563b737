"""The text that a draft learns from: what the target itself answers.

The engine answers all prompts as one batch, each several times: greedily once, then at temperature
with a seed of its own. Answers can be kept in a file, so that another training needs none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams, SamplingParams
from kvtide.engine.request import Request
from kvtide.models.model import Decoder
from kvtide.training.prompts import TrainingError

ShowLine = Callable[[str], None]
"""Takes a line about the progress."""

REPORT_S = 10.0
CHUNK_TOKENS = 8192
"""Of a step: prompts are short and many."""


class ProgressReport:
    """Lines about a part that takes long, with its rate since the last line."""

    def __init__(self, report: ShowLine) -> None:
        self._report, self._last, self._tokens = report, time.monotonic(), 0

    @property
    def due(self) -> bool:
        return time.monotonic() - self._last >= REPORT_S

    def say(self, tokens: int, line: str) -> None:
        now = time.monotonic()
        rate = (tokens - self._tokens) / (now - self._last)
        self._last, self._tokens = now, tokens
        self._report(f"{line}; {rate:,.0f} tokens/s")


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and the target's answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How prompts are answered: `count` times each, the first time greedily unless `samples_all`.

    at_once      requests that run together
    cuda_graphs  of their steps, where the device has them: few answers take less time without
    """

    max_tokens: int = 256
    count: int = 4
    temperature: float = 0.8
    seed: int = 0
    at_once: int = 256
    cuda_graphs: bool = True
    samples_all: bool = False

    def order(self, prompts: int) -> list[tuple[int, int]]:
        """Prompts and answers by number: all first answers, then all second ones, each in random
        order, so that an end in between leaves no kind of prompt out."""
        numbers = list(range(prompts))
        Random(self.seed).shuffle(numbers)
        return [(number, answer) for answer in range(self.count) for number in numbers]

    def sampling(self, prompt: int, answer: int) -> SamplingParams:
        if answer == 0 and not self.samples_all:
            return SamplingParams()
        seed = (self.seed * 1_000_003 + prompt) * self.count + answer
        return SamplingParams(temperature=self.temperature, seed=seed % 2**31)


def open_training_cache(target: Decoder, tokens: int) -> TieredCache:
    """A cache on the target's device for so many tokens of running requests."""
    page, device = target.memory.page_tokens, str(target.head.device)
    size = Tokens(-(-tokens // page) * page)
    return TieredCache(target.memory, CacheConfig(size, None, device=device))


def generate(
    target: Decoder,
    prompts: Sequence[tuple[int, ...]],
    plan: AnswerPlan,
    stop_ids: frozenset[int],
    report: ShowLine,
    until: float = math.inf,
) -> list[Answered]:
    """What the target answers, in the order of prompts.

    All prompts are answered once before any is answered again. At `until`, a time of
    `time.monotonic`, unfinished answers are cut off and the rest of them is left out.
    """
    page = target.memory.page_tokens
    longest = max(map(len, prompts)) + plan.max_tokens + 2 * page
    asked = len(prompts) * plan.count
    at_once = min(plan.at_once, asked)
    cache = open_training_cache(target, (at_once + 1) * longest)
    engine = Engine(
        target,
        cache,
        chunk_tokens=CHUNK_TOKENS,
        max_running=at_once,
        cuda_graphs=plan.cuda_graphs,
    )
    todo = iter(plan.order(len(prompts)))
    requests: dict[tuple[int, int], Request] = {}
    progress = ProgressReport(report)
    while time.monotonic() < until:
        # A short queue: the scheduler looks at every waiting request.
        wanted = at_once - engine.scheduler.waiting
        for number, answer in islice(todo, wanted):
            sampling = plan.sampling(number, answer)
            params = RequestParams(prompts[number], plan.max_tokens, sampling, stop_ids)
            requests[number, answer] = engine.submit(params)
        if engine.idle:
            break
        engine.step()
        if progress.due:
            done = sum(request.finish is not None for request in requests.values())
            tokens = sum(len(request.output) for request in requests.values())
            progress.say(tokens, f"generated {tokens:,} tokens: {done:,} of {asked:,} answers")
    for request in requests.values():
        engine.abort(request)
    cache.close()
    return [
        Answered(request.params.tokens, tuple(sampled.token for sampled in request.output))
        for _, request in sorted(requests.items(), key=lambda item: item[0])
        if request.output
    ]


# -- answers in a file ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerFile:
    """Answers on disk. `model` is the fingerprint of what answered, `made_from` says to what."""

    path: Path

    def write(self, answered: Sequence[Answered], model: bytes, made_from: str = "") -> None:
        tensors = {
            "tokens": torch.tensor([token for one in answered for token in one.tokens]).int(),
            "prompts": torch.tensor([len(one.prompt) for one in answered]).int(),
            "answers": torch.tensor([len(one.answer) for one in answered]).int(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, self.path, {"model": model.hex(), "made_from": made_from})

    def read(self, model: bytes) -> list[Answered]:
        """Refuses answers of another model."""
        if self._open().get("model") != model.hex():
            raise TrainingError(
                f"{self.path}: another model gave these answers; answer the prompts with this one"
            )
        return self._read()

    def read_if(self, made_from: str) -> list[Answered] | None:
        """None where there are none, or others."""
        if not self.path.is_file() or self._open().get("made_from") != made_from:
            return None
        return self._read()

    def _open(self) -> dict[str, str]:
        try:
            with safe_open(self.path, "pt") as file:
                return dict(file.metadata() or {})
        except (SafetensorError, OSError) as flaw:
            raise TrainingError(
                f"{self.path}: not readable as answers ({flaw}); remove it, to generate them again"
            ) from None

    def _read(self) -> list[Answered]:
        with safe_open(self.path, "pt") as file:
            tokens, prompts, answers = (
                file.get_tensor(name).tolist() for name in ("tokens", "prompts", "answers")
            )
        found, end = [], 0
        for prompt, answer in zip(prompts, answers, strict=True):
            middle, start = end + prompt, end
            end = middle + answer
            found.append(Answered(tuple(tokens[start:middle]), tuple(tokens[middle:end])))
        return found
