"""The last batches, by number: what a consumer that missed some asks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

MAX_BYTES = 64 << 20


class ReplayBuffer:
    """Holds up to `max_batches`, and of their payloads up to `max_bytes`, but always the last.

    `next` is the number of the batch that is added next.
    """

    def __init__(self, first: int, max_batches: int, max_bytes: int = MAX_BYTES) -> None:
        self.next = first
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._payloads: deque[bytes] = deque()
        self._bytes = 0

    @property
    def oldest(self) -> int:
        """The number of the oldest batch that is here; `next` if none is."""
        return self.next - len(self._payloads)

    def add(self, payload: bytes) -> int:
        """The batch's number."""
        self._payloads.append(payload)
        self._bytes += len(payload)
        self.next += 1
        while len(self._payloads) > 1 and self._is_full:
            self._bytes -= len(self._payloads.popleft())
        return self.next - 1

    @property
    def _is_full(self) -> bool:
        return len(self._payloads) > self._max_batches or self._bytes > self._max_bytes

    def since(self, number: int) -> Iterator[tuple[int, bytes]] | None:
        """All batches from a number on; None if the first of them is not here any more."""
        if number < self.oldest:
            return None
        skipped = number - self.oldest
        return enumerate(islice(self._payloads, skipped, None), number)
