"""DeepSeek-V4's pools and the published figures, for any compression schedule."""

import pytest

from kvtide.spec import ALL, ModelMemory, Reuse, SpecError, catalog
from kvtide.spec.families import KVDType, declare, draft_for
from kvtide.spec.memory import with_draft

TINY = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "sliding_window": 32,
    "index_head_dim": 32,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
}


def tiny(kv_dtype: KVDType | None = None, page_tokens: int = 256, **fields: object) -> ModelMemory:
    return declare(TINY | fields, model="tiny", page_tokens=page_tokens, kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("name", "compressed_bytes", "window_bytes"),
    [
        ("deepseek-v4-flash", 998_208, 6_439_680),
        ("deepseek-v4-pro", 1_430_208, 9_135_360),
    ],
)
def test_published_figures_come_out(name, compressed_bytes, window_bytes):
    memory = catalog.resolve(name)
    assert memory.page_tokens == 256
    assert memory.slot_bytes("kv") == compressed_bytes
    assert memory.pool("swa").page_bytes(256) == window_bytes


@pytest.mark.parametrize(
    ("name", "layers", "c4", "c128"),
    [("deepseek-v4-flash", 43, 21, 20), ("deepseek-v4-pro", 61, 30, 31)],
)
def test_published_schedules_without_their_mtp_layer(name, layers, c4, c128):
    memory = catalog.resolve(name)
    assert memory.layers == layers
    assert len(memory.pool("swa").layers) == layers
    assert len(memory.pool("c4").layers) == len(memory.pool("c4_index").layers) == c4
    assert len(memory.pool("c128").layers) == c128


def test_entries_are_584_and_132_bytes_in_8_bits():
    memory = catalog.resolve("deepseek-v4-flash")
    for name in ("swa", "c4", "c128"):
        assert memory.pool(name).entry.bytes == 584
    assert memory.pool("c4_index").entry.bytes == 132
    fields = {field.name: field.bytes for field in memory.pool("c4").entry.fields}
    assert fields == {"nope": 448, "rope": 128, "scale": 7, "pad": 1}


@pytest.mark.parametrize(("kv_dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_unpacked_entries_hold_every_value(kv_dtype, size):
    memory = catalog.resolve("deepseek-v4-flash", kv_dtype=kv_dtype)
    assert memory.pool("c4").entry.bytes == 512 * size
    assert memory.pool("c4_index").entry.bytes == 128 * size
    assert memory.pool("swa").row_bytes(256) == 256 * 512 * size


def test_the_pools_hang_together_as_designed():
    memory = tiny()
    follows = {pool.name: pool.follows for pool in memory.pools}
    assert follows == {
        "kv": None,
        "c4": "kv",
        "c4_index": "kv",
        "c128": "kv",
        "swa": None,
        "c4_state": "swa",
        "c4_open": "swa",
        "c4_index_state": "swa",
        "c4_index_open": "swa",
        "c128_open": "swa",
    }
    assert memory.pool("kv").page_bytes(256) == 0
    assert memory.pool("kv").reuse.reach is ALL
    assert memory.pool("swa").reuse == Reuse(reach=31)
    assert memory.pool("c4_state").reuse == Reuse(reach=1)
    assert memory.pool("c4_open").reuse == memory.pool("c128_open").reuse == Reuse(reach=0)
    assert memory.pool("c4_state").layers == memory.pool("c4").layers == (2, 4)
    assert memory.pool("c128").layers == (3,)


def test_a_compressor_keeps_a_mean_under_way_and_nothing_else_leaves_the_device():
    memory = tiny()
    # Three numbers a channel in fp32.
    assert memory.pool("c4_state").row_bytes(256) == 3 * 64 * 4
    assert memory.pool("c4_index_state").row_bytes(256) == 3 * 32 * 4
    assert memory.pool("c128_open").row_bytes(256) == 3 * 64 * 4
    lasting = [pool.name for pool in memory.at_rest.pools]
    assert lasting == ["kv", "c4", "c4_index", "c128", "swa", "c4_state", "c4_index_state"]
    assert memory.slot_bytes("swa") - memory.at_rest.slot_bytes("swa") == (2 * 96 + 64) * 12


def test_small_heads_are_packed_by_the_same_rule():
    entry = tiny().pool("c4").entry
    # 48 + 16 × 2 + 1 scale = 81 bytes, padded to 88; rows of 80 bytes without scales.
    assert entry.bytes == 88
    assert entry.row_align_bytes == 80
    assert tiny().pool("c4_index").entry.bytes == 32 + 4


def test_transformers_form_of_the_config_means_the_same():
    sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
    window = "sliding_attention"
    saved = tiny(
        compress_ratios=None,
        qk_rope_head_dim=None,
        partial_rotary_factor=0.25,
        layer_types=[window, window, sparse, heavy, sparse, window],
        compress_rates={sparse: 4, heavy: 128},
    )
    assert saved.pools == tiny().pools


def test_layers_past_the_last_are_mtp_layers_and_left_out():
    assert tiny(compress_ratios=[0, 0, 4, 128, 4, 0, 4, 4]).pools == tiny().pools


def test_any_ratio_gets_a_pool_of_its_own():
    memory = tiny(compress_ratios=[0, 4, 16, 128, 16, 4])
    assert memory.pool("c16").tokens_per_entry == 16
    assert memory.pool("c16").layers == (2, 4)
    assert "c16_state" not in [pool.name for pool in memory.pools]
    assert memory.pool("c16_open").reuse.reach == 0


def test_the_sparse_ratio_is_the_configs():
    memory = tiny(compress_ratios=[0, 8, 128, 8, 0, 0], compress_rate_csa=8)
    assert memory.pool("c8_index").tokens_per_entry == 8
    assert memory.pool("c8_state").reuse.reach == 1


def test_a_schedule_without_compression_is_windows_only():
    memory = tiny(compress_ratios=[0] * 6)
    assert [pool.name for pool in memory.pools] == ["kv", "swa"]


def test_without_c128_layers_small_pages_are_fine():
    memory = tiny(page_tokens=64, compress_ratios=[0, 0, 4, 4, 4, 0])
    assert memory.pool("c4").entries_per_page(64) == 16


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"page_tokens": 192}, "pool c128: a page of 192 .* whole entries of 128; use a multiple"),
        ({"compress_ratios": None}, "no `compress_ratios` or `layer_types`; add one"),
        ({"compress_ratios": [0, 4]}, "`compress_ratios` has 2 items for 6 layers; list every"),
        ({"compress_ratios": [0, 0, -4, 0, 0, 0]}, "layer 2 has no known compression; use ratios"),
        ({"compress_ratios": [0, 1, 4, 0, 0, 0]}, "layer 1 has no known compression; use ratios"),
        ({"layer_types": ["full_attention"] * 6}, "layer 0 has no known compression; use ratios"),
        ({"qk_rope_head_dim": 64}, "64 rotary dimensions of 64; use fewer than `head_dim`"),
        ({"qk_rope_head_dim": None}, "config.json has no `qk_rope_head_dim`; add it"),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(fields, sentence):
    with pytest.raises(SpecError, match=sentence):
        tiny(**fields)


def test_stages_of_v4_add_up_and_keep_both_anchors():
    memory = catalog.resolve("deepseek-v4-flash")
    stages = list(memory.stages(4))
    for anchor in ("kv", "swa"):
        assert sum(stage.slot_bytes(anchor) for stage in stages) == memory.slot_bytes(anchor)
    bare = memory.slice(range(0, 2))
    assert [pool.name for pool in bare.pools] == ["kv", "swa"]


def test_v4_is_whole_on_every_tensor_rank():
    memory = catalog.resolve("deepseek-v4-pro")
    assert memory.slice(tensor_ranks=8).slot_bytes("swa") == memory.slot_bytes("swa")


def test_a_draft_follows_the_tree_of_v4():
    memory = catalog.resolve("deepseek-v4-flash")
    both = with_draft(memory, draft_for(memory, 1))
    assert both.pool("draft").follows == "kv"
    assert both.pool("draft").layers == (43,)


@pytest.mark.parametrize(("head_dim", "rope"), [(68, 16), (640, 64)])
def test_packed_vectors_whose_scales_are_no_word_are_refused(head_dim: int, rope: int) -> None:
    says = r"use a multiple of 8 bytes before them and at most 512 values .* --kv-dtype bf16"
    with pytest.raises(SpecError, match=says):
        tiny(KVDType.FP8, head_dim=head_dim, qk_rope_head_dim=rope)
    assert tiny(KVDType.BF16, head_dim=head_dim, qk_rope_head_dim=rope).pools
