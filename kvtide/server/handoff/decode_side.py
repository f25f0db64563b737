"""The leader of a decode server: all prefill servers that its requests name.

The engine's messages go to the peer that they name (`prefill_connection`). What a peer says, or can
no longer say, goes to all ranks as engine commands.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

from kvtide.engine.handoff.messages import HandoffMessage, to_json
from kvtide.server.handoff.handoff_settings import HandoffSettings
from kvtide.server.handoff.peer_commands import (
    ConcealMemory,
    ExposeMemory,
    PeerSaid,
    RevokeMemory,
)
from kvtide.server.handoff.prefill_connection import PrefillConnection
from kvtide.server.handoff.rank_handoff import RankHandoff
from kvtide.server.service import Service

Json = dict[str, Any]
COMMAND_S = 60.0


class DecodeSide:
    """`on_lost` is called with the address of a peer whose connection failed, from any thread."""

    def __init__(
        self, service: Service, rank: RankHandoff, settings: HandoffSettings, secret: bytes
    ) -> None:
        self.secret, self.timeout_s = secret, settings.timeout_s
        self.on_lost: Callable[[str], None] = _ignore
        self._service, self._rank = service, rank
        self._instance = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._peers: dict[str, PrefillConnection] = {}

    # -- from the engine and the server -----------------------------------------------------

    def send(self, peer: str, message: HandoffMessage) -> None:
        """The engine's outbox. Never blocks."""
        with self._lock:
            if peer not in self._peers:
                self._peers[peer] = PrefillConnection(peer, self)
            self._peers[peer].send(message)

    def in_flight(self, peer: str) -> int:
        """Handoffs that a peer works on."""
        known = self._peers.get(peer)
        return 0 if known is None else known.in_flight

    def report(self) -> dict[str, Json]:
        with self._lock:
            return {address: peer.report() for address, peer in self._peers.items()}

    def close(self) -> None:
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()

    # -- for the threads of peers -----------------------------------------------------------

    def hello(self, descriptors: list[Json]) -> Json:
        return {
            "instance": self._instance,
            "manifests": self._rank.manifests,
            "descriptors": descriptors,
        }

    def expose(self, peer: str) -> list[Json]:
        return self._service.run_from_thread(ExposeMemory(peer), COMMAND_S)

    def revoke(self, peer: str) -> list[Json] | None:
        return self._service.run_from_thread(RevokeMemory(peer), COMMAND_S)

    def tell(self, peer: str, message: HandoffMessage) -> None:
        """What a peer says, or what is known of one that says nothing."""
        self._service.command_nowait(PeerSaid(peer, to_json(message)))

    def lost(self, peer: str) -> None:
        self.on_lost(peer)

    def retire(self, peer: str, is_idle: Callable[[], bool]) -> bool:
        """Forget a peer that has nothing to do; False if the engine has just sent it something."""
        with self._lock:
            if not is_idle():
                return False
            del self._peers[peer]
            # In the lock: a successor's memory is exposed after this.
            self._service.command_nowait(ConcealMemory(peer))
            return True


def _ignore(peer: str) -> None:
    """No list of servers has this peer."""
