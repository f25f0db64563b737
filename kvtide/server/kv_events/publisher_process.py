"""The process that publishes KV events: it hashes, encodes and sends, beside the engine's process.

    python -m kvtide.server.kv_events.publisher_process FD

It reads feeds from the socket FD, and follows the folder of the server's store by its journals.
When the socket ends, however the server ended, it publishes that nothing is here any longer. It
ignores signals, which the server handles.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import zmq

from kvtide.server.kv_events.block_hashes import BlockHashes, PageKeyHashes, VllmHashes
from kvtide.server.kv_events.block_table import Appeared, BlockTable
from kvtide.server.kv_events.broadcast import STATE_PAGES, Broadcast
from kvtide.server.kv_events.event_encoding import CLEARED, EventEncoder, TokenPacker, WireEvent
from kvtide.server.kv_events.folder_pages import FolderPages, FolderSource
from kvtide.server.kv_events.index_feed import unpacked
from kvtide.server.kv_events.kv_event_settings import BlockNames
from kvtide.server.kv_events.publisher_counts import PublisherCounts
from kvtide.server.kv_events.publisher_messages import Bound, Feed, PublisherReport, Refused, Start
from kvtide.server.setting_values import SettingsError
from kvtide.storage.store import StoreError

BATCH_PAGES = 256
"""A batch is sent once it is about so many blocks, or when a feed ends."""
LOOK_MS = 50
"""How often the folder is looked at while nothing else happens."""
REPORT_S = 0.1
NICENESS = 10
"""Where cores are scarce, events wait for the engine's steps and not the other way round."""
RETRY_S = 1.0
"""How long after an error a folder is opened again."""

log = logging.getLogger("kvtide")


class PublisherProcess:
    """See the module."""

    def __init__(self, start: Start) -> None:
        hashes = _hashes(start.settings.names)
        pack = TokenPacker(start.page_tokens)
        self._table = BlockTable(start.groups, hashes, start.page_tokens, pack, start.fingerprint)
        self._encoder = EventEncoder(hashes, start.page_tokens)
        self._source: FolderSource | None = None
        self._retry_at = 0.0
        self._changes = 0
        self._counts = PublisherCounts()
        self._reported: object = None
        self._report_at = 0.0
        self.broadcast = Broadcast(start.settings, self._counts, self._state, self._shown)

    def run(self, server: Connection) -> None:
        """Until the server's end of the connection is closed."""
        poller = zmq.Poller()
        poller.register(server.fileno(), zmq.POLLIN)
        poller.register(self.broadcast.asking, zmq.POLLIN)
        self.broadcast.publish([CLEARED])
        try:
            while True:
                ready = dict(poller.poll(LOOK_MS))
                if server.fileno() in ready:
                    self._hear(Feed.unpacked(server.recv_bytes()))
                self._open_folder()
                self._publish_changes()
                self.broadcast.answer()  # The present state is then what was published.
                self.broadcast.beat()
                self._report(server)
        except (EOFError, ConnectionError):
            self.broadcast.publish([CLEARED])
        finally:
            self.broadcast.close()

    # -- following --------------------------------------------------------------------------

    def _hear(self, feed: Feed) -> None:
        self._changes += len(feed.changes.packed)
        if feed.folders:
            self._source, self._retry_at = feed.folders[-1], 0.0
            self._table.follow(None)
            self._open_folder()
        if feed.changes.begins:
            self._begin()
        for change in feed.changes.packed:
            self._table.hear(unpacked(change))
            if self._table.pages >= BATCH_PAGES:
                self._publish_changes()
        if feed.changes.whole:
            self._table.whole = True
        for prompt in feed.prompts:
            self._table.name(prompt.namespace, prompt.tokens)

    def _begin(self) -> None:
        """The index is read anew: publish that nothing is left of it, but what the folder has."""
        self._table.clear()
        self._settle()
        self._table.take()
        for events in self._state():
            self.broadcast.publish(events)

    def _open_folder(self) -> None:
        """Begin to follow the folder, unless it is followed or that has just failed."""
        if self._source is None or self._table.follows or time.monotonic() < self._retry_at:
            return
        try:
            self._table.follow(FolderPages(self._source))
            self._retry_at = 0.0
        except (OSError, StoreError) as error:
            self._give_up_folder(error)

    def _settle(self) -> None:
        try:
            self._table.settle()
        except (OSError, StoreError) as error:
            self._give_up_folder(error)
            self._table.settle()

    def _give_up_folder(self, error: Exception) -> None:
        """What cannot be read is not claimed to be there."""
        if not self._retry_at:
            log.warning("KV events: no blocks on STORAGE for now (%s)", error)
        self._table.follow(None)
        self._retry_at = time.monotonic() + RETRY_S

    # -- sending ----------------------------------------------------------------------------

    def _publish_changes(self) -> None:
        self._settle()
        if events := self._encoder.events(self._table.take()):
            self.broadcast.publish(events)

    def _state(self, batch_pages: int = STATE_PAGES) -> Iterator[list[WireEvent]]:
        """The present state in batches of about so many blocks."""
        events, pages = [CLEARED], 0
        for run in self._table.everything():
            for start in range(0, len(run.blocks), batch_pages):
                piece = Appeared(run.cell, run.blocks[start : start + batch_pages])
                events += self._encoder.events([piece])
                pages += len(piece.blocks)
                if pages >= batch_pages:
                    yield events
                    events, pages = [], 0
        if events:
            yield events

    def _shown(self) -> int:
        return sum(len(run.blocks) for run in self._table.everything())

    def _report(self, server: Connection) -> None:
        """What is new, but not too often: the server's thread reads it beside the engine's."""
        counts, now = self._counts, time.monotonic()
        done = (self._changes, counts.batches, counts.replays.total(), counts.cut_off)
        if done != self._reported and now >= self._report_at:
            self._reported, self._report_at = done, now + REPORT_S
            server.send(PublisherReport(self._changes, counts))


def _hashes(names: BlockNames) -> BlockHashes:
    return PageKeyHashes() if names is BlockNames.PAGE_KEYS else VllmHashes()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    os.nice(NICENESS)
    server = Connection(int(sys.argv[1]))
    try:
        publisher = PublisherProcess(server.recv())
    except SettingsError as error:
        server.send(Refused(str(error)))
        return
    server.send(Bound(publisher.broadcast.endpoint, publisher.broadcast.replay_endpoint))
    publisher.run(server)


if __name__ == "__main__":
    main()
