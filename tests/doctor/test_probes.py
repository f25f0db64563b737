"""Probes on a CPU: what they measure, and that none of them takes longer than it may."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from kvtide.doctor import judged_store, probes
from kvtide.doctor.judged_store import JudgedStore
from kvtide.doctor.probes import bounded, measure_machine
from kvtide.spec import catalog

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "CPU_BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(judged_store, "MEASURED_BYTES", 1 << 20)
    monkeypatch.setattr(judged_store, "OBJECT_BYTES", 1 << 16)
    monkeypatch.setattr(probes, "CASE_BYTES", 1 << 20)
    monkeypatch.setattr(probes, "CPU_GEMM", 64)


def test_everything_that_a_cpu_has_is_measured(small: None, tmp_path: Path) -> None:
    found = measure_machine(CPU, JudgedStore.of_folder(tmp_path), catalog.resolve("qwen3-8b"))
    assert {*found.rates} == {"copy", "allocation", "gemm", "storage_write", "storage_read"}
    assert all(rate > 0 for rate in found.rates.values())
    assert found.codec is not None and found.codec.read_ratio > 0
    assert {*found.unmeasured} == {"load", "backup", "both_ways", "gpu_memory"}
    assert {(one.layout, one.backend) for one in found.cells} == {
        (layout, "reference") for layout in ("layer_first", "page_first", "page_first_direct")
    }
    assert list(tmp_path.iterdir()) == [], "the disk is left as it was"


def test_what_cannot_be_measured_is_reported_and_the_rest_is_measured(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: torch.device) -> float:
        raise RuntimeError("the bus is on fire")

    monkeypatch.setattr(probes, "_gemm_flops", broken)
    found = measure_machine(CPU, JudgedStore.of_folder(tmp_path / "not" / "there"), None)
    assert found.unmeasured["gemm"] == "the bus is on fire" and "gemm" not in found.rates
    assert found.rates["storage_read"] > 0, "beside the nearest folder that is there"


def test_a_probe_that_blocks_ends_in_time(small: None, tmp_path: Path) -> None:
    release = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="took more than 0 s"):
        bounded(lambda: release.wait(60), 0.05)
    assert time.monotonic() - began < 30
    release.set()


def test_an_error_of_a_probe_is_its_own() -> None:
    def late() -> None:
        raise TimeoutError("the driver's own")

    with pytest.raises(TimeoutError, match="the driver's own"):
        bounded(late, 60)


def test_without_time_left_nothing_is_begun(tmp_path: Path) -> None:
    found = measure_machine(CPU, JudgedStore.of_folder(tmp_path), None, budget_s=0.0)
    assert found.rates == {}
    assert found.unmeasured["copy"] == found.unmeasured["storage_read"] == "no time was left for it"
