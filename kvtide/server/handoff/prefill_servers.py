"""The servers of `--prefill-from`: which of them prefills a prompt for this one.

A server is asked over HTTP where it listens for handoffs (`GET /server_info`), when the first
request comes, and again after its connection was lost: it may listen elsewhere now. Prompts with
the same beginning go to the same server, which has that in its cache, unless it has much more to do
than another.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import aiohttp
import numpy as np

from kvtide.engine import CheckedRequest
from kvtide.engine.handoff.handoff_source import HandoffSource

log = logging.getLogger("kvtide")
ASK_S = 5.0
WAIT_S = 1.0
"""The longest that a request waits for an answer; without one its prompt is prefilled here."""
RETRY_S = 2.0
"""A server that did not answer is asked again after this."""
AFFINITY_TOKENS = 256
"""Tokens of a prompt that decide which server has its beginning."""
AFFINITY_LEAD = 4
"""How many more handoffs that server may have than the least busy one."""


@dataclass(slots=True)
class _Server:
    url: str
    address: str | None = None
    answer: asyncio.Task[None] | None = None
    next_try: float = 0.0
    last_error: str = ""


class PrefillServers:
    """`in_flight` tells how many handoffs a server works on, by its handoff address."""

    def __init__(
        self, urls: Sequence[str], min_tokens: int, in_flight: Callable[[str], int]
    ) -> None:
        self._servers = [_Server(url) for url in urls]
        self._min_tokens = min_tokens
        self._in_flight = in_flight

    async def hand_over(self, request: CheckedRequest) -> CheckedRequest:
        """The request with a server that prefills its prompt, if there is one."""
        params = request.params
        if params.handoff_from or params.alone or not params.max_tokens:
            return request
        if len(params.tokens) <= self._min_tokens:
            return request
        address = await self._choose(request.packed)
        if address is None:
            return request
        source = HandoffSource(address, secrets.token_hex(12), asks=True)
        return replace(request, params=replace(params, handoff_from=source))

    async def _choose(self, packed: bytes) -> str | None:
        await self._ask_unknown()
        known = [server for server in self._servers if server.address is not None]
        if not known:
            return None
        beginning = np.frombuffer(packed, np.int32)[:AFFINITY_TOKENS].tobytes()
        loads = {server.url: self._in_flight(server.address or "") for server in known}
        preferred = max(known, key=lambda server: _score(server.url, beginning))
        if loads[preferred.url] > min(loads.values()) + AFFINITY_LEAD:
            preferred = min(known, key=lambda server: loads[server.url])
        return preferred.address

    async def _ask_unknown(self) -> None:
        """Ask the servers whose address is not known. If none is, requests wait for the first."""
        now = time.monotonic()
        for server in self._servers:
            if server.address is None and server.answer is None and now >= server.next_try:
                server.answer = asyncio.create_task(self._ask(server))
        while not any(server.address for server in self._servers):
            answers = [server.answer for server in self._servers if server.answer is not None]
            left_s = now + WAIT_S - time.monotonic()
            if not answers or left_s <= 0:
                return
            await asyncio.wait(answers, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    async def _ask(self, server: _Server) -> None:
        try:
            server.address = await _handoff_address(server.url)
            server.last_error = ""
        except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
            reason = str(error) or f"no answer within {ASK_S:g} s"
            if reason != server.last_error:
                log.warning("--prefill-from %s: %s; prompts are prefilled here", server.url, reason)
            server.last_error = reason
            server.next_try = time.monotonic() + RETRY_S
        finally:
            server.answer = None

    def forget(self, address: str) -> None:
        """The server at this address has failed: ask anew where it listens. From any thread."""
        for server in self._servers:
            if server.address == address:
                server.address = None

    def report(self) -> dict[str, dict[str, str | None]]:
        return {
            server.url: {"address": server.address, "last_error": server.last_error}
            for server in self._servers
        }


async def _handoff_address(url: str) -> str:
    """Where a server listens for handoffs."""
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"{url}/server_info") as response,
    ):
        response.raise_for_status()
        info = await response.json()
    handoff = info.get("handoff") if isinstance(info, dict) else None
    if not handoff or not handoff["hands_over"]:
        raise ValueError("it hands no pages over; start it with --role prefill")
    host = str(handoff["host"])
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{int(handoff['port'])}"


def _score(url: str, beginning: bytes) -> bytes:
    """Rendezvous hashing: the highest score wins, and a server more moves few prompts."""
    return hashlib.blake2b(url.encode() + b"\0" + beginning, digest_size=8).digest()
