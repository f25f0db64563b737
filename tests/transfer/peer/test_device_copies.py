"""Copies from a GPU: few in flight, all of them over before memory is unmapped."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvtide.tiers.arena import host_arena
from kvtide.transfer.copy_engine import MAX_COPIES
from kvtide.transfer.peer import device_copies
from kvtide.transfer.peer.conformance.conformance_peer import ReceiverProcess
from kvtide.transfer.peer.device_copies import KERNEL_BYTES, MAX_IN_FLIGHT, DeviceCopies
from kvtide.transfer.peer.shm import SharedMemory, SharedMemoryLink
from kvtide.transfer.peer.transport import (
    Region,
    TransportError,
    TransportSettings,
    WriteBatch,
    write,
)

DEADLINE_S = 60.0


class HandEvent:
    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


class HandCopies(DeviceCopies):
    """A GPU without a clock: copies are done when the test says so."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.submitted: list[tuple[list[np.ndarray], int, int, HandEvent]] = []
        self.broken = False
        self.drained = 0

    def submit(self, rows, first, count) -> HandEvent:
        if self.broken:
            raise RuntimeError("CUDA error 719")
        event = HandEvent()
        self.submitted.append((rows, first, count, event))
        return event

    def submit_short(self, rows) -> HandEvent:
        return self.submit(rows, 0, len(rows[0]))

    def finish(self, submissions: int = 1000) -> None:
        for (source, target, sizes), first, count, event in self.submitted[:submissions]:
            for row in range(first, first + count):
                ctypes.memmove(int(target[row]), int(source[row]), int(sizes[row]))
            event.passed = True
        del self.submitted[:submissions]

    def drain(self) -> bool:
        self.drained += 1
        self.finish()
        return True


@pytest.fixture
def world() -> Iterator[tuple[SharedMemoryLink, HandCopies, torch.Tensor]]:
    copies = HandCopies()
    with host_arena(1 << 20, pinned=False, shared=True) as arena:
        descriptor = SharedMemory(TransportSettings()).expose([Region.of(arena)])
        link = SharedMemoryLink(descriptor, None)
        link._device_copies = copies
        yield link, copies, arena.data
        link.close()


SOURCE = np.random.default_rng(0).integers(1, 256, 1 << 20, np.uint8)


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "KERNEL_BYTES", 0)


def _rows(count: int, size: int = 100) -> WriteBatch:
    """Rows that cannot be joined."""
    places = np.arange(count) * (size + 1)
    return WriteBatch.of(SOURCE.ctypes.data + places, places, size, source_kind="device")


@pytest.mark.usefixtures("no_kernel")
def test_few_copies_are_in_flight_and_the_rest_follow(world) -> None:
    link, copies, memory = world
    first, second = link.begin(_rows(2000), 60.0), link.begin(_rows(10), 60.0)
    assert copies.in_flight == MAX_IN_FLIGHT == sum(one[2] for one in copies.submitted)
    assert max(one[2] for one in copies.submitted) == MAX_COPIES
    assert not second.poll()
    assert not first.poll()
    done = False
    while not done:
        copies.finish(1)
        done = first.poll()
        assert copies.in_flight <= MAX_IN_FLIGHT
    while not second.poll():
        copies.finish()
    assert copies.in_flight == 0
    expected = np.zeros(1 << 20, np.uint8)
    for place in np.arange(2000) * 101:
        expected[place : place + 100] = SOURCE[place : place + 100]
    assert np.array_equal(memory.numpy(), expected)


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(device_copies, "time", clock)
    return clock


def test_short_rows_are_one_submission_beside_long_ones(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, copies, memory = world
    monkeypatch.setattr(device_copies, "KERNEL_BYTES", 2000)
    places, sizes = np.arange(300) * 3001, np.where(np.arange(300) % 3, 1000, 3000)
    rows = WriteBatch.of(SOURCE.ctypes.data + places, places, sizes, source_kind="device")
    pending = link.begin(rows, 60.0)
    assert [(one[2], int(one[0][2][0])) for one in copies.submitted] == [(200, 1000), (100, 3000)]
    copies.finish(1)
    assert not pending.poll(), "the long ones are in flight"
    copies.finish()
    assert pending.poll() and copies.in_flight == 0
    expected = np.zeros(1 << 20, np.uint8)
    for place, size in zip(places, sizes, strict=True):
        expected[place : place + size] = SOURCE[place : place + size]
    assert np.array_equal(memory.numpy(), expected)


def test_short_rows_behind_the_deadline_are_not_begun(world, clock: Clock) -> None:
    link, copies, _ = world
    rows = [np.zeros(1, np.int64)] * 3
    write = device_copies.DeviceWrite(copies, [column[:0] for column in rows], rows, 0.05, link)
    clock.now += 0.06
    with pytest.raises(TransportError, match=r"not written within 0\.05 s"):
        write.poll()
    assert copies.submitted == []


@pytest.mark.usefixtures("no_kernel")
def test_past_the_deadline_nothing_is_submitted_and_what_is_in_flight_ends(
    world, clock: Clock
) -> None:
    link, copies, _ = world
    pending = link.begin(_rows(2000), 0.05)
    clock.now += 0.06
    assert not pending.poll()
    copies.finish()
    with pytest.raises(TransportError, match=r"not written within 0\.05 s") as error:
        pending.poll()
    assert error.value.silent
    assert copies.submitted == []
    assert link.alive()


def test_a_gpu_that_does_not_finish_is_not_silent_and_its_memory_stays(
    world, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, _, _ = world
    pending = link.begin(_rows(10), 0.02)
    clock.now += 0.05
    with pytest.raises(TransportError, match="does not finish a copy") as error:
        pending.poll()
    assert not error.value.silent
    assert not link.alive()
    monkeypatch.setattr(device_copies, "time", time)
    link.close()
    assert link._files


def test_a_gpu_that_fails_is_not_silent(world) -> None:
    link, copies, _ = world
    copies.broken = True
    with pytest.raises(TransportError, match="the copy failed: CUDA error 719") as error:
        link.begin(_rows(10), 1.0)
    assert not error.value.silent
    assert not link.alive()


@pytest.mark.usefixtures("no_kernel")
def test_memory_is_unmapped_after_the_last_copy(world) -> None:
    link, copies, _ = world
    pending = link.begin(_rows(2000), 60.0)
    link.close()
    assert copies.drained == 1
    assert not link._files
    with pytest.raises(TransportError, match="the link is closed") as error:
        pending.poll()
    assert error.value.silent
    assert copies.submitted == []


def test_sources_on_a_gpu_need_a_transport_with_one(world) -> None:
    link, _, _ = world
    link._device_copies = None
    with pytest.raises(TransportError, match="opened without one") as error:
        link.begin(_rows(1), 1.0)
    assert error.value.silent


# -- on a GPU -------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(device: torch.device) -> Iterator[tuple[ReceiverProcess, SharedMemoryLink]]:
    if device.type != "cuda":
        pytest.skip("copies from a GPU: --device cuda")
    receiver = ReceiverProcess("shm", TransportSettings(), [64 << 20])
    link = SharedMemory(TransportSettings(device=device)).connect(receiver.descriptor)
    yield receiver, link
    link.close()
    receiver.kill()


@pytest.mark.parametrize("size", [1, 16, 100, 4096, 65_536, 16 << 20])
def test_rows_of_a_gpu_land_in_another_process(on_gpu, device: torch.device, size: int) -> None:
    receiver, link = on_gpu
    source = torch.randint(1, 256, (64 << 20,), dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    count = min(5000, (64 << 20) // size)
    order = np.random.default_rng(1).permutation(count) * size
    rows = WriteBatch.of(source.data_ptr() + order, order[::-1], size, 0, "device")
    write(link, rows, DEADLINE_S)
    there, here = receiver.memory[receiver.starts[0] :], source.cpu().numpy()
    for start, place in zip(order, order[::-1], strict=True):
        assert np.array_equal(there[place : place + size], here[start : start + size])
    assert not receiver.memory[: receiver.starts[0]].any()


def test_a_write_may_be_the_first_call_of_its_thread(on_gpu, device: torch.device) -> None:
    """The page sender's thread has used no GPU before: nothing else gives it a CUDA context."""
    receiver, link = on_gpu
    source = torch.full((1 << 20,), 7, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    start = np.zeros(1, np.int64)
    rows = WriteBatch.of(source.data_ptr() + start, start, 1 << 20, 0, "device")
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(write, link, rows, DEADLINE_S).result()
    first = receiver.starts[0]
    assert (receiver.memory[first : first + (1 << 20)] == 7).all()


def test_a_link_of_a_gpu_is_closed_during_a_write(on_gpu, device: torch.device) -> None:
    receiver, link = on_gpu
    source = torch.ones(64 << 20, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    places = np.arange(1000) * KERNEL_BYTES
    rows = WriteBatch.of(source.data_ptr() + places, places[::-1], KERNEL_BYTES, 0, "device")
    pending = link.begin(rows, 60.0)
    link.close()
    before = receiver.snapshot()
    with pytest.raises(TransportError, match="the link is closed"):
        pending.poll()
    assert np.array_equal(before, receiver.memory)
