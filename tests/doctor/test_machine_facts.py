"""What is read from the system's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtide.doctor.machine_facts import machine_facts


def system(root: Path, files: dict[str, str]) -> Path:
    meminfo = "MemTotal:       1000 kB\nMemAvailable:    600 kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_this_machine_can_be_described() -> None:
    found = machine_facts()
    assert found.cores > 0 and found.open_files > 0
    assert found.installed_bytes >= found.memory.total_bytes > found.memory.available_bytes > 0


def test_a_bare_system_says_that_nothing_is_known(tmp_path: Path) -> None:
    found = machine_facts(system(tmp_path, {}))
    assert (found.huge_pages, found.shared_huge_pages, found.driver) == (None, None, None)
    assert (found.nvidia_cards, found.shared_memory_bytes) == (0, None)
    assert found.installed_bytes == found.memory.total_bytes == 1000 * 1024 and not found.limited


def test_switches_driver_and_cards_are_read(tmp_path: Path) -> None:
    pages, pci = "sys/kernel/mm/transparent_hugepage", "sys/bus/pci/devices"
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:00 2025\n"
    files = {
        f"{pages}/enabled": "always [madvise] never\n",
        f"{pages}/shmem_enabled": "always within_size advise [never] deny force\n",
        "proc/driver/nvidia/version": version,
        f"{pci}/0000:01:00.0/vendor": "0x10de\n",
        f"{pci}/0000:01:00.0/class": "0x030200\n",
        f"{pci}/0000:01:00.1/vendor": "0x10de\n",
        f"{pci}/0000:01:00.1/class": "0x040300\n",
        f"{pci}/0000:02:00.0/vendor": "0x8086\n",
        f"{pci}/0000:02:00.0/class": "0x030000\n",
    }
    found = machine_facts(system(tmp_path, files))
    assert (found.huge_pages, found.shared_huge_pages) == ("madvise", "never")
    assert (found.driver, found.nvidia_cards) == ("580.65.06", 1), "audio is no GPU"


def test_a_control_groups_limit_shows(tmp_path: Path) -> None:
    group = {"memory.max": "512000\n", "memory.current": "1000\n"}
    files = {f"sys/fs/cgroup/{name}": text for name, text in group.items()}
    found = machine_facts(system(tmp_path, files))
    assert found.limited and found.memory.total_bytes == 512000


def test_a_cpu_without_a_compiler_has_no_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.layers.native.build.shutil.which", lambda name: None)
    if not (found := machine_facts()).gpus:
        assert found.kernel_flaw == "there is no g++ on PATH"


def test_kernels_that_are_turned_off_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIDE_NATIVE", "0")
    if not (found := machine_facts()).gpus:
        assert found.kernel_flaw == "KVTIDE_NATIVE=0 turns them off"


def test_a_cpu_with_kernels_has_no_flaw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.doctor.machine_facts.load", lambda folder: None)
    monkeypatch.delenv("KVTIDE_NATIVE", raising=False)
    assert machine_facts().kernel_flaw is None
