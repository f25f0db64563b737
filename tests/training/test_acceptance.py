"""Acceptance when tokens are sampled: the formulas by hand, and by sampling as the engine does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvtide.engine.sampling.sampler import SamplingInput, sample_all
from kvtide.engine.sampling.sampling_params import SamplingParams
from kvtide.training.acceptance import (
    REJECTION,
    SHARED,
    rejection_acceptance,
    shared_acceptance,
)
from kvtide.training.draft_shape import ShapeRequest
from kvtide.training.draft_training import (
    TrainingOptions,
    TrainingText,
    encoded,
    open_target,
    train_draft,
)
from kvtide.training.eagle3_training import TrainingPlan
from kvtide.training.evaluation import evaluate_draft, open_trained
from kvtide.training.generate import AnswerPlan
from kvtide.training.held_out import HeldOutPlan
from kvtide.training.prompts import PromptFile
from tests.server import tiny_model

CPU = torch.device("cpu")


def rows(*probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64)


@pytest.mark.parametrize(
    ("target", "draft", "shared", "rejection"),
    [
        ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], 1.0, 1.0),
        ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], 0.0, 0.0),
        # A sum for each token x: of p(y) / p(x) or q(y) / q(x), whichever is more.
        ([0.5, 0.3, 0.2], [0.6, 0.2, 0.2],
         1 / (1 + 3 / 5 + 2 / 5) + 1 / (3 + 1 + 1) + 1 / (3 + 3 / 2 + 1), 0.9),
        ([0.5, 0.3, 0.2], [0.3, 0.4, 0.3],
         1 / (1 + 4 / 3 + 1) + 1 / (5 / 3 + 1 + 3 / 4) + 1 / (5 / 2 + 3 / 2 + 1), 0.8),
        # A token that the draft lacks.
        ([0.4, 0.35, 0.25], [0.6, 0.4, 0.0],
         1 / (1 + 35 / 40 + 25 / 40) + 1 / (6 / 4 + 1 + 25 / 35), 0.75),
        # And one that neither has.
        ([0.4, 0.6, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], 1 / (4 / 6 + 1 + 1), 0.5),
    ],
)  # fmt: skip
def test_acceptance_of_hand_made_distributions(
    target: list[float], draft: list[float], shared: float, rejection: float
) -> None:
    p, q = rows(target, target), rows(draft, draft)
    assert shared_acceptance(p, q).tolist() == pytest.approx([shared] * 2)
    assert rejection_acceptance(p, q).tolist() == pytest.approx([rejection] * 2)


def test_shared_acceptance_is_how_often_the_sampler_agrees() -> None:
    chance = torch.Generator().manual_seed(1)
    target = 2 * torch.randn(40, generator=chance)
    draft = target + torch.randn(40, generator=chance)
    draft[7:12] = -torch.inf
    temperature, seeds = 0.8, 3000
    inputs = [
        SamplingInput(SamplingParams(temperature=temperature, seed=seed), (1,), (1,))
        for seed in range(seeds)
    ]
    sampled = [sample_all(one.repeat(seeds, 1), inputs) for one in (target, draft)]
    agreed = sum(a.token == b.token for a, b in zip(*sampled, strict=True)) / seeds
    p, q = ((one.double() / temperature).softmax(-1)[None] for one in (target, draft))
    expected = float(shared_acceptance(p, q))
    assert 0.1 < expected < float(rejection_acceptance(p, q)) < 1
    assert agreed == pytest.approx(expected, abs=0.03)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model and a draft for it."""
    model = tiny_model.save(tmp_path_factory.mktemp("model") / "tiny")
    folder = tmp_path_factory.mktemp("draft")
    torch.manual_seed(0)
    target = open_target(model, ShapeRequest(vocabulary=200), CPU)
    options = TrainingOptions(
        answers=AnswerPlan(max_tokens=24, count=2),
        training=TrainingPlan(steps=30, rate=3e-3, warm_up=5, batch_tokens=512),
    )
    asked = PromptFile("chat", ("What is rain?", "Tell me of boats.", "Bread?", "Trees"))
    train_draft(target, encoded(target, [asked], [], options), options, folder, lambda line: None)
    return model, folder


@pytest.mark.quick(temperature=[0.6])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_a_draft_accepts_what_is_expected(trained: tuple[Path, Path], temperature: float) -> None:
    """The engine's accept length is the predicted one, greedily and at a temperature."""
    model, folder = trained
    target = open_trained(model, folder, CPU)
    plan = HeldOutPlan(max_tokens=48, draft_tokens=2, temperature=temperature)
    asked = [
        PromptFile("seas", tuple(f"Why is the sea number {n} salty?" for n in range(12))),
        PromptFile("lists", ("List three\ntrees.",)),
    ]
    text: TrainingText = encoded(target, [], asked, TrainingOptions(held_out=plan))
    seas, lists = evaluate_draft(target, folder, text, plan)
    assert (seas.measured.category, seas.measured.prompts) == ("seas", 12)
    assert (lists.measured.category, lists.measured.prompts) == ("lists", 1)
    measured = seas.measured.accept_length
    if temperature == 0:
        assert seas.acceptance is None and seas.predicted == pytest.approx(measured, abs=0.02)
        return
    found = seas.acceptance
    assert found is not None and seas.predicted is None
    first, lengths = found.first, found.lengths
    assert 0 < first[SHARED] < first[REJECTION] <= 1
    assert all(chance < first[REJECTION] for name, chance in first.items() if name != REJECTION)
    assert 1 < lengths[SHARED] < lengths[REJECTION] <= 3
    assert measured == pytest.approx(lengths[SHARED], abs=0.15)
