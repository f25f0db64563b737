"""Every family's memory from a tiny config, with its bytes worked out by hand (bf16 = 2 bytes).

The field names are those that labs publish and `transformers` saves.
"""

import pytest

from kvtide.spec import ALL, ModelMemory, SpecError, with_draft
from kvtide.spec.families import KVDType, declare, draft_for, supported

# K and V of 2 heads × 24 in bf16.
HEADS_BYTES = 2 * 2 * 24 * 2

BASE = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
MLA = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "num_key_value_heads": 4}
DSA = MLA | {"index_head_dim": 32, "index_n_heads": 16, "index_topk": 64}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
NEMOTRON = {
    "head_dim": 24,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "conv_kernel": 4,
}
DELTA = {
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
KDA = MLA | {"linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}


def tiny(model_type: str, page_tokens: int | None = None, **fields: object) -> ModelMemory:
    config = BASE | {"model_type": model_type} | fields
    return declare(config, model="tiny", page_tokens=page_tokens)


def layers(memory: ModelMemory) -> dict[str, tuple[int, ...]]:
    return {pool.name: pool.layers for pool in memory.pools}


# -- attention by head ----------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3_moe", "smollm3", "mixtral"])
def test_full_attention_keeps_keys_and_values_of_every_layer(model_type):
    memory = tiny(model_type)
    assert layers(memory) == {"kv": (0, 1, 2, 3)}
    assert memory.pool("kv").entry.bytes == HEADS_BYTES
    assert memory.pool("kv").reuse.reach is ALL
    assert memory.history_bytes_per_token() == 4 * HEADS_BYTES


def test_head_dim_comes_from_the_config_where_it_has_one():
    assert tiny("llama", head_dim=32).pool("kv").entry.bytes == 2 * 2 * 32 * 2
    assert tiny("qwen3").pool("kv").entry.bytes == 2 * 2 * 128 * 2  # the family's default


def test_without_kv_heads_every_head_has_its_own():
    assert tiny("llama", num_key_value_heads=None).pool("kv").entry.bytes == 2 * HEADS_BYTES


@pytest.mark.parametrize(
    ("kv_dtype", "entry_bytes"), [("fp32", 384), ("fp16", 192), ("bf16", 192), ("fp8", 96)]
)
def test_the_kv_dtype_decides_the_entry(kv_dtype, entry_bytes):
    config = BASE | {"model_type": "llama"}
    memory = declare(config, model="tiny", kv_dtype=KVDType.parse(kv_dtype))
    assert memory.pool("kv").entry.bytes == entry_bytes


# -- windows --------------------------------------------------------------------------------


def test_mistral_with_a_window_keeps_nothing_else():
    memory = tiny("mistral", sliding_window=64)
    assert layers(memory) == {"swa": (0, 1, 2, 3)}
    assert memory.anchors[0].reuse.reach == 63
    assert memory.history_bytes_per_token() == 0


def test_mistral_without_a_window_keeps_everything():
    assert layers(tiny("mistral", sliding_window=None)) == {"kv": (0, 1, 2, 3)}


def test_mistral_that_does_not_say_has_the_familys_window():
    assert tiny("mistral").pool("swa").reuse.reach == 4095


@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma2"])
def test_alternating_models_window_the_even_layers(model_type):
    memory = tiny(model_type, sliding_window=64, head_dim=32)
    assert layers(memory) == {"kv": (1, 3), "swa": (0, 2)}
    assert memory.pool("swa").entry == memory.pool("kv").entry


@pytest.mark.parametrize("field", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_gemma3_has_full_attention_once_a_pattern(field):
    memory = tiny("gemma3_text", sliding_window=64, num_hidden_layers=7, **{field: 3})
    assert layers(memory) == {"kv": (2, 5), "swa": (0, 1, 3, 4, 6)}


def test_gemma3_has_full_attention_every_sixth_layer_by_default():
    memory = tiny("gemma3_text", sliding_window=64, num_hidden_layers=12)
    assert layers(memory)["kv"] == (5, 11)


def test_gemma3_text_configs_may_leave_the_heads_out():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 6}
    wrapper = {"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}}
    memory = declare(wrapper, model="tiny")
    assert memory.pool("kv").entry.bytes == 2 * 4 * 256 * 2


def test_a_wrapper_names_the_type_where_its_text_config_does_not():
    text = BASE | {"sliding_window": 64, "head_dim": 32}
    wrapper = {"model_type": "gemma3", "num_hidden_layers": 99, "text_config": text}
    assert declare(wrapper, model="tiny").layers == 4


def test_listed_layer_types_win_over_the_familys_rule():
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    memory = tiny("gpt_oss", sliding_window=64, layer_types=types)
    assert layers(memory) == {"kv": (0, 3), "swa": (1, 2)}


def test_qwen_windows_the_layers_above_max_window_layers_when_configured():
    window = {"sliding_window": 64, "max_window_layers": 3}
    assert layers(tiny("qwen2", **window)) == {"kv": (0, 1, 2, 3)}
    used = tiny("qwen2", use_sliding_window=True, **window)
    assert layers(used) == {"kv": (0, 1, 2), "swa": (3,)}
    every = tiny("qwen3", use_sliding_window=True, sliding_window=64, max_window_layers=0)
    assert layers(every) == {"swa": (0, 1, 2, 3)}


# -- latents and index keys -----------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_mla_keeps_a_latent_and_a_rotary_key(model_type):
    memory = tiny(model_type, **MLA)
    assert layers(memory) == {"kv": (0, 1, 2, 3)}
    assert memory.pool("kv").entry.bytes == (32 + 16) * 2


def test_mla_is_whole_on_every_tensor_rank():
    memory = tiny("deepseek_v3", **MLA)
    assert memory.slice(tensor_ranks=4).slot_bytes("kv") == memory.slot_bytes("kv")


def test_mla_in_8_bits_carries_a_scale_per_128_values_and_bf16_rotary_keys():
    config = BASE | MLA | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    memory = declare(config, model="tiny", kv_dtype=KVDType.FP8)
    assert memory.pool("kv").entry.bytes == 512 + 4 * 4 + 64 * 2


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_dsa_keeps_an_index_key_beside_every_latent(model_type):
    memory = tiny(model_type, **DSA)
    assert layers(memory) == {"kv": (0, 1, 2, 3), "index": (0, 1, 2, 3)}
    assert memory.pool("index").follows == "kv"
    assert memory.pool("index").entry.bytes == 32 * 2
    assert memory.history_bytes_per_token() == 4 * (96 + 64)


@pytest.mark.parametrize(
    "sharing",
    [
        {"index_topk_pattern": "FSFSSF"},
        {"index_topk_pattern": ["F", "S", "F", "S", "S", "F"]},
        {"indexer_types": ["full", "shared", "full", "shared", "shared", "full"]},
        {"index_topk_pattern": "FSFSSFF"},  # one entry more, for an MTP layer
    ],
)
def test_layers_that_share_an_indexer_keep_no_index_keys(sharing):
    memory = tiny("glm_moe_dsa", num_hidden_layers=6, **DSA, **sharing)
    assert layers(memory)["index"] == (0, 2, 5)
    assert layers(memory)["kv"] == (0, 1, 2, 3, 4, 5)


def test_mla_without_rotary_keys_keeps_latents_only():
    memory = tiny("deepseek_v3", **MLA | {"qk_rope_head_dim": 0})
    assert memory.pool("kv").entry.bytes == 32 * 2


def test_indexers_may_come_at_a_frequency_after_an_offset():
    memory = tiny("glm_moe_dsa", num_hidden_layers=8, index_topk_freq=3, **DSA)
    # Layers 0 and 1 have their own, then every third one.
    assert layers(memory)["index"] == (0, 1, 4, 7)


# -- recurrent hybrids ----------------------------------------------------------------------


def test_a_checkpoint_is_one_entry_a_page_on_the_page_grid():
    state = tiny("granitemoehybrid", page_tokens=32, **MAMBA).pool("state")
    assert state.is_anchor
    assert state.entries_per_page(32) == 1
    assert (state.reuse.reach, state.reuse.stride) == (1, 32)


def test_the_checkpoint_grid_can_be_set():
    config = BASE | MAMBA | {"model_type": "granitemoehybrid"}
    memory = declare(config, model="tiny", page_tokens=32, checkpoint_tokens=256)
    assert memory.pool("state").reuse.stride == 256


def test_falcon_h1_has_attention_and_mamba_in_every_layer():
    memory = tiny("falcon_h1", num_hidden_layers=3, mamba_d_ssm=128, **MAMBA)
    assert layers(memory) == {"kv": (0, 1, 2), "state": (0, 1, 2)}
    # Convolution inputs: 128 + 2 × 1 group × 16 channels, 3 of 4 taps; SSM: 8 × 16 × 16 in fp32.
    assert memory.pool("state").entry.bytes == (128 + 32) * 3 * 2 + 8 * 16 * 16 * 4


def test_granite_without_mixers_needs_no_word_of_them():
    memory = tiny("granitemoehybrid", layer_types=["attention"] * 4, mamba_n_heads=7)
    assert layers(memory) == {"kv": (0, 1, 2, 3)}


def test_granite_lists_its_mamba_and_attention_layers():
    types = ["mamba", "attention", "linear_attention", "full_attention"]
    memory = tiny("granitemoehybrid", layer_types=types, **MAMBA)
    assert layers(memory) == {"kv": (1, 3), "state": (0, 2)}
    # Inner width 192 = 8 heads × 24.
    assert memory.pool("state").entry.bytes == (192 + 32) * 3 * 2 + 8 * 24 * 16 * 4


def test_a_model_with_recurrent_layers_only_has_no_history():
    memory = tiny("granitemoehybrid", **MAMBA)
    assert layers(memory) == {"state": (0, 1, 2, 3)}
    assert memory.history_bytes_per_token() == 0


def test_bamba_names_its_attention_layers():
    memory = tiny("bamba", attn_layer_indices=[3, 1], mamba_d_head="auto", **MAMBA)
    assert layers(memory) == {"kv": (1, 3), "state": (0, 2)}


@pytest.mark.parametrize(
    "pattern",
    [
        {"hybrid_override_pattern": "MEM*-"},
        {"layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp"]},
        {
            "layers_block_type": [
                "linear_attention",
                "moe",
                "linear_attention",
                "full_attention",
                "mlp",
            ]
        },
    ],
)
def test_nemotron_h_reads_either_form_of_its_pattern(pattern):
    memory = tiny("nemotron_h", num_hidden_layers=None, **NEMOTRON, **pattern)
    assert memory.layers == 5
    assert layers(memory) == {"kv": (3,), "state": (0, 2)}
    # 192 inner channels, 2 groups × 16 for each of B and C.
    assert memory.pool("state").entry.bytes == (192 + 64) * 3 * 2 + 8 * 24 * 16 * 4


@pytest.mark.parametrize(
    "model_type", ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"]
)
def test_gated_delta_has_attention_every_fourth_layer(model_type):
    memory = tiny(model_type, **DELTA)
    assert layers(memory) == {"kv": (3,), "state": (0, 1, 2)}
    # q and k: 4 × 16 channels each, v: 8 × 16; the state 8 × 16 × 16 in fp32.
    assert memory.pool("state").entry.bytes == (64 + 64 + 128) * 3 * 2 + 8 * 16 * 16 * 4


def test_gated_delta_may_set_another_interval():
    assert layers(tiny("qwen3_next", full_attention_interval=2, **DELTA))["kv"] == (1, 3)


def test_kimi_keeps_latents_on_its_attention_layers():
    memory = tiny("kimi_linear", num_hidden_layers=5, **KDA)
    assert layers(memory) == {"kv": (4,), "state": (0, 1, 2, 3)}
    assert memory.pool("kv").entry.bytes == (32 + 16) * 2
    assert memory.pool("state").entry.bytes == 3 * 64 * 3 * 2 + 4 * 16 * 16 * 4


def test_kimi_as_published_counts_layers_from_one():
    linear = {
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3, 5],
    }
    memory = tiny("kimi_linear", num_hidden_layers=5, linear_attn_config=linear, **MLA)
    assert layers(memory) == {"kv": (3,), "state": (0, 1, 2, 4)}


def test_lfm2_keeps_the_inputs_of_its_short_convolutions():
    memory = tiny("lfm2", full_attn_idxs=[1, 3], conv_L_cache=3)
    assert layers(memory) == {"kv": (1, 3), "state": (0, 2)}
    assert memory.pool("state").entry.bytes == 96 * 2 * 2


def test_recurrent_states_stay_in_fp32_and_convolutions_out_of_8_bits():
    config = BASE | DELTA | {"model_type": "qwen3_next"}
    memory = declare(config, model="tiny", kv_dtype=KVDType.FP8)
    dtypes = {field.name: field.dtype.label for field in memory.pool("state").entry.fields}
    assert dtypes == {"conv_q": "bf16", "conv_k": "bf16", "conv_v": "bf16", "delta": "fp32"}


def test_each_part_of_a_state_divides_by_its_own_heads_or_groups():
    memory = tiny("nemotron_h", layers_block_type=["mamba", "attention"] * 2, **NEMOTRON)
    shapes = {f.name: f.shape for f in memory.slice(tensor_ranks=4).pool("state").entry.fields}
    # 8 heads over 4 ranks: 2 each. 2 groups over 4 ranks: each rank keeps a copy of one.
    assert shapes == {"conv_x": (48, 3), "conv_b": (16, 3), "conv_c": (16, 3), "ssm": (2, 24, 16)}


def test_ranks_that_would_split_a_head_are_refused():
    with pytest.raises(SpecError, match="do not divide over 3 tensor ranks; use a divisor or"):
        tiny("falcon_h1", mamba_d_ssm=128, **MAMBA).slice(tensor_ranks=3)


# -- drafts ---------------------------------------------------------------------------------


def test_a_draft_without_a_config_has_the_targets_heads():
    target = tiny("gpt_oss", sliding_window=64)
    both = with_draft(target, draft_for(target, 3))
    assert both.pool("draft").layers == (4, 5, 6)
    assert both.pool("draft").entry == target.pool("kv").entry


def test_beside_latents_a_draft_has_eight_heads_of_its_own():
    target = tiny("deepseek_v3", **MLA)
    assert draft_for(target, 1).pool("kv").entry.bytes == 2 * 8 * 128 * 2
    with pytest.raises(SpecError, match="0 layers; use at least 1"):
        draft_for(target, 0)


# -- refusals -------------------------------------------------------------------------------


def test_an_unknown_type_is_refused_with_the_known_ones():
    with pytest.raises(SpecError, match="tiny: model_type 'rwkv' is not a family known") as refusal:
        tiny("rwkv")
    for model_type in supported():
        assert model_type in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_type": None}, "model_type None is not a family known here"),
        ({"model_type": 7}, "model_type 7 is not a family known here"),
        ({"num_hidden_layers": None}, "config.json has no `num_hidden_layers`; add it"),
        ({"num_attention_heads": None}, "config.json has no `num_attention_heads`; add it"),
        ({"num_hidden_layers": "4"}, "`num_hidden_layers` is '4'; use a whole number of at least"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0; use a whole number of at least 1"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` is True; use a whole number"),
        ({"hidden_size": 97}, "`hidden_size` 97 does not divide by 4 heads; add `head_dim`"),
        ({"layer_types": "full"}, "`layer_types` is 'full'; use a list with one item per layer"),
        ({"layer_types": ["full_attention"]}, "`layer_types` has 1 items for 4 layers; list every"),
        (
            {"layer_types": ["linear_attention"] * 4},
            "layer type 'linear_attention' is not one this family has; use full_attention",
        ),
        ({"model_type": "gemma2"}, "config.json has no `sliding_window`; add it"),
        ({"model_type": "gpt_oss", "sliding_window": 1}, "keeps nothing; use at least 2"),
        (
            {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 64},
            "`use_sliding_window` without `layer_types`; list the layer types",
        ),
        ({"model_type": "deepseek_v3"}, "config.json has no `kv_lora_rank`; add it"),
        (
            {"model_type": "glm_moe_dsa", "index_topk_pattern": "FXFF"} | DSA,
            "indexer type 'X' is not known here; use full or shared",
        ),
        (
            {"model_type": "falcon_h1", "mamba_d_ssm": 128, "mamba_d_head": 24} | MAMBA,
            "8 Mamba heads of 24 do not make up 128 inner channels; check",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M?*-"} | NEMOTRON,
            "`hybrid_override_pattern` is 'M\\?\\*-'; use one of",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M*"} | NEMOTRON,
            "has 2 letters for 4 layers; give every layer one",
        ),
        ({"model_type": "nemotron_h"} | NEMOTRON, "or list `layers_block_type`"),
        (
            {"model_type": "bamba", "attn_layer_indices": [1, 9]} | MAMBA,
            "`attn_layer_indices` is \\[1, 9\\]; use layer numbers in 0..3",
        ),
    ],
)
def test_an_odd_config_is_refused_with_the_remedy(fields, sentence):
    with pytest.raises(SpecError, match=f"tiny: .*{sentence}"):
        declare(BASE | {"model_type": "llama"} | fields, model="tiny")


def test_pages_and_grids_that_cannot_be_are_refused():
    with pytest.raises(SpecError, match="a page of 0 tokens; use at least 1"):
        tiny("lfm2", page_tokens=0)
    with pytest.raises(SpecError, match="checkpoints every 40 tokens never meet"):
        declare(
            BASE | {"model_type": "lfm2", "full_attn_idxs": [1]}, model="t", checkpoint_tokens=40
        )


def test_an_unknown_kv_dtype_is_refused_with_the_choices():
    with pytest.raises(SpecError, match="'int4' is not a KV dtype; use one of bf16, fp16, fp32, f"):
        KVDType.parse("int4")
