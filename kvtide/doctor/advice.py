"""Which settings fit this machine and model, why, and the command that starts a server with them.

Pure arithmetic over facts and measurements: the same that a server and the planner do.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeGuard

from kvtide.bench.codecs.codec_speed import StoreGain
from kvtide.byte_sizes import format_bytes
from kvtide.doctor.judged_store import CODEC, JudgedStore
from kvtide.doctor.machine_facts import MachineFacts
from kvtide.doctor.model_facts import ModelFacts
from kvtide.doctor.probes import Measured
from kvtide.planner.replay import Rates
from kvtide.server.settings import NO_STORAGE, Settings, flag
from kvtide.server.setup.engine_setup import gpu_sizes
from kvtide.spec import ModelMemory, SpecError
from kvtide.spec.sizing import bytes_for
from kvtide.tiers import Bytes, Layout, MachineMemory
from kvtide.transfer.backends import DEFAULTS

GEMM_FRACTION = 0.5
"""What prefill is assumed to reach of a large GEMM's rate."""
CLEARLY_FASTER = 1.25
"""A layout, a backend or a codec must beat the default by so much: the default stores pages in
place, as they are."""
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
    """Seconds to bring FETCHED_TOKENS from this store, and to compute them."""

    store: str
    fetch_s: float
    compute_s: float

    @property
    def pays(self) -> bool:
        return self.fetch_s < self.compute_s

    def __str__(self) -> str:
        return (
            f"{FETCHED_TOKENS:,} tokens take {_seconds(self.fetch_s)} to fetch from {self.store} "
            f"and about {_seconds(self.compute_s)} to compute"
        )


@dataclass(frozen=True, slots=True)
class TierSizes:
    """What the tiers of a rank take; `fits`: there is room for both, and for the weights.

    ranks  that divide the weights between them, on a GPU each
    """

    device_bytes: int
    host_bytes: int
    fits: bool
    ranks: int = 1


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
    facts: MachineFacts,
    measured: Measured,
    model: ModelFacts | None,
    store: JudgedStore,
    free_bytes: int,
) -> Advice:
    """`free_bytes` are those of the disk, where the store is a folder."""
    device = "cuda" if facts.gpus else "cpu"
    choices = [_device(facts)]
    if model is None:
        choices += [_layout(measured, device), _backend(measured, device)]
        return Advice(None, (*choices, _storage(store, free_bytes, None, None)))
    sizes = tier_sizes(facts, model)
    fetch = fetch_cost(measured, model, store)
    choices += [*_ranks(sizes, facts), _page(model), *_tiers(sizes, device)]
    choices += [_layout(measured, device), _backend(measured, device)]
    choices.append(_storage(store, free_bytes, fetch, measured.codec))
    named = str(model.path) if model.path is not None else f"./{model.name}"
    return Advice(named, tuple(choices), sizes, fetch)


# -- sizes --------------------------------------------------------------------------------------


def tier_sizes(facts: MachineFacts, model: ModelFacts) -> TierSizes:
    """What a server would take by itself beside a GPU; on a CPU parts of what the weights leave.

    Where one GPU has no room, several may: each then has a part of the weights.
    """
    if not facts.gpus:
        return _sizes_on_cpu(facts, model)
    of_one = _sizes_on_gpus(facts, model, 1)
    if not of_one.fits:
        for ranks in range(2, len(facts.gpus) + 1):
            with suppress(SpecError):  # The model's heads do not divide so.
                if (sizes := _sizes_on_gpus(facts, model, ranks)).fits:
                    return sizes
    return of_one


def _sizes_on_cpu(facts: MachineFacts, model: ModelFacts) -> TierSizes:
    free = facts.memory.available_bytes - (model.weights_bytes or 0)
    left = MachineMemory(facts.memory.total_bytes, max(0, free))
    max_bytes = _bytes_of(model.memory, CPU_MAX_TOKENS)
    return _rounded_sizes(
        model.memory,
        min(left.portion(CPU_DEVICE_FRACTION), max_bytes),
        min(left.portion(CPU_HOST_FRACTION), 2 * max_bytes),
    )


def _sizes_on_gpus(facts: MachineFacts, model: ModelFacts, ranks: int) -> TierSizes:
    """Of one of so many ranks, with a GPU each, all like the first."""
    gpu, weights = facts.gpus[0].memory, -(-(model.weights_bytes or 0) // ranks)
    left = MachineMemory(gpu.total_bytes, max(0, gpu.available_bytes - weights))
    device, host = gpu_sizes(Settings(device="cuda", tp=ranks), left, facts.memory)
    assert isinstance(device, Bytes) and isinstance(host, Bytes)
    (memory,) = model.memory.stages(1, 0, ranks)
    return _rounded_sizes(memory, device.bytes, host.bytes, ranks)


def _rounded_sizes(memory: ModelMemory, device: int, host: int, ranks: int = 1) -> TierSizes:
    """At least those of one page."""
    min_bytes = bytes_for(memory, 1, _tokens_per_checkpoint())
    device, host = (_rounded(max(0, size)) for size in (device, host))
    fits = min(device, host) >= min_bytes
    return TierSizes(max(device, min_bytes), max(host, min_bytes), fits, ranks)


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


def fetch_cost(measured: Measured, model: ModelFacts, store: JudgedStore) -> FetchCost | None:
    """By the planner's rates; None where the store, the GEMM or the model's size is not known."""
    rates = _rates(measured, model)
    if rates is None:
        return None
    memory = model.memory
    size = memory.history_bytes_per_token() * FETCHED_TOKENS + memory.resume_bytes()
    faster = measured.codec.read_ratio if _codec_pays(measured.codec) else 1.0
    fetch_s = size / (rates.bytes_s("fetch") * faster)
    return FetchCost(str(store), fetch_s, FETCHED_TOKENS / rates.prefill_tokens_s)


def _codec_pays(gain: StoreGain | None) -> TypeGuard[StoreGain]:
    return gain is not None and gain.read_ratio > CLEARLY_FASTER


def _rates(measured: Measured, model: ModelFacts) -> Rates | None:
    found = measured.rates
    if not {"gemm", "storage_read", "storage_write"} <= found.keys() or not model.active_params:
        return None
    return Rates(
        prefill_tokens_s=GEMM_FRACTION * found["gemm"] / (2 * model.active_params),
        storage_read_bytes_s=found["storage_read"],
        storage_write_bytes_s=found["storage_write"],
    )


# -- choices ------------------------------------------------------------------------------------


def _device(facts: MachineFacts) -> Choice:
    if facts.gpus:
        return Choice("device", "cuda", f"torch finds {facts.gpus[0].name}")
    return Choice("device", "cpu", "torch finds no GPU here")


def _ranks(sizes: TierSizes, facts: MachineFacts) -> list[Choice]:
    if sizes.ranks == 1:
        return []
    why = f"the weights have no room on one of the {len(facts.gpus)} GPUs"
    return [Choice("tp", str(sizes.ranks), why)]


def _page(model: ModelFacts) -> Choice:
    own, tokens = model.own_page_tokens, model.memory.page_tokens
    size = max(model.memory.at_rest.slot_bytes(one.name) for one in model.memory.anchors)
    of_size = f"a page of {tokens} tokens has up to {format_bytes(size)}"
    if tokens == own:
        return Choice("page_tokens", str(tokens), f"the family's own: {of_size}")
    return Choice("page_tokens", str(tokens), f"the family's {own} make small pages; {of_size}")


def _tiers(sizes: TierSizes, device: str) -> list[Choice]:
    if device == "cuda":
        each = "" if sizes.ranks == 1 else ", divided by the ranks"
        why = (
            "four fifths of the GPU's memory beside the weights",
            f"half of the free memory{each}",
        )
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


def _storage(
    store: JudgedStore, free_bytes: int, fetch: FetchCost | None, gain: StoreGain | None
) -> Choice:
    if fetch is not None and not fetch.pays:
        return Choice("storage", NO_STORAGE, str(fetch))
    settings: dict[str, str | None] = {}
    if not store.named:
        cap = min(int(DISK_FRACTION * free_bytes), MAX_DISK_BYTES) // MB
        if cap < 1:
            return Choice("storage", NO_STORAGE, f"{store} is full")
        settings["cap"] = f"{cap}MB"
    if _codec_pays(gain) and "codec" not in store.parsed.settings:
        settings["codec"] = CODEC
    why = str(fetch) if fetch is not None else f"{store}; not compared with computing"
    if gain is not None:
        why += f"; codec={CODEC} reads {gain.read_ratio:.2f} times as fast as none"
    if store.parsed.password:
        added = "".join(f"&{name}={value}" for name, value in settings.items())
        more = f", with {added} behind it" if added else ""
        return Choice("storage", None, f"KVTIDE_STORAGE, for it has a password{more}: {why}")
    return Choice("storage", store.with_settings(**settings) if settings else store.url, why)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
