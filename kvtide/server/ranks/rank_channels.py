"""Channels between the leader and every other rank, beside the process group.

    leader ◀── channel: heartbeats, failures, signals ──▶ rank 1, rank 2, …

Both ends prove a secret before the process group is made. A channel (`transfer.peer.channel`) has
threads of its own, so its heartbeats do not depend on steps: a rank in a long step is alive, and a
frozen process is not. If the leader freezes or dies, the other ranks end by themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Protocol

from kvtide.server.ranks.step_watch import StuckStep
from kvtide.transfer.peer.channel import Channel, ChannelError, Listener, WireMessage, connect

HANDSHAKE_S = 10.0
RETRY_S = 0.1
FAREWELL_S = 1.0
"""A rank that ends gets this long to say why."""

STUCK, ENDED, SIGNAL = "stuck", "ended", "signal"
"""The kinds of messages to the leader."""


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """Where the leader awaits the other ranks, and the secret that both prove."""

    host: str
    port: int
    secret: bytes

    def to_json(self) -> WireMessage:
        return {"host": self.host, "port": self.port, "secret": self.secret.hex()}

    @classmethod
    def from_json(cls, found: WireMessage) -> MeetingPlace:
        return cls(found["host"], found["port"], bytes.fromhex(found["secret"]))


class RankEvents(Protocol):
    """What the leader hears of other ranks, on threads of channels."""

    def on_stuck(self, rank: int, step: StuckStep) -> None:
        """A step of a rank does not end."""

    def on_signal(self, number: int) -> None:
        """A signal was sent to the command of another node."""

    def on_lost(self, rank: int, reason: str, blameless: bool) -> None:
        """A rank's channel has closed. `blameless`: because another rank was lost."""


class RankChannels:
    """The leader's end: a channel to every rank in `ranks`.

    answer  to the hello of a rank that knows the secret; raises ChannelError to refuse it
    """

    def __init__(
        self,
        place: MeetingPlace,
        ranks: Collection[int],
        silence_s: float,
        answer: Callable[[WireMessage], WireMessage],
        events: RankEvents,
    ) -> None:
        self._awaited = set(ranks)
        self._answer_hello, self._events = answer, events
        self._channels: dict[int, Channel] = {}
        self._blameless: set[int] = set()
        self._came = threading.Condition()
        self._listener = Listener(
            place.host,
            place.port,
            self._answer,
            self._take,
            secret=place.secret,
            timeout_s=HANDSHAKE_S,
            silence_s=silence_s,
        )
        self.place = MeetingPlace(place.host, self._listener.port, place.secret)

    def missing(self, timeout_s: float) -> list[int]:
        """The ranks that have not come, after waiting so long for them."""
        with self._came:
            self._came.wait_for(lambda: not self._awaited, timeout_s)
            return sorted(self._awaited)

    def close(self, timeout_s: float) -> None:
        """Wait for ranks that end, and close what is left."""
        self._listener.close()
        deadline = time.monotonic() + timeout_s
        for channel in list(self._channels.values()):
            channel.join(max(0.0, deadline - time.monotonic()))
            channel.close("the server has ended")

    def _answer(self, hello: WireMessage) -> WireMessage:
        with self._came:
            if hello.get("rank") not in self._awaited:
                raise ChannelError(f"rank {hello.get('rank')} is not awaited here")
        return self._answer_hello(hello)

    def _take(self, channel: Channel) -> None:
        rank = int(channel.hello["rank"])
        with self._came:
            if rank not in self._awaited:
                return channel.close(f"rank {rank} came twice")
            self._awaited.discard(rank)
            self._channels[rank] = channel
            self._came.notify_all()
        channel.start(
            lambda message: self._hear(rank, message), lambda reason: self._end(rank, reason)
        )

    def _hear(self, rank: int, message: WireMessage) -> None:
        if STUCK in message:
            self._events.on_stuck(rank, StuckStep(**message[STUCK]))
        if SIGNAL in message:
            self._events.on_signal(int(message[SIGNAL]))
        if message.get(ENDED) is True:
            self._blameless.add(rank)

    def _end(self, rank: int, reason: str) -> None:
        self._events.on_lost(rank, reason, rank in self._blameless)


class LeaderChannel:
    """Another rank's end. `on_lost` is called with the reason if it closes by itself."""

    def __init__(
        self,
        place: MeetingPlace,
        hello: WireMessage,
        silence_s: float,
        timeout_s: float,
        on_lost: Callable[[str], None],
    ) -> None:
        self._on_lost = on_lost
        self.place = place
        self._leaving = False
        self._channel = _connected(place, hello, silence_s, time.monotonic() + timeout_s)
        self._channel.start(lambda message: None, self._closed)

    @property
    def hello(self) -> WireMessage:
        """The leader's hello."""
        return self._channel.hello

    def report_stuck(self, step: StuckStep) -> None:
        self._channel.send({STUCK: asdict(step)})

    def pass_on(self, signal_number: int) -> None:
        self._channel.send({SIGNAL: signal_number})

    def leave(self, reason: str, *, blameless: bool = False) -> None:
        """Tell the leader why this rank ends. `blameless`: another rank has ended before."""
        self._leaving = True
        self._channel.send({ENDED: blameless})
        self._channel.close(reason)
        self._channel.join(FAREWELL_S)

    def _closed(self, reason: str) -> None:
        if not self._leaving:
            self._on_lost(reason)


def _connected(
    place: MeetingPlace, hello: WireMessage, silence_s: float, deadline: float
) -> Channel:
    """Tries again while nothing listens there: the leader may start later."""
    while True:
        try:
            return connect(
                place.host,
                place.port,
                hello,
                secret=place.secret,
                timeout_s=HANDSHAKE_S,
                silence_s=silence_s,
            )
        except ChannelError as error:
            if not isinstance(error.__cause__, OSError) or time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_S)
