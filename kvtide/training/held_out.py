"""Accept length on prompts that training has not seen: what the engine gives with the draft.

Answers are greedy. Every verify step has as many drafts as asked for, except at an answer's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.engine import Engine, RequestParams
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.models.draft import DraftModel
from kvtide.models.model import Decoder
from kvtide.training.generate import CHUNK_TOKENS, open_training_cache
from kvtide.training.prompts import EncodedPrompts


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What verify steps gave on one category. `tokens`: accepted drafts, and one more a step."""

    category: str
    prompts: int
    steps: int
    tokens: int

    @property
    def accept_length(self) -> float:
        """Tokens per verify step."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class HeldOutPlan:
    max_tokens: int = 128
    draft_tokens: int = 3
    at_once: int = 64


def measure_held_out(
    target: Decoder,
    draft: DraftModel,
    files: Sequence[EncodedPrompts],
    plan: HeldOutPlan,
    stop_ids: frozenset[int],
) -> list[HeldOut]:
    """The accept length of every file's prompts."""
    return [_measured(target, draft, file, plan, stop_ids) for file in files]


def _measured(
    target: Decoder,
    draft: DraftModel,
    file: EncodedPrompts,
    plan: HeldOutPlan,
    stop_ids: frozenset[int],
) -> HeldOut:
    at_once = min(plan.at_once, len(file.prompts))
    longest = max(map(len, file.prompts)) + plan.max_tokens + 2 * target.memory.page_tokens
    cache = open_training_cache(target, (at_once + 1) * longest)
    drafter = ModelDrafter(draft, draft.captures, cache, target.vocabulary)
    drafter.cost = 0.0  # So that the number of drafts never falls.
    engine = Engine(
        target,
        cache,
        chunk_tokens=CHUNK_TOKENS,
        max_running=at_once,
        drafter=drafter,
        draft_tokens=plan.draft_tokens,
    )
    for prompt in file.prompts:
        engine.submit(RequestParams(prompt, plan.max_tokens, stop_ids=stop_ids))
    while not engine.idle:
        engine.step()
    cache.close()
    lengths = engine.accept_lengths
    assert lengths is not None, "the engine was made with a drafter"
    steps = sum(counts.total() for counts in lengths.steps.values())
    return HeldOut(file.category, len(file.prompts), steps, lengths.accepted + steps)
