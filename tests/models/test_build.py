"""Building a model: published spellings of a config, and sentences for what cannot be built."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from kvtide.layers.tensor_ranks import TensorRanks
from kvtide.models import FAMILIES, build
from kvtide.spec import SpecError
from kvtide.spec.families import KVDType, supported
from tests.models.playing import Player
from tests.models.tiny import CONFIGS, Tensors, checkpoint, expected, oracle, ours, prompt


def published(name: str, **changes: object) -> dict[str, object]:
    return {**json.loads(oracle(name).config.to_json_string()), **changes}


def test_every_family_with_a_forward_pass_declares_its_memory() -> None:
    assert set(FAMILIES) <= set(supported())
    built = {oracle(name).config.model_type for name in CONFIGS}
    assert built == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama", {"model_type": "gpt2"}, "model_type 'gpt2' has no forward pass here; use one of"),
        ("llama", {"hidden_act": "relu"}, "activation 'relu' is not known here; use gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope type 'dynamic' is not one that cached keys can use; use default, linear",
        ),
        ("llama", {"rms_norm_eps": "small"}, "`rms_norm_eps` is 'small'; use a number"),
        ("gemma3", {"use_bidirectional_attention": True}, "has no cache; unset it"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "use a list of 2 numbers"),
        ("gemma2", {"use_bidirectional_attention": True}, "has no cache; unset it"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "use rope or nope"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "only silu is known here"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "only sigmoid is known here"),
        ("kimi_linear", {"mla_use_nope": False}, "no published model is; unset it"),
        ("deepseek_v2", {"norm_topk_prob": True}, "`norm_topk_prob` has two meanings"),
        ("deepseek_v2", {"topk_method": "random"}, "not known here; use greedy, group_limited"),
        ("deepseek_v3", {"scoring_func": "tanh"}, "not known here; use sigmoid, softmax"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 1}, "cannot be chosen from 1 of 8 groups"),
        ("kimi_linear", {"num_expert_group": 3}, "cannot be chosen from 1 of 3 groups; use the"),
        (
            "nemotron_h-experts",
            {"n_group": 4, "topk_group": 1},
            "3 of 8 experts cannot be chosen from 1 of 4 groups",
        ),
        (
            "deepseek_v3",
            {"partial_rotary_factor": 0.5},
            "how much of a head is rotated; leave it out",
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": ["shared", "full"]},
            "layer 0 takes the selection of an indexer",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_in_a_sentence(
    name: str, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        build(published(name, **changes), checkpoint(name).weights, page_tokens=16)


@pytest.mark.parametrize(
    ("name", "gone", "instead"),
    [
        (
            "llama-biases-llama3-rope",
            ["rope_parameters"],
            {
                "rope_theta": 10_000.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        (
            "gemma3-scaled-rope",
            ["rope_parameters"],
            {
                "rope_theta": 30_000.0,
                "rope_local_base_freq": 500.0,
                "rope_scaling": {"type": "linear", "factor": 8.0},
            },
        ),
        ("gemma3", ["rope_parameters", "layer_types"], {}),
        ("gpt_oss", ["rope_parameters", "layer_types"], {}),
        (
            "gemma2",
            ["rope_parameters", "layer_types", "query_pre_attn_scalar"],
            {"query_pre_attn_scalar": 24},
        ),
        (
            "smollm3-by-interval",
            ["rope_parameters", "layer_types", "no_rope_layers"],
            {"rope_theta": 2_000_000.0, "no_rope_layer_interval": 2},
        ),
        ("bamba", ["rope_parameters"], {"rope_theta": 10_000.0, "attn_rotary_emb": 12}),
        (
            "granitemoehybrid",
            ["layer_types", "position_embedding_type"],
            {"layer_types": ["mamba", "attention"], "position_embedding_type": "nope"},
        ),
        (
            "nemotron_h",
            ["layers_block_type"],
            {"hybrid_override_pattern": "M-*", "num_hidden_layers": 3},
        ),
        (
            "qwen3_next",
            ["rope_parameters", "layer_types"],
            {"rope_theta": 10_000.0, "full_attention_interval": 2},
        ),
        ("lfm2", ["rope_parameters", "layer_types"], {"rope_theta": 1_000_000.0}),
        (
            "kimi_linear",
            ["layer_types", "linear_head_dim", "linear_num_heads"],
            {
                "linear_attn_config": {
                    "head_dim": 16,
                    "num_heads": 4,
                    "short_conv_kernel_size": 4,
                    "full_attn_layers": [2],
                    "kda_layers": [1],
                }
            },
        ),
        (
            "deepseek_v2",
            ["rope_parameters"],
            {
                "rope_theta": 10_000,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 16,
                    "original_max_position_embeddings": 64,
                    "mscale": 0.7,
                    "mscale_all_dim": 1.2,
                },
                "scoring_func": "softmax",
                "moe_layer_freq": 1,
            },
        ),
        ("deepseek_v3", ["rope_parameters", "rope_interleave", "norm_topk_prob"], {}),
        ("deepseek_v32", ["rope_parameters", "layer_types", "mlp_layer_types"], {}),
        ("glm_moe_dsa-shared", ["indexer_types", "layer_types", "mlp_layer_types"], {}),
    ],
)
def test_configs_as_labs_publish_them_give_the_same_model(
    name: str, gone: list[str], instead: dict[str, object]
) -> None:
    config = {key: value for key, value in checkpoint(name).config.items() if key not in gone}
    model = build({**config, **instead}, checkpoint(name).weights, kv_dtype=KVDType.FP32)
    logits = Player(model).prefill(prompt(40), 40)
    torch.testing.assert_close(logits, expected(name, 40), rtol=0, atol=2e-5)


def test_experts_that_lie_in_two_weights_are_those_that_lie_one_by_one() -> None:
    weights = oracle("qwen3_5_moe").state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in weights
    model = build(published("qwen3_5_moe"), Tensors(weights), kv_dtype=KVDType.FP32)
    logits = Player(model).prefill(prompt(40), 40)
    torch.testing.assert_close(logits, expected("qwen3_5_moe", 40), rtol=0, atol=2e-5)


@pytest.mark.parametrize("gone", ["q", "k", "v", "kv"])
def test_a_gated_projection_without_a_bias_lies_beside_those_with_one(gone: str) -> None:
    """What is not there is zero, and takes no other's away."""
    name = "qwen3_5_moe-one-head-each"
    zeroed = {
        key: torch.zeros_like(weight) if _is_bias(key, gone) else weight
        for key, weight in oracle(name).state_dict().items()
    }
    removed = {key: weight for key, weight in zeroed.items() if not _is_bias(key, gone)}
    assert len(removed) == len(zeroed) - len(gone)
    models = [
        build(published(name), Tensors(each), kv_dtype=KVDType.FP32) for each in (zeroed, removed)
    ]
    wanted, logits = (Player(model).prefill(prompt(40), 40) for model in models)
    assert torch.equal(logits, wanted)


def _is_bias(key: str, letters: str) -> bool:
    return key.endswith(tuple(f".{letter}_proj.bias" for letter in letters))


def test_a_tied_head_needs_no_weights_of_its_own() -> None:
    weights = {
        name: weight
        for name, weight in oracle("gemma3").state_dict().items()
        if name != "lm_head.weight"
    }
    model = build(published("gemma3"), Tensors(weights))
    assert model.vocabulary == len(weights["model.embed_tokens.weight"])
    assert model.logits(torch.zeros(1, 96)).shape == (1, model.vocabulary)


def test_layers_after_the_last_are_not_read() -> None:
    """Published checkpoints of DeepSeek-V3 have MTP layers there."""
    weights, asked = checkpoint("deepseek_v3").weights, []

    class Watched:
        def get(self, name: str) -> Tensor:
            asked.append(name)
            return weights.get(name)

        def has(self, name: str) -> bool:
            return weights.has(name) or name.startswith("model.layers.2.")

        def packed(self, name: str) -> None:
            asked.append(name)

    build(published("deepseek_v3", num_nextn_predict_layers=1), Watched(), page_tokens=16)
    assert asked and not any(name.startswith("model.layers.2.") for name in asked)


def test_a_stage_begins_with_an_indexer_or_not_at_all() -> None:
    """Layers are F S S F."""
    for stage, stages in ((0, 2), (2, 3), (3, 4)):
        ours("glm_moe_dsa-shared", stage=stage, stages=stages)
    for stage, stages in ((1, 2), (1, 3), (1, 4), (2, 4)):
        with pytest.raises(SpecError, match="use another number of stages, so that each begins"):
            ours("glm_moe_dsa-shared", stage=stage, stages=stages)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3-wide-queries", "deepseek_v32"])
def test_ranks_have_heads_of_their_own_and_latents_together(name: str) -> None:
    whole = ours(name)
    for rank in range(2):
        part = ours(name, ranks=TensorRanks(rank, 2))
        assert part.memory.pools == whole.memory.pools
        for mine, theirs in zip(part.layers.values(), whole.layers.values(), strict=True):
            half = slice(*(len(theirs.attention.to_latent) // 2 * n for n in (rank, rank + 1)))
            for each in ("to_latent", "from_latent"):
                wanted = getattr(theirs.attention, each)[half]
                assert torch.equal(getattr(mine.attention, each), wanted)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(SpecError, match="o_proj takes 4 units, which do not divide over 8 tensor"):
        ours("deepseek_v3", ranks=TensorRanks(0, 8))
