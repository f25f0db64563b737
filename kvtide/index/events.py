"""Events: which pages became readable in which tier, and which were removed.

Events are made only while a listener is subscribed. They name pages (`PageKey.name`) as every
process does that serves the same model with the same holdback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvtide.spec import Tier


class EventKind(Enum):
    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Event:
    """Pages that follow each other, of one anchor in one tier. `tokens` are packed int32."""

    kind: EventKind
    tier: Tier
    anchor: str
    parent_key: bytes
    page_keys: tuple[bytes, ...]
    tokens: bytes


Listener = Callable[[Event], None]
