"""Pages that ranks of one shape stored come to ranks of any other, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.layers.tensor_ranks import TensorRanks
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, RankShape, Reuse, SpecError
from kvtide.storage import object_formats, open_store
from kvtide.storage.memory_store import MemoryStore
from kvtide.storage.url import StoreURL
from kvtide.testing.faulty_store import Fault, FaultyStore
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.layout import Arrangement, Layout
from kvtide.transfer.host_pages import tails
from kvtide.transfer.shapes import OtherShapes
from kvtide.transfer.shapes.shape_marks import REFRESH_S, mark_key
from kvtide.transfer.storage_requests import Lookup, Reading, SoughtPage, StoredPage
from kvtide.transfer.store_link import StoreLink
from tests.grids import everything
from tests.tiers.handing_over import Content
from tests.transfer.memories import MEMORIES, PAGE_TOKENS, family
from tests.transfer.stores import SPACE, key, until

PAGES, SLOTS, LONG_S = 4, 6, 60.0
WHOLE = {name: memory for name, memory in MEMORIES.items() if memory.part is None}
LLAMA = WHOLE["llama"]
ONE, TP2, PP2 = RankShape(), RankShape(1, 2), RankShape(2)


class RankHost:
    """One rank's host pages, and its link to a store that all ranks share."""

    def __init__(
        self,
        memory: ModelMemory,
        store: Any,
        layout: Layout = Layout.PAGE_FIRST_DIRECT,
        **options: Any,
    ) -> None:
        self.memory, part = memory.at_rest, memory.part
        self.tensor = TensorRanks(part.tensor_rank, part.tensor_ranks) if part else TensorRanks()
        self.formats = object_formats(self.memory, SPACE, b"draft")
        slots = {anchor.name: SLOTS for anchor in self.memory.anchors}
        arrangement = Arrangement(self.memory, slots, layout, tails(self.formats))
        self.host = Buffers(arrangement, torch.zeros(arrangement.bytes, dtype=torch.uint8))
        self.shapes = OtherShapes(arrangement, SPACE, b"draft", **options)
        self.link = StoreLink(store, self.formats, self.host, self.shapes)

    def pages(self, first_slot: int = 0, anchors: Sequence[str] = ()) -> list[StoredPage]:
        names = anchors or [anchor.name for anchor in self.memory.anchors]
        return [
            StoredPage(name, key(n), first_slot + n, after=b"x")
            for name in names
            for n in range(PAGES)
        ]

    def rows(self, page: StoredPage, content: Content) -> list[tuple[np.ndarray, np.ndarray]]:
        """Every row of a page without its padding, beside what it should be."""
        number, found = int.from_bytes(page.key[:4], "little"), []
        for pool in self.memory.group(page.anchor):
            for layer in pool.layers:
                wanted = content.on_rank(number, pool, layer, self.tensor)
                row = self.host.rows(pool.name, layer)[page.slot].numpy()
                found.append((row[: len(wanted)], wanted))
        return found

    def store(self, content: Content, pages: Sequence[StoredPage] | None = None) -> None:
        pages = self.pages() if pages is None else pages
        for page in pages:
            for row, wanted in self.rows(page, content):
                row[:] = wanted
        writing = self.link.write(pages, LONG_S)
        until(lambda: writing.quiet)
        assert writing.count == len(pages)
        self.host.data.zero_()

    def look(self, pages: Sequence[StoredPage]) -> Lookup:
        lookup = self.link.look(lambda: [SoughtPage(p.anchor, p.key) for p in pages], LONG_S)
        until(lambda: lookup.over)
        assert lookup.error is None
        return lookup

    def read(self, pages: Sequence[StoredPage], lookup: Lookup) -> Reading:
        found = [p._replace(shape=lookup.shapes.get(n)) for n, p in enumerate(pages)]
        reading = self.link.read(found, LONG_S)
        until(lambda: reading.over and reading.quiet)
        return reading

    def check(self, pages: Sequence[StoredPage], content: Content) -> None:
        for page in pages:
            for row, wanted in self.rows(page, content):
                assert np.array_equal(row, wanted), page


class Ranks:
    """Ranks of several shapes that share a store."""

    def __init__(self, memory: ModelMemory = LLAMA) -> None:
        self.memory, self.content = memory, Content(memory, seed=3)
        self.inner = open_store("memory:", SPACE)
        self.store = FaultyStore(self.inner)
        self.now = 0.0
        self._links: list[StoreLink] = []

    def of(self, shape: RankShape, *layouts: Layout, **options: bool) -> list[RankHost]:
        hosts = [
            RankHost(memory, self.store, *layouts, clock=lambda: self.now, **options)
            for memory in self.memory.ranks(shape)
        ]
        self._links += [host.link for host in hosts]
        return hosts

    def stored(self, shape: RankShape, *layouts: Layout) -> list[RankHost]:
        hosts = self.of(shape, *layouts)
        for host in hosts:
            host.store(self.content)
        return hosts

    def restore(self, host: RankHost) -> Reading:
        """All pages, other slots than those they were stored from, looked up, read and checked."""
        pages = host.pages(first_slot=SLOTS - PAGES)
        lookup = host.look(pages)
        assert lookup.found == [True] * len(pages)
        reading = host.read(pages, lookup)
        assert reading.ready == len(pages) and not any(reading.absent)
        host.check(pages, self.content)
        return reading

    def close(self) -> None:
        self.store.heal()
        closed = [link.close(5.0) for link in self._links]
        assert all(closed)


@pytest.fixture
def ranks():
    opened: list[Ranks] = []

    def open_ranks(memory: ModelMemory = LLAMA) -> Ranks:
        opened.append(Ranks(memory))
        return opened[-1]

    yield open_ranks
    for one in opened:
        one.close()


def divides(memory: ModelMemory, shape: RankShape) -> bool:
    try:
        return bool(memory.ranks(shape))
    except SpecError:
        return False


# -- bytes ----------------------------------------------------------------------------------

SHAPES = [RankShape(stages, ranks) for stages in (1, 2, 3) for ranks in (1, 2, 4)]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, RankShape, RankShape, Layout, Layout]:
    name = draw(st.sampled_from(sorted(WHOLE)))
    fits = [shape for shape in SHAPES if shape.ranks <= 4 and divides(WHOLE[name], shape)]
    ours, theirs = draw(st.permutations(fits))[:2] if len(fits) > 1 else (ONE, ONE)
    return name, ours, theirs, draw(st.sampled_from(Layout)), draw(st.sampled_from(Layout))


@settings(max_examples=200 if everything() else 20, deadline=None)
@given(pairs())
def test_every_byte_comes_to_every_rank_of_another_shape(drawn) -> None:
    name, ours, theirs, stored_from, read_to = drawn
    ranks = Ranks(WHOLE[name])
    ranks.stored(ours, stored_from)
    for host in ranks.of(theirs, read_to):
        ranks.restore(host)
    ranks.close()


@pytest.mark.parametrize("shapes", [(TP2, ONE), (ONE, TP2), (PP2, ONE), (ONE, PP2), (TP2, PP2)])
@pytest.mark.parametrize("name", ["llama", "falcon_h1", "deepseek_v4", "deepseek_v32"])
def test_two_ranks_and_one_need_no_special_case(ranks, name: str, shapes) -> None:
    world = ranks(WHOLE[name])
    world.stored(shapes[0])
    for host in world.of(shapes[1]):
        world.restore(host)
        assert host.link.counts["combined"] == host.link.counts["read"] > 0


def test_pools_that_every_rank_keeps_whole_are_read_from_one(ranks) -> None:
    world = ranks(WHOLE["deepseek_v3"])
    world.stored(RankShape(1, 4))
    (host,) = world.of(ONE)
    world.restore(host)
    assert host.link.counts["read"] == PAGES
    world = ranks()
    world.stored(TP2)
    (host,) = world.of(ONE)
    world.restore(host)
    assert host.link.counts["read"] == 2 * PAGES


def test_ranks_that_share_a_head_read_it_once(ranks) -> None:
    world = ranks(family("llama", PAGE_TOKENS, num_key_value_heads=2))
    world.stored(RankShape(1, 4))
    for host in world.of(TP2):
        world.restore(host)
        assert host.link.counts["read"] == PAGES


# -- the same shape -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [ONE, TP2, PP2])
def test_the_same_shape_asks_once_and_reads_one_object_a_page(ranks, shape: RankShape) -> None:
    world = ranks()
    world.stored(shape)
    for host in world.of(shape):
        before = world.store.calls.copy()
        world.restore(host)
        calls = world.store.calls - before
        assert calls["exists"] == 1 and "combined" not in host.link.counts
        assert host.link.counts["read"] == PAGES


def test_pages_that_no_shape_has_cost_one_further_look_up_now_and_then(ranks) -> None:
    world = ranks()
    (host,) = world.of(ONE)
    for now, further in ((0.0, 1), (REFRESH_S - 1, 0), (REFRESH_S, 1), (REFRESH_S + 1, 0)):
        before, world.now = world.store.calls["exists"], now
        assert host.look(host.pages()).found == [False] * PAGES
        assert world.store.calls["exists"] - before == 1 + further


def test_ranks_do_not_look_in_their_own_shape_again(ranks) -> None:
    world = ranks()
    for host in world.stored(TP2):
        before = world.store.calls["exists"]
        pages = [StoredPage("kv", key(PAGES), 0)]
        assert [host.look(pages).found for _ in range(3)] == [[False]] * 3
        assert world.store.calls["exists"] - before == 3 + 1, "three look-ups, and one of marks"


def test_states_between_checkpoints_are_not_looked_for_elsewhere(ranks) -> None:
    """All of the history is there, and states never are on every page."""
    world = ranks(WHOLE["falcon_h1"])
    (host,) = world.of(ONE)
    history, state = (anchor.name for anchor in host.memory.anchors)
    host.store(world.content, host.pages(anchors=[history]))
    calls = world.store.calls["exists"]
    found = host.look(host.pages(anchors=[history, state])).found
    assert found == [True] * PAGES + [False] * PAGES
    assert world.store.calls["exists"] == calls + 1


# -- what is missing or wrong ---------------------------------------------------------------


def test_pages_of_several_shapes_are_found_together(ranks) -> None:
    world = ranks()
    (one,) = world.of(ONE)
    one.store(world.content, one.pages()[:1])
    for host in world.of(TP2):
        host.store(world.content, host.pages()[1:2])
    for host in world.of(PP2):
        host.store(world.content, host.pages()[2:])
    lookup = one.look(one.pages())
    assert lookup.found == [True] * PAGES
    assert lookup.shapes == {1: TP2, 2: PP2, 3: PP2}
    world.restore(one)


def test_a_page_without_one_of_its_parts_is_missing(ranks) -> None:
    world = ranks()
    second = world.stored(TP2)[1]
    pages = second.pages()
    world.inner.remove([second.formats["kv"].key(pages[2].key)])
    (host,) = world.of(ONE)
    assert host.look(host.pages()).found == [True, True, False, True]
    found = [one.look(one.pages()).found for one in world.of(PP2)]
    assert found == [[True, True, False, True]] * 2


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.SHORT, Fault.MISSING])
def test_a_wrong_part_is_refused(ranks, fault: Fault) -> None:
    world = ranks()
    world.stored(TP2)
    (host,) = world.of(ONE)
    pages = host.pages()
    lookup = host.look(pages)
    world.store.next("read", fault)
    reading = host.read(pages, lookup)
    assert reading.ready < PAGES
    host.check(pages[: reading.ready], world.content)
    counts = host.link.counts
    assert counts["corrupt"] + counts["missing"] > 0
    if fault is not Fault.MISSING:
        assert False in (host.look(pages).found or ()), "and removed"


def test_a_draft_without_one_of_its_parts_is_absent(ranks) -> None:
    world = ranks(next(m for m in WHOLE.values() if m.draft_sidecars and divides(m, TP2)))
    (sidecar,) = world.memory.draft_sidecars
    second = world.stored(TP2)[-1]
    assert len(world.of(ONE)[0].shapes.parts(TP2, sidecar)) == 2, "heads are divided"
    pages = second.pages()
    world.inner.remove([second.formats[sidecar].key(pages[1].key, pages[1].after)])
    (host,) = world.of(ONE)
    lookup = host.look(host.pages())
    reading = host.read(host.pages(), lookup)
    assert reading.ready == len(host.pages())
    anchor = world.memory.pool(sidecar).follows
    absent = {(p.anchor, n % PAGES): reading.absent[n] for n, p in enumerate(host.pages())}
    assert absent == {at: (sidecar,) if at == (anchor, 1) else () for at in absent}


# -- which shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [(TP2, ONE), (ONE, TP2), (PP2, ONE), (ONE, PP2)])
def test_a_shape_that_appears_later_is_found_when_marks_are_looked_up_again(ranks, shapes) -> None:
    theirs, ours = shapes
    world = ranks()
    hosts = world.of(ours)
    assert [host.look(host.pages()).found for host in hosts] == [[False] * PAGES] * len(hosts)
    world.stored(theirs)
    world.now += REFRESH_S - 1
    assert [host.look(host.pages()).found for host in hosts] == [[False] * PAGES] * len(hosts)
    world.now += 1
    for host in hosts:
        world.restore(host)


@pytest.mark.parametrize("writer", [ONE, TP2], ids=["a rank that knows it", "its own shape"])
def test_a_mark_that_the_store_evicted_is_left_again(ranks, writer: RankShape) -> None:
    world = ranks()
    (first, _), (one,) = world.stored(TP2), world.of(ONE)
    world.restore(one)
    mark = mark_key(first.formats["kv"])
    assert world.inner.remove([mark]) == 1
    pages = [StoredPage("kv", key(PAGES), 0)]
    host = one if writer == ONE else first
    world.now += REFRESH_S
    host.store(world.content, pages)
    assert world.inner.exists([mark]) == [True]


@pytest.mark.parametrize("codec", ["lossless", "fp8"])
def test_shapes_are_found_through_a_codec(ranks, codec: str) -> None:
    world = ranks()
    world.store = FaultyStore(open_store(f"memory:?codec={codec}", SPACE))
    world.stored(TP2)
    (host,) = world.of(ONE)
    assert host.look(host.pages()).found == [True] * PAGES


class RefusesMarks(MemoryStore):
    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[bool]:
        least = min(one.bytes for one in object_formats(LLAMA.at_rest, SPACE).values()) // 2
        kept = [len(source) >= least for source in sources]
        super().write([*compress(keys, kept)], [*compress(sources, kept)])
        return kept


def test_pages_are_stored_where_a_mark_is_refused(ranks) -> None:
    world = ranks()
    world.store = FaultyStore(RefusesMarks(StoreURL.parse("memory:"), SPACE))
    world.stored(TP2)
    assert [host.look(host.pages()).found for host in world.of(TP2)] == [[True] * PAGES] * 2
    (host,) = world.of(ONE)
    assert host.look(host.pages()).found == [False] * PAGES


def test_where_bits_matter_only_the_same_number_of_tensor_ranks_is_found(ranks) -> None:
    world = ranks()
    world.stored(TP2)
    (host,) = world.of(ONE, any_tensor_ranks=False)
    assert host.look(host.pages()).found == [False] * PAGES
    world.stored(PP2)
    world.now += REFRESH_S
    world.restore(host)
    found = [
        one.look(one.pages()).found for one in world.of(RankShape(2, 2), any_tensor_ranks=False)
    ]
    assert found == [[True] * PAGES] * 4, "TP 2, in two stages"


def test_pages_equal_to_the_last_bit_are_preferred(ranks) -> None:
    world = ranks()
    world.stored(RankShape(2, 2))
    world.stored(ONE)
    for host in world.of(TP2):
        assert set(host.look(host.pages()).shapes.values()) == {RankShape(2, 2)}


def test_a_model_without_a_history_is_found_by_any_of_its_pages(ranks) -> None:
    state = PoolSpec(
        "state", (0, 1), Entry((Field("x", (4, 8), DType.UINT8, sharded=True),)),
        tail_entries=1, reuse=Reuse(4, 4),
    )  # fmt: skip
    world = ranks(ModelMemory("states", 4, (state,), layers=2))
    for host in world.of(TP2):
        host.store(world.content, host.pages()[2:3])
    (host,) = world.of(ONE)
    assert host.look(host.pages()).found == [False, False, True, False]


def test_removed_pages_are_removed_in_every_shape(ranks) -> None:
    world = ranks(next(m for m in WHOLE.values() if m.draft_sidecars and divides(m, TP2)))
    for shape in (ONE, TP2, PP2):
        world.stored(shape)
    for host in world.of(TP2):
        host.link.remove([(key(n), b"x") for n in range(1, PAGES)]).result(LONG_S)
    for shape in (ONE, TP2, PP2):
        for host in world.of(shape):
            pages = host.pages()
            found = host.look(pages).found
            assert found == [p.key == key(0) for p in pages]
