"""What is misconfigured on a machine: pure judgements over facts, as sentences with remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from kvtide.byte_sizes import format_bytes
from kvtide.doctor.advice import Advice
from kvtide.doctor.judged_store import JudgedStore
from kvtide.doctor.machine_facts import MachineFacts
from kvtide.doctor.model_facts import ModelFacts
from kvtide.doctor.probes import Measured

MIN_OPEN_FILES = 4096
MIN_SHARED_BYTES = 1 << 30
MIN_LINK_BYTES_S = 10e9
"""A GPU on fewer lanes or an older bus than it was made for is slower."""


class Severity(Enum):
    PROBLEM = "problem"
    """A server will not start, or will not use what the machine has."""
    WARNING = "warning"
    """It starts, and is slower or stops short of what it could do."""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    severity: Severity
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Examined:
    """All that judgements look at."""

    facts: MachineFacts
    measured: Measured
    advice: Advice
    store: JudgedStore
    model: ModelFacts | None = None


def findings(examined: Examined) -> list[Finding]:
    """Every judgement, the worst first."""
    found = [one for judge in JUDGES for one in judge(examined)]
    order = list(Severity)
    return sorted(found, key=lambda one: order.index(one.severity))


# -- the GPU ------------------------------------------------------------------------------------


def _gpu(examined: Examined) -> Iterator[Finding]:
    facts = examined.facts
    if facts.gpus:
        return
    if facts.driver is not None and facts.torch_cuda is None:
        yield Finding(
            "torch without CUDA",
            Severity.PROBLEM,
            f"the NVIDIA driver {facts.driver} is loaded, and torch {facts.torch_version} was "
            "built for CPUs",
            "install a torch that was built for CUDA",
        )
    elif facts.driver is not None:
        yield Finding(
            "GPU not usable",
            Severity.PROBLEM,
            f"the NVIDIA driver {facts.driver} is loaded, and torch {facts.torch_version} for CUDA "
            f"{facts.torch_cuda} finds no GPU",
            "run nvidia-smi; the driver may be too old for this CUDA, CUDA_VISIBLE_DEVICES may be "
            "empty, or the container was started without its devices",
        )
    elif facts.nvidia_cards:
        yield Finding(
            "no NVIDIA driver",
            Severity.PROBLEM,
            f"{facts.nvidia_cards} NVIDIA GPUs are on the bus, and no driver is loaded",
            "install the NVIDIA driver, or load it: modprobe nvidia",
        )
    else:
        yield Finding(
            "no GPU",
            Severity.NOTE,
            "this machine has no NVIDIA GPU that can be seen: models run on the CPU",
            "nothing, if that is meant; else start the container with its GPU",
        )


def _several_gpus(examined: Examined) -> Iterator[Finding]:
    """Where one is enough, the others stay idle."""
    sizes, model, gpus = examined.advice.sizes, examined.model, len(examined.facts.gpus)
    if gpus < 2 or sizes is None or model is None or sizes.ranks > 1:
        return
    weights = "its part of the weights"
    if model.weights_bytes is not None:
        weights = f"{format_bytes(-(-model.weights_bytes // gpus))} of weights"
    yield Finding(
        "several GPUs",
        Severity.NOTE,
        f"torch finds {gpus} GPUs, and the settings are for one: the others stay idle. With --tp "
        f"{gpus} each has {weights} and a part of every page",
        f"--tp {gpus} for longer contexts and faster tokens, or a server on each GPU",
    )


def _kernels(examined: Examined) -> Iterator[Finding]:
    flaw = examined.facts.kernel_flaw
    if flaw is not None:
        yield Finding(
            "no native kernels",
            Severity.WARNING,
            f"CPU kernels are not available ({flaw}): torch computes instead, which is slower, and "
            "weights in 16 bits or of a GGUF file take fp32's memory",
            "install g++ (Debian: apt install g++), drop KVTIDE_NATIVE=0 if it is set, and start "
            "again",
        )


def _link(examined: Examined) -> Iterator[Finding]:
    slow = {
        way: rate
        for way in ("load", "backup")
        if (rate := examined.measured.rates.get(way)) is not None and rate < MIN_LINK_BYTES_S
    }
    if slow:
        rates = ", ".join(f"{way} {format_bytes(rate)}/s" for way, rate in slow.items())
        yield Finding(
            "slow link",
            Severity.WARNING,
            f"the link between host and GPU is slow: {rates}",
            "check lanes and generation with nvidia-smi -q -d PCIE; the slot, or another process",
        )


# -- memory -------------------------------------------------------------------------------------


def _memlock(examined: Examined) -> Iterator[Finding]:
    """Only a host tier beside a GPU is pinned."""
    limit, sizes = examined.facts.memlock_bytes, examined.advice.sizes
    if not examined.facts.gpus or sizes is None or limit is None or limit >= sizes.host_bytes:
        return
    yield Finding(
        "memlock",
        Severity.WARNING,
        f"the process may lock {format_bytes(limit)}, and the host tier of "
        f"{format_bytes(sizes.host_bytes)} is pinned: drivers of network cards refuse to register "
        "it, and some drivers to pin it",
        "ulimit -l unlimited; LimitMEMLOCK=infinity in a unit; --ulimit memlock=-1 for a container",
    )


def _huge_pages(examined: Examined) -> Iterator[Finding]:
    facts = examined.facts
    switch = "/sys/kernel/mm/transparent_hugepage"
    if facts.huge_pages == "never":
        yield Finding(
            "huge pages",
            Severity.WARNING,
            "transparent huge pages are off: tiers are mapped in pages of 4 KiB, which makes "
            "starting, pinning and CPU copies slower",
            f"echo madvise > {switch}/enabled",
        )
    if facts.shared_huge_pages in ("never", "deny"):
        yield Finding(
            "huge pages of shared memory",
            Severity.NOTE,
            "files in memory get no huge pages: those are the host tier of a decode server that "
            "receives pages over shm",
            f"echo advise > {switch}/shmem_enabled, if this server takes part in handoffs",
        )


def _control_group(examined: Examined) -> Iterator[Finding]:
    facts, sizes, model = examined.facts, examined.advice.sizes, examined.model
    if not facts.limited:
        return
    limit = format_bytes(facts.memory.total_bytes)
    what = f"a control group grants {limit} of {format_bytes(facts.installed_bytes)}"
    if sizes is not None and model is not None and _taken(facts, examined) > facts.memory.max_bytes:
        yield Finding(
            "cgroup limit",
            Severity.PROBLEM,
            f"{what}, and tiers and weights take {format_bytes(_taken(facts, examined))}",
            "raise MemoryMax of the unit or --memory of the container, or make the tiers smaller",
        )
        return
    yield Finding(
        "cgroup limit",
        Severity.NOTE,
        f"{what}: the tiers are sized by that",
        "raise MemoryMax of the unit or --memory of the container for a larger host tier",
    )


def _taken(facts: MachineFacts, examined: Examined) -> int:
    """Bytes of host memory that a server takes; weights are on a GPU if there is one."""
    sizes, model = examined.advice.sizes, examined.model
    assert sizes is not None and model is not None
    if facts.gpus:
        return sizes.host_bytes
    return sizes.host_bytes + sizes.device_bytes + (model.weights_bytes or 0)


def _room(examined: Examined) -> Iterator[Finding]:
    sizes, model = examined.advice.sizes, examined.model
    if sizes is None or model is None or sizes.fits:
        return
    weights = model.weights_bytes
    known = "" if weights is None else f" beside {format_bytes(weights)} of weights"
    yield Finding(
        "no room",
        Severity.PROBLEM,
        f"{model.name}: no tier of one request fits into this machine's memory{known}",
        "use a smaller model, several ranks (--tp, --pp), or a machine with more memory",
    )


def _weights(examined: Examined) -> Iterator[Finding]:
    model = examined.model
    if model is not None and model.weights_bytes is None:
        yield Finding(
            "weights not known",
            Severity.NOTE,
            f"{model.name} is a description without weights: the tiers leave no room for them, and "
            f"./{model.name} in the command is a folder that is not here",
            "give the folder or file that kvtide serve will be given",
        )


def _shared_memory(examined: Examined) -> Iterator[Finding]:
    size = examined.facts.shared_memory_bytes
    if size is not None and size >= MIN_SHARED_BYTES:
        return
    has = "there is no /dev/shm" if size is None else f"/dev/shm has {format_bytes(size)}"
    yield Finding(
        "shared memory",
        Severity.WARNING,
        f"{has}: ranks over NCCL, and peers over Mooncake, exchange through it. Handoffs over shm "
        "do not: their memory is that of the control group",
        "--shm-size 1g for a container; mount -o remount,size=1G /dev/shm",
    )


# -- files --------------------------------------------------------------------------------------


def _open_files(examined: Examined) -> Iterator[Finding]:
    if examined.facts.open_files < MIN_OPEN_FILES:
        yield Finding(
            "open files",
            Severity.WARNING,
            f"the process may open {examined.facts.open_files:,} files: connections, and segments "
            "of a store, may need more",
            f"ulimit -n 65536; LimitNOFILE=65536 in a unit (at least {MIN_OPEN_FILES:,})",
        )


def _storage(examined: Examined) -> Iterator[Finding]:
    fetch, store = examined.advice.fetch, examined.store
    if fetch is not None and not fetch.pays:
        read = format_bytes(examined.measured.rates["storage_read"])
        yield Finding(
            "slow storage",
            Severity.WARNING,
            f"{store} reads {read}/s: {fetch}",
            "name a folder on a faster disk with --folder or another store with --storage, or "
            "serve without a store",
        )
    why = examined.measured.unmeasured.get("storage_read")
    if store.named and why is not None:
        yield Finding(
            "storage not usable",
            Severity.PROBLEM,
            f"{store} could not be measured: {why}",
            "start the store, or correct --storage: a server that cannot open it does not start",
        )


def _unmeasured(examined: Examined) -> Iterator[Finding]:
    known = () if examined.facts.gpus else ("load", "backup", "both_ways", "gpu_memory")
    if examined.store.named:
        known = (*known, "storage_write", "storage_read")
    for name, why in examined.measured.unmeasured.items():
        if name not in known:
            yield Finding(
                "not measured",
                Severity.NOTE,
                f"{name.replace('_', ' ')} was not measured: {why}",
                "run kvtide doctor again when the machine is idle, or as a user who may",
            )


JUDGES: tuple[Callable[[Examined], Iterator[Finding]], ...] = (
    *(
        _gpu,
        _several_gpus,
        _kernels,
        _link,
        _room,
        _weights,
        _control_group,
        _memlock,
        _huge_pages,
        _shared_memory,
    ),
    *(_open_files, _storage, _unmeasured),
)
