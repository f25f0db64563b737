"""A machine with nothing wrong, to be changed where a test wants it otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtide.doctor.advice import advise
from kvtide.doctor.findings import Examined
from kvtide.doctor.machine_facts import GPU, MachineFacts
from kvtide.doctor.model_facts import ModelFacts
from kvtide.doctor.probes import Measured
from kvtide.spec import catalog
from kvtide.tiers import MachineMemory

GB = 10**9
H200 = GPU("NVIDIA H200", MachineMemory(140 * GB, 139 * GB))
MACHINE: dict[str, Any] = {
    "cores": 16,
    "installed_bytes": 128 * GB,
    "memory": MachineMemory(128 * GB, 120 * GB),
    "memlock_bytes": None,
    "open_files": 65536,
    "huge_pages": "madvise",
    "shared_huge_pages": "advise",
    "shared_memory_bytes": 64 * GB,
    "nvidia_cards": 1,
    "driver": "580.65.06",
    "torch_version": "2.13.0",
    "torch_cuda": "13.0",
    "gpus": (H200,),
}
RATES = {
    **{"copy": 10e9, "allocation": 5e9, "load": 55e9, "backup": 55e9, "both_ways": 100e9},
    **{"gpu_memory": 4e12, "gemm": 700e12, "disk_write": 2e9, "disk_read": 6e9},
}
ON_CPU: dict[str, Any] = {"gpus": (), "nvidia_cards": 0, "driver": None}


def facts(**changes: Any) -> MachineFacts:
    return MachineFacts(**{**MACHINE, **changes})


def qwen(weights_bytes: int | None = 16 * GB) -> ModelFacts:
    memory = catalog.resolve("qwen3-8b")
    path = Path("/models/qwen3-8b")
    return ModelFacts("qwen3-8b", path, memory, memory.page_tokens, 8 * GB, weights_bytes)


def examined(
    machine: MachineFacts | None = None,
    model: ModelFacts | None = None,
    rates: dict[str, float] | None = None,
    unmeasured: dict[str, str] | None = None,
    free_bytes: int = 1000 * GB,
) -> Examined:
    machine = machine or facts()
    measured = Measured({**RATES, **(rates or {})}, unmeasured or {})
    advice = advise(machine, measured, model, Path("/pages"), free_bytes)
    return Examined(machine, measured, advice, model)
