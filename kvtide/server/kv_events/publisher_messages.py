"""What the server's process and the publisher's exchange, over a socket pair of their own.

server ── Start ─▶ process        server ◀─ Bound | Refused ── process
server ── Feed ──▶ process        server ◀──── PublisherReport ──────── process     and so on
server ── end of file ──▶ process: says that nothing is here any longer, and exits
"""

from __future__ import annotations

import marshal
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtide.index import Namespace
from kvtide.server.kv_events.folder_pages import FolderSource
from kvtide.server.kv_events.index_feed import IndexChanges
from kvtide.server.kv_events.kv_event_settings import KVEventSettings
from kvtide.server.kv_events.kv_groups import KVGroup
from kvtide.server.kv_events.publisher_counts import PublisherCounts


@dataclass(frozen=True, slots=True)
class Start:
    """`fingerprint`: what page keys begin with."""

    settings: KVEventSettings
    groups: Mapping[str, KVGroup]
    page_tokens: int
    fingerprint: bytes


class Bound(NamedTuple):
    endpoint: str
    replay_endpoint: str


class Refused(NamedTuple):
    reason: str


class AskedPrompt(NamedTuple):
    """A prompt that the store was asked for, with its packed tokens."""

    namespace: Namespace
    tokens: bytes


class Feed(NamedTuple):
    """`folders`: those that were to be followed since the last feed, one after another; None: no
    folder. The last of them counts."""

    changes: IndexChanges
    prompts: Sequence[AskedPrompt] = ()
    folders: Sequence[FolderSource | None] = ()

    def packed(self) -> bytes:
        """Changes as plain tuples, which `marshal` writes in half of pickle's time."""
        asked = (self.prompts, self.folders)
        rest = pickle.dumps(asked, pickle.HIGHEST_PROTOCOL) if any(asked) else b""
        changes: Any = self.changes  # Arrays are written as their bytes.
        return marshal.dumps((*changes, rest))

    @classmethod
    def unpacked(cls, packed: bytes) -> Feed:
        """Both ends run the same interpreter, so that they agree on marshal's format."""
        begins, whole, changes, rest = marshal.loads(packed)
        return cls(IndexChanges(begins, whole, changes), *(pickle.loads(rest) if rest else ()))


class PublisherReport(NamedTuple):
    """What the process has done so far; `changes`: how many it has taken in."""

    changes: int
    counts: PublisherCounts
