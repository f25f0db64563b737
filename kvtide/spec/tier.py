"""The three tiers, and the values that request copies between two of them.

Pages and entries have different types of moves, so a count never decides which is meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int32]


class Tier(IntEnum):
    """From the fastest to the largest. The number is the order in which copies are looked for."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


@dataclass(frozen=True, slots=True, eq=False)
class PageMove:
    """Copy these pages of one anchor, with its sidecars, from one tier to another.

    `sidecar`: copy this sidecar alone, to slots that have the rest of the page.
    """

    anchor: str
    source: Tier
    target: Tier
    source_slots: Slots
    target_slots: Slots
    sidecar: str | None = None
