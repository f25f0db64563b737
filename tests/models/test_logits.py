"""Our logits are those of `transformers`, however a prompt is cut and whatever shares the step."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from kvtide.models import FAMILIES, Model
from kvtide.tiers import Layout
from tests.models.playing import Player
from tests.models.tiny import CONFIGS, expected, family_of, ours, prompt
from tests.proofs import Proves

TOLERANCE = 2e-5
TOKENS = 150
ONE_PER_FAMILY = list({family: name for name, (family, _) in reversed(CONFIGS.items())}.values())

every_config = pytest.mark.parametrize("name", list(CONFIGS))
both_modes = pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "determined"])


def assert_close(logits: Tensor, wanted: Tensor) -> None:
    assert logits.dtype is torch.float32
    worst = float((logits - wanted).abs().max())
    assert worst <= TOLERANCE, f"off by {worst:.2g} where logits spread {float(wanted.std()):.2g}"


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, bool], Model]:
    return {}


@pytest.fixture
def model(models: dict[tuple[str, bool], Model], name: str, deterministic: bool) -> Model:
    if (name, deterministic) not in models:
        models[name, deterministic] = ours(name, deterministic=deterministic)
    return models[name, deterministic]


def test_every_family_has_several_configs() -> None:
    counts = Counter(family_of(name) for name in CONFIGS)
    assert {family: counts[family] for family in FAMILIES if counts[family] < 2} == {}


@pytest.mark.quick
@both_modes
@every_config
@pytest.mark.parametrize(
    "chunks",
    [(TOKENS,), (7,), (64,), (50, 1, 1, 3, 29)],
    ids=["whole", "sevens", "64s", "mixed"],
)
def test_logits_are_the_oracles_however_a_prompt_is_cut(
    model: Model, name: str, chunks: tuple[int, ...], proves: Proves
) -> None:
    proves(name, "logits")
    logits = Player(model).prefill(prompt(TOKENS), *chunks)
    assert_close(logits, expected(name, TOKENS))


@pytest.mark.quick(name=ONE_PER_FAMILY[::4])
@both_modes
@every_config
def test_logits_are_the_oracles_token_by_token(model: Model, name: str, proves: Proves) -> None:
    proves(name, "logits")
    logits = Player(model, layout=Layout.PAGE_FIRST).prefill(prompt(80), 1)
    assert_close(logits, expected(name, 80))


@pytest.mark.quick(name=ONE_PER_FAMILY)
@both_modes
@every_config
def test_logits_are_the_oracles_in_a_mixed_step(model: Model, name: str) -> None:
    """A whole prompt, a chunk, two that decode, and one that begins, together; twice."""
    player = Player(model, layout=Layout.PAGE_FIRST_DIRECT)
    lengths = (40, 97, 66, 17, 31)
    sequences = [player.begin(prompt(length, seed)) for seed, length in enumerate(lengths)]
    logits: list[list[Tensor]] = [[] for _ in lengths]

    def step(*counts: int) -> None:
        batch = [(i, count) for i, count in enumerate(counts) if count]
        for (i, _), out in zip(
            batch, player.step(*((sequences[i], count) for i, count in batch)), strict=True
        ):
            logits[i].append(out)

    step(0, 33, 64, 16, 0)
    step(40, 11, 1, 1, 5)
    step(0, 53, 1, 0, 26)
    for seed, length in enumerate(lengths):
        assert_close(torch.cat(logits[seed]), expected(name, length, seed))
