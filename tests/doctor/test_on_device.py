"""Every probe, and the command, on the device under test."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from kvtide.cli.main import main
from kvtide.doctor.judged_store import JudgedStore
from kvtide.doctor.probes import CPU_BUDGET_S, GPU_BUDGET_S, measure_machine
from kvtide.spec import catalog
from kvtide.transfer.backends import CELLS

LINK = {"load", "backup", "both_ways", "gpu_memory"}


@pytest.mark.full
def test_every_probe_measures_something(device: torch.device, tmp_path: Path) -> None:
    began = time.monotonic()
    found = measure_machine(device, JudgedStore.of_folder(tmp_path), catalog.resolve("qwen3-8b"))
    budget = GPU_BUDGET_S if device.type == "cuda" else CPU_BUDGET_S
    assert time.monotonic() - began < budget + 10
    on_gpu = device.type == "cuda"
    assert {*found.unmeasured} == (set() if on_gpu else LINK), found.unmeasured
    common = {"copy", "allocation", "gemm", "storage_write", "storage_read"}
    assert {*found.rates} == common | (LINK if on_gpu else set())
    assert all(rate > 0 for rate in found.rates.values())
    kind = device.type
    cells = [(layout, name) for (on, name), many in CELLS.items() if on == kind for layout in many]
    assert len(found.cells) == 2 * len(cells), "both ways"


@pytest.mark.full
def test_the_command_names_the_device(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("a machine with a GPU is advised to use it")
    main(["doctor", "qwen3-8b", "--folder", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    kind = device.type
    assert found["command"][3:5] == ["--device", kind]
    assert found["settings"]["io_backend"]["value"] in {n for on, n in CELLS if on == kind}
