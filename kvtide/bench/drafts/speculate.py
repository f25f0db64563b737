"""What speculation is worth: tokens per second with it and without, in one run.

Two engines have one model's weights: one with a drafter, one without. The same requests go through
both at the same time, some steps of one, then of the other, so that a machine that slows down does
so for both. Greedy answers must be the same. A first round, which is not counted, leaves the
prompts in both caches and lets the engine learn what drafts are worth: decoding is what is
measured.

`row_costs` times steps with fixed numbers of drafts: what the engine's constants should say.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from kvtide.bench.progress import ShowProgress
from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams
from kvtide.engine.engine import DRAFT_TOKENS
from kvtide.engine.speculation.draft_length import verify_cost
from kvtide.engine.speculation.drafter import Drafter, DraftWish, TokenDrafter
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.engine.speculation.ngram import NGRAM_DRAFTS, NgramDrafter
from kvtide.models import build
from kvtide.models.chat import Conversation
from kvtide.models.checkpoint import Checkpoint, OnDevice
from kvtide.models.draft import DraftModel
from kvtide.models.draft_checkpoint import open_draft
from kvtide.models.model import Decoder
from kvtide.models.model_errors import CheckpointError
from kvtide.models.tokenizer import Tokenizer, load_tokenizer
from kvtide.spec.families import KVDType

TURN_STEPS = 20
"""Steps of an engine before the other's. The engine times its own steps, from one to the next."""
NEVER_BATCH = 64
ROW_BATCHES = (1, 2, 8)
MAX_ROW_DRAFTS = 5
"""`row_costs`: batches, and drafts of a request."""
ROW_STEPS, ROW_WARM_UP = 24, 3
_TEXT = (
    "The harbour of Port Ellery lies in a bay that faces north. Twice a day the tide fills the "
    "bay, and twice a day it leaves the boats on the mud. The fishermen know the hours by heart. "
    "Maria Lund, who keeps the lighthouse, writes the height of the water into a green book every "
    "morning. In the winter of 1953 the water rose two metres above the quay, and the town built a "
    "wall of granite. Since then the market has moved up the hill, where it stands today."
)
_CODE = """\
def total_price(items, discount):
    total = 0
    for item in items:
        price = item["price"] * item["count"]
        total = total + price
    if discount > 0:
        total = total - total * discount
    return total
"""
QUOTES = (
    f"Copy the following text word for word, but write Anna instead of Maria.\n\n{_TEXT}",
    f"Correct the spelling of this text and return the whole text.\n\n{_TEXT}",
    f"Rename the variable `total` to `result` in this function and show all of it.\n\n{_CODE}",
    "Summarise this text. Quote the most important sentences word for word, in quotation marks."
    f"\n\n{_TEXT}",
)
"""Prompts whose answers quote them: three edits and a summary."""

CHAT = (
    "What equipment and how much money does bookbinding take?",
    "Somebody gave me a voucher for geocaching. Shall I use it?",
    "Which alternatives to learning to juggle are there for rainy afternoons?",
    "Convince a sceptic that puppet theatre is fun.",
)
"""Every eighth of the held-out chat prompts that the shipped draft is measured on
(examples/draft_prompts)."""
QUESTIONS = (
    "What causes the tides?",
    "Give me three tips for sleeping better.",
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
)
"""Questions that are neither trained on nor held out."""
PROSE = tuple(f"Write a paragraph about the number {number}." for number in range(NEVER_BATCH))


class WrongDrafter(TokenDrafter):
    """Proposes as many drafts as it may, each wrong almost surely."""

    cost = NgramDrafter.cost

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        return [
            tuple((7919 * (wish.request.length + n) + 31) % self._vocabulary for n in range(limit))
            for wish in wishes
            for limit in (wish.limit,)
        ]


# -- what is measured -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeculationCase:
    """`at_once`: requests that decode together. `goal`: tokens/s with drafts over those without.
    `draft_tokens`: a server's default, unless given."""

    name: str
    prompts: tuple[str, ...]
    at_once: int
    goal: float
    draft_tokens: int
    drafter: Callable[[ModelBed, TieredCache], Drafter]

    @property
    def needs_draft(self) -> bool:
        """A draft model proposes."""
        return self.drafter is _model


@dataclass(frozen=True, slots=True)
class SpeculationGain:
    """`ratio`: the median over the rounds."""

    case: str
    at_once: int
    draft_tokens: int
    generated_tokens: int
    on_tokens_s: float
    off_tokens_s: float
    ratio: float
    goal: float
    accept_length: float
    accepted: int
    rejected: int

    @property
    def reached(self) -> bool:
        return self.ratio >= self.goal

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"reached": self.reached}


@dataclass(frozen=True, slots=True)
class RowCost:
    """A verify step with so many drafts for every request of a batch, in decode steps of it:
    `ratio` as measured, `assumed` as the engine counts when it chooses how many drafts pay."""

    batch: int
    drafts: int
    step_s: float
    ratio: float
    assumed: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _ngram(bed: ModelBed, cache: TieredCache) -> Drafter:
    return NgramDrafter()


def _wrong(bed: ModelBed, cache: TieredCache) -> Drafter:
    return WrongDrafter(bed.model.vocabulary)


def _model(bed: ModelBed, cache: TieredCache) -> Drafter:
    assert bed.draft is not None, "a draft's case needs the draft"
    return ModelDrafter(bed.draft, bed.draft.captures, cache, bed.model.vocabulary)


CASES = {
    case.name: case
    for case in (
        SpeculationCase("quotes", QUOTES, 1, 1.6, NGRAM_DRAFTS, _ngram),
        SpeculationCase("chat", CHAT, 1, 1.4, DRAFT_TOKENS, _model),
        SpeculationCase("questions", QUESTIONS, 1, 1.4, DRAFT_TOKENS, _model),
        SpeculationCase("never", PROSE, NEVER_BATCH, 0.9, DRAFT_TOKENS, _wrong),
    )
}
"""`quotes`: n-gram; `chat`, `questions`: a draft model; `never`: drafts that are never accepted."""


class ModelBed:
    """A model for all cases; with a draft its memory has the draft's pools."""

    def __init__(self, checkpoint: Checkpoint, draft: str | None, device: torch.device) -> None:
        opened = None if draft is None else open_draft(draft)
        on_cpu = device.type == "cpu"
        with device:
            self.model: Decoder = build(
                checkpoint.config,
                OnDevice(checkpoint.weights, device),
                kv_dtype=KVDType.FP32 if on_cpu else KVDType.BF16,
                dtype=torch.float32 if on_cpu else torch.bfloat16,
                draft=opened,
            )
        self.draft: DraftModel | None = None if opened is None else opened.build(self.model)
        self.device = device
        tokenizer = load_tokenizer(checkpoint)
        if tokenizer is None:
            raise CheckpointError(
                f"{checkpoint.path}: there is no tokenizer, and the prompts are texts; pass a "
                "model with one"
            )
        self.tokenizer: Tokenizer = tokenizer

    def params(self, text: str, answer_tokens: int) -> RequestParams:
        """A chat's first turn, answered greedily and to the full length."""
        message = {"role": "user", "content": text}
        return RequestParams(
            tuple(self.tokenizer.encode_chat(Conversation([message]))), answer_tokens
        )

    def engine(
        self,
        case: SpeculationCase,
        tokens: int,
        draft_tokens: int | None,
        *,
        fixed_drafts: bool = False,
    ) -> Engine:
        """Without drafts if `draft_tokens` is None."""
        config = CacheConfig(Tokens(tokens), host_size=None, device=str(self.device))
        cache = TieredCache(self.model.memory, config)
        running = max(case.at_once, 2)
        if draft_tokens is None:
            return Engine(self.model, cache, max_running=running)
        return Engine(
            self.model,
            cache,
            max_running=running,
            drafter=case.drafter(self, cache),
            draft_tokens=draft_tokens,
            fixed_drafts=fixed_drafts,
        )


# -- measuring --------------------------------------------------------------------------------


def measure(
    bed: ModelBed,
    case: SpeculationCase,
    answer_tokens: int,
    draft_tokens: int,
    rounds: int,
    progress: ShowProgress,
) -> SpeculationGain:
    params = [bed.params(text, answer_tokens) for text in case.prompts]
    page = bed.model.memory.page_tokens
    longest = max(len(each.tokens) for each in params) + answer_tokens
    tokens = len(params) * (longest // page + 2) * page
    on, off = (bed.engine(case, tokens, k) for k in (draft_tokens, None))
    try:
        assert on.accept_length_stats is not None, "an engine with a drafter counts"
        answers = _serve((on, off), params, case.at_once).answers
        before = on.accept_length_stats.accepted, on.accept_length_stats.rejected
        steps_before = _verify_steps(on)
        seconds: list[tuple[float, ...]] = []
        for _ in progress(range(rounds), rounds, case.name):
            served = _serve((on, off), params, case.at_once)
            assert served.answers == answers, f"{case.name}: an answer differs between rounds"
            seconds.append(served.seconds)
        assert answers[0] == answers[1], f"{case.name}: speculation changed an answer"
        accepted, rejected = on.accept_length_stats.accepted, on.accept_length_stats.rejected
        steps = _verify_steps(on) - steps_before
    finally:
        on.cache.close()
        off.cache.close()
    generated = sum(len(answer) for answer in answers[0])
    return SpeculationGain(
        case=case.name,
        at_once=case.at_once,
        draft_tokens=draft_tokens,
        generated_tokens=generated,
        on_tokens_s=generated / statistics.median(on_s for on_s, _ in seconds),
        off_tokens_s=generated / statistics.median(off_s for _, off_s in seconds),
        ratio=statistics.median(off_s / on_s for on_s, off_s in seconds),
        goal=case.goal,
        accept_length=1 + (accepted - before[0]) / steps if steps else 1.0,
        accepted=accepted - before[0],
        rejected=rejected - before[1],
    )


def row_costs(bed: ModelBed, batch: int, steps: int, progress: ShowProgress) -> Iterator[RowCost]:
    """Engines with 0 to MAX_ROW_DRAFTS drafts for every request, wrong ones, step in turns."""
    case = replace(CASES["never"], prompts=PROSE[:batch], at_once=batch)
    params = [bed.params(text, steps + ROW_WARM_UP + 2) for text in case.prompts]
    page = bed.model.memory.page_tokens
    longest = max(len(each.tokens) for each in params) + steps + ROW_WARM_UP + MAX_ROW_DRAFTS
    tokens = batch * (longest // page + 2) * page
    counts = (None, *range(1, MAX_ROW_DRAFTS + 1))
    engines = [bed.engine(case, tokens, count, fixed_drafts=True) for count in counts]
    seconds: list[list[float]] = [[] for _ in engines]
    try:
        for engine in engines:
            requests = [engine.submit(each) for each in params]
            while any(len(request.output) < ROW_WARM_UP for request in requests):
                engine.step()
        for _ in progress(range(steps), steps, f"rows, batch {batch}"):
            for engine, mine in zip(engines, seconds, strict=True):
                began = time.perf_counter()
                engine.step()
                mine.append(time.perf_counter() - began)
    finally:
        for engine in engines:
            engine.cache.close()
    decode_s = statistics.median(seconds[0])
    for drafts, mine in enumerate(seconds):
        step_s = statistics.median(mine)
        assumed = verify_cost(drafts)
        yield RowCost(batch, drafts, step_s, step_s / decode_s, assumed)


def _verify_steps(engine: Engine) -> int:
    assert engine.accept_length_stats is not None, "an engine with a drafter counts"
    return sum(counts.total() for counts in engine.accept_length_stats.steps.values())


class _Served(NamedTuple):
    """Of each engine: seconds in its steps, and the answers' tokens."""

    seconds: tuple[float, ...]
    answers: list[list[list[int]]]


def _serve(
    engines: tuple[Engine, Engine], params: Sequence[RequestParams], at_once: int
) -> _Served:
    """The requests through both engines, `at_once` at a time, in turns of TURN_STEPS steps."""
    seconds = [0.0, 0.0]
    requests: list[list[Request]] = [[], []]
    for first in range(0, len(params), at_once):
        for engine, mine in zip(engines, requests, strict=True):
            mine += [engine.submit(each) for each in params[first : first + at_once]]
        number = 0
        while not all(engine.idle for engine in engines):
            number += 1
            for which in (0, 1) if number % 2 else (1, 0):
                began = time.perf_counter()
                for _ in range(TURN_STEPS):
                    if not engines[which].idle:
                        engines[which].step()
                seconds[which] += time.perf_counter() - began
    answers = [[[token.token for token in one.output] for one in mine] for mine in requests]
    return _Served((seconds[0], seconds[1]), answers)
