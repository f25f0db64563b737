"""The table of backends: what is in it opens, what is not is refused with what is."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest
import torch

from kvtide.cache import CacheConfig, Tokens
from kvtide.tiers.arena import TierError
from kvtide.tiers.layout import Layout, Piece
from kvtide.transfer import backends, copy_engine
from kvtide.transfer.backends import CELLS, DEFAULTS, check, open_backend, open_copier
from kvtide.transfer.copy_engine import (
    MAX_COPIES,
    MAX_IN_FLIGHT,
    Direct,
    DirectUnavailableError,
)
from kvtide.transfer.strided import Way
from tests.transfer.memories import MEMORIES, Sketch, Tiers, random_bytes

CPU = torch.device("cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        kind = metafunc.config.getoption("device")
        cells = [
            (name, layout)
            for (on, name), layouts in CELLS.items()
            for layout in Layout
            if on == kind and layout in layouts
        ]
        ids = [f"{name}-{layout.value}" for name, layout in cells]
        metafunc.parametrize("cell", cells, ids=ids)


def small_tiers(device: torch.device, host: Layout = Layout.PAGE_FIRST) -> Tiers:
    layouts = (Layout.LAYER_FIRST, host)
    return Tiers(MEMORIES["llama"], layouts, device, ({"kv": 8}, {"kv": 8}))


# -- cells ----------------------------------------------------------------------------------


def test_every_cell_of_the_table_opens_on_its_device(
    cell: tuple[str, Layout], device: torch.device
) -> None:
    name, layout = cell
    check(device, name, layout)
    tiers = small_tiers(device, layout)
    assert open_backend(name, tiers.device, tiers.host).name == name
    copier = open_copier(name, tiers.device, tiers.host)
    assert set(copier.lanes) == set(Way)
    assert copier.close(30.0)


def test_each_way_gets_a_lane_of_its_own() -> None:
    tiers = small_tiers(CPU)
    copier = open_copier("reference", tiers.device, tiers.host)
    assert copier.lanes[Way.LOAD] is not copier.lanes[Way.BACKUP]
    assert copier.lanes[Way.LOAD].timeline is not copier.lanes[Way.BACKUP].timeline
    assert copier.close(30.0)


def test_every_kind_of_device_has_a_default_that_takes_any_layout() -> None:
    assert set(DEFAULTS) == {kind for kind, _ in CELLS}
    for kind, name in DEFAULTS.items():
        for layout in Layout:
            check(torch.device(kind), name, layout)


@pytest.mark.parametrize(
    ("kind", "name", "choices"),
    [
        ("cpu", "kernel", ["reference"]),
        ("cpu", "auto", ["reference"]),
        ("cuda", "reference", ["kernel", "direct", "auto"]),
        ("cuda", "telepathy", ["kernel", "direct", "auto"]),
    ],
)
def test_a_backend_of_another_device_is_refused_with_the_choices(
    kind: str, name: str, choices: list[str]
) -> None:
    with pytest.raises(TierError, match=f"backend {name} .* does not work on {kind}; use ") as no:
        check(torch.device(kind), name, Layout.PAGE_FIRST)
    offered = str(no.value).split("; use ")[1]
    assert [part.split(" ")[0] for part in offered.split(" or ")] == choices


def test_a_layout_that_a_backend_does_not_take_is_refused_with_those_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = {("cpu", "reference"): frozenset({Layout.PAGE_FIRST, Layout.LAYER_FIRST})}
    monkeypatch.setattr(backends, "CELLS", cells)
    check(CPU, "reference", Layout.PAGE_FIRST)
    CacheConfig(Tokens(1024), host_layout=Layout.PAGE_FIRST)
    with pytest.raises(TierError) as refusal:
        CacheConfig(Tokens(1024), host_layout=Layout.PAGE_FIRST_DIRECT)
    assert str(refusal.value) == (
        "backend reference with host layout page_first_direct does not work on cpu; "
        "use reference (host layout layer_first, page_first)"
    )


def test_a_device_that_nothing_copies_to_is_refused_with_those_that_work() -> None:
    with pytest.raises(TierError, match=r"device meta: nothing copies .*; use cpu or cuda"):
        check(torch.device("meta"), "kernel", Layout.PAGE_FIRST)


# -- the copy engine, without one -------------------------------------------------------------


class FakeDriver:
    """What the driver's batched copy does, on host memory; an event is passed when waited for."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.batches: list[int] = []
        self.done = 0

    def __call__(
        self,
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        firsts: int,
        kinds: int,
        stream: int,
    ) -> int:
        columns = [(ctypes.c_uint64 * count).from_address(at) for at in (targets, sources, sizes)]
        # All copies of a batch have the first and only attributes.
        assert kinds == 1 and ctypes.c_size_t.from_address(firsts).value == 0
        in_stream_order = ctypes.c_int.from_address(attributes).value
        assert (in_stream_order, stream) == (1, 77)
        if not self.status:
            for target, source, size in zip(*columns, strict=True):
                ctypes.memmove(target, source, size)
            self.batches.append(count)
            assert sum(self.batches) - self.done <= MAX_IN_FLIGHT
        return self.status

    def event(self, blocking: bool) -> FakeEvent:
        assert blocking, "a lane that spins takes a core from the model"
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def record(self) -> None:
        self._reached = sum(self._driver.batches)

    def synchronize(self) -> None:
        self._driver.done = max(self._driver.done, self._reached)


class FakeStream:
    cuda_stream = 77


def direct_over(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Direct:
    monkeypatch.setattr(copy_engine, "_driver_calls", lambda: (driver, lambda: None))
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", driver.event)
    return Direct()


def test_direct_hands_over_every_run_in_batches_that_do_not_cross_a_leg(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    engine = direct_over(driver, monkeypatch)
    # None of the pieces fills its slots, so none of the runs are joined.
    near, far = Piece(0, 64, 0, 32, 32), Piece(20000, 64, 9000, 48, 32)
    last = Piece(60000, 48, 60000, 48, 40)
    slots = 2 * MAX_COPIES // 3
    order = tuple(np.random.default_rng(2).permutation(slots).tolist())
    one = Sketch(((near, far), (), (last,)), order, tuple(range(slots)))
    rng = np.random.default_rng(1)
    source, target = random_bytes(rng, 80000), random_bytes(rng, 80000)
    wanted = target.clone()
    for leg, _ in enumerate(engine.issue([one.work(source.data_ptr(), target.data_ptr())], 3)):
        naive = one.naive(leg)
        wanted[list(naive)] = source[list(naive.values())]
        assert torch.equal(target, wanted)
    assert driver.batches == [MAX_COPIES, 2 * slots - MAX_COPIES, slots]


def test_direct_waits_itself_before_the_drivers_queue_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    engine = direct_over(driver, monkeypatch)
    slots = tuple(range(3 * MAX_IN_FLIGHT + 5))
    block = torch.zeros(2 * 32 * len(slots), dtype=torch.uint8)
    far = block.data_ptr() + 32 * len(slots)
    work = Sketch(((Piece(0, 32, 0, 32, 32),),), slots, slots[::-1]).work(block.data_ptr(), far)
    for _ in range(2):
        list(engine.issue([work], 1))
    assert sum(driver.batches) == 2 * len(slots)
    # It let the queue run low only to make room: the engine had work all the time.
    assert driver.done >= sum(driver.batches) - MAX_IN_FLIGHT > 0
    assert driver.done < sum(driver.batches)


def test_a_status_of_the_driver_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = direct_over(FakeDriver(status=719), monkeypatch)
    work = Sketch(((Piece(0, 32, 0, 32, 32),),), (0,), (0,)).work()
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync failed with CUDA error 719"):
        next(engine.issue([work], 1))


def test_direct_without_cuda_bindings_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DirectUnavailableError, match="cuda-bindings is not installed; install it"):
        Direct()
