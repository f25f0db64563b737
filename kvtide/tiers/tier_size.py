"""How large a tier is: as a multiple of the device tier, in bytes, or in tokens.

All three come down to bytes, and bytes to pages of every anchor by `kvtide.spec.sizing`, so any
model can be sized in any of the three ways. A tier never holds less than it was asked for in
tokens, nor takes more than it was given in bytes. `server.setup.engine_setup` chooses sizes from
free memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvtide.spec import ModelMemory, SpecError
from kvtide.spec.sizing import TOKENS_PER_CHECKPOINT, bytes_for, pages_for, pages_per_anchor
from kvtide.tiers.arena import TierError
from kvtide.tiers.layout import stride_bytes


@dataclass(frozen=True, slots=True)
class Ratio:
    """So many times the bytes of the device tier."""

    times: float

    def __post_init__(self) -> None:
        if not 0 < self.times < math.inf:
            raise TierError(
                f"a tier of {self.times:g} times the device tier; use a ratio above 0, like 2.0, "
                "or leave the tier out"
            )


@dataclass(frozen=True, slots=True)
class Bytes:
    """So many bytes, all pools together."""

    bytes: int

    def __post_init__(self) -> None:
        if self.bytes < 1:
            raise TierError(
                f"a tier of {self.bytes:,} bytes; use at least what one request needs to run, "
                "or leave the tier out"
            )


@dataclass(frozen=True, slots=True)
class Tokens:
    """The history of so many tokens, and the checkpoints among them."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise TierError(
                f"a tier of {self.tokens:,} tokens; use at least a page of them, "
                "or leave the tier out"
            )


TierSize = Ratio | Bytes | Tokens


def capacity_pages(
    memory: ModelMemory,
    size: TierSize,
    device_bytes: int | None = None,
    tokens_per_checkpoint: int = TOKENS_PER_CHECKPOINT,
    tails: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Pages of every anchor that a tier of this size holds.

    `device_bytes` is the size of the device tier, which only a ratio needs; `tails` what lies
    behind every page (`layout.Arrangement`).
    """
    total_bytes = tier_bytes(memory, size, device_bytes, tokens_per_checkpoint)
    if isinstance(size, Tokens):
        return pages_per_anchor(memory, _pages_of(memory, size), tokens_per_checkpoint)
    try:
        pages = pages_for(memory, total_bytes, tokens_per_checkpoint)
        while (taken := _with_tails(memory, pages, tails or {})) > total_bytes:
            without = sum(memory.slot_bytes(anchor) * count for anchor, count in pages.items())
            pages = pages_for(memory, without * total_bytes // taken, tokens_per_checkpoint)
    except SpecError as refusal:
        raise TierError(str(refusal)) from refusal
    return pages


def _with_tails(memory: ModelMemory, pages: Mapping[str, int], tails: Mapping[str, int]) -> int:
    return sum(stride_bytes(memory, anchor, tails) * count for anchor, count in pages.items())


def tier_bytes(
    memory: ModelMemory,
    size: TierSize,
    device_bytes: int | None = None,
    tokens_per_checkpoint: int = TOKENS_PER_CHECKPOINT,
) -> int:
    """The most bytes that the pages of a tier of this size may take."""
    if tokens_per_checkpoint < 1:
        raise TierError(
            f"a checkpoint every {tokens_per_checkpoint} tokens; use a distance of at least 1"
        )
    match size:
        case Bytes():
            return size.bytes
        case Tokens():
            return bytes_for(memory, _pages_of(memory, size), tokens_per_checkpoint)
        case Ratio():
            return _ratio_bytes(size, device_bytes, bytes_for(memory, 1, tokens_per_checkpoint))


def _pages_of(memory: ModelMemory, size: Tokens) -> int:
    """Pages for all of the tokens, the last one perhaps in part."""
    if size.tokens < memory.page_tokens:
        raise TierError(
            f"{memory.model}: a tier of {size.tokens:,} tokens is less than a page; "
            f"use at least {memory.page_tokens:,} tokens"
        )
    return -(-size.tokens // memory.page_tokens)


def _ratio_bytes(size: Ratio, device_bytes: int | None, min_bytes: int) -> int:
    """The ratio's bytes; refused here if too few, where the least ratio can still be named."""
    if not device_bytes:
        raise TierError(
            f"a tier of {size.times:g} times the device tier, but the device tier has no size; "
            "give the device tier's bytes, or size this tier in bytes or tokens"
        )
    assert device_bytes > 0, f"a device tier of {device_bytes} bytes"
    total_bytes = round(size.times * device_bytes)
    if total_bytes < min_bytes:
        min_ratio = math.ceil(1000 * min_bytes / device_bytes) / 1000
        raise TierError(
            f"a tier of {size.times:g} times the device tier's {device_bytes:,} bytes does not "
            f"hold what one request needs to run ({min_bytes:,} bytes); "
            f"use a ratio of at least {min_ratio:.3f}"
        )
    return total_bytes
