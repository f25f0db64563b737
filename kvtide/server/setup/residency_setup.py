"""Which pools a server keeps on the host while requests run: what is asked for, or what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvtide.byte_sizes import format_bytes
from kvtide.models.checkpoint import Checkpoint
from kvtide.server.settings import NO_STORAGE, Settings
from kvtide.spec import ModelMemory
from kvtide.spec.residency import (
    Residency,
    fitting_drafts,
    hot_bytes,
    least_hot,
    step_queries,
)
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
    """`drafts`: of a request in a step, at the most. `sentence`: the line about all this that a
    starting server prints; empty where all is resident."""

    residency: Residency
    drafts: int
    sentence: str = ""


def choose_residency(
    settings: Settings,
    declare: Callable[[], DeclaredModel],
    device_bytes: Callable[[ModelMemory], int],
    drafts: int,
) -> ResidencyChoice:
    """What the settings ask for; `auto` is decided by what fits the device.

    `device_bytes` gives the size of the device tiers of all stages for a memory with all pools
    resident. `drafts` are those of a request in a step; a hot buffer may have room for fewer.
    """
    asked = settings.residency
    if asked.hot is not None:
        return _with_store(_hot(settings, declare, drafts), settings)
    if not asked.auto:
        return ResidencyChoice(asked, drafts)
    declared = declare()
    memory = declared.memory
    top_k = max((pool.selected or 0 for pool in memory.pools), default=0)
    if not top_k:
        reason = "attention reads all entries of all its pools"
        return ResidencyChoice(Residency(), drafts, f"residency: all, since {reason}")
    if settings.host_size is None:
        return ResidencyChoice(Residency(), drafts, "residency: all, since there is no host tier")
    hot = Residency(AUTO_SELECTIONS * step_queries(memory, drafts) * top_k)
    running = settings.max_running or UNSET_RUNNING
    fitting = _fitting(declared, hot, running, device_bytes(memory), drafts)
    return _with_store(fitting, settings)


def _hot(settings: Settings, declare: Callable[[], DeclaredModel], drafts: int) -> ResidencyChoice:
    """As asked for, with as many drafts as have room. A drafter that was asked for needs room for
    one: without it the memory is refused."""
    hot = settings.residency
    sentence = f"residency: {hot}, pages of running requests on the host"
    if not drafts:
        return ResidencyChoice(hot, 0, sentence)
    memory = declare().memory
    fitting = fitting_drafts(memory, hot, drafts)
    if fitting < drafts:
        needed = Residency(least_hot(memory, drafts))
        sentence += f"; up to {fitting} drafts in a step, since {drafts} need {needed}"
    named = settings.speculate is not None or settings.draft is not None
    return ResidencyChoice(hot, max(fitting, 1) if named else fitting, sentence)


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
        return ResidencyChoice(Residency(), drafts, f"residency: all, since {what}")
    served = hot.of(memory, drafts)
    each = running_bytes(served, 1, pages) - hot_bytes(served, 1, pages)
    beside = max(0, device_bytes - hot_bytes(served, running, pages)) // max(1, each)
    fewer, more = largest_batch(memory, context, device_bytes) or 0, min(running, beside)
    if more <= fewer:
        why = f"hot buffers would leave room for {more} of them and not {fewer}"
        return ResidencyChoice(Residency(), drafts, f"residency: all, since {what}; {why}")
    sentence = f"residency: {hot}, since {what}; {more} of them run instead of {fewer}"
    return ResidencyChoice(hot, drafts, sentence)


def stored_bytes(checkpoint: Checkpoint) -> int:
    """The size of a checkpoint's files: about what its weights take."""
    path: Path = checkpoint.path
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
