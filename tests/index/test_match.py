"""The one rule of reuse, against its definition, and what `why` says about it."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvtide.index import Index, Namespace, WantedPages
from kvtide.index.match.match import deepest_boundary, read_order, shared_pages
from kvtide.spec import ModelMemory, Tier, with_draft
from kvtide.testing.naive import NaiveIndex
from tests.grids import everything
from tests.index.building import back_up, build, found, keep, lease_for
from tests.index.memories import ALL_MEMORIES, FULL, PAGE, RECURRENT, THREE, WINDOW

PAGES = 8
STORED_PAGES = 16
TEXT = list(range(1, PAGES * PAGE + 2))


def _scattered(name: str, cells: list[set[int]]) -> tuple[Index, NaiveIndex]:
    """A chain of single-page nodes, each resident in the cells asked for."""
    memory = ALL_MEMORIES[name]
    index, naive = build(memory), NaiveIndex(memory)
    tree, keys = index.tree, naive.page_keys(TEXT)
    prompt = index.prompt(TEXT)
    node = tree.root(prompt)
    for page, held in enumerate(cells):
        start = page * tree.page_bytes
        node = tree.add_leaf(node, prompt.body[start : start + tree.page_bytes], 1)
        for cell in sorted(held):
            tier, anchor = divmod(cell, len(memory.anchors))
            where = tree.cells[cell]
            assert where.slots.reserve(1)
            tree.hold(node, cell, where.slots.take(1))
            where.queue.offer(node)
            naive.readable[Tier(tier), memory.anchors[anchor].name].add(keys[page])
    return index, naive


@settings(deadline=None, max_examples=60 if everything() else 30)
@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
@given(data=st.data())
def test_the_boundary_is_the_deepest_that_the_definition_allows(name: str, data) -> None:
    anchors = len(ALL_MEMORIES[name].anchors)
    often = st.lists(st.integers(0, 3 * anchors - 1), max_size=4 * anchors).map(set)
    cells = data.draw(st.lists(often, min_size=PAGES, max_size=PAGES))
    index, naive = _scattered(name, cells)
    for length in (1, 2 * PAGE, 5 * PAGE + 1, len(TEXT) - 1, len(TEXT)):
        for slowest in Tier:
            hit = index.match(index.prompt(TEXT[:length]), slowest)
            assert hit.boundary == naive.boundary(TEXT[:length], slowest=slowest)
            assert bool(index.why(hit)) == (hit.boundary < hit.limit)


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
@pytest.mark.parametrize("hole", range(PAGES))
def test_one_missing_page_of_one_pool_stops_just_what_it_must(name: str, hole: int) -> None:
    memory = ALL_MEMORIES[name]
    anchors = set(range(len(memory.anchors)))
    for missing, pool in enumerate(memory.anchors):
        cells = [anchors - {missing} if page == hole else anchors for page in range(PAGES)]
        index, _ = _scattered(name, [set(held) for held in cells])
        reach = pool.reuse.reach_pages(PAGE)
        whole = reach is not None and hole + reach < PAGES
        expected = PAGES if whole or not pool.reuse.required else hole
        assert index.match(index.prompt(TEXT)).boundary == expected


@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
def test_a_lease_keeps_just_the_pages_its_boundary_needs(name: str) -> None:
    memory = ALL_MEMORIES[name]
    index, _ = _scattered(name, [set(range(len(memory.anchors))) for _ in range(PAGES)])
    text = TEXT[: 6 * PAGE + max(1, memory.holdback)]
    lease = lease_for(index, text)
    index.clear(Tier.DEVICE)
    assert lease.boundary == index.match(index.prompt(text)).boundary == 6
    for pool in memory.anchors:
        needed = pool.reuse.reach_pages(PAGE) or 6
        assert index.resident_pages(Tier.DEVICE, pool.name) == needed
    index.release(lease)
    index.clear(Tier.DEVICE)
    assert index.tree.nodes == 0


@pytest.mark.parametrize(
    ("page", "tokens", "limit"), [(64, 63, 0), (64, 64, 0), (64, 65, 1), (64, 128, 1), (64, 129, 2)]
)
@pytest.mark.parametrize("memory", [FULL, with_draft(FULL, FULL)], ids=lambda memory: memory.model)
def test_a_token_is_always_left_to_compute(memory, page: int, tokens: int, limit: int) -> None:
    index = build(replace(memory, page_tokens=page), 200)
    text = list(range(tokens + 64))
    keep(index, text)
    hit = index.match(index.prompt(text[:tokens]))
    assert hit.boundary == hit.limit == limit
    assert hit.boundary * page < tokens


@pytest.mark.parametrize("tokens", [63, 64, 65, 127, 128, 129])
def test_only_full_pages_are_kept(tokens: int) -> None:
    index = build(replace(FULL, page_tokens=64))
    text = list(range(tokens))
    keep(index, text)
    assert index.resident_pages(Tier.DEVICE, "kv") == tokens // 64
    assert found(index, text) == tokens // 64


def _snapshot(index: Index) -> object:
    tree = index.tree
    nodes = [
        (id(n), id(n.parent), list(n.children), *(copy.deepcopy(getattr(n, name)) for name in (
            "tokens", "pages", "depth", "resident", "arriving", "arrivals", "kids", "pins",
            "leases", "queued", "last", "born", "hits", "priority", "key")),
         [None if s is None else s.tolist() for s in n.slots])
        for n in (*tree.walk(), *tree.roots.values())
    ]  # fmt: skip
    cells = [(c.slots.promised, c.slots.free_slots().tolist(), c.resident_pages, c.pinned_pages,
              [(k, e, id(n)) for k, e, n in c.queue._heap]) for c in tree.cells]  # fmt: skip
    return nodes, cells, tree.nodes, tree.tick, list(tree.roots), len(tree.leases)


def test_matching_changes_nothing() -> None:
    index = build(THREE)
    keep(index, TEXT)
    back_up(index, TEXT[:20])
    lease_for(index, TEXT[:13])
    before = _snapshot(index)
    for text in (TEXT, TEXT[:13], [*TEXT[:6], 99, 99, 99], [99] * 9, []):
        for slowest in Tier:
            index.why(index.match(index.prompt(text), slowest))
    assert _snapshot(index) == before
    index.release(lease_for(index, TEXT[:13]))
    assert _snapshot(index) != before, "the snapshot sees changes"


def test_tiers_that_were_not_asked_are_not_looked_at() -> None:
    index = build(FULL)
    keep(index, TEXT[:8])
    back_up(index, TEXT[:8])
    index.clear(Tier.DEVICE)
    lease = lease_for(index, TEXT)
    index.land(index.copy(lease, Tier.HOST, Tier.STORAGE))
    index.release(lease)
    assert [found(index, TEXT[:8], tier) for tier in Tier] == [0, 2, 2]
    index.clear(Tier.HOST)
    assert [found(index, TEXT[:8], tier) for tier in Tier] == [0, 0, 2]


# -- why ------------------------------------------------------------------------------------


def _why(index: Index, text: list[int], slowest: Tier = Tier.STORAGE) -> list[str]:
    return [str(stop) for stop in index.why(index.match(index.prompt(text), slowest))]


def test_why_is_silent_when_nothing_could_be_deeper() -> None:
    index = build(FULL)
    keep(index, TEXT)
    assert _why(index, TEXT) == [] and _why(index, TEXT[:3]) == []


def test_why_names_tokens_that_were_not_kept() -> None:
    index = build(WINDOW)
    keep(index, TEXT[:8])
    assert _why(index, TEXT) == [
        f"{pool}: no prompt with these tokens was kept, resumable up to 8" for pool in ("kv", "swa")
    ]


def test_why_names_the_pool_without_a_checkpoint() -> None:
    index = build(RECURRENT)
    keep(index, TEXT)
    assert _why(index, TEXT[:17]) == ["state: no checkpoint was kept further on, resumable up to 0"]


def test_why_names_the_pool_that_gave_up_pages() -> None:
    index, _ = _scattered("two histories", [{0, 1}, {0, 1}, {1}, {1}, *[set()] * 4])
    assert _why(index, TEXT[:17]) == ["kv: pages were given up, resumable up to 8"]


def test_why_says_that_pages_are_arriving() -> None:
    index = build(FULL)
    keep(index, TEXT[:16])
    back_up(index, TEXT[:16])
    index.clear(Tier.DEVICE)
    index.copy(lease_for(index, TEXT[:17]), Tier.HOST, Tier.DEVICE)
    expected = "kv: pages are still arriving, resumable up to 0"
    assert _why(index, TEXT[:17], Tier.DEVICE) == [expected]
    assert _why(index, TEXT[:17], Tier.HOST) == []


def test_why_says_when_pools_cannot_agree() -> None:
    """The window is whole at 1 and 4, the state stands at 2 and 4, the history ends before 4."""
    index, _ = _scattered("recurrent", [{0}, {0, 1}, {1}, {0, 1}, *[set()] * 4])
    assert _why(index, TEXT[:17]) == ["kv: pages were given up, resumable up to 8"]
    memory = "window and state"
    index, _ = _scattered(memory, [{0, 1}, {0, 1, 2}, {0, 2}, {0, 1}, {0, 1}, {0, 1}, {0}, {0}])
    stops = index.why(index.match(index.prompt(TEXT[: 6 * PAGE + 1])))
    assert {stop.pool: stop.at for stop in stops} == {"state": 3 * PAGE}


@given(st.lists(st.integers(0, 1), max_size=24), st.lists(st.integers(0, 1), max_size=24))
def test_shared_pages_counts_whole_equal_pages(run: list[int], body: list[int]) -> None:
    max_pages = min(len(run), len(body)) // 2
    as_bytes = [b"".join(t.to_bytes(4, "little") for t in text) for text in (run, [7, *body])]
    equal = [run[2 * p : 2 * p + 2] == body[2 * p : 2 * p + 2] for p in range(max_pages)]
    expected = equal.index(False) if False in equal else max_pages
    assert shared_pages(*as_bytes, 4, max_pages, 8) == expected


# -- what others have yet to compute --------------------------------------------------------


@pytest.mark.parametrize("name", ALL_MEMORIES)
@settings(deadline=None, max_examples=60 if everything() else 30)
@given(data=st.data())
def test_common_pages_are_those_that_are_known_once_the_other_is_kept(name: str, data) -> None:
    tokens = st.lists(st.sampled_from([1, 1, 1, 1, 2]), max_size=6 * PAGE)
    ours, theirs = data.draw(tokens), data.draw(tokens)
    index = build(ALL_MEMORIES[name])
    prompt, other = index.prompt(ours), index.prompt(theirs)
    common = index.shared_pages(prompt, other)
    for beyond in range(7):
        assert index.shared_pages(prompt, other, beyond) == (common if common > beyond else 0)
    keep(index, theirs)
    assert index.match(prompt).matched == common


def test_prompts_of_two_namespaces_have_nothing_in_common_nor_have_scratch_prompts() -> None:
    index, tokens = build(FULL), [1] * (3 * PAGE)
    salted, plain = index.prompt(tokens, Namespace(cache_salt="a")), index.prompt(tokens)
    assert index.shared_pages(plain, plain) == 2
    assert index.shared_pages(salted, plain) == index.shared_pages(plain, salted) == 0
    assert index.shared_pages(index.scratch(tokens), index.scratch(tokens)) == 0
    assert index.shared_pages(plain, index.scratch(tokens)) == 0


# -- the rule over bitmaps -------------------------------------------------------------------


def _bits(memory: ModelMemory, chance: random.Random) -> dict[str, np.ndarray]:
    """Mostly there, or hardly, as differs from pool to pool."""
    shares = {anchor.name: chance.choice((0.5, 0.8, 0.95, 1.0)) for anchor in memory.anchors}
    return {
        name: np.array([chance.random() < share for _ in range(STORED_PAGES)])
        for name, share in shares.items()
    }


@pytest.mark.quick
@pytest.mark.parametrize("name", ALL_MEMORIES)
@pytest.mark.parametrize("seed", range(25))
def test_bitmaps_and_the_tree_allow_the_same_boundary(name: str, seed: int) -> None:
    memory, chance = ALL_MEMORIES[name], random.Random(f"{name} {seed}")
    there = _bits(memory, chance)
    index = build(memory, host=64)
    tokens = list(range(STORED_PAGES * PAGE + 1 + memory.holdback))
    wanted = [
        WantedPages(anchor, int(n)) for anchor, bits in there.items() for n in np.flatnonzero(bits)
    ]
    arriving = index.take(lease_for(index, tokens, slowest=Tier.HOST), wanted)
    assert arriving is not None
    index.adopt(arriving, arriving.taken[: len(wanted)], [()] * len(wanted))
    index.forgo(arriving)
    prompt = index.prompt(tokens)
    outline = index.outline(prompt)
    known = index.match(prompt, Tier.HOST).matched
    for anchor, bits in there.items():
        assert outline.held[anchor][:known].tolist() == bits[:known].tolist()
    assert (
        deepest_boundary(memory, outline.limit, outline.held)
        == index.match(prompt, Tier.HOST).boundary
    )


@pytest.mark.quick
@pytest.mark.parametrize("name", ALL_MEMORIES)
@pytest.mark.parametrize("seed", range(25))
def test_an_order_has_what_its_boundary_needs_once_and_parts_come_whole(
    name: str, seed: int
) -> None:
    memory, chance = ALL_MEMORIES[name], random.Random(f"{name} {seed}")
    there, held = _bits(memory, chance), _bits(memory, chance)
    there = {anchor: bits | held[anchor] for anchor, bits in there.items()}
    boundary = deepest_boundary(memory, STORED_PAGES, there)
    runs = read_order(memory, boundary, held, there)
    read = [(anchor, page) for anchor, pages in runs for page in pages.tolist()]
    assert len(read) == len(set(read))
    assert not any(held[anchor][page] or not there[anchor][page] for anchor, page in read)
    now, reached = {anchor: bits.copy() for anchor, bits in held.items()}, [0]
    for anchor, page in read:
        now[anchor][page] = True
        reached.append(deepest_boundary(memory, STORED_PAGES, now))
    if read:
        assert reached[-1] >= boundary
