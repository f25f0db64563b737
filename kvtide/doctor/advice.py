"""Which settings fit this machine and model, why, and the command that starts a server with them.

Pure arithmetic over facts and measurements: the same that a server and the planner do.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from kvtide.byte_sizes import format_bytes
from kvtide.doctor.machine_facts import MachineFacts
from kvtide.doctor.model_facts import ModelFacts
from kvtide.doctor.probes import Measured
from kvtide.planner.replay import Rates
from kvtide.server.settings import NO_STORAGE, Settings, flag
from kvtide.server.setup.engine_setup import gpu_sizes
from kvtide.spec import ModelMemory
from kvtide.spec.sizing import bytes_for
from kvtide.tiers import Bytes, Layout, MachineMemory
from kvtide.transfer.backends import DEFAULTS

GEMM_FRACTION = 0.5
"""What prefill is assumed to reach of a large GEMM's rate."""
CLEARLY_FASTER = 1.25
"""A layout or backend must beat the default by so much: the default stores pages in place."""
CPU_MAX_TOKENS = 131_072
CPU_DEVICE_FRACTION, CPU_HOST_FRACTION = 1 / 6, 1 / 3
"""The tiers on a CPU, of the memory that the weights leave: the host has twice the device."""
DISK_FRACTION, MAX_DISK_BYTES = 0.5, 2 * 10**12
FETCHED_TOKENS = 4096
"""The prefix by which fetching is compared with computing."""
MB = 10**6


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting of `kvtide serve`; `value` None leaves it to the server."""

    setting: str
    value: str | None
    why: str


@dataclass(frozen=True, slots=True)
class FetchCost:
    """Seconds to bring FETCHED_TOKENS from storage, and to compute them."""

    fetch_s: float
    compute_s: float

    @property
    def pays(self) -> bool:
        return self.fetch_s < self.compute_s

    def __str__(self) -> str:
        return (
            f"{FETCHED_TOKENS:,} tokens take {_seconds(self.fetch_s)} to fetch from this disk and "
            f"about {_seconds(self.compute_s)} to compute"
        )


@dataclass(frozen=True, slots=True)
class TierSizes:
    """What the tiers take; `fits`: there is room for both, and for the weights."""

    device_bytes: int
    host_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """`model` is the word of the command; None: the server's own default."""

    model: str | None
    choices: tuple[Choice, ...]
    sizes: TierSizes | None = None
    fetch: FetchCost | None = None

    @property
    def words(self) -> list[str]:
        chosen = [(flag(one.setting), one.value) for one in self.choices if one.value is not None]
        model = [] if self.model is None else [self.model]
        return ["kvtide", "serve", *model, *(word for pair in chosen for word in pair)]

    @property
    def command(self) -> str:
        return shlex.join(self.words)


def advise(
    facts: MachineFacts, measured: Measured, model: ModelFacts | None, folder: Path, free_bytes: int
) -> Advice:
    """`folder` is where pages would be stored, on a disk with so many free bytes."""
    device = "cuda" if facts.gpus else "cpu"
    choices = [_device(facts)]
    if model is None:
        choices += [_layout(measured, device), _backend(measured, device)]
        return Advice(None, (*choices, _storage(folder, free_bytes, None)))
    sizes = tier_sizes(facts, model)
    fetch = fetch_cost(measured, model)
    choices += [_page(model), *_tiers(sizes, device)]
    choices += [_layout(measured, device), _backend(measured, device)]
    choices.append(_storage(folder, free_bytes, fetch))
    named = str(model.path) if model.path is not None else f"./{model.name}"
    return Advice(named, tuple(choices), sizes, fetch)


# -- sizes --------------------------------------------------------------------------------------


def tier_sizes(facts: MachineFacts, model: ModelFacts) -> TierSizes:
    """What a server would take by itself beside a GPU; on a CPU parts of what the weights leave."""
    weights = model.weights_bytes or 0
    min_bytes = bytes_for(model.memory, 1, _tokens_per_checkpoint())
    if facts.gpus:
        gpu = facts.gpus[0].memory
        left = MachineMemory(gpu.total_bytes, max(0, gpu.available_bytes - weights))
        device_size, host_size = gpu_sizes(Settings(device="cuda"), left, facts.memory)
        assert isinstance(device_size, Bytes) and isinstance(host_size, Bytes)
        sizes = (device_size.bytes, host_size.bytes)
    else:
        left = MachineMemory(
            facts.memory.total_bytes, max(0, facts.memory.available_bytes - weights)
        )
        max_bytes = _bytes_of(model.memory, CPU_MAX_TOKENS)
        sizes = (
            min(left.portion(CPU_DEVICE_FRACTION), max_bytes),
            min(left.portion(CPU_HOST_FRACTION), 2 * max_bytes),
        )
    device_bytes, host_bytes = (_rounded(max(0, size)) for size in sizes)
    fits = min(device_bytes, host_bytes) >= min_bytes
    return TierSizes(max(device_bytes, min_bytes), max(host_bytes, min_bytes), fits)


def _tokens_per_checkpoint() -> int:
    return Settings().tokens_per_checkpoint


def _bytes_of(memory: ModelMemory, tokens: int) -> int:
    return bytes_for(memory, max(1, tokens // memory.page_tokens), _tokens_per_checkpoint())


def _rounded(size: int) -> int:
    """Down to whole megabytes, where that leaves most of it."""
    return size // MB * MB if size > 10 * MB else size


def _written(size: int) -> str:
    return f"{size // MB}MB" if size % MB == 0 else str(size)


# -- fetching against computing -----------------------------------------------------------------


def fetch_cost(measured: Measured, model: ModelFacts) -> FetchCost | None:
    """By the planner's rates; None where the disk, the GEMM or the model's size is not known."""
    rates = _rates(measured, model)
    if rates is None:
        return None
    memory = model.memory
    size = memory.history_bytes_per_token() * FETCHED_TOKENS + memory.resume_bytes()
    return FetchCost(size / rates.bytes_s("fetch"), FETCHED_TOKENS / rates.prefill_tokens_s)


def _rates(measured: Measured, model: ModelFacts) -> Rates | None:
    found = measured.rates
    if not {"gemm", "disk_read", "disk_write"} <= found.keys() or not model.active_params:
        return None
    return Rates(
        prefill_tokens_s=GEMM_FRACTION * found["gemm"] / (2 * model.active_params),
        storage_read_bytes_s=found["disk_read"],
        storage_write_bytes_s=found["disk_write"],
    )


# -- choices ------------------------------------------------------------------------------------


def _device(facts: MachineFacts) -> Choice:
    if facts.gpus:
        return Choice("device", "cuda", f"torch finds {facts.gpus[0].name}")
    return Choice("device", "cpu", "torch finds no GPU here")


def _page(model: ModelFacts) -> Choice:
    own, tokens = model.own_page_tokens, model.memory.page_tokens
    size = max(model.memory.at_rest.slot_bytes(one.name) for one in model.memory.anchors)
    of_size = f"a page of {tokens} tokens has up to {format_bytes(size)}"
    if tokens == own:
        return Choice("page_tokens", str(tokens), f"the family's own: {of_size}")
    return Choice("page_tokens", str(tokens), f"the family's {own} make small pages; {of_size}")


def _tiers(sizes: TierSizes, device: str) -> list[Choice]:
    if device == "cuda":
        why = ("four fifths of the GPU's memory beside the weights", "half of the free memory")
    else:
        why = ("a sixth of the memory beside the weights, at most", "twice as much, at most")
    return [
        Choice("device_bytes", _written(sizes.device_bytes), why[0]),
        Choice("host_bytes", _written(sizes.host_bytes), why[1]),
    ]


def _layout(measured: Measured, device: str) -> Choice:
    layout, _, why = _fastest(measured, device)
    return Choice("host_layout", layout, why)


def _backend(measured: Measured, device: str) -> Choice:
    _, backend, why = _fastest(measured, device)
    return Choice("io_backend", backend, why)


def _fastest(measured: Measured, device: str) -> tuple[str, str, str]:
    """Layout and backend that load fastest; the defaults unless others are clearly faster."""
    usual = (Layout.PAGE_FIRST_DIRECT.value, DEFAULTS[device])
    loads = {(one.layout, one.backend): one.gb_s for one in measured.cells if one.way == "load"}
    if usual not in loads:
        return (*usual, "the default; not measured for a model")
    best = max(loads, key=lambda cell: loads[cell])
    if loads[best] > CLEARLY_FASTER * loads[usual]:
        return (*best, f"loads {loads[best]:.1f} GB/s; the default {loads[usual]:.1f}")
    return (*usual, f"the default: loads {loads[usual]:.1f} GB/s, no other is clearly faster")


def _storage(folder: Path, free_bytes: int, fetch: FetchCost | None) -> Choice:
    if fetch is not None and not fetch.pays:
        return Choice("storage", NO_STORAGE, str(fetch))
    cap = min(int(DISK_FRACTION * free_bytes), MAX_DISK_BYTES) // MB
    if cap < 1:
        return Choice("storage", NO_STORAGE, f"the disk of {folder} is full")
    url = f"file://{quote(str(folder.absolute()))}?cap={cap}MB"
    if fetch is None:
        return Choice("storage", url, "half of the free disk; not compared with computing")
    return Choice("storage", url, str(fetch))


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
