"""Conversations whose prefix must stay until their next turn.

A session pins what its next turn needs to resume, in the tier where it is now. Pins are bounded:
past their fraction of the device (of hot pools, of the host), the session that was kept longest ago
is unpinned. So abandoned sessions never fill the tiers where requests run.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtide.index import Index, Prompt
from kvtide.index import IndexLease as IndexLease


class Sessions:
    def __init__(self, index: Index, fraction: float) -> None:
        memory = index.memory
        self._index = index
        self._reaches = {
            anchor.name: anchor.reuse.reach_pages(memory.page_tokens) for anchor in memory.anchors
        }
        self._max_pages = {
            anchor.name: fraction * index.capacity(anchor.home, anchor.name)
            for anchor in memory.anchors
        }
        self._leases: dict[str, IndexLease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def keep(self, session: str, prompt: Prompt, priority: int) -> bool:
        """Pin what the prompt's next turn can resume from, in place of the session's last pin.

        False when that alone exceeds what all sessions may pin; other sessions keep theirs.
        """
        self.forget(session)
        lease = self._index.pin(self._index.match(prompt), priority)
        if self._too_much([lease]):
            self._index.release(lease)
            return False
        self._leases[session] = lease
        while self._too_much(self._leases.values()):
            self.forget_oldest()
        return True

    def forget(self, session: str) -> bool:
        """Unpin a session's prefix; False if there was none."""
        lease = self._leases.pop(session, None)
        if lease is None:
            return False
        self._index.release(lease)
        return True

    def forget_oldest(self) -> bool:
        return bool(self._leases) and self.forget(next(iter(self._leases)))

    def forget_hidden(self) -> None:
        """Unpin prefixes that no turn will find again."""
        hidden = [session for session, lease in self._leases.items() if lease.hidden]
        for session in hidden:
            self.forget(session)

    def forget_all(self) -> None:
        for session in list(self._leases):
            self.forget(session)

    def _too_much(self, leases: Iterable[IndexLease]) -> bool:
        """Counted as if no two sessions shared a page: an upper bound."""
        held = [lease.boundary for lease in leases]
        return any(
            sum(pages if reach is None else min(pages, reach) for pages in held)
            > self._max_pages[name]
            for name, reach in self._reaches.items()
        )
