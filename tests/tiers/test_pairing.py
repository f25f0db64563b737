"""Pairing: every byte of every required field comes to its place, whatever the two sides are."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.spec import ALL, DType, ModelMemory, SpecError, with_draft
from kvtide.spec.config import Config
from kvtide.spec.families import KVDType, declare_eagle3
from kvtide.spec.residency import served_hot
from kvtide.tiers.layout import Arrangement, Layout, pieces
from kvtide.tiers.manifest import (
    PAGES,
    TAIL,
    Area,
    MemoryKind,
    MemoryManifest,
    RowPlace,
    running_areas,
)
from kvtide.tiers.pairing import Pairing, PairingError, pair
from kvtide.tiers.row_copies import DestinationError, RowCopy, expand
from tests.grids import everything
from tests.tiers.handing_over import (
    FINGERPRINT,
    TAIL_ROWS,
    Content,
    Handover,
    Shape,
    sliced,
    source_ranks,
    target_ranks,
)
from tests.transfer.memories import LAYOUT_PAIRS, MEMORIES, PAGE_TOKENS, family

SELECTED = 8
EAGLE3 = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def with_eagle3(memory: ModelMemory) -> ModelMemory:
    return with_draft(memory, declare_eagle3(Config("EAGLE3", EAGLE3), memory=memory))


def _hot_families() -> dict[str, ModelMemory]:
    """Memories whose attention selects, so that their pools can be served hot."""
    ratios = [0, 4, PAGE_TOKENS, 4, PAGE_TOKENS, 0]
    v4 = {"compress_ratios": ratios, "index_topk": SELECTED}
    return {
        "deepseek_v32_selected": family("deepseek_v32", PAGE_TOKENS, index_topk=SELECTED),
        "deepseek_v32_selected_fp8": family(
            "deepseek_v32", PAGE_TOKENS, KVDType.FP8, index_topk=SELECTED
        ),
        "deepseek_v4_selected": family("deepseek_v4", PAGE_TOKENS, **v4),
        "deepseek_v4_selected_bf16": family("deepseek_v4", PAGE_TOKENS, KVDType.BF16, **v4),
    }


WHOLE = {
    name: memory
    for name, memory in MEMORIES.items()
    if memory.part is None and not memory.draft_sidecars
} | {
    "llama_one_head": family("llama", PAGE_TOKENS, num_key_value_heads=1),
    **_hot_families(),
}
"""Every family and kind of bytes, undivided and without a draft."""


def side(memory: ModelMemory, *, hot: bool = False, draft: bool = False) -> ModelMemory:
    memory = served_hot(memory, SELECTED) if hot else memory
    return with_eagle3(memory) if draft else memory


def hot_ones(memory: ModelMemory) -> bool:
    return any(pool.selected is not None for pool in memory.pools)


def draftable(memory: ModelMemory) -> bool:
    """Whether an anchor keeps as much history as a draft does."""
    return any(anchor.reuse.reach is ALL for anchor in memory.anchors)


def divides(memory: ModelMemory, shape: Shape) -> bool:
    try:
        return bool(sliced(memory, shape))
    except SpecError:
        return False


def slot_counts(memory: ModelMemory, min_slots: int) -> dict[str, int]:
    return {anchor.name: min_slots + number for number, anchor in enumerate(memory.anchors)}


@st.composite
def handovers(draw: st.DrawFn) -> tuple[Handover, dict[str, dict[str, dict[int, int]]]]:
    """Two sides of one model, and which pages go to which slots."""
    memory = WHOLE[draw(st.sampled_from(sorted(WHOLE)))]
    flags = st.booleans() if hot_ones(memory) else st.just(False)
    drafts = st.booleans() if draftable(memory) else st.just(False)
    sides = [side(memory, hot=draw(flags), draft=draw(drafts)) for _ in range(2)]
    shapes = [
        draw(
            st.builds(
                Shape,
                st.integers(1, min(3, memory.layers)),
                st.sampled_from([1, 2, 4]),
                st.sampled_from(Layout),
                st.booleans(),
                st.sampled_from([0, 48]),
            ).filter(lambda shape, one=one: divides(one, shape))  # type: ignore[misc]
        )
        for one in sides
    ]
    pages = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    tables = {
        name: rng.permutation(count)[:pages].astype(np.int32)
        for name, count in slot_counts(sides[0], 5).items()
    }
    sources = source_ranks(sides[0], shapes[0], slot_counts(sides[0], 5))
    targets = target_ranks(sides[1], shapes[1], slot_counts(sides[1], 4))
    content = Content(side(memory, draft=draftable(memory)), seed=1)
    whole, last = {}, {}
    for name, count in slot_counts(sides[1], 4).items():
        wanted = draw(st.lists(st.integers(0, pages - 1), max_size=pages, unique=True))
        whole[name] = dict(zip(wanted, rng.permutation(count).tolist(), strict=False))
        last[name] = {pages - 1: draw(st.integers(0, TAIL_ROWS - 1))}
    return Handover(content, sources, targets, tables), {PAGES: whole, TAIL: last}


@settings(max_examples=150 if everything() else 40, deadline=None)
@given(handovers())
def test_every_byte_of_every_required_field_lands_once_and_no_other_byte_changes(
    drawn: tuple[Handover, dict[str, dict[str, dict[int, int]]]],
) -> None:
    handover, sent = drawn
    for area, slots in sent.items():
        handover.send(area, slots)
    handover.check(sent)
    has_draft = [bool(ranks[0].manifest.draft_fingerprint) for ranks in
                 (handover.sources, handover.targets)]  # fmt: skip
    assert handover.pairing.absent == ({"draft"} if has_draft == [False, True] else set())


def all_sent(
    memories: tuple[ModelMemory, ModelMemory],
    shapes: tuple[Shape, Shape],
    whole: ModelMemory,
    pages: int = 3,
) -> Handover:
    """All pages sent and checked; source slots run backwards, target slots forwards."""
    slots = [slot_counts(memory, pages + 1) for memory in memories]
    tables = {
        name: np.arange(count - 1, count - 1 - pages, -1, np.int32)
        for name, count in slots[0].items()
    }
    sources = source_ranks(memories[0], shapes[0], slots[0])
    targets = target_ranks(memories[1], shapes[1], slots[1])
    handover = Handover(Content(whole, seed=2), sources, targets, tables)
    sent = {
        PAGES: {name: {page: page + 1 for page in range(pages)} for name in slots[1]},
        TAIL: {name: {pages - 1: 1} for name in slots[1]},
    }
    for area, to in sent.items():
        handover.send(area, to)
    handover.check(sent)
    return handover


NAMED = ["deepseek_v4", "deepseek_v32", "qwen3_next", "nemotron_h", "bamba", "falcon_h1", "gpt_oss"]
DIVIDED = [(Shape(2), Shape()), (Shape(), Shape(2)), (Shape(1, 2), Shape()), (Shape(), Shape(1, 2))]


@pytest.mark.parametrize("shapes", DIVIDED, ids=["PP2-1", "PP1-2", "TP2-1", "TP1-2"])
@pytest.mark.parametrize("name", NAMED)
def test_stages_and_tensor_ranks_of_both_sides_need_no_special_case(
    name: str, shapes: tuple[Shape, Shape]
) -> None:
    memory = WHOLE[name]
    all_sent((memory, memory), shapes, memory)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("ranks", [(2, 4), (4, 2), (4, 4), (1, 4), (4, 1)])
def test_ranks_that_share_a_head_send_and_get_it_once(ranks: tuple[int, int], heads: int) -> None:
    memory = family("llama", PAGE_TOKENS, num_key_value_heads=heads)
    handover = all_sent((memory, memory), (Shape(1, ranks[0]), Shape(1, ranks[1])), memory)
    for target in range(ranks[1]):
        senders = [s for s in range(ranks[0]) if target in handover.pairing.targets(s, PAGES)]
        assert len(senders) == min(ranks[0], -(-heads // ranks[1]))


def test_a_field_that_does_not_divide_is_sent_by_the_first_rank_alone() -> None:
    memory = WHOLE["deepseek_v3"]
    handover = all_sent((memory, memory), (Shape(1, 2), Shape(1, 2)), memory)
    assert [handover.pairing.targets(s, PAGES) for s in (0, 1)] == [[0, 1], []]


def test_mamba_groups_are_copied_where_heads_are_divided() -> None:
    """One group of B and C on every rank, and a head of the state on each."""
    memory = WHOLE["bamba"]
    units = {f.name: f.groups or f.shape[0] for f in memory.pool("state").entry.fields}
    assert units == {"conv_x": 4, "conv_b": 1, "conv_c": 1, "ssm": 4}
    handover = all_sent((memory, memory), (Shape(1, 4), Shape(1, 1)), memory)
    sizes = [
        sum(copy.page_bytes for copy in handover.pairing.copies(s, 0, PAGES)
            if copy.pools == ("state",))
        for s in range(4)
    ]  # fmt: skip
    assert sizes[0] > sizes[1] == sizes[2] == sizes[3] > 0


# -- hot pools, drafts, devices -------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, memory in WHOLE.items() if hot_ones(memory)])
@pytest.mark.parametrize("hot", [(True, False), (False, True), (True, True)])
def test_a_hot_pool_on_one_side_may_be_a_sidecar_on_the_other(
    name: str, hot: tuple[bool, bool]
) -> None:
    memory = WHOLE[name]
    both = (side(memory, hot=hot[0]), side(memory, hot=hot[1]))
    handover = all_sent(both, (Shape(2), Shape(1, 2)), memory)
    regions = {copy.source_region for s in (0, 1) for copy in handover.pairing.copies(s, 0, PAGES)}
    assert regions == ({4, 7} if hot[0] else {4})


def test_an_eagle3_draft_travels_and_is_absent_where_only_the_decode_side_has_it() -> None:
    memory = WHOLE["llama"]
    drafted = with_eagle3(memory)
    shapes = (Shape(2), Shape(1, 2))
    assert all_sent((drafted, drafted), shapes, drafted).pairing.absent == set()
    assert all_sent((memory, drafted), shapes, drafted).pairing.absent == {"draft"}
    assert all_sent((drafted, memory), shapes, drafted).pairing.absent == set()


def test_pages_of_another_draft_count_as_absent() -> None:
    drafted = with_eagle3(WHOLE["llama"])
    sources, targets = two_sides(drafted, drafted)
    other = [replace(one, draft_fingerprint=b"other") for one in sources]
    pairing = pair(other, targets)
    assert pairing.absent == {"draft"}
    assert "draft" not in pools_of(pairing, 0, 0)
    assert "draft" in pools_of(pair(sources, targets), 0, 0)


def test_a_draft_is_absent_on_all_ranks_if_a_layer_of_it_is_missing() -> None:
    """All ranks keep the same tree, which records what pages carry."""
    memory = WHOLE["gpt_oss"]
    longer = with_draft(memory, declare_eagle3(
        Config("EAGLE3", EAGLE3 | {"num_hidden_layers": 2}), memory=memory))  # fmt: skip
    sources, targets = two_sides(with_eagle3(memory), longer)
    pairing = pair([replace(one, draft_fingerprint=b"") for one in sources],
                   [replace(one, draft_fingerprint=b"") for one in targets])  # fmt: skip
    assert pairing.absent == {"draft"}


def test_what_holds_state_within_a_page_goes_with_the_tail_alone() -> None:
    memory = WHOLE["deepseek_v4"]
    sources, targets = two_sides(memory, memory)
    pairing = pair(sources, targets)
    within = {pool.name for pool in memory.pools if pool.reuse.reach == 0}
    assert within
    assert not pools_of(pairing, 0, 0) & within
    assert within <= pools_of(pairing, 0, 0, TAIL)


def test_a_device_is_a_target_as_the_host_is() -> None:
    memory = WHOLE["deepseek_v4_selected"]
    hot = side(memory, hot=True)
    shape = Shape(on_device=True, layout=Layout.PAGE_FIRST)
    handover = all_sent((memory, hot), (Shape(), shape), memory)
    copies = handover.pairing.copies(0, 0, PAGES)
    assert {copy.target_region for copy in copies} == {5, 2}
    assert {copy.target_region for copy in copies if copy.target_anchor == "c4"} == {2}


# -- how many runs --------------------------------------------------------------------------


@pytest.mark.parametrize("layouts", LAYOUT_PAIRS, ids=lambda pair: "-".join(x.value for x in pair))
@pytest.mark.parametrize("name", ["deepseek_v4", "qwen3_next", "gpt_oss", "llama_fp8"])
def test_equal_sides_copy_in_as_few_runs_as_tiers_do(
    name: str, layouts: tuple[Layout, Layout]
) -> None:
    memory = WHOLE[name]
    counts = slot_counts(memory, 5)
    source = Arrangement(memory, counts, layouts[0])
    target = Arrangement(memory.at_rest, counts, layouts[1])
    pairing = pair([manifest(source)], [landing(target)])
    for anchor in memory.anchors:
        wanted = pieces(source, target, anchor.name, range(memory.end_layer))
        found = [c for c in pairing.copies(0, 0, PAGES) if c.target_anchor == anchor.name]
        assert {(c.source_offset, c.target_offset, c.bytes, c.count) for c in found} == {
            (p.source_offset, p.target_offset, p.bytes, 1) for p in wanted
        }


def test_slots_that_follow_each_other_on_both_sides_are_one_run() -> None:
    memory = WHOLE["llama"]
    copies = whole_copies(memory, Layout.LAYER_FIRST)
    table = {"kv": np.array([3, 4, 5, 9, 10], np.int32)}
    runs = expand(copies, table, "kv", [0, 1, 2, 3, 4], [6, 7, 8, 9, 1])
    assert len(copies) == memory.layers
    assert len(runs) == 3 * len(copies)
    row = copies[0].bytes
    assert sorted(set(runs.bytes.tolist())) == [row, 3 * row]


def test_a_page_that_is_one_run_with_nothing_behind_it_joins_its_neighbours() -> None:
    memory = WHOLE["llama"]
    copies = whole_copies(memory, Layout.PAGE_FIRST_DIRECT)
    runs = expand(copies, {"kv": np.arange(8, dtype=np.int32)}, "kv", range(8), range(1, 9))
    assert len(copies) == len(runs) == 1
    assert runs.bytes.tolist() == [8 * memory.slot_bytes("kv")]


def test_split_heads_are_runs_by_entry() -> None:
    memory = WHOLE["llama_every_head"]
    sources = [rank.manifest for rank in source_ranks(memory, Shape(1, 2), {"kv": 4})]
    targets = [rank.manifest for rank in target_ranks(memory, Shape(), {"kv": 4})]
    copies = pair(sources, targets).copies(1, 0, PAGES)
    assert len(copies) == 2 * memory.layers
    assert {copy.count for copy in copies} == {PAGE_TOKENS}
    half = memory.pool("kv").entry.fields[0].bytes // 2
    assert {copy.bytes for copy in copies} == {half}
    runs = expand(copies, {"kv": np.array([2, 0], np.int32)}, "kv", [0, 1], [1, 3])
    assert len(runs) == len(copies) * PAGE_TOKENS * 2


def test_a_source_without_layers_of_an_anchor_writes_nothing() -> None:
    memory = WHOLE["nemotron_h"]
    sources = [rank.manifest for rank in source_ranks(memory, Shape(2), slot_counts(memory, 4))]
    targets = [rank.manifest for rank in target_ranks(memory, Shape(), slot_counts(memory, 4))]
    pairing = pair(sources, targets)
    tables = {anchor.name: np.arange(4, dtype=np.int32) for anchor in memory.anchors}
    assert memory.pool("kv").layers == (3,)
    assert len(expand(pairing.copies(0, 0, PAGES), tables, "kv", [0, 1], [1, 2])) == 0
    assert len(expand(pairing.copies(1, 0, PAGES), tables, "kv", [0, 1], [1, 2])) > 0
    nothing = expand(pairing.copies(1, 0, PAGES), tables, "kv", [], [])
    assert len(nothing) == 0
    assert nothing.source.dtype == nothing.target_region.dtype == np.int64


def test_expanding_is_no_loop_over_runs() -> None:
    """1,000 pages × 150 rows, against adding up its runs one by one."""
    copies = [
        RowCopy(("kv",), 0, "kv", n << 24, 4096, 0, "kv", n * 4096, 150 * 4096, 1000, 4096)
        for n in range(150)
    ]
    table = {"kv": np.random.default_rng(1).permutation(1000).astype(np.int32)}
    pages = np.arange(1000)

    def seconds(work: object) -> float:
        assert callable(work)
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    runs = expand(copies, table, "kv", pages, pages)
    assert len(runs) == 150_000

    def one_by_one() -> None:
        for copy in copies:
            for here, there in zip(table["kv"].tolist(), range(1000), strict=True):
                assert copy.source_offset + here * 4096 >= 0
                assert copy.target_offset + there * copy.target_stride >= 0

    vectorised = min(seconds(lambda: expand(copies, table, "kv", pages, pages)) for _ in range(7))
    assert vectorised < min(seconds(one_by_one) for _ in range(3)) / 4


# -- refusals -------------------------------------------------------------------------------


def two_sides(
    source: ModelMemory, target: ModelMemory
) -> tuple[list[MemoryManifest], list[MemoryManifest]]:
    ranks = (
        source_ranks(source, Shape(), slot_counts(source, 3)),
        target_ranks(target, Shape(), slot_counts(target, 3)),
    )
    ours, theirs = ([rank.manifest for rank in side] for side in ranks)
    return ours, theirs


def manifest(arrangement: Arrangement) -> MemoryManifest:
    return MemoryManifest.of(arrangement.memory, running_areas(arrangement), FINGERPRINT)


def landing(arrangement: Arrangement) -> MemoryManifest:
    area = Area.of(PAGES, arrangement, MemoryKind.HOST)
    return MemoryManifest.of(arrangement.memory, [area], FINGERPRINT)


def pools_of(pairing: Pairing, source: int, target: int, area: str = PAGES) -> set[str]:
    return {pool for copy in pairing.copies(source, target, area) for pool in copy.pools}


def whole_copies(memory: ModelMemory, layout: Layout) -> tuple[RowCopy, ...]:
    source, target = (Arrangement(memory, slot_counts(memory, 12), layout) for _ in range(2))
    return pair([manifest(source)], [landing(target)]).copies(0, 0, PAGES)


def refused(sources: list[MemoryManifest], targets: list[MemoryManifest], *words: str) -> None:
    with pytest.raises(PairingError) as raised:
        pair(sources, targets)
    for word in words:
        assert word in str(raised.value)


def changed(manifest: MemoryManifest, **values: object) -> MemoryManifest:
    """With other values in the shape of every row of kv."""

    def row(one: RowPlace) -> RowPlace:
        return replace(one, shape=replace(one.shape, **values)) if one.pool == "kv" else one

    areas = (replace(area, rows=tuple(map(row, area.rows))) for area in manifest.areas)
    return replace(manifest, areas=tuple(areas))


def test_pages_of_another_size_are_refused() -> None:
    sources, targets = two_sides(family("llama", 16), family("llama", 32))
    refused(sources, targets, "pages of 16 tokens", "decode side of 32", "--page-tokens")


def test_another_dtype_is_refused_by_pool_and_layer_before_fingerprints_are() -> None:
    sources, targets = two_sides(WHOLE["llama"], WHOLE["llama_fp8"])
    sources = [replace(one, fingerprint=b"other") for one in sources]
    words = "pool kv, layer 0", "k in bf16", "decode side k in fp8_e4m3", "--kv-dtype"
    refused(sources, targets, *words)


def test_another_packing_is_refused() -> None:
    words = "latent in bf16, rope in bf16 (plain)", "latent_scale in fp32", "(scaled)"
    refused(*two_sides(WHOLE["deepseek_v3"], WHOLE["deepseek_v3_fp8"]), *words)
    refused(*two_sides(WHOLE["deepseek_v4"], WHOLE["deepseek_v4_bf16"]), "pool c", "(joined)")


def test_other_weights_are_refused() -> None:
    sources, targets = two_sides(WHOLE["llama"], WHOLE["llama"])
    other = [replace(one, fingerprint=bytes.fromhex("00ff" * 16)) for one in sources]
    refused(other, targets, "fingerprint 00ff00ff00ff", FINGERPRINT.hex()[:12], "same weights")


def test_a_layer_or_a_pool_that_no_source_has_is_refused() -> None:
    shorter = family("llama", PAGE_TOKENS, num_hidden_layers=3)
    refused(*two_sides(shorter, WHOLE["llama"]), "pool kv, layer 3", "no prefill rank has it")
    refused(*two_sides(WHOLE["llama"], WHOLE["gpt_oss"]), "pool swa", "same model")
    stages = source_ranks(WHOLE["llama"], Shape(2), {"kv": 3})
    targets = target_ranks(WHOLE["llama"], Shape(), {"kv": 3})
    ours, theirs = [stages[0].manifest], [targets[0].manifest]
    refused(ours, theirs, "pool kv, layer 2", "connect all prefill ranks")


def test_a_stage_needs_nothing_of_layers_that_it_lacks() -> None:
    last = target_ranks(WHOLE["llama"], Shape(2), {"kv": 3})[1]
    shorter = family("llama", PAGE_TOKENS)
    sources, _ = two_sides(shorter, shorter)
    assert pools_of(pair(sources, [last.manifest]), 0, 0) == {"kv"}


def test_heads_that_no_connected_rank_has_are_refused() -> None:
    ranks = source_ranks(WHOLE["llama"], Shape(1, 2), {"kv": 3})
    targets = target_ranks(WHOLE["llama"], Shape(), {"kv": 3})
    ours, theirs = [ranks[0].manifest], [targets[0].manifest]
    refused(ours, theirs, "pool kv, layer 0, field k: the decode side needs unit 1 of 2")


def test_another_number_of_heads_is_refused() -> None:
    both = WHOLE["llama"], WHOLE["llama_every_head"]
    refused(*two_sides(*both), "field k: 2 heads", "4 on each of 1 of the decode", "same model")
    # A rank with one head has all that there are, or its own.
    ranks = source_ranks(WHOLE["llama"], Shape(1, 2), {"kv": 3})
    targets = target_ranks(WHOLE["llama_every_head"], Shape(), {"kv": 3})
    ours, theirs = [rank.manifest for rank in ranks], [targets[0].manifest]
    refused(ours, theirs, "1 heads or groups on each of 2", "4 on each of 1")


def test_another_head_size_is_refused() -> None:
    wide = family("llama", PAGE_TOKENS, head_dim=16)
    words = "pool kv, layer 0, field k", "2 × (1, 8) on the prefill", "2 × (1, 16) on the decode"
    refused(*two_sides(WHOLE["llama"], wide), *words)


@pytest.mark.parametrize("what", ["entries", "tokens_per_entry", "tail_entries"])
def test_other_entries_are_refused(what: str) -> None:
    sources, targets = two_sides(WHOLE["llama"], WHOLE["llama"])
    words = f"pool kv, layer 0: `{what}` is", "and 2 on the decode side"
    refused(sources, [changed(targets[0], **{what: 2})], *words)


def test_rows_that_are_padded_otherwise_are_copied_without_their_padding() -> None:
    sources, targets = two_sides(WHOLE["llama"], WHOLE["llama"])
    size = targets[0].areas[0].rows[0].shape.bytes
    padded = pair([changed(sources[0], bytes=size + 48)], targets)
    assert {copy.bytes for copy in padded.copies(0, 0, TAIL)} == {size}
    shape = targets[0].areas[0].rows[0].shape
    assert shape.entries * shape.entry_bytes == size


def test_a_field_that_divides_on_one_side_alone_is_refused() -> None:
    sources, targets = two_sides(WHOLE["llama"], WHOLE["llama"])
    row = targets[0].areas[0].rows[0]
    fields = tuple(replace(one, sharded=False, units=1) for one in row.shape.fields)
    refused(sources, [changed(targets[0], fields=fields)], "field k", "1 × (2, 8)")


def test_ranks_of_two_servers_are_refused() -> None:
    sources, targets = two_sides(WHOLE["llama"], WHOLE["llama"])
    other = replace(targets[0], fingerprint=b"other")
    refused(sources, [*targets, other], "ranks of the decode side differ in `fingerprint`")
    other = replace(sources[0], tensor_ranks=2)
    refused([*sources, other], targets, "ranks of the prefill side differ in `tensor_ranks`")
    refused([], targets, "the prefill side has no rank")


def test_an_optional_pool_of_the_same_draft_in_another_dtype_is_refused() -> None:
    memory = WHOLE["llama"]
    eagle3 = Config("EAGLE3", EAGLE3)
    plain, eight = (
        with_draft(memory, declare_eagle3(eagle3, memory=memory, kv_dtype=kind))
        for kind in (KVDType.BF16, KVDType.FP8)
    )
    refused(*two_sides(plain, eight), "pool draft, layer 4", "k in bf16", repr(DType.FP8_E4M3))


def _tables(**slots: list[int]) -> Mapping[str, npt.NDArray[np.int32]]:
    return {name: np.array(one, np.int32) for name, one in slots.items()}


def test_a_slot_outside_the_target_or_a_page_that_the_source_lacks_is_refused() -> None:
    copies = whole_copies(WHOLE["llama"], Layout.LAYER_FIRST)
    with pytest.raises(DestinationError, match="slot 12 of kv: the decode side has 12"):
        expand(copies, _tables(kv=[0, 1]), "kv", [0, 1], [3, 12])
    with pytest.raises(DestinationError, match="slot -1 of kv"):
        expand(copies, _tables(kv=[0, 1]), "kv", [0], [-1])
    with pytest.raises(DestinationError, match="page 1 of kv: the sequence has no such page"):
        expand(copies, _tables(kv=[0, -1]), "kv", [0, 1], [3, 4])
    for page in (2, -1):
        with pytest.raises(DestinationError, match=f"page {page} of kv"):
            expand(copies, _tables(kv=[0, 1]), "kv", [0, page], [3, 4])
