"""On a decode server: the connection to one prefill server, what it was sent, and when it is lost.

A thread of its own delivers the engine's messages, so that no step waits for a connection. Another
thread opens the connection, so that no request waits long for a peer that does not answer.

| seen here                          | reported to the engine                                  |
|------------------------------------|---------------------------------------------------------|
| no connection within `patience_s`  | Failed, silent: the peer never got the slots            |
| nothing landed for `timeout_s`     | Failed, not silent; the engine answers with StopWriting |
| the connection ends                | Failed, not silent, for all that may still be written   |
| memory revoked                     | Silent                                                  |
| it cannot be, and the peer is gone | Silent                                                  |

Slots that a peer was sent are *unsilent* from the end of their handoff until the peer says that it
writes no more, has lost its access to the memory, or is gone. A frozen peer keeps them until then.
A peer that is connected and does not say so for `timeout_s` is disconnected: that lets the memory
be revoked.

The end of the peer's processes counts only where the transport cannot revoke: its sender writes
by itself. Bytes in a network's sockets land after their sender's end, on one machine too. A server
that listens at the same address later speaks for itself alone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kvtide.engine.handoff.messages import (
    Ask,
    Complete,
    Done,
    Failed,
    First,
    HandoffMessage,
    Reserve,
    Silent,
    StopWriting,
    Written,
    from_json,
    to_json,
)
from kvtide.transfer.peer.channel import Channel, ChannelError, connect
from kvtide.transfer.peer.process_watch import OtherMachineError, ProcessIdentity, ProcessWatch
from kvtide.transfer.peer.transport import TransportError

log = logging.getLogger("kvtide")
Json = dict[str, Any]

POLL_S = 0.1
CONNECT_S = 60.0
"""A peer may pin much memory before it answers."""
PATIENCE_S = 5.0
"""The longest that a request waits for a connection, and a peer without a sign of life."""
RETRY_S = 1.0
"""A peer that could not be reached is not tried again before; its requests are prefilled here."""
RETIRE_S = 60.0
"""After this time without a connection and without work, the peer is forgotten."""


class OwnSide(Protocol):
    """What a peer needs of the decode side that it belongs to."""

    secret: bytes
    timeout_s: float

    def hello(self, descriptors: list[Json]) -> Json: ...
    def expose(self, peer: str) -> list[Json]: ...
    def revoke(self, peer: str) -> list[Json] | None: ...
    def tell(self, peer: str, message: HandoffMessage) -> None: ...
    def lost(self, peer: str) -> None: ...
    def retire(self, peer: str, is_idle: Callable[[], bool]) -> bool: ...


class _Channel:
    """A channel, and the peer's processes if they are on this machine."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.lost = False
        """Set when the channel's end has been dealt with."""
        self._watches: list[ProcessWatch] = []
        self._is_watched = False
        own = ProcessIdentity.own()
        with suppress(KeyError, TypeError, ValueError):
            processes = [ProcessIdentity.from_json(each) for each in channel.hello["processes"]]
            here = [(each.boot, each.namespace) == (own.boot, own.namespace) for each in processes]
            self._is_watched = bool(here) and all(here)
        for process in processes if self._is_watched else ():
            with suppress(OtherMachineError):  # It is gone already.
                self._watches.append(ProcessWatch(process))

    @property
    def peer_is_gone(self) -> bool:
        return self._is_watched and not any(watch.alive() for watch in self._watches)

    def is_same_server(self, other: _Channel) -> bool:
        """Whether the processes at the other end are those of another connection."""
        here, there = (one.channel.hello.get("processes") for one in (self, other))
        return other is self or bool(here == there)

    def close(self) -> None:
        while self._watches:
            self._watches.pop().close()


@dataclass(slots=True)
class _SentSlots:
    """Slots that the peer was sent. `since`: when something last landed, or their handoff ended."""

    room: str
    over: _Channel
    since: float
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Opened:
    """What came of an attempt to connect."""

    channel: Channel | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Messages for a connection that is being opened."""

    messages: tuple[HandoffMessage, ...]
    since: float


class PrefillConnection:
    """`address` is where the prefill server listens for handoffs."""

    def __init__(self, address: str, side: OwnSide) -> None:
        self.address, self._side = address, side
        self.last_error = ""
        self._patience_s = min(PATIENCE_S, side.timeout_s)
        self._queue: queue.SimpleQueue[HandoffMessage | _Opened | None] = queue.SimpleQueue()
        self._connection: _Channel | None = None
        self._former: list[_Channel] = []
        self._opening_since: float | None = None
        self._next_try = 0.0
        self._descriptors: list[Json] | None = None
        self._can_revoke = True
        """Until the transport has answered otherwise."""
        self._ask: Ask | None = None
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()
        self._sent: dict[int, _SentSlots] = {}
        self._unsilent: dict[int, _SentSlots] = {}
        self._revocations = 0
        self._idle_since = time.monotonic()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="kvtide-peer", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._connection.channel.closed

    @property
    def in_flight(self) -> int:
        """Handoffs that the peer works on."""
        return len(self._sent) + len(self._waiting)

    def report(self) -> Json:
        return {
            "connected": self.connected,
            "in_flight": self.in_flight,
            "unsilent": len(self._unsilent),
            "revocations": self._revocations,
            "last_error": self.last_error,
        }

    def send(self, message: HandoffMessage) -> None:
        """Never blocks."""
        self._queue.put(message)

    def close(self) -> None:
        self._closing = True
        self._queue.put(None)
        self._thread.join()
        if self._connection is not None:
            self._connection.channel.close("the server is shutting down")
        self._forget_connections()

    def _forget_connections(self) -> None:
        for connection in (*self._former, *filter(None, [self._connection])):
            connection.close()

    # -- the thread -------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closing and not self._retires():
            event = None
            with suppress(queue.Empty):
                event = self._queue.get(timeout=POLL_S)
            if self._closing:
                return
            try:
                if isinstance(event, _Opened):
                    self._opened(event)
                elif event is not None:
                    self._deliver(event)
                self._check_deadlines()
                self._confirm_silence()
            except Exception:  # The thread serves all requests of this peer: it goes on.
                log.exception("handoff: prefill server %s", self.address)

    def _retires(self) -> bool:
        """Whether nothing is left to do for a peer that has gone."""
        now = time.monotonic()
        if self.connected or self._opening_since or self.in_flight or self._unsilent:
            self._idle_since = now
        retires = now - self._idle_since > RETIRE_S
        if retires := retires and self._side.retire(self.address, self._queue.empty):
            self._forget_connections()
        return retires

    def _deliver(self, message: HandoffMessage) -> None:
        match message:
            case Ask():
                self._ask = message  # It goes with its reservation, or not at all.
            case Reserve():
                asks = self._ask is not None and self._ask.room == message.room
                self._send_soon(*([self._ask] if self._ask and asks else []), message)
                self._ask = None
            case StopWriting():
                self._stop(message)
            case _:
                self._send_soon(message)

    def _send_soon(self, *messages: HandoffMessage) -> None:
        """Send over the connection that there is, or over the next one if that comes soon."""
        now = time.monotonic()
        if self.connected:
            self._send(messages)
            return
        if self._may_open():
            self._open()
        if self._opening_since is not None and now - self._opening_since < self._patience_s:
            self._waiting.append(_Waiting(messages, now))
        else:
            self._give_up(messages, self.last_error or "it does not answer")

    def _send(self, messages: tuple[HandoffMessage, ...]) -> None:
        connection = self._connection
        assert connection is not None
        reserves = [message for message in messages if isinstance(message, Reserve)]
        with self._lock:
            for reserve in reserves:
                self._sent[reserve.epoch] = _SentSlots(reserve.room, connection, time.monotonic())
        sent = [connection.channel.send(to_json(message)) for message in messages]
        if not sent[-1]:
            with self._lock:  # `_lost` may have spoken for them.
                unsaid = [each for each in reserves if self._sent.pop(each.epoch, None)]
            self._give_up(tuple(unsaid), "the connection ended")

    def _give_up(self, messages: tuple[HandoffMessage, ...], problem: str) -> None:
        """The peer cannot be reached: its requests are prefilled here."""
        reason = f"prefill server {self.address}: {problem}"
        for message in messages:
            if isinstance(message, Reserve):
                self._report(Failed(message.room, message.epoch, reason, silent=True))

    def _stop(self, message: StopWriting) -> None:
        epoch, room = message.epoch, message.room
        with self._lock:
            sent = self._sent.pop(epoch, None)
            if sent is not None:
                sent.since = time.monotonic()
                self._unsilent[epoch] = sent
            unsilent = self._unsilent.get(epoch)
        if unsilent is None:  # It never got these slots, or has ended.
            self._waiting = [each for each in self._waiting if not _reserves(each, epoch)]
            self._report(Silent(room, epoch))
            self._send_now(Done(room, epoch))
        elif self._is_known(unsilent):
            self._send_now(message)

    def _send_now(self, message: HandoffMessage) -> None:
        """Send over the connection that there is, or not at all."""
        if self.connected:
            self._send((message,))

    # -- the connection ---------------------------------------------------------------------

    def _may_open(self) -> bool:
        """What the former connection left unsilent is known first, so that it can be revoked."""
        former = self._connection
        ready = self._opening_since is None and (former is None or former.lost)
        return ready and time.monotonic() >= self._next_try

    def _is_known(self, sent: _SentSlots) -> bool:
        """Whether the connected server is the one that was sent the slots."""
        return self._connection is not None and self._connection.is_same_server(sent.over)

    def _open(self) -> None:
        """Begin to connect."""
        self._opening_since = time.monotonic()
        threading.Thread(target=self._try, name="kvtide-connect", daemon=True).start()

    def _try(self) -> None:
        """On a thread of its own: revoke what may still be written, then connect."""
        try:
            opened = _Opened(self._connected())
        except (ChannelError, TransportError, TimeoutError, ValueError) as error:
            opened = _Opened(None, str(error))
        except Exception as error:  # The peer's thread waits for an answer in any case.
            log.exception("handoff: prefill server %s", self.address)
            opened = _Opened(None, f"{type(error).__name__}: {error}")
        if self._closing and opened.channel is not None:
            opened.channel.close("the server is shutting down")
        self._queue.put(opened)

    def _connected(self) -> Channel:
        side = self._side
        if self._unsilent and self._can_revoke:
            self._revoke()
        if self._descriptors is None:
            self._descriptors = side.expose(self.address)
        host, _, port = self.address.rpartition(":")
        return connect(
            host.strip("[]"),
            int(port),
            side.hello(self._descriptors),
            secret=side.secret,
            timeout_s=CONNECT_S,
            silence_s=self._patience_s,
        )

    def _revoke(self) -> None:
        unsilent = list(self._unsilent)
        renewed = self._side.revoke(self.address)
        self._can_revoke = renewed is not None
        if renewed is not None:
            self._descriptors = renewed
            self._revocations += 1
            self._silent(unsilent)

    def _opened(self, opened: _Opened) -> None:
        self._opening_since = None
        waiting, self._waiting = self._waiting, []
        if opened.channel is None:
            if opened.problem != self.last_error:
                log.warning("handoff: %s", opened.problem)
            self.last_error = opened.problem
            self._next_try = time.monotonic() + RETRY_S
            for each in waiting:
                self._give_up(each.messages, opened.problem)
            self._side.lost(self.address)
            return
        self._confirm_gone()
        connection = _Channel(opened.channel)
        if self._connection is not None:
            self._former.append(self._connection)
        self._connection = connection
        opened.channel.start(partial(self._hear, connection), partial(self._lost, connection))
        log.info("handoff: prefill server %s is connected", self.address)
        for epoch, sent in list(self._unsilent.items()):
            sent.since = time.monotonic()
            if self._is_known(sent):
                self._send((StopWriting(sent.room, epoch),))
        for each in waiting:
            self._send(each.messages)

    def _lost(self, connection: _Channel, reason: str) -> None:
        """On the channel's thread, after its last message."""
        if self._closing:
            return
        log.warning("handoff: prefill server %s: %s", self.address, reason)
        self.last_error = reason
        now = time.monotonic()
        with self._lock:
            lost = {epoch: sent for epoch, sent in self._sent.items() if sent.over is connection}
            for epoch, sent in lost.items():
                del self._sent[epoch]
                sent.since = now
                self._unsilent[epoch] = sent
        connection.lost = True
        for epoch, sent in lost.items():
            self._report(Failed(sent.room, epoch, f"the prefill server is lost: {reason}", False))
        self._side.lost(self.address)

    # -- from the peer ----------------------------------------------------------------------

    def _hear(self, connection: _Channel, values: Json) -> None:
        """On the channel's thread; an error closes the channel."""
        message = from_json(values)
        if not isinstance(message, (Written, First, Complete, Failed, Silent)):
            raise ChannelError(f"a prefill server does not send {type(message).__name__}")
        with self._lock:
            epoch = message.epoch
            sent = self._sent.get(epoch)
            known = sent or self._unsilent.get(epoch)
            if known is None or not connection.is_same_server(known.over):
                return  # It has ended, or was another server's.
            if sent is not None:
                sent.since = time.monotonic()
            if isinstance(message, Silent) or (isinstance(message, Failed) and message.silent):
                self._sent.pop(epoch, None)
                self._unsilent.pop(epoch, None)
            if isinstance(message, Complete):
                self._sent.pop(epoch, None)
        self._report(message)

    def _report(self, message: HandoffMessage) -> None:
        self._side.tell(self.address, message)

    # -- deadlines and silence --------------------------------------------------------------

    def _check_deadlines(self) -> None:
        now, timeout_s = time.monotonic(), self._side.timeout_s
        late = [each for each in self._waiting if now - each.since > self._patience_s]
        for each in late:
            self._waiting.remove(each)
            self._give_up(each.messages, f"no connection within {self._patience_s:g} s")
        with self._lock:
            for epoch, sent in self._sent.items():
                if now - sent.since > timeout_s and not sent.failed:
                    sent.failed = True
                    reason = f"prefill server {self.address}: nothing came for {timeout_s:g} s"
                    self._report(Failed(sent.room, epoch, reason, silent=False))
            mute = any(
                now - sent.since > timeout_s and self._is_known(sent)
                for sent in self._unsilent.values()
            )
        if mute and self.connected and self._connection is not None:
            self._connection.channel.close(f"no silence within {timeout_s:g} s")

    def _confirm_silence(self) -> None:
        """A lost peer's slots go back when it is gone, or by the next attempt to connect to it."""
        self._confirm_gone()
        if self._unsilent and not self.connected and self._may_open():
            self._open()

    def _confirm_gone(self) -> None:
        with self._lock:
            unsilent = {} if self._can_revoke else dict(self._unsilent)
        self._silent([epoch for epoch, sent in unsilent.items() if sent.over.peer_is_gone])
        with self._lock:
            in_use = [sent.over for sent in (*self._unsilent.values(), *self._sent.values())]
        for connection in [each for each in self._former if each not in in_use]:
            self._former.remove(connection)
            connection.close()

    def _silent(self, epochs: list[int]) -> None:
        with self._lock:
            known = {epoch: self._unsilent.pop(epoch, None) for epoch in epochs}
        for epoch, sent in known.items():
            if sent is not None:
                self._report(Silent(sent.room, epoch))


def _reserves(waiting: _Waiting, epoch: int) -> bool:
    return any(isinstance(each, Reserve) and each.epoch == epoch for each in waiting.messages)
