"""The leader of a decode server: one connection to every prefill server that its requests name.

The engine's messages go out through a queue per peer, so that no step waits for a connection. What
the peer says goes to all ranks as engine commands. So does what it can no longer say:

| seen here                        | told to the engine                                      |
|----------------------------------|---------------------------------------------------------|
| no connection, or it is refused  | Failed, silent: the peer was never told the slots       |
| nothing landed for `timeout_s`   | Failed, not silent; the engine answers with StopWriting |
| the connection ends              | Failed, not silent, for all that may still be written   |
| memory revoked, or peer is gone  | Silent                                                  |

A peer that is frozen keeps its slots in quarantine until it answers again or is gone.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvtide.engine.handoff.messages import (
    Failed,
    First,
    Message,
    Reserve,
    Silent,
    StopWriting,
    Written,
    from_json,
    to_json,
)
from kvtide.server.handoff.handoff_settings import HandoffSettings
from kvtide.server.handoff.peer_commands import ExposeMemory, PeerSaid, RevokeMemory
from kvtide.server.handoff.rank_handoff import RankHandoff
from kvtide.server.service import Service
from kvtide.transfer.peer.channel import Channel, ChannelError, connect
from kvtide.transfer.peer.process_watch import OtherMachineError, ProcessIdentity, ProcessWatch

log = logging.getLogger("kvtide")
Json = dict[str, Any]
POLL_S = 0.1
CONNECT_S = 10.0
COMMAND_S = 60.0
RETRY_S = 1.0
"""A peer that could not be reached is not tried again before; its requests are prefilled here."""


@dataclass(slots=True)
class _Sent:
    """Slots that the peer was told, and when something last landed there."""

    room: str
    since: float
    failed: bool = False


class PrefillPeer:
    """One prefill server. Its thread connects, sends, watches deadlines and confirms silence."""

    def __init__(self, address: str, side: DecodeSide) -> None:
        self.address, self._side = address, side
        self.last_error = ""
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._channel: Channel | None = None
        self._descriptors: list[Json] | None = None
        self._watches: list[ProcessWatch] | None = None
        self._epochs: dict[int, _Sent] = {}
        self._unsilent: dict[int, str] = {}
        self._lock = threading.Lock()
        self._next_try = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="kvtide-peer", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._channel is not None and not self._channel.closed

    @property
    def in_flight(self) -> int:
        return len(self._epochs)

    def send(self, message: Message) -> None:
        """Never blocks."""
        self._queue.put(message)

    def close(self) -> None:
        self._closing = True
        self._queue.put(None)
        self._thread.join(CONNECT_S)
        if self._channel is not None:
            self._channel.close("the server is shutting down")
        for watch in self._watches or ():
            watch.close()

    # -- the thread -------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closing:
            message = None
            with suppress(queue.Empty):
                message = self._queue.get(timeout=POLL_S)
            if self._closing:
                return
            try:
                if message is not None:
                    self._deliver(message)
                self._check_deadlines()
                self._confirm_silence()
            except Exception:  # The thread serves all requests of this peer: it goes on.
                log.exception("handoff: prefill server %s", self.address)

    def _deliver(self, message: Message) -> None:
        if isinstance(message, StopWriting) and message.epoch not in self._unsilent:
            with self._lock:
                sent = self._epochs.pop(message.epoch, None)
                if sent is None:
                    return  # It was never told these slots, or is silent already.
                self._unsilent[message.epoch] = message.room
        if not self._connect():
            if isinstance(message, Reserve):
                reason = f"prefill server {self.address}: {self.last_error}"
                self._tell(Failed(message.room, message.epoch, reason, silent=True))
            return
        if isinstance(message, Reserve):
            with self._lock:
                self._epochs[message.epoch] = _Sent(message.room, time.monotonic())
        assert self._channel is not None
        self._channel.send(to_json(message))

    def _connect(self) -> bool:
        """Whether there is a connection, after trying to make one."""
        if self.connected:
            return True
        if time.monotonic() < self._next_try:
            return False
        try:
            self._open()
        except (ChannelError, TimeoutError, ValueError) as error:
            self.last_error = str(error)
            self._next_try = time.monotonic() + RETRY_S
            log.warning("handoff: %s", error)
            return False
        return True

    def _open(self) -> None:
        host, _, port = self.address.rpartition(":")
        side = self._side
        if self._descriptors is None:
            self._descriptors = side.run(ExposeMemory(self.address))
        hello = {
            "instance": side.instance,
            "manifests": side.rank.manifests,
            "descriptors": self._descriptors,
        }
        channel = connect(
            host.strip("[]"), int(port), hello, secret=side.secret, timeout_s=CONNECT_S
        )
        self._watch(channel.hello)
        self._channel = channel
        channel.start(self._hear, lambda reason: self._lost(channel, reason))
        for epoch, room in list(self._unsilent.items()):
            channel.send(to_json(StopWriting(room, epoch)))

    def _watch(self, hello: Json) -> None:
        """Keep an eye on the peer's processes, where that is possible: the dead write no more."""
        for watch in self._watches or ():
            watch.close()
        self._watches = None
        with suppress(OtherMachineError, KeyError, TypeError, ValueError):
            identities = [ProcessIdentity.from_json(each) for each in hello["processes"]]
            self._watches = [ProcessWatch(each) for each in identities]

    # -- from the peer ----------------------------------------------------------------------

    def _hear(self, values: Json) -> None:
        """On the channel's thread; an error closes the channel."""
        message = from_json(values)
        with self._lock:
            if isinstance(message, Written) and message.epoch in self._epochs:
                self._epochs[message.epoch].since = time.monotonic()
            if isinstance(message, First) or (isinstance(message, Failed) and message.silent):
                self._epochs.pop(message.epoch, None)
            if isinstance(message, Silent) or (isinstance(message, Failed) and message.silent):
                self._unsilent.pop(message.epoch, None)
        if isinstance(message, (Written, First, Failed, Silent)):
            self._tell(message)

    def _lost(self, channel: Channel, reason: str) -> None:
        if self._closing:
            return
        log.warning("handoff: prefill server %s: %s", self.address, reason)
        self.last_error = reason
        with self._lock:
            for epoch, sent in self._epochs.items():
                self._unsilent[epoch] = sent.room
                self._tell(Failed(sent.room, epoch, f"the prefill server is lost: {reason}", False))
            self._epochs = {}

    def _tell(self, message: Message) -> None:
        self._side.service.command_nowait(PeerSaid(self.address, to_json(message)))

    # -- deadlines and silence --------------------------------------------------------------

    def _check_deadlines(self) -> None:
        limit = time.monotonic() - self._side.settings.timeout_s
        with self._lock:
            for epoch, sent in self._epochs.items():
                if sent.since < limit and not sent.failed:
                    sent.failed = True
                    waited = self._side.settings.timeout_s
                    reason = f"prefill server {self.address}: nothing came for {waited:g} s"
                    self._tell(Failed(sent.room, epoch, reason, silent=False))

    def _confirm_silence(self) -> None:
        """Without a connection: the peer is gone, or its registration is."""
        if not self._unsilent or self.connected:
            return
        gone = self._watches is not None and not any(each.alive() for each in self._watches)
        if not gone:
            renewed = self._side.run(RevokeMemory(self.address))
            if renewed is None:
                self._connect()  # It may answer again.
                return
            self._descriptors = renewed
        with self._lock:
            epochs, self._unsilent = self._unsilent, {}
        for epoch, room in epochs.items():
            self._tell(Silent(room, epoch))


class DecodeSide:
    """All prefill servers that requests have named, by address."""

    def __init__(
        self, service: Service, rank: RankHandoff, settings: HandoffSettings, secret: bytes
    ) -> None:
        self.service, self.rank, self.settings, self.secret = service, rank, settings, secret
        self.instance = secrets.token_hex(8)
        self._peers: dict[str, PrefillPeer] = {}

    def send(self, peer: str, message: Message) -> None:
        """The engine's outbox. Never blocks."""
        if peer not in self._peers:
            self._peers[peer] = PrefillPeer(peer, self)
        self._peers[peer].send(message)

    def run(self, command: Any) -> Any:
        """Run an engine command from a peer's thread."""
        return self.service.run_from_thread(command, COMMAND_S)

    def in_flight(self, peer: str) -> int:
        """Handoffs that a peer works on."""
        known = self._peers.get(peer)
        return 0 if known is None else known.in_flight

    def report(self) -> dict[str, Json]:
        return {
            address: {
                "connected": peer.connected,
                "in_flight": peer.in_flight,
                "last_error": peer.last_error,
            }
            for address, peer in self._peers.items()
        }

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
