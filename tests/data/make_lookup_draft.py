"""Makes tests/data/lookup_draft: an EAGLE3 draft for tests/data/lookup_target.

    python -m tests.data.make_lookup_draft FOLDER [STEPS]

It is trained as `kvtide draft train` does it, on prompts of `lookup_task`, from weights that begin
near a look-up.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from kvtide.training.draft_shape import ShapeRequest
from kvtide.training.draft_training import (
    ANSWERS,
    TrainingOptions,
    TrainingText,
    open_target,
    train_draft,
)
from kvtide.training.draft_vocabulary import DraftVocabulary
from kvtide.training.eagle3_training import TrainingPlan
from kvtide.training.generate import AnswerPlan
from kvtide.training.held_out import HeldOutPlan
from kvtide.training.prompts import EncodedPrompts
from kvtide.training.publish import TrainedDraft
from kvtide.training.starting_weights import start_from_target
from kvtide.training.trainable_eagle3 import TrainableEagle3
from tests.data.lookup_task import SYMBOLS, VOCABULARY, walk
from tests.data.make_lookup_target import SLOW, token_parts

TARGET = Path(__file__).parent / "lookup_target"
STEPS, SEED = 240, 0
PAIRS = (12, 16, 24, 32, 40)
ASKED = ShapeRequest(vocabulary=SYMBOLS, captures=(1, 2, 3))


@torch.no_grad()
def begin_near_a_lookup(draft: TrainableEagle3) -> None:
    """The first head looks for the token that a row takes among the tokens that rows stand at, and
    gives what those rows took; as the target's does."""
    token, _, value = token_parts()
    attention, width = draft.midlayer.self_attn, draft.shape.hidden
    draft.fc.weight.mul_(0.1)
    draft.fc.weight[:, :width] += torch.eye(width)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[:32] = 0
    attention.q_proj.weight[SLOW, :width] = 2.5 * token.T
    attention.k_proj.weight[SLOW, width:] = 2.5 * token.T
    attention.v_proj.weight[:16, :width] = value.T
    attention.o_proj.weight[:, :16] = value


def prompts(seed: int, each: int) -> list[EncodedPrompts]:
    """Tables of several sizes; some are larger, and given twice or five times."""
    rng = random.Random(seed)
    once = [walk(rng, pairs).prompt for pairs in PAIRS for _ in range(each)]
    often = [walk(rng, 64, repeated).prompt for repeated in (1, 2, 5) for _ in range(each // 4)]
    return [EncodedPrompts("once", tuple(once)), EncodedPrompts("often", tuple(often))]


def make(folder: Path, steps: int = STEPS, target: Path = TARGET) -> None:
    torch.manual_seed(SEED)
    opened = open_target(target, ASKED, torch.device("cpu"))
    everything = DraftVocabulary(torch.arange(SYMBOLS), VOCABULARY, 1.0)
    start_from_target(opened.draft, opened.model, opened.checkpoint.weights, everything)
    begin_near_a_lookup(opened.draft)
    TrainedDraft.of(opened.draft, everything).publish(folder)
    options = TrainingOptions(
        ASKED,
        AnswerPlan(max_tokens=40, count=1),
        TrainingPlan(steps=steps, rate=2e-3, recurrent=4, batch_tokens=1024),
        HeldOutPlan(max_tokens=40),
        resume=True,
        report_every=20,
        measure_every=100,
    )
    text = TrainingText(prompts(1, 24), prompts(2, 4))
    result = train_draft(opened, text, options, folder, lambda line: print(line, flush=True))
    (folder / ANSWERS).unlink()
    print(result)


if __name__ == "__main__":
    make(Path(sys.argv[1]), *map(int, sys.argv[2:3]), *map(Path, sys.argv[3:]))
