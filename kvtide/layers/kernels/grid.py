"""Sizes of tiles and grids, in plain Python: Triton's helpers take ten times as long."""

from __future__ import annotations

from functools import cache

import torch

MIN_ROWS = 16
"""Rows and columns of a tensor core tile, at least."""
SEQUENCES_AT_ONCE = 128
"""Sequences of a step that a scheduling CTA handles at a time."""


INTERPRETED_SMS = 132
"""SMs of the CPU interpreter: as many as an H200 has."""


@cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of the device. The driver is asked once per device."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_two(minimum: int) -> int:
    """The smallest power of two that is at least `minimum`."""
    return 1 << max(0, minimum - 1).bit_length()


def divided_up(total: int, each: int) -> int:
    """total / each, rounded up."""
    return -(-total // each)
