"""Pools with a selector may live on the host; what that declares, and when it is refused."""

from dataclasses import replace

import pytest

from kvtide.spec import (
    DType,
    Entry,
    Field,
    ModelMemory,
    PoolSpec,
    Reuse,
    SpecError,
    Tier,
    catalog,
    with_draft,
)
from kvtide.spec.families import declare, draft_for
from kvtide.spec.residency import (
    HotShape,
    Residency,
    hot_queries,
    pages_spanned,
    served_hot,
    step_queries,
)

GLM = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "index_head_dim": 32,
    "index_n_heads": 16,
    "index_topk": 64,
}
SHARED = {"indexer_types": ["full", "shared", "full", "shared", "shared", "full"]}


def glm(**fields: object) -> ModelMemory:
    return declare(GLM | fields, model="glm", page_tokens=16)


def owners(memory: ModelMemory) -> dict[str, str]:
    """Whose slots every pool uses, in declaration order."""
    return {pool.name: pool.follows or pool.name for pool in memory.pools}


# -- what is declared -----------------------------------------------------------------------


def test_index_keys_own_device_slots_where_latents_are_hot():
    memory = served_hot(catalog.resolve("deepseek-v3.2"), 4096)
    assert owners(memory) == {"index": "index", "kv": "kv"}
    assert [(a.name, a.hot, a.home) for a in memory.anchors] == [
        ("index", None, Tier.DEVICE),
        ("kv", 4096, Tier.HOST),
    ]
    assert memory.pool("kv").selected == 2048
    assert [pool.name for pool in memory.hot_pools] == ["kv"]


@pytest.mark.parametrize("sharing", [{}, SHARED], ids=["own indexers", "shared indexers"])
def test_layers_of_hot_latents_are_those_of_the_model(sharing):
    resident = glm(**sharing)
    memory = served_hot(resident, 64)
    assert owners(memory) == {"index": "index", "kv": "kv"}
    for name in ("index", "kv"):
        assert memory.pool(name).layers == resident.pool(name).layers
        assert memory.pool(name).entry == resident.pool(name).entry
    assert len(memory.pool("index").layers) == (3 if sharing else 6)


def test_c4_leaves_its_anchor_and_all_else_of_v4_stays_as_it_was():
    resident = catalog.resolve("deepseek-v4-flash")
    memory = served_hot(resident, 4096)
    assert memory.pools[:-1] == tuple(pool for pool in resident.pools if pool.name != "c4")
    assert memory.pools[-1] == replace(resident.pool("c4"), follows=None, hot=4096)
    assert [a.name for a in memory.anchors] == ["kv", "swa", "c4"]


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5", "deepseek-v4-flash", "deepseek-v4-pro"])
def test_device_pages_lack_the_hot_pools_and_the_host_has_all_that_lasts(name):
    resident = catalog.resolve(name)
    memory = served_hot(resident, 4096)
    hot = {pool.name for pool in memory.hot_pools}
    on_device = {pool.name for pool in memory.kept_in(Tier.DEVICE).pools}
    assert on_device == {pool.name for pool in resident.pools} - hot
    for tier in (Tier.HOST, Tier.STORAGE):
        assert set(owners(memory.kept_in(tier))) == set(owners(resident.kept_in(tier)))
    total = memory.kept_in(Tier.DEVICE).history_bytes_per_token() + sum(
        pool.page_bytes(memory.page_tokens) / memory.page_tokens for pool in memory.hot_pools
    )
    assert total == resident.history_bytes_per_token()


def test_a_draft_follows_what_stays_on_the_device():
    memory = served_hot(glm(), 128, queries=2)
    both = with_draft(memory, draft_for(memory, 1))
    assert both.pool("draft").follows == "index"
    assert both.in_device_pages.pool("draft") == both.pool("draft")
    assert both.without_draft == replace(memory, model=both.model)


def test_every_rank_has_the_hot_anchor_with_its_own_layers():
    memory = served_hot(glm(**SHARED), 64)
    first, second, third = memory.stages(3, tensor_ranks=2)
    for part, layers in ((first, (0, 1)), (second, (2, 3)), (third, (4, 5))):
        assert [(a.name, a.hot) for a in part.anchors] == [("index", None), ("kv", 64)]
        assert part.pool("kv").layers == layers
        assert part.hot_pools == (part.pool("kv"),)
    last_layers = memory.slice(range(3, 5))
    assert last_layers.pool("index").layers == ()
    assert last_layers.in_device_pages.slot_bytes("index") == 0


# -- what stored bytes mean -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("deepseek-v3.2", "d759aa426e3bf4ad"),
        ("glm-5", "17f57eba456888e2"),
        ("deepseek-v4-flash", "9cfb3ab8180d02e6"),
        ("llama-3.1-8b", "f5bf2c5ee12e1c5d"),
    ],
)
def test_stores_filled_before_pools_had_a_residency_are_still_read(name, digest):
    assert catalog.resolve(name).schema_digest().hex().startswith(digest)


def test_a_selector_is_not_part_of_the_schema_and_neither_is_the_size_of_a_hot_buffer():
    assert glm(index_topk=32).schema_digest() == glm(index_topk=64).schema_digest()
    digests = {served_hot(glm(), entries).schema_digest() for entries in (64, 65, 4096)}
    assert len(digests) == 1


def test_pages_of_the_two_residencies_are_kept_apart():
    """Their objects hold other pools: index keys are beside the latents in one of them only."""
    resident = glm()
    memory = served_hot(resident, 64)
    assert memory.schema_digest() != resident.schema_digest()
    grouped = [[pool.name for pool in m.object_pools("kv")] for m in (resident, memory)]
    assert grouped == [["kv", "index"], ["kv"]]


# -- refusals -------------------------------------------------------------------------------


def test_a_model_without_a_selector_is_refused():
    with pytest.raises(SpecError, match=r"reads all entries of all its pools.*--resident all"):
        served_hot(catalog.resolve("qwen3-8b"), 4096)


def test_a_config_that_does_not_say_how_many_are_selected_is_refused():
    unknown = declare(
        {key: value for key, value in GLM.items() if key != "index_topk"}, model="glm"
    )
    with pytest.raises(SpecError, match="reads all entries"):
        served_hot(unknown, 4096)


def test_a_hot_buffer_smaller_than_one_selection_is_refused():
    with pytest.raises(SpecError, match=r"a query selects up to 64 of kv; use --resident hot:64$"):
        served_hot(glm(), 63)
    assert served_hot(glm(), 64).pool("kv").hot == 64


def test_a_hot_buffer_smaller_than_the_selections_of_all_drafts_is_refused():
    with pytest.raises(SpecError, match=r"drafts make 4 queries of a step; use --resident hot:256"):
        served_hot(glm(), 255, queries=4)
    assert served_hot(glm(), 256, queries=4).pool("kv").hot == 256


def test_a_history_without_index_keys_on_the_device_is_refused():
    memory = glm()
    alone = replace(memory, pools=(memory.pool("kv"),))
    with pytest.raises(SpecError, match=r"nothing of kv's history would stay.*--resident all"):
        served_hot(alone, 64)


@pytest.mark.parametrize(
    ("pool", "fields", "sentence"),
    [
        ("kv", {"selected": None}, "reads all its entries.*leave it resident"),
        ("kv", {"hot": 63}, "a query selects up to 64; use at least 64"),
        ("kv", {"follows": "index"}, "no history with slots of its own; make it one"),
        ("kv", {"reuse": Reuse(reach=31)}, "no history with slots of its own; make it one"),
        ("index", {"follows": "kv"}, "others follow it to the host; let them own slots"),
        ("index", {"reuse": Reuse(reach=31)}, "no history stays on the device"),
    ],
)
def test_a_memory_that_cannot_be_served_hot_is_no_memory(pool, fields, sentence):
    memory = served_hot(glm(), 64)
    pools = tuple(replace(p, **fields) if p.name == pool else p for p in memory.pools)
    with pytest.raises(SpecError, match=sentence):
        replace(memory, pools=pools)


# -- how it is asked for --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "residency"),
    [
        ("all", Residency()),
        ("auto", Residency(auto=True)),
        ("hot:4096", Residency(4096)),
        ("hot:1", Residency(1)),
    ],
)
def test_a_residency_is_read_and_written_alike(text, residency):
    assert Residency.parse(text) == residency
    assert str(residency) == text


@pytest.mark.parametrize(
    "text", ["", "hot", "hot:", "hot:0", "hot:-1", "hot:4k", "cold:1", "All", "all:1", "hot:1:2"]
)
def test_what_is_no_residency_is_refused_with_the_remedy(text):
    with pytest.raises(SpecError, match="is no residency; use all, auto, or hot:4096"):
        Residency.parse(text)


def test_a_residency_is_applied_to_a_memory():
    memory = glm()
    assert Residency().of(memory) is memory
    assert Residency(64).of(memory) == served_hot(memory, 64)


# -- the device memory of a hot pool --------------------------------------------------------


def test_hot_buffers_of_all_layers_come_first_then_rings_then_the_gather_region():
    kv = served_hot(glm(), 100).pool("kv")
    shape = HotShape.of(kv, 16, rows=3, longest=40)
    assert (shape.layers, shape.rows, shape.row_pages) == (6, 3, 7)  # 100 entries: 7 pages of 16
    assert (shape.ring_pages, shape.gather_pages) == (1, 40)
    assert shape.first_ring == 6 * 3 * 7
    assert shape.first_gathered == shape.first_ring + 3
    assert shape.pages == shape.first_gathered + 40
    # And which entry every slot holds, when it was used, and marks by sequence and gathered entry.
    slots, gathered = 6 * 3 * 7 * 16, 40 * 16
    assert shape.bytes == shape.pages * kv.row_bytes(16) + 8 * slots + 4 * gathered * (3 + 1)


def test_pages_of_compressed_entries_hold_fewer():
    c4 = served_hot(catalog.resolve("deepseek-v4-flash"), 4096).pool("c4")
    shape = HotShape.of(c4, 256, rows=1, longest=0)
    assert shape.row_pages == 4096 // 64
    assert hot_queries(c4) == 8
    assert shape.ring_pages == 2


def test_hot_queries_are_the_tokens_whose_selections_fit():
    for entries, queries in ((64, 1), (127, 1), (128, 2), (640, 10)):
        assert hot_queries(served_hot(glm(), entries).pool("kv")) == queries


@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_ring_holds_all_pages_that_a_step_can_touch(page):
    for tokens in range(1, 40):
        touched = {(start + tokens - 1) // page - start // page + 1 for start in range(page)}
        assert pages_spanned(tokens, page) == max(touched)


def test_a_step_has_more_queries_where_states_are_put_back() -> None:
    assert step_queries(glm(), 0) == 1 and step_queries(glm(), 3) == 4
    stated = replace(glm(), pools=(*glm().pools, _STATE))
    assert step_queries(stated, 3) == 7 and step_queries(stated, 0) == 1
    with pytest.raises(SpecError, match=f"7 queries of a step; use --resident hot:{7 * 64}$"):
        Residency(4 * 64).of(stated, drafts=3)


_STATE = PoolSpec(
    "state",
    (0,),
    Entry((Field("x", (1,), DType.FP32),)),
    tail_entries=1,
    reuse=Reuse(reach=1, stride=64),
)
