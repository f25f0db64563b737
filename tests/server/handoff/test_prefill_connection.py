"""When the slots of a lost prefill server are known to be silent, with a peer that is a listener.

The peer's process is a sleeper that the test ends. The decode side is a stand-in whose transport
revokes, or cannot.
"""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvtide.engine.handoff.messages import (
    Failed,
    HandoffMessage,
    PagePlaces,
    Reserve,
    Silent,
    StopWriting,
    from_json,
    to_json,
)
from kvtide.server.handoff import prefill_connection
from kvtide.server.handoff.prefill_connection import POLL_S, PrefillConnection
from kvtide.transfer.peer.channel import Channel, Listener
from tests.processes import free_port, freeze, identity_of

DEADLINE_S = 60.0
QUIET_S = 4 * POLL_S
"""So long nothing is reported that may not be."""
SLOTS = PagePlaces("kv", 0, np.arange(2, dtype=np.int32), np.arange(2, dtype=np.int32))
RESERVE = Reserve("room", 7, "digest", 2, (SLOTS,), 0)


class Peer:
    """A prefill server: its process, and the messages that it hears."""

    def __init__(self, port: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.process = process or subprocess.Popen(["sleep", "600"])
        self.heard: queue.Queue[HandoffMessage] = queue.Queue()
        self._identity = identity_of(self.process.pid).to_json()
        self._channels: list[Channel] = []
        self._listener = Listener("127.0.0.1", port, self._answer, self._take)

    def _answer(self, hello: dict[str, Any]) -> dict[str, Any]:
        return {"processes": [self._identity]}

    def _take(self, channel: Channel) -> None:
        self._channels.append(channel)
        channel.start(lambda values: self.heard.put(from_json(values)), lambda reason: None)

    def say(self, message: HandoffMessage) -> None:
        self._channels[-1].send(to_json(message))

    def hang_up(self) -> None:
        self._listener.close()
        for channel in self._channels:
            channel.close()
            assert channel.join(DEADLINE_S)

    def kill(self) -> None:
        """The kernel ends its connections with it."""
        self.process.kill()
        self.process.wait()
        self.hang_up()


class Side:
    """The decode side. A revocation waits until the test lets it go on."""

    secret = b""
    timeout_s = 60.0

    def __init__(self, revokes: bool) -> None:
        self.reported: queue.Queue[HandoffMessage] = queue.Queue()
        self.revoking, self.may_revoke = threading.Event(), threading.Event()
        self._revokes = revokes

    def hello(self, descriptors: list[Any]) -> dict[str, Any]:
        return {"descriptors": descriptors}

    def expose(self, peer: str) -> list[Any]:
        return [{}]

    def revoke(self, peer: str) -> list[Any] | None:
        self.revoking.set()
        assert self.may_revoke.wait(DEADLINE_S)
        return [{}] if self._revokes else None

    def tell(self, peer: str, message: HandoffMessage) -> None:
        self.reported.put(message)

    def lost(self, peer: str) -> None:
        """Its requests go elsewhere."""

    def retire(self, peer: str, is_idle: Callable[[], bool]) -> bool:
        return False

    def says_nothing(self) -> None:
        with pytest.raises(queue.Empty):
            assert not self.reported.get(timeout=QUIET_S)


class Stage:
    """A connection over which slots were sent."""

    def __init__(self, revokes: bool) -> None:
        self.port = free_port()
        self.peers = [Peer(self.port)]
        self.side = Side(revokes)
        self.connection = PrefillConnection(f"127.0.0.1:{self.port}", self.side)
        self.connection.send(RESERVE)
        heard = self.peers[0].heard.get(timeout=DEADLINE_S)
        assert isinstance(heard, Reserve) and heard.epoch == RESERVE.epoch

    def until_lost(self) -> None:
        """The engine hears that the handoff failed, and asks for silence."""
        failed = self.side.reported.get(timeout=DEADLINE_S)
        assert isinstance(failed, Failed) and not failed.silent
        self.connection.send(StopWriting(RESERVE.room, RESERVE.epoch))

    def another_server(self) -> Peer:
        """At the same address."""
        self.peers.append(Peer(self.port))
        deadline = time.monotonic() + DEADLINE_S
        while not self.connection.connected:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self.peers[-1]

    def until_silent(self) -> None:
        reported = self.side.reported.get(timeout=DEADLINE_S)
        assert reported == Silent(RESERVE.room, RESERVE.epoch)

    def close(self) -> None:
        self.side.may_revoke.set()
        self.connection.close()
        for peer in self.peers:
            peer.kill()


@pytest.fixture
def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(prefill_connection, "RETRY_S", POLL_S)
    stage = Stage(request.param)
    yield stage
    stage.close()


def revocation(possible: bool) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("stage", [possible], indirect=True, ids=[""])


@revocation(possible=True)
def test_slots_of_a_dead_peer_are_kept_until_its_access_is_revoked(stage: Stage) -> None:
    """Its bytes may wait in sockets, on this machine too."""
    stage.peers[0].kill()
    stage.until_lost()
    assert stage.side.revoking.wait(DEADLINE_S)
    stage.side.says_nothing()
    stage.side.may_revoke.set()
    stage.until_silent()
    assert stage.connection.report()["revocations"] == 1


@revocation(possible=False)
def test_without_revocation_slots_are_kept_until_the_peer_is_dead(stage: Stage) -> None:
    freeze(stage.peers[0].process.pid)
    stage.peers[0].hang_up()
    stage.side.may_revoke.set()
    stage.until_lost()
    assert stage.side.revoking.wait(DEADLINE_S)
    stage.side.says_nothing()
    stage.peers[0].kill()
    stage.until_silent()
    assert stage.connection.report()["revocations"] == 0


@revocation(possible=False)
def test_another_server_at_the_address_does_not_speak_for_the_former(stage: Stage) -> None:
    """A rank of the former one may be frozen, and write when it continues."""
    freeze(stage.peers[0].process.pid)
    stage.peers[0].hang_up()
    stage.side.may_revoke.set()
    stage.until_lost()
    other = stage.another_server()
    other.say(Silent(RESERVE.room, RESERVE.epoch))
    stage.side.says_nothing()
    assert other.heard.empty(), "it knows nothing of these slots"
    stage.peers[0].kill()
    stage.until_silent()


@revocation(possible=False)
def test_a_server_that_is_connected_again_is_asked_for_silence(stage: Stage) -> None:
    stage.peers[0].hang_up()
    stage.side.may_revoke.set()
    stage.until_lost()
    stage.peers.append(Peer(stage.port, stage.peers[0].process))
    heard = stage.peers[1].heard.get(timeout=DEADLINE_S)
    assert heard == StopWriting(RESERVE.room, RESERVE.epoch)
    stage.peers[1].say(Silent(RESERVE.room, RESERVE.epoch))
    stage.until_silent()
