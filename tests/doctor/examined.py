"""A machine with nothing wrong, to be changed where a test wants it otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtide.bench.codecs.codec_speed import StoreGain
from kvtide.doctor.advice import advise
from kvtide.doctor.findings import Examined
from kvtide.doctor.judged_store import JudgedStore
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
    **{"gpu_memory": 4e12, "gemm": 700e12, "storage_write": 2e9, "storage_read": 6e9},
}
FOLDER = JudgedStore.of_folder(Path("/pages"))
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
    storage: str | None = None,
    codec: float | None = None,
) -> Examined:
    """`storage` is a URL that was given, `codec` how much faster pages are read with one."""
    machine = machine or facts()
    store = FOLDER if storage is None else JudgedStore(storage)
    gain = None if codec is None else StoreGain("lossless", 1.0, 1.0, 0.5, codec)
    missing = unmeasured or {}
    known = {name: rate for name, rate in {**RATES, **(rates or {})}.items() if name not in missing}
    measured = Measured(known, missing, gain)
    advice = advise(machine, measured, model, store, free_bytes)
    return Examined(machine, measured, advice, store, model)
