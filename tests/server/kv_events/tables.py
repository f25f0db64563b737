"""What the publisher's process knows, in the test's own process."""

from __future__ import annotations

from kvtide.server.kv_events.block_hashes import VllmHashes
from kvtide.server.kv_events.block_table import BlockTable
from kvtide.server.kv_events.event_encoding import TokenPacker
from kvtide.server.kv_events.index_feed import EventQueue, unpacked
from kvtide.server.kv_events.kv_groups import kv_groups
from kvtide.server.kv_events.publisher_messages import Feed
from kvtide.spec import ModelMemory
from tests.server.kv_events.consuming import Known, published


class Table:
    """A process's table behind a queue, in place of the process."""

    def __init__(self, memory: ModelMemory, queue: EventQueue) -> None:
        self._hashes = VllmHashes()
        page = memory.page_tokens
        self._table = BlockTable(kv_groups(memory), self._hashes, page, TokenPacker(page))
        self._queue = queue

    def take(self) -> bool:
        """Take in what is queued; whether anything was."""
        changes = Feed.unpacked(Feed(self._queue.take()).packed()).changes
        if changes.begins:
            self._table.clear()
        for change in changes.packed:
            self._table.hear(unpacked(change))
        self._table.whole = self._table.whole or changes.whole
        self._table.settle()
        return bool(changes)

    @property
    def known(self) -> Known:
        found: Known = {}
        for run in self._table.everything():
            here = found.setdefault((run.cell.medium, run.cell.group.index), set())
            here |= {published(self._hashes, block.digest) for block in run.blocks}
        return found
