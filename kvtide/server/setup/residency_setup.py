"""Which pools a server keeps on the host while requests run: what is asked for, or what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtide.byte_sizes import format_bytes
from kvtide.models.checkpoint import Checkpoint
from kvtide.server.settings import Settings
from kvtide.spec import ModelMemory
from kvtide.spec.residency import Residency, hot_bytes, step_queries
from kvtide.spec.sizing import largest_batch, running_bytes

AUTO_CONTEXT = 32_768
"""Tokens per request for which `auto` decides."""
UNSET_RUNNING = 64
"""Requests that `auto` counts with, and that hot buffers are for, without `--max-running`."""
AUTO_SELECTIONS = 2
"""Selections of a step that the hot buffer of `auto` holds: those of a step, and as many before."""


@dataclass(frozen=True, slots=True)
class ResidencyChoice:
    """`sentence`: the line about it that a starting server prints; empty where all is resident."""

    residency: Residency
    sentence: str = ""


def choose_residency(
    settings: Settings,
    declare: Callable[[], ModelMemory],
    device_bytes: Callable[[ModelMemory], int],
    drafts: int,
) -> ResidencyChoice:
    """What the settings ask for; `auto` is decided by what fits the device.

    `declare` gives the memory with all pools resident, `device_bytes` the size of the device tiers
    of all stages for it. `drafts` are those of a request in a step.
    """
    asked = settings.residency
    if asked.hot is not None:
        return ResidencyChoice(asked, f"residency: {asked}, pages of running requests on the host")
    if not asked.auto:
        return ResidencyChoice(asked)
    memory = declare()
    top_k = max((pool.selected or 0 for pool in memory.pools), default=0)
    if not top_k:
        reason = "attention reads all entries of all its pools"
        return ResidencyChoice(Residency(), f"residency: all, since {reason}")
    if settings.host_size is None:
        return ResidencyChoice(Residency(), "residency: all, since there is no host tier")
    hot = Residency(AUTO_SELECTIONS * step_queries(memory, drafts) * top_k)
    running = settings.max_running or UNSET_RUNNING
    return _fitting(memory, hot, running, device_bytes(memory), drafts)


def _fitting(
    memory: ModelMemory, hot: Residency, running: int, device_bytes: int, drafts: int
) -> ResidencyChoice:
    """Hot if more requests run then, beside the hot buffers of as many as may run at once."""
    pages = -(-AUTO_CONTEXT // memory.page_tokens)
    wanted = running_bytes(memory, running, pages)
    have = f"the device tier has {format_bytes(device_bytes)}"
    what = f"{running} requests of {AUTO_CONTEXT:,} tokens take {format_bytes(wanted)}, and {have}"
    if wanted <= device_bytes:
        return ResidencyChoice(Residency(), f"residency: all, since {what}")
    served = hot.of(memory, drafts)
    each = running_bytes(served, 1, pages) - hot_bytes(served, 1, pages)
    beside = max(0, device_bytes - hot_bytes(served, running, pages)) // max(1, each)
    fewer, more = largest_batch(memory, AUTO_CONTEXT, device_bytes) or 0, min(running, beside)
    if more <= fewer:
        why = f"hot buffers would leave room for {more} of them and not {fewer}"
        return ResidencyChoice(Residency(), f"residency: all, since {what}; {why}")
    return ResidencyChoice(
        hot, f"residency: {hot}, since {what}; {more} of them run instead of {fewer}"
    )


def stored_bytes(checkpoint: Checkpoint) -> int:
    """The size of a checkpoint's files: about what its weights take."""
    path: Path = checkpoint.path
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
