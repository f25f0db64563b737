"""The copier: what a call submits, in which legs, and what has come when a leg was waited for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvtide.spec import ALL, ModelMemory, PageMove, Tier, catalog
from kvtide.testing.faults import FaultError, FaultyBackend
from kvtide.testing.hand_run import HandRunLane
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.layout import Arrangement, Layout
from kvtide.transfer.copy_jobs import (
    GROUP_PAGE_BYTES,
    MAX_GROUPS,
    MIN_GROUPS,
    Copier,
    layer_groups,
)
from kvtide.transfer.lane import Job, Lane, TransferError
from kvtide.transfer.strided import Reference, Way, runs
from kvtide.transfer.timeline import DeviceEvent, HostTimeline
from tests.transfer.memories import MEMORIES, Tiers, family, slot_array, some_slots

CPU = torch.device("cpu")
DIRECT = (Layout.PAGE_FIRST_DIRECT, Layout.PAGE_FIRST_DIRECT)
LONG_S = 30.0
SHORT_S = 0.05


@dataclass(frozen=True)
class Setup:
    tiers: Tiers
    copier: Copier
    lanes: dict[Way, HandRunLane]


def setup(
    name: str,
    groups: Sequence[range] = (),
    layouts: tuple[Layout, Layout] = (Layout.LAYER_FIRST, Layout.PAGE_FIRST_DIRECT),
    slots: int = 8,
) -> Setup:
    memory = MEMORIES[name]
    tiers = Tiers(memory, layouts, CPU, (some_slots(memory, slots), some_slots(memory, slots)))
    tiers.fill(np.random.default_rng(3))
    lanes = {way: HandRunLane(Reference()) for way in Way}
    return Setup(tiers, Copier(tiers.device, tiers.host, lanes, groups), lanes)


def load(anchor: str, source: Sequence[int], target: Sequence[int]) -> PageMove:
    return PageMove(anchor, Tier.HOST, Tier.DEVICE, slot_array(source), slot_array(target))


def backup(anchor: str, source: Sequence[int], target: Sequence[int]) -> PageMove:
    return PageMove(anchor, Tier.DEVICE, Tier.HOST, slot_array(source), slot_array(target))


def leg_bytes(job: Job) -> list[list[int]]:
    """Of every leg, how long its runs are."""
    found = runs(job.works, job.legs)
    return [sorted(found.bytes[a:b].tolist()) for a, b in pairwise(found.legs)]


def test_a_copier_that_was_dropped_leaves_its_memory_to_the_jobs_under_way() -> None:
    """A cache need not be closed before it goes, say with an exception: that must not crash."""
    one = setup("llama")
    blocks = [weakref.ref(tier.data) for tier in (one.tiers.device, one.tiers.host)]
    lane, move = one.lanes[Way.BACKUP], backup("kv", [0], [1])
    one.copier.copy(Way.BACKUP, [move], LONG_S)
    del one
    gc.collect()
    assert all(block() is not None for block in blocks)
    lane.run()
    gc.collect()
    assert all(block() is None for block in blocks)


# -- what is submitted ----------------------------------------------------------------------


def test_moves_of_one_anchor_are_copied_together_in_every_leg() -> None:
    one = setup("gpt_oss_draft", groups=[range(0, 2), range(2, 4), range(4, 6)])
    moves = [load("kv", [1], [4]), load("swa", [2], [2]), load("kv", [7, 0], [5, 3])]
    one.copier.copy(Way.LOAD, moves, LONG_S)
    (job,) = one.lanes[Way.LOAD].jobs
    kv, swa = job.works
    assert (kv.source_index.tolist(), kv.target_index.tolist()) == ([1, 7, 0], [4, 5, 3])
    assert (swa.source_index.tolist(), swa.target_index.tolist()) == ([2], [2])
    assert kv.source_index.dtype == kv.target_index.dtype == np.int64
    # Windows are in the layers 0 and 2 only, and the last leg is the draft's two layers.
    row = one.tiers.memory.pool("kv").row_bytes(16)
    assert leg_bytes(job) == [[row] * 4, [row] * 4, [row] * 6]


def test_a_backup_is_one_leg_whatever_the_groups() -> None:
    one = setup("gpt_oss_draft", groups=[range(layer, layer + 1) for layer in range(6)])
    one.copier.copy(Way.BACKUP, [backup("kv", [1], [4]), backup("swa", [2], [2])], LONG_S)
    (job,) = one.lanes[Way.BACKUP].jobs
    assert job.legs == 1
    memory = one.tiers.memory
    pages = sum(memory.slot_bytes(anchor) for anchor in ("kv", "swa"))
    assert [sum(sizes) for sizes in leg_bytes(job)] == [pages]


def test_pages_that_follow_each_other_on_both_sides_are_copied_as_one_run() -> None:
    one = setup("llama", layouts=DIRECT)
    page = one.tiers.memory.slot_bytes("kv")
    moves = [backup("kv", [2, 3], [4, 5]), backup("kv", [4], [6]), backup("kv", [7], [0])]
    one.copier.copy(Way.BACKUP, moves, LONG_S)
    assert leg_bytes(one.lanes[Way.BACKUP].jobs[0]) == [[page, 3 * page]]


def test_rows_that_follow_each_other_are_joined_layer_by_layer() -> None:
    one = setup("llama", layouts=(Layout.LAYER_FIRST, Layout.LAYER_FIRST))
    row = one.tiers.memory.pool("kv").row_bytes(16)
    one.copier.copy(Way.BACKUP, [backup("kv", [2, 3, 4], [4, 5, 6])], LONG_S)
    one.copier.copy(Way.BACKUP, [backup("kv", [2, 3, 4], [6, 5, 4])], LONG_S)
    joined, apart = one.lanes[Way.BACKUP].jobs
    assert leg_bytes(joined) == [[3 * row] * 4]
    assert leg_bytes(apart) == [[row] * 12]


def test_an_anchor_without_bytes_moves_without_a_copy() -> None:
    one = setup("nemotron_h_stage_without_a_byte")
    moves = [backup("kv", [1], [2]), backup("state", [0], [3])]
    ticket = one.copier.copy(Way.BACKUP, moves, LONG_S)
    assert not one.lanes[Way.BACKUP].jobs[0].works
    one.lanes[Way.BACKUP].run()
    ticket.wait(0)


@pytest.mark.parametrize("moves", [[], [load("kv", [], [])]])
def test_nothing_to_load_is_there_as_soon_as_the_lane_came_by(moves: list[PageMove]) -> None:
    one = setup("llama", groups=[range(0, 2), range(2, 4)])
    ticket = one.copier.copy(Way.LOAD, moves, LONG_S)
    assert not ticket.done()
    assert one.lanes[Way.LOAD].run() == 1
    assert ticket.done()
    ticket.wait(1)
    one.tiers.assert_as_expected()


def test_each_way_has_its_own_lane() -> None:
    one = setup("llama")
    one.copier.copy(Way.LOAD, [load("kv", [1], [4])], LONG_S)
    assert [len(one.lanes[way].jobs) for way in (Way.LOAD, Way.BACKUP)] == [1, 0]


def test_a_move_the_other_way_is_an_error_of_the_caller() -> None:
    one = setup("llama")
    with pytest.raises(AssertionError, match="does not go LOAD"):
        one.copier.copy(Way.LOAD, [backup("kv", [1], [4])], LONG_S)
    assert not any(lane.jobs for lane in one.lanes.values())


def test_addresses_in_a_tier_of_many_terabytes_are_exact() -> None:
    """On a block without memory, which only has a size."""
    memory, slots = family("llama", page_tokens=64), 10**9
    arrangement = Arrangement(memory, {"kv": slots}, Layout.LAYER_FIRST)
    block = Buffers(arrangement, torch.empty(arrangement.bytes, dtype=torch.uint8, device="meta"))
    lanes = {way: HandRunLane(Reference()) for way in Way}
    copier = Copier(block, block, lanes)
    last, row = slots - 1, 64 * 64
    copier.copy(Way.BACKUP, [backup("kv", [last], [last - 5])], LONG_S)
    (page,) = (runs(job.works, job.legs) for job in lanes[Way.BACKUP].jobs)
    assert page.source.tolist() == [(y * slots + last) * row for y in range(4)]
    assert page.target.tolist() == [(y * slots + last - 5) * row for y in range(4)]


class MarkedTimeline(HostTimeline):
    """Fences that are distinct, and a record of those that the lane has to come after."""

    def __init__(self) -> None:
        self.fences = 0
        self.after: list[object] = []

    def fence(self) -> DeviceEvent:
        self.fences += 1
        return f"fence {self.fences}"  # type: ignore[return-value]

    def inside(self, after: DeviceEvent) -> AbstractContextManager[object]:
        self.after.append(after)
        return super().inside(after)


def test_copies_come_after_what_was_queued_when_they_were_submitted() -> None:
    tiers = setup("llama").tiers
    timeline = MarkedTimeline()
    lane = Lane("test", timeline, Reference())
    copier = Copier(tiers.device, tiers.host, dict.fromkeys(Way, lane))
    copier.copy(Way.LOAD, [load("kv", [1], [4])], LONG_S).wait(0)
    copier.copy(Way.LOAD, [load("kv", [2], [5])], LONG_S).wait(0)
    assert lane.close(LONG_S)
    assert timeline.after == ["fence 1", "fence 2"]


# -- loads by groups of layers ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("llama", [range(0, 1), range(1, 3), range(3, 4)]),
        ("gpt_oss_draft", [range(0, 2), range(2, 4), range(4, 6)]),
        ("qwen3_next", [range(0, 2), range(2, 4)]),
        ("deepseek_v4", [range(0, 3), range(3, 4), range(4, 6)]),
        ("deepseek_v4_stage", [range(3, 4), range(4, 6)]),
        ("glm_moe_dsa_stage", [range(2, 3), range(3, 4)]),
    ],
)
def test_a_leg_brings_its_layers_while_later_ones_have_not_run(
    name: str, groups: list[range]
) -> None:
    one = setup(name, groups)
    moves = [load(anchor.name, [1, 6], [4, 0]) for anchor in one.tiers.memory.anchors]
    before = one.tiers.blocks[Tier.DEVICE].bytes()
    ticket = one.copier.copy(Way.LOAD, moves, SHORT_S)
    for leg in range(len(groups)):
        with pytest.raises(TransferError, match="missed its deadline"):
            ticket.wait(leg)
        one.lanes[Way.LOAD].run_legs(1)
        ticket.wait(leg)
        _assert_layers_came(one.tiers, moves, range(groups[0].start, groups[leg].stop), before)
        assert ticket.done() == (leg == len(groups) - 1)


def _assert_layers_came(
    tiers: Tiers, moves: list[PageMove], layers: range, before: torch.Tensor
) -> None:
    """These layers are the host's, and every other byte is as it was before."""
    block = tiers.model[Tier.DEVICE]
    block.whole.copy_(before)
    for move in moves:
        for pool, layer in tiers.rows_of(move.anchor):
            if layer in layers:
                source = tiers.model[Tier.HOST].buffers.rows(pool, layer)
                target = block.buffers.rows(pool, layer)
                target[move.target_slots.tolist()] = source[move.source_slots.tolist()]
    tiers.assert_as_expected()


@pytest.mark.parametrize("name", list(MEMORIES))
def test_the_leg_of_a_layer_is_the_one_that_brings_it(name: str) -> None:
    memory = MEMORIES[name]
    layers = range(memory.end_layer) if memory.part is None else memory.part.layers
    groups = [range(layer, layer + 1) for layer in layers]
    one = setup(name, groups)
    for number, layer in enumerate(layers):
        assert one.copier.leg_of(layer) == number
    moves = [load(anchor.name, [0], [1]) for anchor in memory.anchors]
    one.copier.copy(Way.LOAD, moves, LONG_S)
    (job,) = one.lanes[Way.LOAD].jobs
    for layer, sizes in zip(layers, leg_bytes(job), strict=True):
        kept = (pool for pool in memory.at_rest.pools if layer in pool.layers)
        assert sum(sizes) == sum(pool.row_bytes(memory.page_tokens) for pool in kept)


def test_a_load_that_fails_midway_is_an_error_for_its_waiters() -> None:
    one = setup("llama", groups=[range(0, 2), range(2, 4)])
    lane = HandRunLane(FaultyBackend(Reference(), raises=[1]))
    copier = Copier(one.tiers.device, one.tiers.host, dict.fromkeys(Way, lane), one.copier.groups)
    ticket = copier.copy(Way.LOAD, [load("kv", [1], [4])], LONG_S)
    lane.run()
    with pytest.raises(TransferError, match="the copy failed: leg 1") as refusal:
        ticket.wait(1)
    assert isinstance(refusal.value.__cause__, FaultError)
    assert ticket.done()
    assert lane.failures == 1


# -- which layers go together -----------------------------------------------------------------


def whole_and_slices() -> Iterator[tuple[str, ModelMemory]]:
    yield from MEMORIES.items()
    for name in catalog.names():
        memory = catalog.resolve(name)
        yield name, memory
        for number, stage in enumerate(memory.stages(3, tensor_ranks=1)):
            yield f"{name}-stage{number}", stage


GROUPED = dict(whole_and_slices())


@pytest.mark.parametrize("name", list(GROUPED))
def test_groups_cover_the_layers_in_order_and_none_twice(name: str) -> None:
    memory = GROUPED[name]
    layers = range(memory.end_layer) if memory.part is None else memory.part.layers
    for max_groups in (1, 2, 5, MAX_GROUPS, 1000):
        groups = layer_groups(memory, max_groups)
        assert [layer for group in groups for layer in group] == list(layers)
        assert all(len(group) for group in groups)
        assert len(groups) <= max_groups


def history_bytes(memory: ModelMemory) -> Callable[[int], int]:
    histories = [pool for pool in memory.pools if pool.reuse.reach is ALL and pool.layers]

    def of_layer(layer: int) -> int:
        kept = [pool for pool in histories or memory.pools if layer in pool.layers]
        return sum(pool.row_bytes(memory.page_tokens) for pool in kept)

    return of_layer


@pytest.mark.parametrize("name", list(GROUPED))
def test_groups_bring_about_the_same_number_of_bytes(name: str) -> None:
    memory = GROUPED[name]
    of_layer = history_bytes(memory)
    groups = layer_groups(memory)
    sizes = [sum(map(of_layer, group)) for group in groups]
    largest = max(of_layer(layer) for group in groups for layer in group)
    assert max(sizes) <= sum(sizes) / len(sizes) + largest
    if len(groups) > MIN_GROUPS:
        assert sum(sizes) / len(sizes) >= GROUP_PAGE_BYTES


def test_small_pages_are_loaded_in_few_groups_and_large_ones_in_many() -> None:
    assert layer_groups(MEMORIES["llama"]) == (range(0, 2), range(2, 3), range(3, 4))
    assert layer_groups(MEMORIES["glm_moe_dsa_stage"]) == (range(2, 4),)
    # 32 layers of 256 KiB a page.
    llama = catalog.resolve("llama-3.1-8b")
    assert layer_groups(llama) == tuple(range(i, i + 2) for i in range(0, 32, 2))


# -- the lanes --------------------------------------------------------------------------------


class Stub(HandRunLane):
    """A lane that ends in time, or does not."""

    def __init__(self, ends: bool) -> None:
        super().__init__(Reference())
        self.ends = ends
        self.closed = 0

    def close(self, timeout_s: float) -> bool:
        self.closed += 1
        return self.ends


@pytest.mark.parametrize(
    ("ends", "closes"),
    [((True, True), True), ((False, True), False), ((True, False), False)],
)
def test_closing_closes_both_lanes_and_says_whether_both_ended(
    ends: tuple[bool, bool], closes: bool
) -> None:
    tiers = setup("llama").tiers
    lanes = {way: Stub(end) for way, end in zip(Way, ends, strict=True)}
    copier = Copier(tiers.device, tiers.host, lanes)
    assert copier.close(SHORT_S) is closes
    assert [lane.closed for lane in lanes.values()] == [1, 1]


# -- wrong calls ------------------------------------------------------------------------------


def test_slots_that_are_not_there_are_refused_before_anything_moves() -> None:
    one = setup("llama")
    for source, target in ([[0], [10**6]], [[-1], [0]], [[0, 1], [0]]):
        move = PageMove("kv", *Way.BACKUP.value, slot_array(source), slot_array(target))
        with pytest.raises(AssertionError):
            one.copier.copy(Way.BACKUP, [move], SHORT_S)


def test_groups_that_leave_out_a_layer_are_refused() -> None:
    tiers = setup("llama").tiers
    with pytest.raises(AssertionError, match="left out"):
        Copier(tiers.device, tiers.host, {}, groups=[range(1)])


def test_both_sides_must_keep_the_same_memory() -> None:
    one, other = setup("llama").tiers, setup("deepseek_v4").tiers
    with pytest.raises(AssertionError, match="what lasts of the same"):
        Copier(one.device, other.host, {})
