"""Makes tests/data/lookup_draft: an EAGLE3 draft for tests/data/lookup_target.

    python -m tests.data.make_lookup_draft FOLDER [STEPS]

It is trained as `kvtide draft train` does it, on prompts of `lookup_task`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from kvtide.training.draft_shape import ShapeRequest
from kvtide.training.draft_training import (
    TrainingOptions,
    TrainingText,
    open_target,
    train_draft,
)
from kvtide.training.eagle3_training import TrainingPlan
from kvtide.training.generate import AnswerPlan
from kvtide.training.held_out import HeldOutPlan
from kvtide.training.prompts import EncodedPrompts
from tests.data.lookup_task import walk

TARGET = Path(__file__).parent / "lookup_target"
STEPS, SEED = 600, 0
PAIRS = (8, 16, 24, 32, 40, 48, 56, 64)


def prompts(seed: int, each: int) -> list[EncodedPrompts]:
    """Tables of several sizes; some are given twice and five times."""
    rng = random.Random(seed)
    once = [walk(rng, pairs).prompt for pairs in PAIRS for _ in range(each)]
    often = [walk(rng, 64, repeated).prompt for repeated in (2, 5) for _ in range(each)]
    return [EncodedPrompts("once", tuple(once)), EncodedPrompts("often", tuple(often))]


def make(folder: Path, steps: int = STEPS, target: Path = TARGET) -> None:
    torch.manual_seed(SEED)
    asked = ShapeRequest(vocabulary=72, captures=(1, 2, 3))
    opened = open_target(target, asked, torch.device("cpu"))
    text = TrainingText(prompts(1, 12), prompts(2, 2))
    options = TrainingOptions(
        asked,
        AnswerPlan(max_tokens=48, count=1),
        TrainingPlan(steps=steps, rate=2e-3, recurrent=4, batch_tokens=2048),
        HeldOutPlan(max_tokens=48),
        report_every=20,
        measure_every=100,
    )
    result = train_draft(opened, text, options, folder, lambda line: print(line, flush=True))
    print(result)


if __name__ == "__main__":
    make(Path(sys.argv[1]), *map(int, sys.argv[2:3]), *map(Path, sys.argv[3:]))
