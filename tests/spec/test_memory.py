"""A memory's pools hang together, its slices add up, and its digest tells schemas apart."""

from dataclasses import replace

import pytest

from kvtide.spec import (
    DType,
    Encoding,
    Entry,
    Field,
    ModelMemory,
    PoolSpec,
    RankShape,
    Reuse,
    SpecError,
    with_draft,
)
from kvtide.spec.families import declare
from kvtide.spec.families.pool_parts import KVDType, scaled

HEADS = Entry(tuple(Field(name, (4, 16), DType.BF16, sharded=True) for name in ("k", "v")))
KEYS = Entry((Field("index_key", (32,), DType.BF16),))
KV = PoolSpec("kv", (1, 3), HEADS)
INDEX = PoolSpec("index", (1,), KEYS, follows="kv")
SWA = PoolSpec("swa", (0, 2), HEADS, reuse=Reuse(reach=31))
STATE = PoolSpec("state", (0,), KEYS, tail_entries=1, reuse=Reuse(reach=1, stride=16))


def memory(*pools: PoolSpec, page_tokens: int = 16, holdback: int = 0) -> ModelMemory:
    return ModelMemory("tiny", page_tokens, pools, layers=4, holdback=holdback)


@pytest.fixture
def hybrid() -> ModelMemory:
    return memory(KV, INDEX, SWA)


# -- what a memory must be ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: memory(KV, page_tokens=0), "a page of 0 tokens; use at least 1"),
        (lambda: memory(STATE, page_tokens=0), "a page of 0 tokens; use at least 1"),
        (lambda: memory(), "no pool owns slots; declare one without `follows`"),
        (lambda: memory(KV, holdback=16), "must be less than a page; use 0 to 15"),
        (lambda: memory(KV, holdback=-1), "must be less than a page; use 0 to 15"),
        (lambda: memory(KV, KV), "two pools named kv; rename one"),
        (lambda: memory(KV, replace(INDEX, follows="swa")), "follows swa.*owns no slots; use kv"),
        (
            lambda: memory(KV, INDEX, replace(INDEX, name="more", follows="index")),
            "follows index, which owns no slots; use kv",
        ),
        (lambda: memory(SWA, replace(INDEX, follows="swa")), "shorten its reach or make it an anc"),
        (
            lambda: memory(SWA, replace(INDEX, follows="swa", reuse=Reuse(reach=32))),
            "shorten its reach or make it an anchor",
        ),
        (
            lambda: memory(replace(KV, reuse=Reuse(required=False)), INDEX),
            "make both required or neither",
        ),
        (
            lambda: memory(replace(KV, name="c128", tokens_per_entry=128), page_tokens=96),
            "pool c128: a page of 96 tokens does not hold whole entries of 128; use a multiple",
        ),
        (
            lambda: memory(replace(STATE, reuse=Reuse(reach=1, stride=24))),
            "checkpoints every 24 tokens never meet the ends of pages of 16; make one a multiple",
        ),
    ],
)
def test_a_memory_that_cannot_work_is_refused_with_the_remedy(build, sentence):
    with pytest.raises(SpecError, match=sentence):
        build()


def test_all_problems_are_reported_at_once():
    with pytest.raises(SpecError) as refusal:
        memory(replace(KV, tokens_per_entry=3), replace(KV, tokens_per_entry=3), holdback=99)
    assert "two pools named kv" in str(refusal.value)
    assert "whole entries of 3" in str(refusal.value)
    assert "holdback of 99" in str(refusal.value)


@pytest.mark.parametrize("stride", [4, 8, 16, 32, 48])
def test_checkpoints_on_page_ends_or_inside_pages_are_accepted(stride):
    memory(replace(STATE, reuse=Reuse(reach=1, stride=stride)))


def test_an_unknown_pool_is_refused_with_the_names(hybrid):
    with pytest.raises(SpecError, match="no pool named c4; it has kv, index, swa"):
        hybrid.pool("c4")


# -- anchors, sidecars and sizes ------------------------------------------------------------


def test_anchors_own_slots_and_sidecars_share_them(hybrid):
    assert [anchor.name for anchor in hybrid.anchors] == ["kv", "swa"]
    assert [pool.name for pool in hybrid.group("kv")] == ["kv", "index"]
    # 16 tokens: 2 layers × 256 B of K and V, 1 layer × 64 B of index keys.
    assert hybrid.slot_bytes("kv") == 16 * (2 * 256 + 64)
    assert hybrid.slot_bytes("swa") == 16 * 2 * 256


def test_history_counts_only_what_grows_and_resume_only_what_does_not(hybrid):
    assert hybrid.history_bytes_per_token() == 2 * 256 + 64
    assert hybrid.resume_bytes() == 2 * 16 * 2 * 256  # 31 tokens touch two pages of 16


# -- slices ---------------------------------------------------------------------------------


def test_a_slice_keeps_global_layer_numbers(hybrid):
    part = hybrid.slice(range(2, 4))
    assert part.pool("kv").layers == (3,)
    assert part.pool("swa").layers == (2,)
    assert part.part.layers == range(2, 4)


def test_anchors_stay_in_every_slice_and_empty_sidecars_leave(hybrid):
    part = hybrid.slice(range(2, 3))
    assert [pool.name for pool in part.pools] == ["kv", "swa"]
    assert part.pool("kv").layers == ()
    assert part.slot_bytes("kv") == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_stages_add_up_to_the_whole(hybrid, ranks):
    stages = list(hybrid.stages(ranks))
    assert len(stages) == ranks
    for anchor in ("kv", "swa"):
        assert sum(s.slot_bytes(anchor) for s in stages) == hybrid.slot_bytes(anchor)
    covered = [layer for stage in stages for layer in stage.part.layers]
    assert covered == [0, 1, 2, 3]


def test_uneven_stages_give_the_first_ones_a_layer_more(hybrid):
    assert [len(stage.part.layers) for stage in hybrid.stages(3)] == [2, 1, 1]


@pytest.mark.parametrize("shape", [RankShape(2), RankShape(1, 2), RankShape(2, 4)])
def test_the_ranks_of_a_shape_are_slices_that_know_their_whole(hybrid, shape):
    ranks = hybrid.ranks(shape)
    assert len(ranks) == shape.ranks and ranks[0] == hybrid.first_rank(shape)
    for number, rank in enumerate(ranks):
        stage, tensor_rank = divmod(number, shape.tensor_ranks)
        assert rank == list(hybrid.stages(shape.stages, tensor_rank, shape.tensor_ranks))[stage]
        assert rank.whole is rank.without_draft.whole is hybrid
    assert hybrid.whole is hybrid and hybrid.ranks(RankShape()) == [hybrid]


def test_a_tensor_rank_keeps_its_heads_and_a_copy_of_what_is_not_by_head(hybrid):
    rank = hybrid.slice(tensor_rank=1, tensor_ranks=2)
    assert rank.pool("kv").entry.bytes == KV.entry.bytes // 2
    assert rank.pool("index").entry.bytes == INDEX.entry.bytes


def test_stages_of_a_tensor_rank_are_sharded(hybrid):
    stages = list(hybrid.stages(2, tensor_rank=1, tensor_ranks=4))
    assert [stage.part.tensor_rank for stage in stages] == [1, 1]
    assert sum(s.slot_bytes("swa") for s in stages) == hybrid.slot_bytes("swa") // 4


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda m: m.slice(range(2, 9)), "cannot slice layers 2..9; use a range within 0..4"),
        (lambda m: m.slice(range(2, 2)), "cannot slice layers 2..2"),
        (lambda m: m.slice(range(0, 4, 2)), "use a range within 0..4"),
        (
            lambda m: m.slice(tensor_rank=2, tensor_ranks=2),
            "tensor rank 2 of 2; ranks count from 0",
        ),
        (lambda m: m.slice(tensor_ranks=0), "tensor rank 0 of 0"),
        (lambda m: m.slice(tensor_ranks=3), "4 heads or groups do not divide over 3"),
        (lambda m: m.slice().slice(), "this is a slice already; slice the whole memory"),
        (lambda m: list(m.stages(5)), "4 layers over 5 pipeline ranks; use 1 to 4"),
        (lambda m: list(m.stages(0)), "4 layers over 0 pipeline ranks; use 1 to 4"),
    ],
)
def test_a_slice_that_cannot_be_is_refused(hybrid, build, sentence):
    with pytest.raises(SpecError, match=sentence):
        build(hybrid)


# -- drafts ---------------------------------------------------------------------------------


def draft(layers: int, page_tokens: int = 16) -> ModelMemory:
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return declare(config, model="eagle", page_tokens=page_tokens)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_draft_follows_the_history_and_is_not_required(hybrid, layers):
    both = with_draft(hybrid, draft(layers))
    pool = both.pool("draft")
    assert pool.follows == "kv"
    assert pool.reuse == Reuse(required=False)
    assert pool.layers == tuple(range(4, 4 + layers))
    assert both.holdback == 1
    # 2 heads × 16 × K and V × 2 bytes for each of the draft's layers.
    assert both.slot_bytes("kv") == hybrid.slot_bytes("kv") + 16 * layers * 128
    assert both.resume_bytes() == hybrid.resume_bytes()


def test_a_draft_with_more_pools_keeps_their_names_apart(hybrid):
    sparse = memory(KV, INDEX)
    both = with_draft(hybrid, sparse)
    assert [pool.name for pool in both.pools[-2:]] == ["draft_kv", "draft_index"]


def test_a_draft_goes_to_the_last_stage(hybrid):
    first, last = with_draft(hybrid, draft(3)).stages(2)
    assert first.pool("draft").layers == ()  # In the tree of all, in the memory of one.
    assert last.pool("draft").layers == (4, 5, 6)


def test_without_its_draft_a_memory_is_that_of_the_target(hybrid):
    both = with_draft(hybrid, draft(3))
    assert both.without_draft.schema_digest() == hybrid.schema_digest()
    for ranks in (1, 2, 4):
        for ours, theirs in zip(both.stages(ranks), hybrid.stages(ranks), strict=True):
            assert ours.without_draft.schema_digest() == theirs.schema_digest()
    sliced = both.slice(tensor_rank=1, tensor_ranks=2).without_draft
    assert sliced.schema_digest() == hybrid.slice(tensor_rank=1, tensor_ranks=2).schema_digest()
    assert hybrid.without_draft == hybrid


def test_an_object_has_an_anchor_with_what_it_requires_or_an_optional_sidecar(hybrid):
    both = with_draft(hybrid, draft(1))
    assert [pool.name for pool in both.object_pools("kv")] == ["kv", "index"]
    assert [pool.name for pool in both.object_pools("draft")] == ["draft"]


def test_drafts_that_cannot_follow_are_refused(hybrid):
    with pytest.raises(SpecError, match="can only follow a target that keeps as much history"):
        with_draft(memory(SWA), draft(1))
    with pytest.raises(SpecError, match="declare the draft with page_tokens=16"):
        with_draft(hybrid, draft(1, page_tokens=32))


def test_a_windowed_draft_follows_the_shortest_anchor_that_covers_it(hybrid):
    both = with_draft(hybrid, memory(SWA))
    assert both.pool("draft").follows == "swa"
    assert not both.pool("draft").reuse.required


# -- identity -------------------------------------------------------------------------------


def test_the_digest_is_the_same_for_the_same_schema(hybrid):
    assert memory(KV, INDEX, SWA).schema_digest() == hybrid.schema_digest()


def test_the_digest_differs_whenever_stored_bytes_would_mean_something_else(hybrid):
    fp32 = Entry(tuple(replace(field, dtype=DType.FP32) for field in HEADS.fields))
    swapped = Entry(HEADS.fields[::-1])
    aligned = replace(HEADS, row_align_bytes=576)
    reshaped = Entry(tuple(replace(field, shape=(8, 8)) for field in HEADS.fields))
    eight_bits = scaled("index_key", 32, KVDType.FP8)
    unscaled = replace(eight_bits, encoding=Encoding.PLAIN)
    variants = [
        hybrid,
        *(memory(KV, replace(INDEX, entry=e), SWA) for e in (eight_bits, unscaled)),
        memory(KV, INDEX, SWA, page_tokens=32),
        memory(KV, INDEX, SWA, holdback=1),
        memory(KV, SWA),
        memory(KV, SWA, INDEX),
        *(memory(replace(KV, entry=e), INDEX, SWA) for e in (fp32, swapped, aligned, reshaped)),
        memory(replace(KV, layers=(1, 2)), INDEX, SWA),
        memory(replace(KV, name="history"), replace(INDEX, follows="history"), SWA),
        memory(KV, replace(INDEX, tokens_per_entry=4), SWA),
        memory(KV, replace(INDEX, tail_entries=4), SWA),
        memory(KV, replace(INDEX, follows=None), SWA),
        memory(KV, INDEX, replace(SWA, reuse=Reuse(reach=30))),
        memory(KV, replace(INDEX, reuse=Reuse(required=False)), SWA),
        hybrid.slice(),
        hybrid.slice(range(0, 2)),
        hybrid.slice(tensor_ranks=2),
        hybrid.slice(tensor_rank=1, tensor_ranks=2),
        with_draft(hybrid, draft(1)),
    ]
    digests = {variant.schema_digest() for variant in variants}
    assert len(digests) == len(variants)
