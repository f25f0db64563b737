"""Arenas: all there when handed out, refused with a remedy when not, gone only when unused."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtide.tiers.arena import (
    HUGE_PAGE_BYTES,
    TOUCH_BYTES,
    Arena,
    MachineMemory,
    TierError,
    device_arena,
    host_arena,
    machine_memory,
)

CPU = torch.device("cpu")
GB = 10**9
ODD = 3 * mmap.PAGESIZE + 17

ON_THE_CPU: dict[str, Callable[..., Arena]] = {
    "host": lambda count, **given: host_arena(count, False, **given),
    "device": lambda count, **given: device_arena(count, CPU, **given),
}
both_tiers = pytest.mark.parametrize("tier", list(ON_THE_CPU))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class FakeCudart:
    """Keeps the tree that CUDA would keep, and reads what it has to let go of."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.asked: list[tuple[int, int, int]] = []
        self.let_go: list[bytes] = []

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:  # noqa: N802
        self.asked.append((ptr, size, flags))
        return self.answer

    def cudaHostUnregister(self, ptr: int) -> int:  # noqa: N802
        self.let_go.append(ctypes.string_at(ptr, 4))
        return 0


def resident(data: torch.Tensor) -> list[bool]:
    """Which pages of a tensor that starts on a page's border lie in memory."""
    pages = -(-data.numel() // mmap.PAGESIZE)
    marks = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel())
    assert libc.mincore(address, length, marks) == 0, ctypes.get_errno()
    return [bool(mark & 1) for mark in marks]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


# -- what is handed out ---------------------------------------------------------------------


@both_tiers
@pytest.mark.parametrize("count", [1, mmap.PAGESIZE, ODD, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1])
def test_arena_has_exactly_its_bytes_and_is_writable_to_the_last(tier: str, count: int) -> None:
    with ON_THE_CPU[tier](count) as arena:
        assert arena.data.dtype == torch.uint8
        assert arena.data.shape == (count,)
        assert arena.data.untyped_storage().nbytes() == arena.bytes == count
        assert not arena.data.any()
        arena.data.fill_(7)
        arena.data[-1] = 255
        assert arena.data[-1] == 255
        assert arena.data[:-1].sum() == 7 * (count - 1)


@both_tiers
def test_arena_starts_on_a_huge_pages_border(tier: str) -> None:
    with ON_THE_CPU[tier](ODD) as arena:
        assert arena.data.data_ptr() % HUGE_PAGE_BYTES == 0


@both_tiers
def test_every_page_was_touched_before_use(tier: str) -> None:
    # More than one thread's share, with a last one that is short and not a whole page.
    with ON_THE_CPU[tier](TOUCH_BYTES + ODD) as arena:
        assert all(resident(arena.data))


@both_tiers
def test_huge_pages_are_asked_for_and_a_kernel_without_them_is_no_error(tier: str) -> None:
    plain = mmap.mmap(-1, HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        plain.madvise(mmap.MADV_HUGEPAGE)
        granted = True
    except OSError:
        granted = False
    with ON_THE_CPU[tier](HUGE_PAGE_BYTES) as arena:
        assert arena.huge_pages is granted


@both_tiers
def test_arena_of_no_bytes_works_even_where_there_is_no_room(tier: str) -> None:
    with ON_THE_CPU[tier](0, machine=MachineMemory(GB, 0)) as arena:
        assert arena.data.shape == (0,)
        assert arena.bytes == 0
        assert not arena.huge_pages


def test_arenas_on_the_cpu_are_not_pinned() -> None:
    with host_arena(ODD, pinned=False) as host, device_arena(ODD, CPU) as device:
        assert not host.pinned
        assert not device.pinned


# -- closing --------------------------------------------------------------------------------


@both_tiers
def test_closing_twice_is_closing_once(tier: str) -> None:
    arena = ON_THE_CPU[tier](ODD)
    assert not arena.closed
    arena.close()
    arena.close()
    assert arena.closed
    with pytest.raises(AssertionError, match="closed"):
        _ = arena.data


@both_tiers
def test_closing_gives_the_memory_back(tier: str) -> None:
    arena = ON_THE_CPU[tier](TOUCH_BYTES)
    before = resident_bytes()
    arena.close()
    assert before - resident_bytes() > TOUCH_BYTES // 2


@both_tiers
def test_a_view_outlives_the_arena_it_came_from(tier: str) -> None:
    arena = ON_THE_CPU[tier](TOUCH_BYTES)
    view = arena.data[-8:].view(torch.int64)
    view.fill_(-5)
    arena.close()
    del arena
    gc.collect()
    assert view.tolist() == [-5]


def test_leaving_the_with_block_by_an_error_closes_too() -> None:
    with pytest.raises(RuntimeError), host_arena(ODD, pinned=False) as arena:
        raise RuntimeError
    assert arena.closed


# -- pinning --------------------------------------------------------------------------------


def test_pinned_arena_is_registered_whole_for_every_device() -> None:
    cudart = FakeCudart()
    with host_arena(ODD, pinned=True, cudart=cudart) as arena:
        assert arena.pinned
        assert cudart.asked == [(arena.data.data_ptr(), ODD, 1 | 2)]
        assert cudart.let_go == []


def test_closing_unregisters_once_and_while_the_memory_is_mapped() -> None:
    cudart = FakeCudart()
    arena = host_arena(ODD, pinned=True, cudart=cudart)
    arena.data[:4] = torch.tensor([1, 2, 3, 4])
    arena.close()
    arena.close()
    assert cudart.let_go == [b"\1\2\3\4"]


def test_an_arena_that_is_not_closed_is_unregistered_before_its_memory_goes() -> None:
    cudart = FakeCudart()
    arena = host_arena(ODD, pinned=True, cudart=cudart)
    arena.data[:4] = torch.tensor([4, 3, 2, 1])
    del arena
    gc.collect()
    assert cudart.let_go == [b"\4\3\2\1"]


def test_unpinned_and_empty_arenas_never_reach_cuda() -> None:
    cudart = FakeCudart()
    host_arena(ODD, pinned=False, cudart=cudart).close()
    with host_arena(0, pinned=True, cudart=cudart) as arena:
        assert arena.pinned
    assert not cudart.asked
    assert not cudart.let_go


def test_registration_that_cuda_refuses_names_size_code_and_remedy() -> None:
    cudart = FakeCudart(answer=2)
    with pytest.raises(
        TierError, match=r"12\.4 KB wanted pinned, .* error 2; use a smaller host size, or unpinned"
    ):
        host_arena(ODD, pinned=True, cudart=cudart)
    assert cudart.let_go == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can pin")
def test_without_cuda_pinned_memory_and_cuda_devices_are_refused() -> None:
    with pytest.raises(TierError, match=r"sees no CUDA device; use unpinned host memory"):
        host_arena(ODD, pinned=True)
    with pytest.raises(TierError, match=r"cuda:0 wanted, .* sees no CUDA device; use the cpu"):
        device_arena(ODD, torch.device("cuda:0"))


@needs_cuda
def test_cuda_copies_through_a_pinned_arena_both_ways() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with host_arena(TOUCH_BYTES + ODD, pinned=True) as host:
        assert host.data.is_pinned()
        host.data[-1] = 9
        with device_arena(host.bytes, device) as arena:
            assert arena.data.device == device
            arena.data.copy_(host.data, non_blocking=True)
            arena.data[0] = 8
            host.data.copy_(arena.data, non_blocking=True)
            torch.cuda.synchronize()
        assert host.data[[0, -1]].tolist() == [8, 9]
        view = host.data[:1]
    assert not view.is_pinned()


@needs_cuda
def test_cuda_device_without_the_room_is_a_refusal_with_a_remedy() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(TierError, match=r"cuda:\d has .* GB of which .*; use a device size of at"):
        device_arena(10**15, device)
    promised = MachineMemory(10**16, 10**16)
    with pytest.raises(TierError, match=r"1000000\.0 GB wanted, .* use a smaller device size"):
        device_arena(10**15, device, machine=promised)


# -- shared memory --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, ODD, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1])
def test_another_mapping_of_a_shared_arena_sees_the_same_bytes(count: int) -> None:
    with host_arena(count, False, shared=True) as arena:
        file = arena.shared
        assert file is not None
        assert all(resident(arena.data))
        assert arena.data.data_ptr() % HUGE_PAGE_BYTES == 0
        fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR)
        with mmap.mmap(fd, 0) as other:
            os.close(fd)
            arena.data[-1] = 7
            assert other[file.offset + count - 1] == 7
            other[file.offset] = 9
            assert arena.data[0] == 9


def test_a_closed_arena_is_shared_no_more() -> None:
    arena = host_arena(ODD, False, shared=True)
    assert arena.shared is not None
    fd, view = arena.shared.fd, arena.data[:4]
    arena.close()
    arena.close()
    assert arena.shared is None
    assert not Path(f"/proc/self/fd/{fd}").exists()
    view.fill_(1)


def test_private_and_empty_arenas_have_no_file() -> None:
    with host_arena(ODD, False) as private, host_arena(0, False, shared=True) as empty:
        assert private.shared is empty.shared is None


def test_a_shared_arena_is_pinned_and_a_refusal_leaves_no_file() -> None:
    cudart = FakeCudart()
    with host_arena(ODD, True, shared=True, cudart=cudart) as arena:
        assert cudart.asked[0][:2] == (arena.data.data_ptr(), ODD)
    assert len(cudart.let_go) == 1
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TierError, match="wanted pinned"):
        host_arena(ODD, True, shared=True, cudart=FakeCudart(answer=2))
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_shared_arena_counts_what_the_machine_has() -> None:
    with pytest.raises(TierError, match=r"512\.0 GB wanted, the machine has"):
        host_arena(512 * GB, False, shared=True, machine=MachineMemory(25 * GB, 18 * GB))


# -- refusals -------------------------------------------------------------------------------


@both_tiers
def test_more_than_is_available_names_wanted_had_and_remedy(tier: str) -> None:
    machine = MachineMemory(25_275_000_000, 18_111_000_000)
    with pytest.raises(TierError) as refusal:
        ON_THE_CPU[tier](512 * GB, machine=machine)
    assert str(refusal.value) == (
        f"{tier} memory: 512.0 GB wanted, the machine has 25.2 GB of which 18.1 GB are available; "
        f"use a {tier} size of at most 16.8 GB"
    )


@both_tiers
def test_a_twentieth_of_the_machine_stays_free(tier: str) -> None:
    machine = MachineMemory(1000, 800)
    ON_THE_CPU[tier](750, machine=machine).close()
    with pytest.raises(TierError, match=r"751 bytes wanted.* at most 750 bytes"):
        ON_THE_CPU[tier](751, machine=machine)


@pytest.mark.parametrize("available", [1_999, 1_234_567, 7_654_321, 19_999_999])
def test_the_size_a_remedy_names_fits(available: int) -> None:
    machine = MachineMemory(available, available)
    with pytest.raises(TierError) as refusal:
        host_arena(available, pinned=False, machine=machine)
    number, unit = re.findall(r"at most ([\d.]+) (\w+)$", str(refusal.value))[0]
    size = round(float(number) * {"KB": 1e3, "MB": 1e6}[unit])
    assert size > 0.85 * available
    host_arena(size, pinned=False, machine=machine).close()


def test_a_full_machine_names_no_size_but_says_to_free_some() -> None:
    with pytest.raises(TierError, match=r"1 bytes wanted, .* free memory there first: 5%"):
        host_arena(1, pinned=False, machine=MachineMemory(100 * GB, 4 * GB))


@both_tiers
def test_a_mapping_that_the_kernel_refuses_is_a_refusal_with_a_remedy(tier: str) -> None:
    machine = MachineMemory(1 << 60, 1 << 60)
    with pytest.raises(TierError, match=rf"kernel did not map .* use a smaller {tier} size"):
        ON_THE_CPU[tier](1 << 56, machine=machine)


# -- what there is --------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 1000 KiB, 800 of them available, without control groups."""
    write(
        tmp_path / "proc/meminfo",
        "MemTotal:           1000 kB\nMemFree:              10 kB\n"
        "MemAvailable:        800 kB\nHugePages_Total:       0\n",
    )
    return tmp_path


def limit(group: Path, maximum: str, current: int) -> None:
    write(group / "memory.max", f"{maximum}\n")
    write(group / "memory.current", f"{current}\n")


def test_this_machine_has_memory() -> None:
    memory = machine_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_machine_without_control_groups_has_what_meminfo_says(root: Path) -> None:
    assert machine_memory(root) == MachineMemory(1000 << 10, 800 << 10)


def test_a_containers_limit_less_its_use_counts(root: Path) -> None:
    limit(root / "sys/fs/cgroup", str(500 << 10), 200 << 10)
    assert machine_memory(root) == MachineMemory(500 << 10, 300 << 10)


def test_a_limit_larger_than_the_machine_changes_nothing(root: Path) -> None:
    limit(root / "sys/fs/cgroup", str(5000 << 10), 200 << 10)
    assert machine_memory(root) == MachineMemory(1000 << 10, 800 << 10)


def test_a_control_group_without_a_limit_changes_nothing(root: Path) -> None:
    limit(root / "sys/fs/cgroup", "max", 999 << 10)
    assert machine_memory(root) == MachineMemory(1000 << 10, 800 << 10)


def test_files_cached_in_a_container_do_not_count_as_used(root: Path) -> None:
    group = root / "sys/fs/cgroup"
    limit(group, str(500 << 10), 490 << 10)
    write(group / "memory.stat", f"anon {90 << 10}\ninactive_file {400 << 10}\n")
    assert machine_memory(root) == MachineMemory(500 << 10, 410 << 10)


def test_the_tightest_group_around_the_process_counts(root: Path) -> None:
    groups = root / "sys/fs/cgroup"
    write(root / "proc/self/cgroup", "1:cpu:/elsewhere\n0::/serving/kvtide\n")
    limit(groups / "serving/kvtide", str(600 << 10), 0)
    limit(groups / "serving", str(700 << 10), 650 << 10)
    limit(groups / "elsewhere", str(1 << 10), 0)
    assert machine_memory(root) == MachineMemory(600 << 10, 50 << 10)


def test_a_group_over_its_limit_leaves_nothing_rather_than_less(root: Path) -> None:
    limit(root / "sys/fs/cgroup", str(100 << 10), 120 << 10)
    assert machine_memory(root).available_bytes == 0


def test_refusal_in_a_container_speaks_of_the_container(root: Path) -> None:
    limit(root / "sys/fs/cgroup", str(500 << 10), 200 << 10)
    with pytest.raises(TierError, match=r"512\.0 KB of which 307\.2 KB are available; use"):
        host_arena(400 << 10, pinned=False, machine=machine_memory(root))
