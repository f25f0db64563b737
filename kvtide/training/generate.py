"""The text that a draft learns from: what the target itself answers.

The engine answers all prompts as one batch, each several times: greedily once, then at temperature
with a seed of its own. Answers can be kept in a file, so that another training needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams, SamplingParams
from kvtide.models.model import Decoder
from kvtide.training.prompts import TrainingError

Report = Callable[[str], None]
"""Takes a line about the progress."""

REPORT_STEPS = 100
CHUNK_TOKENS = 8192
"""Of a step: prompts are short and many."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and what the target said."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How prompts are answered: `count` times each, the first time greedily.

    at_once  requests that run together
    """

    max_tokens: int = 256
    count: int = 4
    temperature: float = 0.8
    seed: int = 0
    at_once: int = 256

    def sampling(self, prompt: int, answer: int) -> SamplingParams:
        if answer == 0:
            return SamplingParams()
        seed = (self.seed * 1_000_003 + prompt) * self.count + answer
        return SamplingParams(temperature=self.temperature, seed=seed % 2**31)


def open_training_cache(target: Decoder, tokens: int) -> TieredCache:
    """A cache on the target's device for so many tokens of running requests."""
    page, device = target.memory.page_tokens, str(target.head.weight.device)
    size = Tokens(-(-tokens // page) * page)
    return TieredCache(target.memory, CacheConfig(size, None, device=device))


def generate(
    target: Decoder,
    prompts: Sequence[tuple[int, ...]],
    plan: AnswerPlan,
    stop_ids: frozenset[int],
    report: Report,
) -> list[Answered]:
    """What the target answers, in the order of prompts."""
    page = target.memory.page_tokens
    longest = max(map(len, prompts)) + plan.max_tokens + 2 * page
    asked = len(prompts) * plan.count
    at_once = min(plan.at_once, asked)
    cache = open_training_cache(target, (at_once + 1) * longest)
    engine = Engine(target, cache, chunk_tokens=CHUNK_TOKENS, max_running=at_once)
    requests = [
        engine.submit(
            RequestParams(prompt, plan.max_tokens, plan.sampling(number, answer), stop_ids)
        )
        for number, prompt in enumerate(prompts)
        for answer in range(plan.count)
    ]
    steps = 0
    while not engine.idle:
        engine.step()
        steps += 1
        if steps % REPORT_STEPS == 0:
            done = sum(request.finish is not None for request in requests)
            tokens = sum(len(request.output) for request in requests)
            report(f"generated {tokens:,} tokens: {done:,} of {asked:,} answers are complete")
    cache.close()
    return [
        Answered(request.params.tokens, tuple(sampled.token for sampled in request.output))
        for request in requests
    ]


# -- answers in a file ---------------------------------------------------------------------------


def save_answers(path: Path, answered: Sequence[Answered], label: str) -> None:
    """Write the answers; `label` says what they were made from."""
    tensors = {
        "tokens": torch.tensor([token for one in answered for token in one.tokens]).int(),
        "prompts": torch.tensor([len(one.prompt) for one in answered]).int(),
        "answers": torch.tensor([len(one.answer) for one in answered]).int(),
    }
    save_file(tensors, path, {"made_from": label})


def load_answers(path: Path, label: str) -> list[Answered] | None:
    """The answers of this label; None where there are none."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("made_from") != label:
                return None
            tokens, prompts, answers = (
                file.get_tensor(name).tolist() for name in ("tokens", "prompts", "answers")
            )
    except (SafetensorError, OSError) as flaw:
        raise TrainingError(
            f"{path}: not readable as answers ({flaw}); remove it, to generate them again"
        ) from None
    found, end = [], 0
    for prompt, answer in zip(prompts, answers, strict=True):
        middle, start = end + prompt, end
        end = middle + answer
        found.append(Answered(tuple(tokens[start:middle]), tuple(tokens[middle:end])))
    return found
