"""A server's part in handoffs, as the HTTP application and the command see it."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from kvtide.engine import CheckedRequest
from kvtide.server.engine_rank import EngineRank
from kvtide.server.handoff.conventions import RouterConventions
from kvtide.server.handoff.decode_side import DecodeSide
from kvtide.server.handoff.handoff_fields import HandoffAddress
from kvtide.server.handoff.handoff_settings import HandoffSettings
from kvtide.server.handoff.prefill_servers import PrefillServers
from kvtide.server.handoff.prefill_side import PrefillSide
from kvtide.server.service import Service

Json = dict[str, Any]


class ServerHandoff:
    """Opens the sides that the settings ask for; raises `ChannelError` if it cannot listen.

    conventions  what routers say, read for this server
    """

    def __init__(self, service: Service, rank: EngineRank, settings: HandoffSettings) -> None:
        secret = settings.secret(os.environ) or b""
        self.settings = settings
        self.prefill: PrefillSide | None = None
        self.decode: DecodeSide | None = None
        self._servers: PrefillServers | None = None
        if settings.listens and rank.handoff is not None:
            self.prefill = PrefillSide(service, rank.handoff, settings, secret)
        if settings.receives and rank.handoff is not None:
            self.decode = DecodeSide(service, rank.handoff, settings, secret)
            rank.engine.handoffs.decode.outbox = self.decode.send
            if settings.prefill_from:
                self._servers = PrefillServers(
                    settings.prefill_from, settings.min_tokens, self.decode.in_flight
                )
                self.decode.on_lost = self._servers.forget
        address = HandoffAddress(*self.prefill.address) if self.prefill is not None else None
        self.conventions = RouterConventions(settings, address, guarded=bool(secret))

    @property
    def sentence(self) -> str:
        """For the start of the server; empty where it has no part in handoffs."""
        parts = []
        if self.prefill is not None:
            host, port = self.prefill.address
            parts.append(f"prefills for decode servers that connect to {host}:{port}")
        if self.decode is not None:
            peers = ", ".join(self.settings.prefill_from) or "whatever server a router names"
            parts.append(f"receives pages from {peers}")
        transport = f" over {self.settings.transport}" if parts else ""
        return " and ".join(parts) + transport

    async def hand_over(self, choices: tuple[CheckedRequest, ...]) -> tuple[CheckedRequest, ...]:
        """The requests, with a prefill server for those that one should prefill."""
        if self._servers is None:
            return choices
        return tuple(await asyncio.gather(*(self._servers.hand_over(each) for each in choices)))

    def report(self) -> Json:
        return {
            "role": self.settings.role.value,
            "transport": self.settings.transport,
            "prefill_from": {} if self._servers is None else self._servers.report(),
            "decode_servers": None if self.prefill is None else self.prefill.report(),
            "prefill_servers": {} if self.decode is None else self.decode.report(),
        }

    def close(self) -> None:
        """End all connections; blocks for a moment."""
        if self.prefill is not None:
            self.prefill.close()
        if self.decode is not None:
            self.decode.close()
