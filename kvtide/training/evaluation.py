"""What a trained draft is worth on some prompts: accept length in the engine, and what to expect.

At a temperature the expected acceptance is that of shared noise, which is the engine's, and that of
rejection sampling, over the same answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvtide.models.checkpoint import open_checkpoint
from kvtide.models.draft_checkpoint import open_draft
from kvtide.models.eagle3 import target_tokens
from kvtide.spec.families import declare
from kvtide.training.acceptance import Acceptance, expected_acceptance
from kvtide.training.draft_shape import QUANTIZATION, HeadFormat, ShapeRequest, draft_shape
from kvtide.training.draft_training import (
    TrainingTarget,
    TrainingText,
    held_out_states,
    resumable_draft,
)
from kvtide.training.eagle3_training import DraftTraining, TrainingPlan
from kvtide.training.held_out import (
    HeldOut,
    HeldOutPlan,
    measure_held_out,
    predicted_accept_length,
)
from kvtide.training.starting_weights import start_from_draft


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One category.

    predicted   the accept length of greedy answers, from hidden states; None at a temperature
    acceptance  at a temperature
    """

    measured: HeldOut
    predicted: float | None
    acceptance: Acceptance | None


def open_trained(model: Path, draft: Path, device: torch.device) -> TrainingTarget:
    """The model with the draft in this folder as its draft in training."""
    checkpoint, known = open_checkpoint(model), open_draft(draft)
    fields = known.config
    memory = declare(checkpoint.config, model=str(checkpoint.config.get("model_type")))
    tokens = int(fields.count("vocab_size"))
    asked = ShapeRequest(
        fields.count("draft_vocab_size", default=tokens),
        fields.count("num_hidden_layers"),
        fields.count("intermediate_size"),
        known.captures(memory),
        lm_head=HeadFormat.FP8 if fields.find(QUANTIZATION) is not None else HeadFormat.BF16,
    )
    return TrainingTarget(checkpoint, draft_shape(checkpoint.config, asked), device)


def evaluate_draft(
    target: TrainingTarget, draft: Path, text: TrainingText, plan: HeldOutPlan
) -> list[Evaluated]:
    """The draft in this folder on the held-out prompts of `text`."""
    known = resumable_draft(target, draft)
    start_from_draft(target.draft, target.model, known.weights, None)
    recurrent = TrainingPlan(recurrent=plan.draft_tokens)
    training = DraftTraining(target.draft, target.model, target_tokens(known.weights), recurrent)
    target.draft.eval()
    states = held_out_states(target, text, plan)
    model = known.build(target.model)
    measured = measure_held_out(target.model, model, text.held_out, plan, text.stop_ids)
    found = []
    for one in measured:
        some = states.get(one.category)
        greedy = acceptance = None
        if some is not None and plan.temperature == 0:
            greedy = predicted_accept_length(training, some)
        elif some is not None:
            acceptance = expected_acceptance(training, some, plan.temperature)
        found.append(Evaluated(one, greedy, acceptance))
    return found
