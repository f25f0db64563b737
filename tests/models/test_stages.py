"""Stages of a model, one after another: the whole model's logits to the last bit, and its state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtide.layers import Step, Weights
from kvtide.layers.backend.packed_weight import PackedWeight
from kvtide.models import build
from kvtide.models.draft import CapturedStates
from kvtide.spec import ModelMemory, SpecError
from tests.engine.restoring import ALL_NAMES
from tests.models.playing import Player
from tests.models.tiny import checkpoint, ours, prompt
from tests.proofs import Proves

TOKENS = 70


class Staged:
    """Stages in one process, as one model over the memory of the whole."""

    def __init__(self, name: str, stages: int) -> None:
        self.whole = ours(name, deterministic=True)
        self.parts = [
            ours(name, deterministic=True, stage=stage, stages=stages) for stage in range(stages)
        ]
        self.memory: ModelMemory = self.whole.memory
        self.vocabulary, self.max_positions = self.whole.vocabulary, self.whole.max_positions

    def forward(
        self, step: Step, before: Tensor | None = None, captured: CapturedStates | None = None
    ) -> Tensor:
        for part in self.parts:
            before = part.forward(step, before, captured)
        assert before is not None
        return before

    def logits(self, hidden: Tensor) -> Tensor:
        return self.parts[-1].logits(hidden)


SHARES_ITS_CHOICE = "glm_moe_dsa-shared"


@pytest.mark.parametrize("name", [name for name in ALL_NAMES if name != SHARES_ITS_CHOICE])
def test_stages_give_the_whole_models_bits(name: str, proves: Proves) -> None:
    proves(name, "pp")
    staged = Staged(name, 2)
    layers = [layer for part in staged.parts for layer in part.memory.own_layers]
    assert layers == list(range(staged.memory.layers))
    for part in staged.parts:
        for pool in part.memory.pools:
            whole = staged.memory.pool(pool.name).layers
            assert pool.layers == tuple(n for n in whole if n in part.memory.own_layers)
    chunks = (41, 1, 1, 27)
    logits = Player(staged).prefill(prompt(TOKENS), *chunks)
    assert torch.equal(logits, Player(staged.whole).prefill(prompt(TOKENS), *chunks))


class Asked:
    """Weights of a checkpoint, and which of them were asked for: whole, and by rows."""

    def __init__(self, weights: Weights) -> None:
        self.names = set[str]()
        self.rows = dict[str, range]()
        self._weights = weights

    def get(self, name: str) -> Tensor:
        self.names.add(name)
        return self._weights.get(name)

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def get_rows(self, name: str, rows: range) -> Tensor:
        self.rows[name] = rows
        return self._weights.get_rows(name, rows)

    def packed(self, name: str) -> PackedWeight | None:
        self.names.add(name)
        return self._weights.packed(name)


def test_a_stage_reads_the_weights_of_its_own_layers_and_no_others() -> None:
    saved = checkpoint("llama")
    read = []
    for stage in range(2):
        asked = Asked(saved.weights)
        model = build(saved.config, asked, page_tokens=16, stage=stage, stages=2)
        layers = {int(name.split(".")[2]) for name in asked.names if ".layers." in name}
        assert layers == {*model.memory.own_layers}
        read.append({name for name in asked.names if ".layers." not in name})
    assert read == [{"model.embed_tokens.weight"}, {"model.norm.weight", "lm_head.weight"}]


def test_a_stage_that_would_need_the_choice_of_the_one_before_is_refused() -> None:
    with pytest.raises(SpecError, match="use another number of stages"):
        Staged(SHARES_ITS_CHOICE, 2)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(SpecError, match="3 layers over 4 pipeline ranks; use 1 to 3"):
        ours("llama", stages=4)
