"""Sizes of tiles and grids, worked out before every launch: Triton's own take ten times as long."""

from __future__ import annotations

from functools import cache

import torch

MIN_ROWS = 16
"""What a matrix unit takes, of rows and of columns."""
SEQUENCES_AT_ONCE = 128
"""Of a step, that a program looks at."""


INTERPRETED_SMS = 132
"""SMs of the CPU interpreter: as many as an H200 has."""


@cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of the device. The driver is asked once per device."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_two(least: int) -> int:
    """The smallest that is not below."""
    return 1 << max(0, least - 1).bit_length()


def divided_up(total: int, each: int) -> int:
    """How many parts of this size there are, the last one perhaps smaller."""
    return -(-total // each)
