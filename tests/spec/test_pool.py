"""A pool says what a page costs and when it allows a resume; what cannot work is refused."""

from dataclasses import replace

import pytest

from kvtide.spec import ALL, DType, Encoding, Entry, Field, PoolSpec, Reuse, SpecError

KEY = Field("k", (8, 64), DType.BF16, sharded=True)
VECTOR = Entry((Field("latent", (512,), DType.BF16),))


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (lambda: Reuse(reach=-1), "use 0 or more, or ALL"),
        (lambda: Reuse(reach=1, stride=0), "use at least 1, or None"),
        (lambda: Reuse(reach=ALL, stride=64), "use a reach of one page"),
        (lambda: Field("k", (), DType.BF16), "every axis needs ≥ 1"),
        (lambda: Field("k", (8, 0), DType.BF16), "every axis needs ≥ 1"),
        (lambda: Field("x", (10, 3), DType.BF16, groups=4), "do not divide into 4 groups"),
        (lambda: PoolSpec("kv", (1, 0), VECTOR), "sort them"),
        (lambda: PoolSpec("kv", (1, 1), VECTOR), "drop repeats"),
        (lambda: PoolSpec("kv", (0,), VECTOR, tokens_per_entry=0), "at least 1"),
        (lambda: PoolSpec("kv", (0,), VECTOR, tail_entries=0), "at least 1, or None for all"),
    ],
)
def test_a_pool_that_cannot_work_is_refused_with_the_remedy(build, remedy):
    with pytest.raises(SpecError, match=remedy):
        build()


LATENT = Field("latent", (300,), DType.FP8_E4M3)
SCALES = Field("latent_scale", (3,), DType.FP32)
ROPE = Field("rope", (16,), DType.BF16)
NOPE = Field("nope", (100,), DType.FP8_E4M3)
POWERS = Field("scale", (2,), DType.UE8M0)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ((LATENT, ROPE), "entry of latent, rope: scaled, .* or leave the entry plain"),
        ((), "entry of nothing: scaled, and no field has scales; add them as X_scale"),
        ((LATENT, replace(SCALES, shape=(2,))), r"\(300,\) in fp8_e4m3 with scales \(2,\) in fp32"),
        ((LATENT, replace(SCALES, dtype=DType.BF16)), "in bf16; .* an fp32 for every 128 values"),
        ((replace(LATENT, dtype=DType.BF16), SCALES), "in bf16 .* use a vector in fp8_e4m3"),
        ((replace(LATENT, shape=(300, 1)), SCALES), "field latent: .* use a vector"),
        ((replace(LATENT, sharded=True), SCALES), "neither of them sharded"),
        ((LATENT, replace(SCALES, sharded=True)), "neither of them sharded"),
    ],
)
def test_fields_that_do_not_fit_a_scaled_entry_are_refused(fields, says):
    with pytest.raises(SpecError, match=says):
        Entry(fields, encoding=Encoding.SCALED)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ((), "use the vectors nope in fp8_e4m3, rope in bf16, scale in ue8m0, pad in uint8"),
        ((NOPE, ROPE), "entry of nope, rope: joined; use the vectors"),
        ((NOPE, POWERS, ROPE), "in this order"),
        ((replace(NOPE, dtype=DType.BF16), ROPE, POWERS), "nope in fp8_e4m3"),
        ((NOPE, ROPE, replace(POWERS, dtype=DType.FP32)), "scale in ue8m0"),
        ((NOPE, replace(ROPE, sharded=True), POWERS), "not sharded"),
        ((NOPE, ROPE, POWERS, SCALES), "entry of nope, rope, scale, latent_scale: joined"),
        ((NOPE, ROPE, replace(POWERS, shape=(1,))), "use one for every 64 values"),
    ],
)
def test_fields_that_do_not_fit_a_joined_entry_are_refused(fields, says):
    with pytest.raises(SpecError, match=says):
        Entry(fields, encoding=Encoding.JOINED)


def test_a_scaled_vector_may_have_plain_fields_beside_it():
    entry = Entry((ROPE, LATENT, SCALES), encoding=Encoding.SCALED)
    assert entry.scales == {"latent": SCALES}
    assert Entry(entry.fields).scales == {}


def test_a_field_counts_its_elements_bytes():
    assert Field("k", (8, 64), DType.BF16).bytes == 1024
    assert Field("k", (8, 64), DType.FP32).bytes == 2048
    assert Field("scale", (7,), DType.UE8M0).bytes == 7


def test_reach_touches_whole_pages():
    assert Reuse(reach=1).reach_pages(64) == 1
    assert Reuse(reach=64).reach_pages(64) == 1
    assert Reuse(reach=127).reach_pages(64) == 2
    assert Reuse(reach=ALL).reach_pages(64) is None


def test_a_page_holds_one_entry_per_tokens_per_entry():
    pool = PoolSpec("c4", (2, 4), VECTOR, tokens_per_entry=4)
    assert pool.entries_per_page(256) == 64
    assert pool.row_bytes(256) == 64 * 1024
    assert pool.page_bytes(256) == 2 * 64 * 1024


def test_a_tail_keeps_its_last_entries_only_and_never_more_than_the_page_has():
    pool = PoolSpec("tail", (0,), VECTOR, tail_entries=8)
    assert pool.entries_per_page(256) == 8
    assert pool.entries_per_page(4) == 4


def test_a_row_is_padded_to_its_alignment():
    entry = Entry((Field("packed", (584,), DType.UINT8),), row_align_bytes=576)
    pool = PoolSpec("c128", (0,), entry, tokens_per_entry=128)
    assert pool.row_bytes(256) == 1728  # 2 × 584 = 1,168, up to 3 × 576
    assert pool.row_bytes(128) == 1152  # 584, up to 2 × 576


def test_heads_divide_over_tensor_ranks():
    assert KEY.shard(1) == KEY
    assert KEY.shard(4).shape == (2, 64)
    assert KEY.shard(8).shape == (1, 64)


def test_more_ranks_than_heads_keep_one_head_each():
    assert KEY.shard(16).shape == (1, 64)


def test_a_field_that_is_not_sharded_stays_whole():
    assert VECTOR.shard(8) == VECTOR


def test_channels_divide_by_their_groups():
    conv = Field("conv_x", (8 * 16, 3), DType.BF16, sharded=True, groups=8)
    assert conv.shard(4).shape == (2 * 16, 3)
    assert conv.shard(4).groups == 2
    assert conv.shard(16).shape == (16, 3)


def test_heads_that_do_not_divide_over_the_ranks_are_refused():
    with pytest.raises(SpecError, match="8 heads or groups do not divide over 3 tensor ranks; use"):
        KEY.shard(3)
