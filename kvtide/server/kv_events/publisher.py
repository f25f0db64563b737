"""The thread that publishes KV events, and answers consumers that missed some.

    PUB     topic │ number, 8 bytes, big endian │ msgpack [time, events, dp_rank]
    ROUTER  ask: a number │ answer: batches (topic, number, payload) from it on, then number -1

The engine's thread appends the index's events to a bounded queue and never waits. The publisher
polls the queue, hashes, encodes and sends.

How a consumer keeps up:

- Numbers are consecutive. A consumer that sees a gap asks for a replay from its next number on.
- If the buffer does not reach back so far, the answer is the present state: AllBlocksCleared and
  all blocks, in batches whose numbers end at the last one published. Later batches go on from it.
- Numbers begin at the microseconds of the wall clock: those of a restarted server are a gap.
- While nothing happens the last number is sent again every second, with a batch without events: a
  consumer that connects late, or missed the end of a burst, sees its gap then.
- If the queue overflows, the index is read anew between two steps, and AllBlocksCleared and all
  blocks are published.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import zmq

from kvtide.index import Event, Index
from kvtide.index.events import EventFields
from kvtide.server.kv_events.block_hashes import BlockHashes, PageKeyHashes, VllmHashes
from kvtide.server.kv_events.block_table import Appeared, BlockTable, Change
from kvtide.server.kv_events.event_encoding import (
    CLEARED,
    EventEncoder,
    TokenPacker,
    WireEvent,
    encode_batch,
)
from kvtide.server.kv_events.kv_event_settings import BlockNames, KVEventSettings
from kvtide.server.kv_events.kv_groups import kv_groups
from kvtide.server.kv_events.publisher_counts import PublisherCounts
from kvtide.server.kv_events.replay_buffer import ReplayBuffer
from kvtide.server.setting_values import SettingsError

QUEUE_EVENTS = 1 << 16
BATCH_PAGES = 256
"""A batch is sent once it is about so many blocks, or when the queue is empty."""
STATE_PAGES = 1024
"""Blocks in one batch of the present state."""
POLL_MS = 5
BEACON_S = 1.0
PUB_BATCHES = 1000
"""A subscriber that is further behind loses batches, and asks for a replay."""
RETRY_S, CLOSE_S = 1.0, 2.0
LINGER_MS = 200
PAUSE_S = 20e-6
END = (-1).to_bytes(8, "big", signed=True)

log = logging.getLogger("kvtide")


class Beginning(NamedTuple):
    """What is readable in the index, and the number of its last event."""

    number: int
    events: Sequence[Event]


class Publisher:
    """See the module.

    read_anew  asks for a call of `begin` on the engine's thread; may be called from any thread
    """

    def __init__(
        self,
        settings: KVEventSettings,
        index: Index,
        read_anew: Callable[[], None],
        *,
        queue_events: int = QUEUE_EVENTS,
    ) -> None:
        self.counts = PublisherCounts()
        hashes = _hashes(settings, index)
        page_tokens = index.memory.page_tokens
        groups, pack = kv_groups(index.memory), TokenPacker(page_tokens)
        self._table = BlockTable(groups, hashes, page_tokens, pack, _pause)
        self._encoder = EventEncoder(hashes, page_tokens)
        self._buffer = ReplayBuffer(time.time_ns() // 1000, settings.replay_batches)
        self._topic = settings.topic.encode()
        self._read_anew = read_anew
        self._queue: deque[EventFields] = deque(maxlen=queue_events)
        self._beginnings: deque[Beginning] = deque(maxlen=1)
        self._follows = False
        self._heard: int | None = None
        self._asked = False
        self._sent_at = 0.0
        self._beacon = b""
        self._closing = threading.Event()
        self._context = zmq.Context()
        try:
            self._pub = self._bound(zmq.PUB, settings.endpoint, "--kv-events", PUB_BATCHES)
            kept = settings.replay_batches + PUB_BATCHES
            self._replay = self._bound(
                zmq.ROUTER, settings.replay_endpoint, "--kv-events-replay", kept
            )
        except SettingsError:
            self._context.destroy(linger=0)
            raise
        self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.endpoint, self.replay_endpoint = map(_endpoint, (self._pub, self._replay))
        self._thread = threading.Thread(target=self._run, name="kvtide-kv-events", daemon=True)
        self._thread.start()

    # -- on the engine's thread -------------------------------------------------------------

    def begin(self, index: Index) -> None:
        """Hand over what is readable, and follow the index from here on. Between two steps."""
        if not self._follows:
            self._follows = True
            index.subscribe_fields(self._queue.append)
        self._beginnings.append(Beginning(index.last_event, list(index.readable())))

    # -- from any thread --------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Events of the index that are not published yet."""
        return len(self._queue)

    @property
    def sentence(self) -> str:
        return f"KV events on {self.endpoint}, replays on {self.replay_endpoint}"

    def close(self) -> None:
        """Publish what is queued, and that nothing is here any longer."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._publish([CLEARED])
            while not self._closing.is_set():
                self._replay.poll(POLL_MS)
                try:
                    self._step()
                except Exception:
                    log.exception("KV events: reading the index anew")
                    self._closing.wait(RETRY_S)
                    self._lose(0)
            self._step()
            self._publish([CLEARED])
        finally:
            self._context.destroy(linger=LINGER_MS)

    def _step(self) -> None:
        while self._replay.poll(0):
            self._answer(self._replay.recv_multipart())
        self._follow()
        if time.monotonic() - self._sent_at >= BEACON_S:
            self._repeat()

    def _follow(self) -> None:
        """Publish all that is queued."""
        while self._queue:
            event = Event(*self._queue.popleft())
            self._start_anew()  # An event that comes after a beginning is queued after it is set.
            if self._heard is None or event.number <= self._heard:
                self.counts.skipped += 1
            elif event.number != self._heard + 1:
                self._lose(event.number - self._heard - 1)
            else:
                self._heard = event.number
                self._table.hear(event)
                _pause()
            if self._table.pages >= BATCH_PAGES:
                self._publish_changes(self._table.take())
        self._start_anew()
        self._publish_changes(self._table.take())

    def _start_anew(self) -> None:
        """Publish what is readable in the index, if it was read anew."""
        if not self._beginnings:
            return
        beginning = self._beginnings.popleft()
        self._table.clear()
        self._heard, self._asked = beginning.number, False
        for event in beginning.events:
            self._table.hear(event)
            _pause()
        self._table.take()
        for batch in self._state(STATE_PAGES):
            self._publish(batch)

    def _lose(self, events: int) -> None:
        """Some events have been dropped: nothing is known until the index is read anew."""
        self.counts.dropped += events
        self._heard = None
        self._table.take()
        if not self._asked:
            self._asked = True
            self.counts.read_anew += 1
            self._read_anew()

    def _state(self, batch_pages: int) -> Iterator[list[WireEvent]]:
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

    # -- sending ----------------------------------------------------------------------------

    def _publish_changes(self, changes: Iterable[Change]) -> None:
        if events := self._encoder.events(changes):
            self._publish(events)

    def _publish(self, events: Sequence[WireEvent]) -> None:
        payload = encode_batch(events)
        number = self._buffer.add(payload)
        self._send(number, payload)
        self._beacon = b"" if events else payload
        self.counts.batches += 1
        for event in events:
            self.counts.events[event.kind] += 1

    def _repeat(self) -> None:
        """Send the last number again, with a batch without events."""
        if self._beacon:
            self._send(self._buffer.next - 1, self._beacon)
        else:
            self._publish([])

    def _send(self, number: int, payload: bytes) -> None:
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        self._sent_at = time.monotonic()

    def _answer(self, frames: Sequence[bytes]) -> None:
        """Answer one request for a replay; what is not one is skipped."""
        if len(frames) < 2 or len(frames[-1]) != 8:
            return
        peer, asked = frames[0], int.from_bytes(frames[-1], "big")
        batches = self._buffer.since(asked)
        self.counts.replays["buffer" if batches is not None else "state"] += 1
        try:
            for number, payload in self._state_since(asked) if batches is None else batches:
                self._reply(peer, self._topic, number.to_bytes(8, "big"), payload)
            self._reply(peer, b"", END, b"")
        except zmq.ZMQError as error:  # It is gone, or does not read.
            log.warning("KV events: a replay from %d was cut off (%s)", asked, error)
            self.counts.cut_off += 1

    def _state_since(self, asked: int) -> Iterator[tuple[int, bytes]]:
        """The present state, under numbers from `asked` to the last one published."""
        numbers = self._buffer.next - asked
        shown = sum(len(run.blocks) for run in self._table.everything())
        per_batch = max(STATE_PAGES, 2 * -(-shown // max(1, numbers)))
        batches = list(self._state(per_batch))
        first = self._buffer.next - len(batches)
        for number, events in enumerate(batches, first):
            yield number, encode_batch(events)

    def _reply(self, peer: bytes, *frames: bytes) -> None:
        self._replay.send_multipart((peer, b"", *frames), zmq.NOBLOCK)

    def _bound(self, kind: int, endpoint: str, flag: str, max_batches: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, max_batches)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(f"{endpoint[:-1]}*" if endpoint.endswith(":0") else endpoint)
        except zmq.ZMQError as error:
            raise SettingsError(
                f"{flag} cannot listen on {endpoint} ({error}); choose another address or port"
            ) from None
        return socket


def _pause() -> None:
    """Let the engine's thread have the interpreter, if it waits for it.

    A thread that gives it up for no time mostly has it again before another one wakes.
    """
    time.sleep(PAUSE_S)


def _hashes(settings: KVEventSettings, index: Index) -> BlockHashes:
    if settings.names is BlockNames.PAGE_KEYS:
        return PageKeyHashes(index.root_key)
    return VllmHashes()


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    found = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()
