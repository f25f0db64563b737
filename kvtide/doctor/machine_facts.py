"""What the system says about this machine, without measuring: memory, limits, driver, GPUs."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtide.layers.native.build import SWITCH, BuildError, cache_folder, load
from kvtide.tiers import MachineMemory, device_memory, machine_memory

NVIDIA = "0x10de"
"""The vendor's number on the PCI bus."""


@dataclass(frozen=True, slots=True)
class GPU:
    name: str
    memory: MachineMemory


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """installed_bytes      the machine's memory; `memory` is what the control groups leave of it
    memlock_bytes        that the process may lock; None: no limit
    open_files           descriptors that the process may have
    huge_pages           the kernel's word for private memory: always, madvise, never; None: not
                         known. `shared_huge_pages` is that for files in memory, as handoffs use
    shared_memory_bytes  the size of /dev/shm; None: there is none
    nvidia_cards         NVIDIA devices on the PCI bus, with a driver or without
    driver               the NVIDIA driver's version; None: it is not loaded
    torch_cuda           the CUDA version that torch was built for; None: for CPUs
    gpus                 those that torch can use
    kernel_flaw          why a CPU has no native kernels; None: it has, or computes nothing
    """

    cores: int
    installed_bytes: int
    memory: MachineMemory
    memlock_bytes: int | None
    open_files: int
    huge_pages: str | None
    shared_huge_pages: str | None
    shared_memory_bytes: int | None
    nvidia_cards: int
    driver: str | None
    torch_version: str
    torch_cuda: str | None
    gpus: tuple[GPU, ...] = ()
    kernel_flaw: str | None = None

    @property
    def limited(self) -> bool:
        """A control group grants less memory than the machine has."""
        return self.memory.total_bytes < self.installed_bytes


def machine_facts(root: Path = Path("/")) -> MachineFacts:
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    switches, gpus = root / "sys/kernel/mm/transparent_hugepage", _gpus()
    return MachineFacts(
        cores=len(os.sched_getaffinity(0)),
        installed_bytes=_installed_bytes(root),
        memory=machine_memory(root),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        open_files=files,
        huge_pages=_chosen(switches / "enabled"),
        shared_huge_pages=_chosen(switches / "shmem_enabled"),
        shared_memory_bytes=_file_system_bytes(root / "dev/shm"),
        nvidia_cards=_nvidia_cards(root),
        driver=_driver(root),
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        gpus=gpus,
        kernel_flaw=None if gpus else _kernel_flaw(),
    )


def _kernel_flaw() -> str | None:
    """Kernels that this machine has not compiled yet are compiled, as at a server's start."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 turns them off"
    try:
        load(cache_folder())
    except (BuildError, OSError) as error:
        return str(error)
    return None


def _installed_bytes(root: Path) -> int:
    found = re.search(r"^MemTotal:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.M)
    assert found is not None, "/proc/meminfo has no MemTotal"
    return int(found[1]) * 1024


def _chosen(switch: Path) -> str | None:
    """The word in brackets of one of the kernel's files: `always [madvise] never`."""
    try:
        found = re.search(r"\[(\w+)\]", switch.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _file_system_bytes(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _nvidia_cards(root: Path) -> int:
    """Display and 3D controllers (class 0x03…) of the vendor: not their audio functions."""
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        count += vendor == NVIDIA and kind.startswith("0x03")
    return count


def _driver(root: Path) -> str | None:
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else "unknown"


def _gpus() -> tuple[GPU, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(
        GPU(torch.cuda.get_device_name(number), device_memory(torch.device("cuda", number)))
        for number in range(torch.cuda.device_count())
    )
