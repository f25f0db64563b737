"""The leader of a prefill server: decode servers connect, and are told what was written.

    decode ──hello: its memory──▶ paired, or refused in a sentence
           ──Ask──▶ a request for one token      ──Reserve, StopWriting, Done──▶ the engine
           ◀──Written, First, Failed, Silent── what the ranks report

A room belongs to the connection that reserved it. When that ends, so does all that it reserved.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import Any

from kvtide.engine import RequestError
from kvtide.engine.handoff.messages import (
    Ask,
    Done,
    Failed,
    Message,
    Reserve,
    from_json,
    to_json,
)
from kvtide.engine.handoff.request_fields import asked_params
from kvtide.server.handoff.handoff_settings import HandoffSettings
from kvtide.server.handoff.peer_commands import ExpireRooms, PairWith, PeerLost, PeerSaid
from kvtide.server.handoff.rank_handoff import RankHandoff
from kvtide.server.service import Service
from kvtide.transfer.peer.channel import Channel, ChannelError, Listener

log = logging.getLogger("kvtide")
Json = dict[str, Any]
PAIR_TIMEOUT_S = 60.0
EXPIRE_EVERY_S = 1.0


class PrefillSide:
    """`address` is where decode servers connect."""

    def __init__(
        self, service: Service, rank: RankHandoff, settings: HandoffSettings, secret: bytes
    ) -> None:
        self._service, self._rank, self._settings = service, rank, settings
        self._names = itertools.count(1)
        self._lock = threading.Lock()
        self._channels: dict[str, Channel] = {}
        self._rooms: dict[str, str] = {}
        self._epochs: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        rank.sends = self._send
        self._listener = Listener(
            settings.host,
            settings.port or 0,
            self._answer,
            self._take,
            secret=secret,
            timeout_s=PAIR_TIMEOUT_S,
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._expire, name="kvtide-rooms", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.host, self._listener.port

    @property
    def peers(self) -> int:
        return len(self._channels)

    def close(self) -> None:
        self._closing.set()
        self._listener.close()
        for channel in list(self._channels.values()):
            channel.close("the server is shutting down")
        self._thread.join()

    # -- connections ------------------------------------------------------------------------

    def _answer(self, hello: Json) -> Json:
        """Pair with a decode server, on the thread of its handshake."""
        try:
            manifests, descriptors = list(hello["manifests"]), list(hello["descriptors"])
            instance = str(hello["instance"])
        except (KeyError, TypeError):
            raise ChannelError(
                "the hello names no memory; use the same version on both sides"
            ) from None
        name = f"{instance}/{next(self._names)}"
        problem = self._service.run_from_thread(
            PairWith(name, manifests, descriptors), PAIR_TIMEOUT_S
        )
        if problem is not None:
            raise ChannelError(problem)
        hello["name"] = name
        return {"processes": self._rank.processes, "name": name}

    def _take(self, channel: Channel) -> None:
        name = str(channel.hello["name"])
        with self._lock:
            self._channels[name] = channel
        channel.start(lambda message: self._hear(name, message), lambda _: self._lost(name))
        log.info("handoff: decode server %s at %s is paired", name, channel.peer_address)

    def _lost(self, name: str) -> None:
        with self._lock:
            self._channels.pop(name, None)
            rooms = [room for room, peer in self._rooms.items() if peer == name]
        for room in rooms:
            self._forget(room)
        self._service.command_nowait(PeerLost(name))

    # -- messages ---------------------------------------------------------------------------

    def _hear(self, name: str, values: Json) -> None:
        """On the channel's thread; an error closes the channel."""
        message = from_json(values)
        if isinstance(message, Ask):
            self._ask(name, message)
            return
        if isinstance(message, Reserve):
            with self._lock:
                self._rooms[message.room] = name
                self._epochs[message.room] = message.epoch
                refused = self._refused.pop(message.room, None)
            if refused is not None:
                self._send(message.room, Failed(message.room, message.epoch, refused, silent=True))
                return
        if isinstance(message, Done):
            self._forget(message.room)
        self._service.command_nowait(PeerSaid(name, to_json(message)))

    def _ask(self, name: str, message: Ask) -> None:
        """A prompt to prefill: it is queued before its reservation, or that is refused."""
        try:
            params = asked_params(message.room, message.request)
            checked = self._service.check(params)
        except (RequestError, ValueError) as error:
            self._refuse(name, message.room, str(error))
            return
        self._service.submit_from_thread(
            checked, lambda error: self._refuse(name, message.room, str(error))
        )

    def _refuse(self, name: str, room: str, reason: str) -> None:
        """Tell the peer now, or as soon as it has named an epoch."""
        with self._lock:
            epoch = self._epochs.get(room)
            if epoch is None:
                self._refused[room] = reason
        if epoch is not None:
            self._send(room, Failed(room, epoch, reason, silent=True))
            self._service.command_nowait(PeerSaid(name, to_json(Done(room))))

    def _forget(self, room: str) -> None:
        with self._lock:
            for known in (self._rooms, self._epochs, self._refused):
                known.pop(room, None)
        if self._rank.reports is not None:
            self._rank.reports.forget(room)

    def _send(self, room: str, message: Message) -> None:
        """To the connection that has the room; from any thread."""
        with self._lock:
            channel = self._channels.get(self._rooms.get(room, ""))
        if channel is not None:
            channel.send(to_json(message))

    def _expire(self) -> None:
        while not self._closing.wait(EXPIRE_EVERY_S):
            if self._service.has_rooms:
                now = time.monotonic()
                self._service.command_nowait(ExpireRooms(now, self._settings.timeout_s))
