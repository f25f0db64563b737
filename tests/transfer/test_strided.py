"""Strided copies: plain runs and the device kernel move the same bytes as a naive expansion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.spec import Tier
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.layout import Arrangement, Layout, Piece, pieces
from kvtide.transfer.copy_kernel import CHUNK_BYTES, Kernel, page_copy
from kvtide.transfer.lane import Backend
from kvtide.transfer.strided import PieceTable, Reference, Runs, Strided, Way, runs
from tests.transfer.memories import MEMORIES, Origins, Sketch, random_bytes

SLOTS = 12
FAR = 1 << 20
"""How far apart the works of one job lie in their blocks: further than any of them is long."""


def sketch(*found: Piece, sources: Sequence[int], targets: Sequence[int]) -> Sketch:
    return Sketch((found,), tuple(sources), tuple(targets))


@st.composite
def jobs(draw: st.DrawFn, words: Sequence[int] = (1, 2, 4, 8, 16), works: int = 3) -> list[Sketch]:
    """Works of as many legs each, with pieces that fill their stride or leave room.

    Pieces lie one behind the other as in a real tier. Slots come shuffled or in order, so that
    some follow each other on one side, on both, or on neither.
    """
    legs = draw(st.integers(1, 3))
    return [_sketch(draw, legs, words) for _ in range(draw(st.integers(1, works)))]


def _sketch(draw: st.DrawFn, legs: int, words: Sequence[int]) -> Sketch:
    word = draw(st.sampled_from(words))
    gap = st.sampled_from(draw(st.sampled_from(((0,), (0, 1, 3)))))
    found: list[list[Piece]] = []
    source = target = 0
    for leg in range(legs):
        found.append([])
        # A leg may be empty, but not all of them.
        for _ in range(draw(st.integers(0 if leg else 1, 2))):
            # The very first size is an odd number of words: no wider word divides them all.
            size = word * (draw(st.integers(1, 6)) if source else draw(st.sampled_from((1, 3, 5))))
            gaps = [word * draw(gap) for _ in range(2)]
            found[-1].append(Piece(source, size + gaps[0], target, size + gaps[1], size))
            source += SLOTS * found[-1][-1].source_stride
            target += SLOTS * found[-1][-1].target_stride
    count = draw(st.integers(0, SLOTS))
    orders = [st.permutations(range(SLOTS)), st.just(range(SLOTS))]
    picked = [tuple(draw(st.one_of(orders)))[:count] for _ in range(2)]
    return Sketch(tuple(map(tuple, found)), picked[0], picked[1])


# -- runs -----------------------------------------------------------------------------------


def copied(found: Runs, leg: int) -> Origins:
    """The bytes that the runs of a leg copy; none is written twice."""
    origins: Origins = {}
    for run in range(found.legs[leg], found.legs[leg + 1]):
        source, target = int(found.source[run]), int(found.target[run])
        for byte in range(int(found.bytes[run])):
            assert target + byte not in origins
            origins[target + byte] = source + byte
    return origins


@settings(max_examples=120, deadline=None)
@given(job=jobs())
def test_runs_copy_leg_by_leg_exactly_what_a_naive_expansion_does(job: list[Sketch]) -> None:
    legs = len(job[0].legs)
    found = runs([one.work(FAR * i, FAR * i) for i, one in enumerate(job)], legs)
    assert len(found.legs) == legs + 1
    assert found.legs[0] == 0
    assert found.legs[-1] == len(found.source) == len(found.target) == len(found.bytes)
    for leg in range(legs):
        wanted: Origins = {}
        for i, one in enumerate(job):
            wanted |= one.naive(leg, FAR * i)
        assert copied(found, leg) == wanted
    assert sum(one.work().bytes for one in job) == found.bytes.sum()


@settings(max_examples=120, deadline=None)
@given(job=jobs(works=1))
def test_slots_that_follow_each_other_are_joined_where_every_piece_fills_its_slot(
    job: list[Sketch],
) -> None:
    (one,) = job
    pairs = list(zip(one.sources, one.targets, strict=True))
    stretches = len(pairs) - sum((a + 1, b + 1) == after for (a, b), after in pairwise(pairs))
    fills = all(p.bytes == p.source_stride == p.target_stride for p in one.pieces)
    found = runs([one.work()], len(one.legs))
    assert len(found.bytes) == len(one.pieces) * (stretches if fills else len(pairs))


def test_slots_that_follow_on_both_sides_become_one_long_run() -> None:
    one = sketch(Piece(0, 32, 4096, 32, 32), sources=(3, 4, 5, 9), targets=(6, 7, 8, 0))
    found = runs([one.work()], 1)
    assert found.source.tolist() == [96, 288]
    assert found.target.tolist() == [4096 + 192, 4096]
    assert found.bytes.tolist() == [96, 32]
    assert found.legs == (0, 2)


@pytest.mark.parametrize("targets", [(6, 8, 7), (8, 7, 6)])
def test_slots_that_follow_on_one_side_only_stay_apart(targets: tuple[int, ...]) -> None:
    one = sketch(Piece(0, 32, 4096, 32, 32), sources=(3, 4, 5), targets=targets)
    assert runs([one.work()], 1).bytes.tolist() == [32, 32, 32]


@pytest.mark.parametrize("strides", [(48, 32), (32, 48)])
def test_pieces_with_room_between_slots_stay_apart(strides: tuple[int, int]) -> None:
    piece = Piece(0, strides[0], 4096, strides[1], 32)
    one = sketch(piece, sources=(3, 4, 5), targets=(6, 7, 8))
    assert runs([one.work()], 1).bytes.tolist() == [32, 32, 32]


def test_addresses_far_into_a_large_tier_do_not_wrap_around() -> None:
    far, block = 2**40, 2**46
    one = sketch(Piece(0, far, 2**45, far + 16, 32), sources=(0, 11), targets=(11, 0))
    found = runs([one.work(block, block)], 1)
    assert found.source.tolist() == [block, block + 11 * far]
    assert found.target.tolist() == [block + 2**45 + 11 * (far + 16), block + 2**45]


def test_nothing_to_copy_is_no_run_in_every_leg() -> None:
    filled, apart = Piece(0, 32, 0, 32, 32), Piece(4096, 48, 4096, 32, 32)
    for found in ((filled,), (filled, apart)):
        empty = Sketch((found, ()), (), ()).work()
        for works in ([], [empty], [empty, empty]):
            assert len(runs(works, 2).bytes) == 0
            assert runs(works, 2).legs == (0, 0, 0)


# -- tables ---------------------------------------------------------------------------------


def tier_of(name: str) -> Buffers:
    memory = MEMORIES[name]
    slots = {anchor.name: 3 for anchor in memory.anchors}
    arrangement = Arrangement(memory, slots, Layout.PAGE_FIRST)
    return Buffers(arrangement, torch.empty(arrangement.bytes, dtype=torch.uint8))


@pytest.mark.parametrize("name", list(MEMORIES))
def test_a_table_has_the_pieces_of_each_leg_at_their_addresses_in_words_of_16_bytes(
    name: str,
) -> None:
    memory, tier = MEMORIES[name], tier_of(name)
    halves = range(3), range(3, memory.end_layer)
    for anchor in memory.anchors:
        found = [pieces(tier.arrangement, tier.arrangement, anchor.name, y) for y in halves]
        table = PieceTable.of(Way.BACKUP, tier, tier, found)
        assert table.legs == (0, len(found[0]), len(found[0]) + len(found[1]))
        offsets = [piece.source_offset + tier.address for leg in found for piece in leg]
        assert table.source.tolist() == table.target.tolist() == offsets
        assert table.bytes.tolist() == [piece.bytes for leg in found for piece in leg]
        columns = (table.source, table.source_stride, table.target, table.target_stride)
        assert table.word_bytes == 16
        assert all((column % 16 == 0).all() for column in (*columns, table.bytes))


@pytest.mark.parametrize(("sizes", "word"), [((584,), 8), ((132,), 4), ((72, 66), 2), ((33,), 1)])
def test_a_table_of_odd_entries_has_the_widest_word_that_fits(
    sizes: tuple[int, ...], word: int
) -> None:
    tier = tier_of("llama")
    legs = [[Piece(0, 1, 0, 1, size)] for size in sizes]
    assert PieceTable.of(Way.LOAD, tier, tier, legs).word_bytes == word


def test_picked_pieces_keep_their_columns_their_legs_and_their_word() -> None:
    first, second, third = Piece(0, 32, 8, 40, 16), Piece(512, 48, 600, 56, 8), Piece(9, 9, 9, 9, 8)
    table = Sketch(((first,), (second, third), ()), (1,), (2,)).work().table
    picked = table.pick(np.array([False, True, False]))
    assert len(table) == 3 and len(picked) == 1
    assert (picked.way, picked.word_bytes) == (Way.LOAD, 8)
    assert picked.legs == (0, 0, 1, 1)
    columns = (picked.source, picked.source_stride, picked.target, picked.target_stride)
    assert [column.tolist() for column in (*columns, picked.bytes)] == [
        [512],
        [48],
        [600],
        [56],
        [8],
    ]


def test_a_way_knows_its_ends() -> None:
    assert (Way.LOAD.source, Way.LOAD.target) == (Tier.HOST, Tier.DEVICE)
    assert (Way.BACKUP.source, Way.BACKUP.target) == (Tier.DEVICE, Tier.HOST)


# -- what copies ----------------------------------------------------------------------------


def assert_copies(backend: Backend, job: list[Sketch], device: torch.device) -> None:
    """When a leg was issued its bytes are there, and no other byte of the target changed.

    What it has copied is spoiled at the source, so that no later leg may copy it again.
    """
    rng, legs = np.random.default_rng(len(job[0].sources)), len(job[0].legs)
    blocks = [[random_bytes(rng, one.bytes + 64).to(device) for _ in range(2)] for one in job]
    wanted = [target.cpu().clone() for _, target in blocks]
    works = [
        one.work(source.data_ptr(), target.data_ptr())
        for one, (source, target) in zip(job, blocks, strict=True)
    ]
    issued = 0
    for _ in backend.issue(works, legs):
        for one, (source, target), held in zip(job, blocks, wanted, strict=True):
            naive = one.naive(issued)
            held[list(naive)] = source.cpu()[list(naive.values())]
            assert torch.equal(target.cpu(), held)
            source[list(naive.values())] += 1
        issued += 1
    assert issued == legs


@settings(max_examples=40, deadline=None)
@given(job=jobs())
def test_the_reference_copies_like_a_naive_expansion(job: list[Sketch]) -> None:
    assert_copies(Reference(), job, torch.device("cpu"))


@pytest.mark.parametrize("word", [1, 2, 4, 8, 16])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_the_kernel_copies_like_a_naive_expansion(
    word: int, device: torch.device, data: st.DataObject
) -> None:
    job = data.draw(jobs((word,), works=2))
    assert {one.work().table.word_bytes for one in job} == {word}
    assert_copies(Kernel(device), job, device)


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize("beside", [-16, 0, 16, CHUNK_BYTES + 16])
def test_the_kernel_copies_pieces_longer_than_a_chunk(
    beside: int, ctas: int, device: torch.device
) -> None:
    size = CHUNK_BYTES + beside
    long, short = Piece(0, size + 16, 0, size, size), Piece(65536, 32, 65536, 48, 16)
    one = Sketch(((long, short), (), (replaced(long, 131072),)), (5, 0, 6, 2, 1), (1, 2, 3, 0, 9))
    assert_copies(Kernel(device, ctas), [one], device)


def replaced(piece: Piece, offset: int) -> Piece:
    return Piece(offset, piece.source_stride, offset, piece.target_stride, piece.bytes)


def test_the_kernel_copies_more_chunks_than_its_ctas_take_at_once(
    device: torch.device,
) -> None:
    slots = range(SLOTS)
    found = (Piece(4096 * i, 64, 4096 * i, 64, 64) for i in range(5))
    one = sketch(*found, sources=slots, targets=slots[::-1])
    assert_copies(Kernel(device, ctas=1), [one], device)


class ByPage:
    """Every page on its own."""

    name = "by page"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def issue(self, works: Sequence[Strided], legs: int) -> Iterator[None]:
        assert legs == 1
        for work in works:
            copy = page_copy(work.table, self._device)
            for source, target in zip(work.source_index, work.target_index, strict=True):
                copy(int(source), int(target))
        yield


@pytest.mark.parametrize("size", [1, 6, 48, CHUNK_BYTES + 16])
def test_the_kernel_copies_single_pages(size: int, device: torch.device) -> None:
    found = (Piece(65536 * i, size + 16 * i, 65536 * i, size, size) for i in range(3))
    assert_copies(ByPage(device), [sketch(*found, sources=(5, 0), targets=(1, 9))], device)


def test_without_work_every_leg_is_issued_and_nothing_copied(device: torch.device) -> None:
    none = Sketch(((Piece(0, 32, 0, 32, 32),), ()), (), ()).work()
    for backend in (Kernel(device), Reference()):
        assert len(list(backend.issue([], 3))) == 3
        assert len(list(backend.issue([none], 2))) == 2
