"""What the publisher of KV events has done, for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class PublisherCounts:
    """Of the publisher's thread and process together.

    events     published, by type, in `batches`
    dropped    events of the index that the queue had no room for
    skipped    events of the index that came between a loss and reading it anew
    read_anew  times that the index was read anew
    replays    requests answered from the buffer, or with the present state; `cut_off`: unfinished
    """

    events: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    dropped: int = 0
    skipped: int = 0
    read_anew: int = 0
    replays: Counter[str] = field(default_factory=Counter)
    cut_off: int = 0

    def add(self, more: PublisherCounts) -> None:
        self.events.update(more.events)
        self.batches += more.batches
        self.dropped += more.dropped
        self.skipped += more.skipped
        self.read_anew += more.read_anew
        self.replays.update(more.replays)
        self.cut_off += more.cut_off
