"""The sockets of a publisher: batches for all who listen, and replays for those who missed some.

    PUB     topic │ number, 8 bytes, big endian │ msgpack [time, events, dp_rank]
    ROUTER  ask: a number │ answer: batches (topic, number, payload) from it on, then number -1

How a consumer keeps up:

- Numbers are consecutive. A consumer that sees a gap asks for a replay from its next number on.
- If the buffer does not reach back so far, the answer is the present state: AllBlocksCleared and
  all blocks, in batches whose numbers end at the last one published. Later batches go on from it.
- Numbers begin at the microseconds of the wall clock: those of a restarted server are a gap.
- While nothing happens the last number is sent again every second, with a batch without events: a
  consumer that connects late, or missed the end of a burst, sees its gap then.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import zmq

from kvtide.server.kv_events.event_encoding import WireEvent, encode_batch
from kvtide.server.kv_events.kv_event_settings import KVEventSettings
from kvtide.server.kv_events.publisher_counts import PublisherCounts
from kvtide.server.kv_events.replay_buffer import ReplayBuffer
from kvtide.server.setting_values import SettingsError

STATE_PAGES = 1024
"""Blocks in one batch of the present state, at least."""
PUB_BATCHES = 1000
"""A subscriber that is further behind loses batches, and asks for a replay."""
LINGER_MS = 200
BIND_S = 1.0
"""A server that restarts may find its ports taken this long, by the process of its last life."""
END = (-1).to_bytes(8, "big", signed=True)

log = logging.getLogger("kvtide")

State = Callable[[int], Iterable[list[WireEvent]]]
"""The present state in batches of about so many blocks, the first of which clears all."""


class Broadcast:
    """See the module. Binds the sockets, or raises `SettingsError`.

    state  the present state; `shown`: of how many blocks it is
    """

    def __init__(
        self,
        settings: KVEventSettings,
        counts: PublisherCounts,
        state: State,
        shown: Callable[[], int],
    ) -> None:
        self.counts = counts
        self._state, self._shown = state, shown
        self._buffer = ReplayBuffer(time.time_ns() // 1000, settings.replay_batches)
        self._topic = settings.topic.encode()
        self._beacon_s = settings.beacon_s
        self._sent_at = 0.0
        self._beacon = b""
        self._context = zmq.Context()
        try:
            self._pub = self._bound(zmq.PUB, settings.endpoint, "--kv-events", PUB_BATCHES)
            kept = settings.replay_batches + PUB_BATCHES
            self.asking = self._bound(
                zmq.ROUTER, settings.replay_endpoint, "--kv-events-replay", kept
            )
        except SettingsError:
            self.close()
            raise
        self.asking.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.endpoint, self.replay_endpoint = map(_endpoint, (self._pub, self.asking))

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)

    # -- to all -----------------------------------------------------------------------------

    def publish(self, events: Sequence[WireEvent]) -> None:
        payload = encode_batch(events)
        number = self._buffer.add(payload)
        self._send(number, payload)
        self._beacon = b"" if events else payload
        self.counts.batches += 1
        for event in events:
            self.counts.events[event.kind] += 1

    def beat(self) -> None:
        """Send the last number again, with a batch without events, if that is due."""
        if time.monotonic() - self._sent_at < self._beacon_s:
            return
        if self._beacon:
            self._send(self._buffer.next - 1, self._beacon)
        else:
            self.publish([])

    def _send(self, number: int, payload: bytes) -> None:
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        self._sent_at = time.monotonic()

    # -- to one -----------------------------------------------------------------------------

    def answer(self) -> None:
        """Answer all who have asked for a replay."""
        while self.asking.poll(0):
            self._answer(self.asking.recv_multipart())

    def _answer(self, frames: Sequence[bytes]) -> None:
        """Answer one request; what is not one is skipped."""
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
        batches = list(self._state(max(STATE_PAGES, 2 * -(-self._shown() // max(1, numbers)))))
        for number, events in enumerate(batches, self._buffer.next - len(batches)):
            yield number, encode_batch(events)

    def _reply(self, peer: bytes, *frames: bytes) -> None:
        self.asking.send_multipart((peer, b"", *frames), zmq.NOBLOCK)

    # -- binding ----------------------------------------------------------------------------

    def _bound(self, kind: int, endpoint: str, flag: str, max_batches: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, max_batches)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        address = f"{endpoint[:-1]}*" if endpoint.endswith(":0") else endpoint
        deadline = time.monotonic() + BIND_S
        while True:
            try:
                socket.bind(address)
                return socket
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise SettingsError(
                        f"{flag} cannot listen on {endpoint} ({error}); choose another address or "
                        "port"
                    ) from None
            time.sleep(0.02)


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    found = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()
