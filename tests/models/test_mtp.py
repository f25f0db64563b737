"""Next-token layers of checkpoints as drafts: what plain torch says, in every chunking."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvtide.engine import EngineError
from kvtide.engine.declared_state.state_check import check_declared_state
from kvtide.layers import Rows, Step
from kvtide.layers.backend.triton_ops import TritonOps
from kvtide.layers.tensor_ranks import TensorRanks
from kvtide.models import build, build_mtp, has_mtp
from kvtide.models.checkpoint import StoredWeights, open_checkpoint
from kvtide.models.draft import CapturedStates, DraftModel
from kvtide.models.family_registry import FAMILIES, MTP
from kvtide.models.model import Model
from kvtide.spec import ModelMemory, SpecError
from kvtide.spec.families import KVDType, declare, declare_mtp, mtp_layers
from tests.models import tiny_mtp
from tests.models.playing import Player
from tests.models.test_logits import assert_close
from tests.models.test_tensor_ranks import Threads, together
from tests.models.tiny import Tensors, checkpoint, family_of, ours, prompt
from tests.models.tiny_mtp import NAMES, V4, Guessing, guessing, pair

TOKENS = 120
CPU = torch.device("cpu")
SHARES_ITS_CHOICE = "glm_moe_dsa-mtp"

every_name = pytest.mark.parametrize("name", NAMES)


class Recorded(Guessing):
    """Keeps the hidden states of a step. A feature that is set replaces what the target gives."""

    hidden: Tensor
    feature: Tensor | None = None

    def __init__(self, target: Model, draft: DraftModel, tokens: list[int]) -> None:
        super().__init__(target, draft, tokens)
        # The player counts a draft's layer as the model's: it is waited for, too.
        self.memory = replace(self.memory, layers=self.memory.end_layer)
        self.seen: list[Tensor] = []

    def forward(
        self, step: Step, before: Tensor | None = None, captured: CapturedStates | None = None
    ) -> Tensor:
        captured = CapturedStates(self.draft.captures)
        self.target.forward(step, before, captured)
        given = self.draft.features(captured.joined) if self.feature is None else self.feature
        following = replace(step, tokens=self.tokens[step.positions + 1])
        self.seen.append(self.draft.forward(following, given))
        return self.seen[-1]


def played(name: str, *chunks: int, **more: Any) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of all tokens."""
    model = Recorded(*pair(name, **more), prompt(TOKENS + 1))
    logits = Player(model).prefill(prompt(TOKENS), *chunks)
    return torch.cat(model.seen), logits


# -- what the layer computes -------------------------------------------------------------------


@pytest.mark.quick
@every_name
@pytest.mark.parametrize("chunks", [(TOKENS,), (50, 1, 1, 3), (7,)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "determined"])
def test_hidden_states_and_logits_are_the_oracles(
    name: str, chunks: tuple[int, ...], deterministic: bool
) -> None:
    hidden, logits = played(name, *chunks, deterministic=deterministic)
    wanted, wanted_logits = tiny_mtp.expectation(name, tuple(prompt(TOKENS + 1)))
    assert_close(hidden, wanted)
    assert_close(logits, wanted_logits)


@every_name
def test_the_bits_are_the_same_in_every_chunking(name: str) -> None:
    whole, cut = (played(name, *cuts, deterministic=True)[1] for cuts in ((TOKENS,), (31, 1, 2)))
    assert torch.equal(whole, cut)


@every_name
def test_a_drafted_token_is_the_next_ones_input_with_the_drafts_own_feature(name: str) -> None:
    certain, ahead = 40, 4
    known = prompt(certain + 1)
    model = Recorded(*pair(name), [*known, *[0] * ahead])
    player = Player(model)
    sequence = player.begin(prompt(certain + ahead))
    logits = player.step((sequence, certain))[0][-1]
    wanted, wanted_logits = tiny_mtp.expectation(name, tuple(known))
    features = tiny_mtp.target_features(name, torch.tensor(known[:-1]))
    for row in range(certain, certain + ahead):
        token = int(wanted_logits[-1].argmax())
        assert int(logits.argmax()) == token
        model.tokens[row + 1], model.feature = token, model.seen[-1][-1:]
        logits = player.step((sequence, 1))[0][-1]
        features = torch.cat([features, wanted[-1:]])
        wanted, wanted_logits = tiny_mtp.drafted(name, model.tokens[1 : row + 2], features)
        assert_close(model.seen[-1][0], wanted[-1])
        assert_close(logits, wanted_logits[-1])


@every_name
def test_pages_without_a_drafts_kv_are_left_out(name: str) -> None:
    """The rest is as if the sequence began behind them, at the positions that it has."""
    page, rows = 16, 40
    target, draft = pair(name)
    tokens = torch.tensor(prompt(page + rows + 1))
    features = tiny_mtp.target_features(name, tokens[:-1])[page:]
    logits = []
    for first in (0, page):
        player = Player(target)
        slots = player._grown(player.begin([]), rows)
        positions = torch.arange(first, first + rows)
        views = (player.buffers.view, lambda layer: None)
        step = Step(tokens[page + 1 :], positions, (Rows(0, rows, 0, slots),), page, *views)
        logits.append(draft.logits(draft.forward(step, features)))
    assert_close(logits[1], logits[0])


def test_a_layer_in_eight_bits_is_read_as_the_numbers_that_it_stands_for(tmp_path: Path) -> None:
    """Where arithmetic is deterministic, to the last bit; other arithmetic may multiply packed
    weights, whose sums have another order."""
    name, tensors, numbers = "deepseek_v3-mtp", {}, {}
    for key, weight in tiny_mtp.weights(name).items():
        tensors[key] = numbers[key] = weight.contiguous()
        if key.startswith("model.layers.2.") and key.endswith("_proj.weight"):
            tensors[key] = weight.to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = torch.full([-(-n // 128) for n in weight.shape], 0.5)
            numbers[key] = tensors[key].float() / 2
    assert "model.layers.2.eh_proj.weight_scale_inv" in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    fields = {**tiny_mtp.config(name), "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = open_checkpoint(tmp_path)

    def logits(weights: StoredWeights | Tensors, *, deterministic: bool = False) -> Tensor:
        how = {"page_tokens": 16, "kv_dtype": KVDType.FP32, "mtp": True}
        target = build(found.config, weights, **how, deterministic=deterministic)
        model = Recorded(target, build_mtp(found.config, weights, target), prompt(41))
        return Player(model).prefill(prompt(40), 17)

    wanted = logits(Tensors(numbers), deterministic=True)
    assert torch.equal(logits(found.weights, deterministic=True), wanted)
    assert_close(logits(found.weights), wanted)


@pytest.mark.full
def test_kernels_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.layers.kernels.qkv.FEW_TOKENS", 0)
    name, tokens = "glm_moe_dsa-mtp", prompt(30)
    wanted = Player(Recorded(*pair(name), tokens)).prefill(tokens[:-1], 15, 6, 1)
    choose = "kvtide.models.family_registry.choose"
    monkeypatch.setattr(choose, lambda deterministic, device: TritonOps())
    logits = Player(Recorded(*pair(name), tokens)).prefill(tokens[:-1], 15, 6, 1)
    assert float((logits - wanted).abs().max()) <= 1e-4


# -- what it keeps -----------------------------------------------------------------------------


@every_name
def test_its_memory_is_a_drafts_and_the_target_is_the_same_with_it(name: str) -> None:
    target, draft = pair(name)
    memory = target.memory
    assert draft.memory is memory and memory.holdback == 1
    assert draft.captures == (memory.layers,) and draft.vocabulary is None
    sparse = "index" in [pool.name for pool in memory.pools]
    assert memory.draft_sidecars == (("draft_kv", "draft_index") if sparse else ("draft",))
    for pool in map(memory.pool, memory.draft_sidecars):
        assert pool.layers == (memory.layers,) and not pool.reuse.required
        assert pool.follows == ("swa" if name == V4 else "kv")
    plain = build(tiny_mtp.config(name), Tensors(tiny_mtp.weights(name)), page_tokens=16)
    assert plain.memory.holdback == 0
    assert plain.memory.layers == memory.layers == tiny_mtp.config(name)["num_hidden_layers"]


@every_name
def test_it_keeps_what_it_declares(name: str) -> None:
    target, draft = pair(name)
    check_declared_state(target, CPU)
    check_declared_state(target, CPU, draft)


def test_a_draft_that_keeps_more_or_less_is_refused() -> None:
    target, draft = pair("deepseek_v3-mtp")
    layer, kept = draft.layer, []

    def keeping(x: Tensor, run: Any) -> Tensor:
        kept.append(x)
        return layer(x, run)

    draft.layer = keeping
    with pytest.raises(EngineError, match=r"draft.layer.* holds a new tensor"):
        check_declared_state(target, CPU, draft)
    draft.layer = lambda x, run: x
    with pytest.raises(EngineError, match=r"pool draft is declared for layers \[2\], and"):
        check_declared_state(target, CPU, draft)


@every_name
def test_of_several_layers_the_first_drafts_every_token(name: str) -> None:
    fields = {**tiny_mtp.config(name), "num_nextn_predict_layers": 3}
    weights = Tensors(tiny_mtp.weights(name))
    target = build(fields, weights, page_tokens=16, mtp=True)
    assert target.memory.end_layer == target.memory.layers + 1
    assert mtp_layers(fields) == 3
    assert build_mtp(fields, weights, target).captures == (target.memory.layers,)


@pytest.mark.parametrize("name", [name for name in NAMES if name != SHARES_ITS_CHOICE])
def test_it_is_on_the_last_stage(name: str) -> None:
    fields, weights = tiny_mtp.config(name), Tensors(tiny_mtp.weights(name))
    how = {"page_tokens": 16, "mtp": True, "stages": 2}
    first, last = (build(fields, weights, stage=stage, **how) for stage in (0, 1))
    for pool in first.memory.draft_sidecars:
        assert not first.memory.pool(pool).layers and last.memory.pool(pool).layers
    draft = build_mtp(fields, weights, last)
    assert draft.captures == (last.memory.layers,)
    assert len(last.embedding.weight) == last.vocabulary
    with pytest.raises(SpecError, match=r"no pools for its .* with mtp=True, and the draft beside"):
        build_mtp(fields, weights, first)


@every_name
def test_ranks_give_one_ranks_logits(name: str) -> None:
    def run(ranks: TensorRanks) -> Tensor:
        try:
            model = Recorded(*pair(name, ranks=ranks), prompt(41))
            return Player(model).prefill(prompt(40), 17)
        except BaseException:
            if isinstance(ranks, Threads):
                ranks.meeting.leave()
            raise

    alone = run(TensorRanks())
    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(run, together(2)):
            torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)


# -- what is refused ---------------------------------------------------------------------------


def without(name: str, part: str) -> Tensors:
    kept = tiny_mtp.weights(name).items()
    return Tensors({key: weight for key, weight in kept if part not in key})


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("deepseek_v3-mtp", "model.layers.2.enorm.weight"),
        ("glm_moe_dsa-mtp", "model.layers.2.enorm.weight"),
        ("qwen3_5-mtp", "mtp.pre_fc_norm_embedding.weight"),
        (V4, "mtp.0.enorm.weight"),
    ],
)
def test_a_checkpoint_without_the_layer_is_refused(name: str, tensor: str) -> None:
    fields = tiny_mtp.config(name)
    assert has_mtp(fields, Tensors(tiny_mtp.weights(name)))
    assert not has_mtp(fields, without(name, tensor))
    says = f"the checkpoint has no tensor {tensor}, .*; use --speculate ngram or eagle3"
    with pytest.raises(SpecError, match=says):
        build(fields, without(name, tensor), page_tokens=16, mtp=True)
    target, _ = pair(name)
    with pytest.raises(SpecError, match=says):
        build_mtp(fields, without(name, tensor), target)


def test_a_config_without_the_layer_is_refused() -> None:
    name = "deepseek_v3-mtp"
    weights = Tensors(tiny_mtp.weights(name))
    for number in (0, None):
        fields = {**tiny_mtp.config(name), "num_nextn_predict_layers": number}
        assert mtp_layers(fields) == 0 and not has_mtp(fields, weights)
        with pytest.raises(SpecError, match=r"no layer for .* \(`num_nextn_predict_layers` or"):
            build(fields, weights, page_tokens=16, mtp=True)


def test_a_family_without_such_layers_is_refused() -> None:
    saved = checkpoint("llama")
    assert not has_mtp(saved.config, saved.weights)
    with pytest.raises(
        SpecError, match="llama: its family has no layer for multi-token prediction"
    ):
        ours("llama", mtp=True)
    memory = declare(saved.config, model="llama")
    with pytest.raises(SpecError, match="model_type 'llama' has no layer for multi-token"):
        declare_mtp(saved.config, memory=memory)


def test_families_with_a_draft_declare_what_it_keeps() -> None:
    assert {family_of(name) for name in NAMES} == set(MTP) <= set(FAMILIES)
    for name in NAMES:
        fields = tiny_mtp.config(name)
        memory = declare(fields, model=name, page_tokens=16)
        assert isinstance(declare_mtp(fields, memory=memory), ModelMemory)


def test_an_embedding_of_the_layers_own_is_refused() -> None:
    name = "qwen3_5-mtp"
    fields = {**tiny_mtp.config(name), "mtp_use_dedicated_embeddings": True}
    target, _ = pair(name)
    with pytest.raises(
        SpecError, match=r"`mtp_use_dedicated_embeddings` is set, .* use --speculate"
    ):
        build_mtp(fields, Tensors(tiny_mtp.weights(name)), target)


def test_a_layer_that_compresses_is_refused() -> None:
    fields = {**tiny_mtp.config(V4), "layer_types": None, "compress_rates": None}
    fields |= {"num_hidden_layers": 2, "compress_ratios": [4, 16, 4]}
    with pytest.raises(
        SpecError, match=r"gives layer 2, .*, 4; use 0: it attends to a window only"
    ):
        build(fields, Tensors(tiny_mtp.weights(V4)), page_tokens=16, mtp=True)


def test_a_multimodal_checkpoint_has_its_layer_beside_the_language_model() -> None:
    name = "qwen3_5-mtp"
    plain, fields = tiny_mtp.weights(name), tiny_mtp.config(name)
    inner = {"model.": "model.language_model."}
    found = {key: weight for key, weight in plain.items() if not key.startswith("model.")}
    for key, weight in plain.items():
        if key.startswith("model."):
            found[inner["model."] + key.removeprefix("model.")] = weight
    config = {"model_type": "qwen3_5", "text_config": fields}
    assert has_mtp(config, Tensors(found))
    target = build(config, Tensors(found), page_tokens=16, mtp=True)
    draft = build_mtp(config, Tensors(found), target)
    assert torch.equal(draft.project.weight, guessing([], name).draft.project.weight)
