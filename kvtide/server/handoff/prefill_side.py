"""The leader of a prefill server: decode servers connect, and hear what was written.

    decode ──hello: its memory──▶ paired, or refused in a sentence
           ──Ask──▶ a request for one token      ──Reserve, StopWriting, Done──▶ the engine
           ◀──Written, First, Complete, Failed, Silent── what the ranks report

An epoch of a room belongs to the connection that reserved it, or that asks for its silence later:
a decode server that lost its connection asks over the next one. When a connection ends, so does all
that it reserved.
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
from kvtide.engine.handoff.request_fields import asked_params
from kvtide.server.handoff.handoff_settings import HandoffSettings
from kvtide.server.handoff.peer_commands import ExpireRooms, PairWith, PeerLost, PeerSaid
from kvtide.server.handoff.rank_handoff import RankHandoff
from kvtide.server.service import Service
from kvtide.transfer.peer.channel import Channel, ChannelError, Listener

log = logging.getLogger("kvtide")
Json = dict[str, Any]
HELLO_S = 5.0
"""For a hello, which comes at once from a decode server and never from others."""
PAIR_TIMEOUT_S = 60.0
SILENCE_S = 5.0
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
        self._pairing: dict[str, float] = {}
        self._rooms: dict[str, dict[int, str]] = {}
        self._refused: dict[str, str] = {}
        rank.sends = self._send
        self._listener = Listener(
            settings.host,
            settings.port or 0,
            self._answer,
            self._take,
            secret=secret,
            timeout_s=HELLO_S,
            silence_s=min(SILENCE_S, settings.timeout_s),
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._expire, name="kvtide-rooms", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.host, self._listener.port

    def report(self) -> Json:
        return {
            "connected": len(self._channels),
            "refused": self._listener.refused,
            "last_error": self._listener.last_refusal,
        }

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
        with self._lock:
            self._pairing[name] = time.monotonic()
        command = PairWith(name, manifests, descriptors)
        problem = self._service.run_from_thread(command, PAIR_TIMEOUT_S)
        if problem is not None:
            with self._lock:
                del self._pairing[name]
            raise ChannelError(problem)
        hello["name"] = name
        return {"processes": self._rank.processes, "name": name}

    def _take(self, channel: Channel) -> None:
        name = str(channel.hello["name"])
        with self._lock:
            self._pairing.pop(name, None)
            self._channels[name] = channel
        channel.start(lambda message: self._hear(name, message), lambda _: self._lost(name))
        log.info("handoff: decode server %s at %s is paired", name, channel.peer_address)

    def _lost(self, name: str) -> None:
        with self._lock:
            self._channels.pop(name, None)
            rooms = [room for room, owners in self._rooms.items() if name in owners.values()]
        for room in rooms:
            self._forget(name, room)
        self._service.command_nowait(PeerLost(name))

    # -- messages ---------------------------------------------------------------------------

    def _hear(self, name: str, values: Json) -> None:
        """On the channel's thread; an error closes the channel."""
        message = from_json(values)
        match message:
            case Ask():
                self._ask(name, message)
                return
            case Reserve() | StopWriting():
                with self._lock:
                    self._rooms.setdefault(message.room, {})[message.epoch] = name
                    refused = self._refused.pop(message.room, None)
                if refused is not None and isinstance(message, Reserve):
                    self._send(message.room, Failed(message.room, message.epoch, refused, True))
                    return
            case Done():
                self._forget(name, message.room, message.epoch)
            case _:
                raise ChannelError(f"a decode server does not send {type(message).__name__}")
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
            epochs = list(self._rooms.get(room, ()))
            if not epochs:
                self._refused[room] = reason
        for epoch in epochs:
            self._send(room, Failed(room, epoch, reason, silent=True))
            self._service.command_nowait(PeerSaid(name, to_json(Done(room))))

    def _forget(self, name: str, room: str, epoch: int = 0) -> None:
        """The connection needs nothing more of an epoch, or of all that it has of the room."""
        with self._lock:
            owners = self._rooms.pop(room, {})
            left = {e: o for e, o in owners.items() if o != name or epoch not in (0, e)}
            if left:
                self._rooms[room] = left
            self._refused.pop(room, None)

    def _send(self, room: str, message: HandoffMessage) -> None:
        """To the connection that has the room and epoch; from any thread."""
        assert isinstance(message, (Written, First, Complete, Failed, Silent))
        with self._lock:
            owners = self._rooms.get(room, {})
            channel = self._channels.get(owners.get(message.epoch, ""))
            if isinstance(message, Silent):  # Nothing more is sent for it.
                owners.pop(message.epoch, None)
                if not owners:
                    self._rooms.pop(room, None)
        if channel is not None:
            channel.send(to_json(message))

    def _expire(self) -> None:
        while not self._closing.wait(EXPIRE_EVERY_S):
            now = time.monotonic()
            if self._service.has_rooms:
                self._service.command_nowait(ExpireRooms(now, self._settings.timeout_s))
            with self._lock:
                limit = now - 2 * PAIR_TIMEOUT_S
                left = [name for name, since in self._pairing.items() if since < limit]
                for name in left:
                    del self._pairing[name]
            for name in left:  # Its handshake ended before it was answered.
                self._service.command_nowait(PeerLost(name))
