"""Which pools a server keeps on the host while requests run: what is asked for, or what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvtide.byte_sizes import format_bytes
from kvtide.models.checkpoint import Checkpoint
from kvtide.server.settings import NO_STORAGE, Settings
from kvtide.spec import ModelMemory
from kvtide.spec.residency import Residency, hot_bytes, step_queries
from kvtide.spec.sizing import largest_batch, running_bytes

AUTO_CONTEXT = 32_768
"""Tokens per request for which `auto` decides, of a model that has so many positions."""
UNSET_RUNNING = 64
"""Requests that `auto` counts with, and that hot buffers are for, without `--max-running`."""
AUTO_SELECTIONS = 2
"""Selections of a step that the hot buffer of `auto` holds: those of a step, and as many before."""


@dataclass(frozen=True, slots=True)
class DeclaredModel:
    """A model that is not loaded: its memory with all pools resident, and its positions."""

    memory: ModelMemory
    max_positions: int


@dataclass(frozen=True, slots=True)
class ResidencyChoice:
    """`sentence`: the line about it that a starting server prints; empty where all is resident."""

    residency: Residency
    sentence: str = ""


def choose_residency(
    settings: Settings,
    declare: Callable[[], DeclaredModel],
    device_bytes: Callable[[ModelMemory], int],
    drafts: int,
) -> ResidencyChoice:
    """What the settings ask for; `auto` is decided by what fits the device.

    `device_bytes` gives the size of the device tiers of all stages for a memory with all pools
    resident. `drafts` are those of a request in a step.
    """
    asked = settings.residency
    if asked.hot is not None:
        sentence = f"residency: {asked}, pages of running requests on the host"
        return _with_store(ResidencyChoice(asked, sentence), settings)
    if not asked.auto:
        return ResidencyChoice(asked)
    declared = declare()
    memory = declared.memory
    top_k = max((pool.selected or 0 for pool in memory.pools), default=0)
    if not top_k:
        reason = "attention reads all entries of all its pools"
        return ResidencyChoice(Residency(), f"residency: all, since {reason}")
    if settings.host_size is None:
        return ResidencyChoice(Residency(), "residency: all, since there is no host tier")
    hot = Residency(AUTO_SELECTIONS * step_queries(memory, drafts) * top_k)
    running = settings.max_running or UNSET_RUNNING
    fitting = _fitting(declared, hot, running, device_bytes(memory), drafts)
    return _with_store(fitting, settings)


def auto_context(max_positions: int) -> int:
    """Tokens per request for which defaults are chosen."""
    return min(AUTO_CONTEXT, max_positions)


def _with_store(choice: ResidencyChoice, settings: Settings) -> ResidencyChoice:
    """Says which pages a store has but does not give: those of the other residency."""
    if settings.storage == NO_STORAGE or settings.host_size is None:
        return choice
    other = "hot:B" if choice.residency.hot is None else "all"
    unread = f"; pages that were stored with --resident {other} are not read"
    advice = ", name a residency to keep to it" if settings.residency.auto else ""
    return replace(choice, sentence=choice.sentence + unread + advice)


def _fitting(
    declared: DeclaredModel, hot: Residency, running: int, device_bytes: int, drafts: int
) -> ResidencyChoice:
    """Hot if more requests run then, beside the hot buffers of as many as may run at once."""
    memory, context = declared.memory, auto_context(declared.max_positions)
    pages = -(-context // memory.page_tokens)
    wanted = running_bytes(memory, running, pages)
    have = f"the device tier has {format_bytes(device_bytes)}"
    what = f"{running} requests of {context:,} tokens take {format_bytes(wanted)}, and {have}"
    if wanted <= device_bytes:
        return ResidencyChoice(Residency(), f"residency: all, since {what}")
    served = hot.of(memory, drafts)
    each = running_bytes(served, 1, pages) - hot_bytes(served, 1, pages)
    beside = max(0, device_bytes - hot_bytes(served, running, pages)) // max(1, each)
    fewer, more = largest_batch(memory, context, device_bytes) or 0, min(running, beside)
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
