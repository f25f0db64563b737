"""Pieces go to the backend that was faster with runs of their length, per direction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from kvtide.spec import PageMove
from kvtide.tiers.layout import Layout, Piece
from kvtide.transfer import measured_backend
from kvtide.transfer.backends import open_backend
from kvtide.transfer.copy_jobs import Copier
from kvtide.transfer.copy_kernel import Kernel
from kvtide.transfer.lane import Backend, Lane
from kvtide.transfer.measured_backend import (
    LENGTHS_BYTES,
    LinkMeasurement,
    MeasuredBackend,
    measure,
    shortest_direct,
)
from kvtide.transfer.strided import Reference, Strided, Way, runs
from kvtide.transfer.timeline import CudaTimeline, HostTimeline
from tests.transfer.memories import MEMORIES, Sketch, Tiers, pick, some_slots

CPU = torch.device("cpu")


class Recorder:
    """Copies nothing, but keeps the sizes of what it was given, by leg."""

    def __init__(self, name: str, log: list[str] | None = None) -> None:
        self.name = name
        self.log = [] if log is None else log
        self.sizes: list[list[list[int]]] = []

    def issue(self, works: Sequence[Strided], legs: int) -> Iterator[None]:
        self.sizes.append([])
        for leg in range(legs):
            bounds = [work.table.legs[leg : leg + 2] for work in works]
            self.sizes[-1].append(
                [
                    size
                    for w, (a, b) in zip(works, bounds, strict=True)
                    for size in w.table.bytes[a:b]
                ]
            )
            self.log.append(f"{self.name} {leg}")
            yield


def job(way: Way, *legs: Sequence[int]) -> list[Strided]:
    """One work with pieces of these sizes in its legs."""
    found = tuple(tuple(Piece(0, size, 0, size, size) for size in sizes) for sizes in legs)
    return [Sketch(found, (4, 2), (1, 0)).work(way=way)]


# -- backends by copy -----------------------------------------------------------------------


def test_long_pieces_go_to_the_copy_engine_and_short_ones_to_the_kernel() -> None:
    kernel, direct = Recorder("kernel"), Recorder("direct")
    both = MeasuredBackend(kernel, direct, {Way.LOAD: 4096, Way.BACKUP: 4096})
    assert len(list(both.issue(job(Way.LOAD, [4095, 64, 4096], [], [8192]), 3))) == 3
    assert kernel.sizes == [[[4095, 64], [], []]]
    assert direct.sizes == [[[4096], [], [8192]]]


def test_each_way_has_its_own_length() -> None:
    kernel, direct = Recorder("kernel"), Recorder("direct")
    both = MeasuredBackend(kernel, direct, {Way.LOAD: 1024, Way.BACKUP: 4096})
    for way in Way:
        list(both.issue(job(way, [512, 2048, 8192]), 1))
    assert kernel.sizes == [[[512]], [[512, 2048]]]
    assert direct.sizes == [[[2048, 8192]], [[8192]]]


def test_a_leg_is_over_when_both_have_issued_theirs() -> None:
    log: list[str] = []
    both = MeasuredBackend(Recorder("kernel", log), Recorder("direct", log), dict.fromkeys(Way, 64))
    issuing = both.issue(job(Way.LOAD, [32, 96], [32, 96]), 2)
    next(issuing)
    assert sorted(log) == ["direct 0", "kernel 0"]
    next(issuing)
    assert sorted(log[2:]) == ["direct 1", "kernel 1"]


def test_slots_go_with_both_parts_and_an_empty_part_is_not_handed_over() -> None:
    kernel, direct = Recorder("kernel"), Recorder("direct")
    given: list[Strided] = []
    both = MeasuredBackend(_keeping(kernel, given), _keeping(direct, given), dict.fromkeys(Way, 64))
    list(both.issue(job(Way.LOAD, [32, 96]), 1))
    assert [work.source_index.tolist() for work in given] == [[4, 2], [4, 2]]
    assert [work.target_index.tolist() for work in given] == [[1, 0], [1, 0]]
    given.clear()
    list(both.issue(job(Way.LOAD, [96]), 1))
    assert [work.table.bytes.tolist() for work in given] == [[96]]


def _keeping(recorder: Recorder, given: list[Strided]) -> Backend:
    class Keeping(Recorder):
        def issue(self, works: Sequence[Strided], legs: int) -> Iterator[None]:
            given.extend(works)
            return recorder.issue(works, legs)

    return Keeping(recorder.name)


@pytest.mark.parametrize("name", ["deepseek_v4", "glm_moe_dsa_fp8"])
@pytest.mark.parametrize("layout", list(Layout), ids=lambda one: one.value)
def test_what_two_backends_copy_together_is_all_of_it(
    name: str, layout: Layout, device: torch.device
) -> None:
    memory = MEMORIES[name]
    layouts = (Layout.LAYER_FIRST, layout)
    tiers = Tiers(memory, layouts, device, (some_slots(memory, 6), some_slots(memory, 5)))
    on_cuda = device.type == "cuda"
    engine = open_backend("direct", tiers.device, tiers.host) if on_cuda else Reference()
    both = MeasuredBackend(Kernel(device), engine, {Way.LOAD: 400, Way.BACKUP: 1440})
    lanes = {
        way: Lane(way.name, CudaTimeline(device) if on_cuda else HostTimeline(), both)
        for way in Way
    }
    halves = [range(0, 2), range(2, memory.end_layer)]
    copier = Copier(tiers.device, tiers.host, lanes, halves)
    rng = np.random.default_rng(9)
    tiers.fill(rng)
    for way in (Way.BACKUP, Way.LOAD):
        moves = [
            PageMove(a.name, way.source, way.target, pick(rng, 5, 4), pick(rng, 5, 4))
            for a in memory.anchors
        ]
        copier.copy(way, moves, 30.0).wait(-1)
        for move in moves:
            tiers.expect(move)
    tiers.assert_as_expected()
    assert copier.close(30.0)


# -- the measurement ------------------------------------------------------------------------


def measured(way: Way, *direct_wins: bool) -> list[LinkMeasurement]:
    """One result per length, shortest first."""
    return [
        LinkMeasurement(way, length, 2.0 if wins else 1.0, 1.5)
        for length, wins in zip(LENGTHS_BYTES, direct_wins, strict=False)
    ]


@pytest.mark.parametrize(
    ("wins", "shortest"),
    [
        ((True, True, True, True), LENGTHS_BYTES[0]),
        ((False, False, True, True), LENGTHS_BYTES[2]),
        ((True, False, False, True), LENGTHS_BYTES[3]),
        ((True, True, True, False), 2 * LENGTHS_BYTES[-1]),
        ((), 2 * LENGTHS_BYTES[-1]),
    ],
    ids=["always", "from the third on", "one early win", "not the longest", "not measured"],
)
def test_the_copy_engine_takes_over_where_it_wins_from_then_on(
    wins: tuple[bool, ...], shortest: int
) -> None:
    results = measured(Way.LOAD, *wins)
    others = measured(Way.BACKUP, *(not one for one in wins))
    assert shortest_direct(results + others, Way.LOAD) == shortest
    assert shortest_direct(others + results[::-1], Way.LOAD) == shortest


@pytest.mark.parametrize(("direct_bytes_s", "wins"), [(1.2, True), (0.86, True), (0.84, False)])
def test_the_copy_engine_wins_what_is_nearly_even(direct_bytes_s: float, wins: bool) -> None:
    assert LinkMeasurement(Way.LOAD, 4096, direct_bytes_s, 1.0).direct_wins is wins


def test_lengths_are_in_order() -> None:
    assert list(LENGTHS_BYTES) == sorted(set(LENGTHS_BYTES))


def test_measurements_stay_within_both_tiers_and_take_only_lengths_that_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With timing replaced by a check of every run that would have been timed."""
    memory = MEMORIES["llama"]
    layouts = (Layout.LAYER_FIRST, Layout.PAGE_FIRST)
    tiers = Tiers(memory, layouts, CPU, ({"kv": 40}, {"kv": 70}))
    tiers.fill(np.random.default_rng(4))
    room = {Way.LOAD: (tiers.host, tiers.device), Way.BACKUP: (tiers.device, tiers.host)}

    def checked(backend: Backend, work: Strided) -> float:
        found = runs([work], 1)
        ends = zip((found.source, found.target), room[work.table.way], strict=True)
        for addresses, tier in ends:
            starts = np.sort(addresses - tier.address)
            assert starts[0] >= 0
            assert (np.diff(starts) >= work.table.bytes[0]).all()
            assert starts[-1] + work.table.bytes[0] <= tier.data.numel()
        assert len(found.bytes) >= 4
        list(backend.issue([work], 1))
        return {"kernel": 1.0, "direct": 2.0}[backend.name]

    monkeypatch.setattr(measured_backend, "_bytes_s", checked)
    results = measure(tiers.device, tiers.host, Recorder("kernel"), Recorder("direct"))
    fitting = [length for length in LENGTHS_BYTES if 8 * length <= tiers.device.data.numel()]
    assert 0 < len(fitting) < len(LENGTHS_BYTES)
    assert [(one.way, one.run_bytes) for one in results] == [(w, n) for w in Way for n in fitting]
    assert {(one.direct_bytes_s, one.kernel_bytes_s) for one in results} == {(2.0, 1.0)}


def test_tiers_too_small_to_measure_go_to_the_kernel(device: torch.device) -> None:
    memory = MEMORIES["llama_stage_and_rank"]
    layouts = (Layout.LAYER_FIRST, Layout.PAGE_FIRST)
    tiers = Tiers(memory, layouts, device, ({"kv": 2}, {"kv": 2}))
    assert measure(tiers.device, tiers.host, Recorder("kernel"), Recorder("direct")) == []
    assert shortest_direct([], Way.LOAD) > LENGTHS_BYTES[-1]


def test_both_backends_are_timed_on_a_real_device(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("times the device's own copy engine: --device cuda")
    memory = MEMORIES["llama"]
    layouts = (Layout.LAYER_FIRST, Layout.PAGE_FIRST)
    tiers = Tiers(memory, layouts, device, ({"kv": 2048}, {"kv": 2048}))
    chosen = open_backend("auto", tiers.device, tiers.host)
    assert isinstance(chosen, MeasuredBackend)
    assert set(chosen.min_direct_bytes) == set(Way)
    assert all(
        shortest in (*LENGTHS_BYTES, 2 * LENGTHS_BYTES[-1])
        for shortest in chosen.min_direct_bytes.values()
    )
