"""The publisher of KV events: the server's end of the process that publishes.

    engine's thread ──events──▶ EventQueue ─┐
                    ──prompts, folder──────▶ feeding thread ──bytes──▶ publisher_process
                                             ▲                              │
                                             └──────────── reports ─────────┘

The engine's thread appends to bounded queues and never waits. The feeding thread packs what they
have, many requests' events at once, which takes a few microseconds an event; it waits for the
process where that is behind. All else, hashing, encoding, sending and replays, the process does,
beside the interpreter that the engine runs in. A process that ends is started again, and gets the
index anew.
"""

from __future__ import annotations

import logging
import select
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import Pipe
from typing import Any

from kvtide.index import Index, Namespace, Prompt
from kvtide.server.kv_events.folder_pages import FolderSource
from kvtide.server.kv_events.index_feed import QUEUE_EVENTS, EventQueue
from kvtide.server.kv_events.kv_event_settings import KVEventSettings
from kvtide.server.kv_events.kv_groups import kv_groups
from kvtide.server.kv_events.publisher_counts import PublisherCounts
from kvtide.server.kv_events.publisher_messages import (
    AskedPrompt,
    Bound,
    Feed,
    PublisherReport,
    Refused,
    Start,
)
from kvtide.server.setting_values import SettingsError

FEEDING_THREAD = "kvtide-kv-events"
PROCESS = "kvtide.server.kv_events.publisher_process"
LIBRARIES = ("zmq", "msgpack")
"""Only the process imports them."""
POLL_S = 0.02
"""How often the queues are looked at: writing to the process costs more than packing an event."""
READING_POLL_S = 0.005
"""The same while the index is read, a slice at a time."""
MAX_PROMPTS = 256
"""So many prompts wait to be named; older ones are not."""
RETRY_S, CLOSE_S = 1.0, 2.0

log = logging.getLogger("kvtide")


class Publisher:
    """See the module. Starts the process, or raises `SettingsError`.

    ask  asks for a call of `read` on the engine's thread; may be called from any thread
    """

    def __init__(
        self,
        settings: KVEventSettings,
        index: Index,
        ask: Callable[[], None],
        *,
        queue_events: int = QUEUE_EVENTS,
    ) -> None:
        if not all(map(find_spec, LIBRARIES)):
            raise SettingsError("--kv-events needs pyzmq and msgpack; install kvtide[events]")
        groups = kv_groups(index.memory)
        self._counts = PublisherCounts()
        self._queue = EventQueue(groups, ask, self._counts, queue_events)
        self._prompts: deque[AskedPrompt] = deque(maxlen=MAX_PROMPTS)
        self._folders: deque[FolderSource | None] = deque()
        self._folder: FolderSource | None = None
        self._closing = threading.Event()
        start = Start(settings, groups, index.memory.page_tokens, index.fingerprint)
        self._process = _Process(start)
        self.endpoint, self.replay_endpoint = self._process.bound
        # A process that is started again binds what the first one has found.
        bound = replace(settings, endpoint=self.endpoint, replay=self.replay_endpoint)
        self._start = replace(start, settings=bound)
        self._thread = threading.Thread(target=self._run, name=FEEDING_THREAD, daemon=True)
        self._thread.start()

    # -- on the engine's thread -------------------------------------------------------------

    def read(self, index: Index) -> None:
        """Hand over a slice of what is readable, and follow the index. Between two steps."""
        self._queue.read(index)

    def follow(self, folder: FolderSource | None) -> None:
        """Publish what this folder has of the known pages as on STORAGE."""
        self._folders.append(folder)

    def name(self, prompt: Prompt) -> None:
        """The store is asked for this prompt: the folder may have some of its pages."""
        assert isinstance(prompt.namespace, Namespace)
        self._prompts.append(AskedPrompt(prompt.namespace, prompt.packed))

    # -- from any thread --------------------------------------------------------------------

    @property
    def counts(self) -> PublisherCounts:
        counts = PublisherCounts()
        counts.add(self._counts)
        counts.add(self._process.reported.counts)
        return counts

    @property
    def waiting(self) -> int:
        """Events of the index that are not published yet."""
        return len(self._queue) + self._process.behind

    @property
    def sentence(self) -> str:
        return f"KV events on {self.endpoint}, replays on {self.replay_endpoint}"

    @property
    def process_id(self) -> int:
        return self._process.id

    def close(self) -> None:
        """Publish what is queued, and that nothing is here any longer."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        self._process.close(CLOSE_S)

    # -- the feeding thread -----------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                while not self._closing.is_set():
                    self._process.hear(READING_POLL_S if self._queue.reading else POLL_S)
                    self._feed()
            except (EOFError, OSError):
                if not self._closing.wait(RETRY_S):
                    self._start_again()
        try:
            self._feed()
        except OSError:
            log.warning("KV events: the last ones were not published")
        self._process.end()

    def _feed(self) -> None:
        """Pass on all that is queued."""
        while True:
            changes = self._queue.take()
            feed = Feed(changes, _drained(self._prompts), _drained(self._folders))
            if feed.folders:
                self._folder = feed.folders[-1]
            if not any(feed):
                return
            self._process.feed(feed)
            self._process.hear(0.0)

    def _start_again(self) -> None:
        log.error("KV events: the publisher's process has ended; another one is started")
        self._process.close(0.0)
        try:
            new = _Process(self._start)
        except SettingsError as error:
            log.error("KV events: %s", error)
            return
        self._counts.add(self._process.reported.counts)
        self._process = new
        self._folders.appendleft(self._folder)
        self._queue.lose()


class _Process:
    """The process, from its start to its end. `reported`: what it has done so far."""

    def __init__(self, start: Start) -> None:
        self._connection, its = Pipe(duplex=True)
        self.reported = PublisherReport(0, PublisherCounts())
        self._fed = 0
        with its:
            command = [sys.executable, "-m", PROCESS, str(its.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()]
            )
        self.id = self._process.pid
        self._reports = select.poll()  # `Connection.poll` makes a selector each time.
        self._reports.register(self._connection.fileno(), select.POLLIN)
        answer = self._begun(start)
        if isinstance(answer, Refused):
            self.close(CLOSE_S)
            raise SettingsError(answer.reason)
        self.bound = answer

    def _begun(self, start: Start) -> Bound | Refused:
        try:
            self._connection.send(start)
            answer: Bound | Refused = self._connection.recv()
            return answer
        except (EOFError, OSError):
            return Refused("--kv-events: its process did not start; its output says why")

    @property
    def behind(self) -> int:
        """Changes that it has not reported yet."""
        return self._fed - self.reported.changes

    def feed(self, feed: Feed) -> None:
        self._fed += len(feed.changes.packed)
        self._connection.send_bytes(feed.packed())

    def hear(self, timeout_s: float) -> None:
        """Take in reports; the first one may take so long to come."""
        while self._reports.poll(timeout_s * 1e3):
            self.reported = self._connection.recv()
            timeout_s = 0.0

    def end(self) -> None:
        """Nothing more will be fed."""
        self._connection.close()

    def close(self, timeout_s: float) -> None:
        """Wait until the process has ended; kill it if it takes longer."""
        self._connection.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _drained(queue: deque[Any]) -> list[Any]:
    return [queue.popleft() for _ in range(len(queue))]
