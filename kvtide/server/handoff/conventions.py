"""Two conventions of routers: the fields that they send, and what the prefill side answers.

**Bootstrap** (`smg`, `sglang-router`). One body goes to both sides at the same time:

    "bootstrap_host": "10.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 7627304970034759073

Several prompts, or `n` choices of one, have lists instead, with a room each. A router that retries
takes new rooms. It forwards the decode side's response, once the prefill side has begun its own.
A server of both roles is the side that host and port name: it prefills where they are its own.

**KV transfer** (`vllm-router`). The prefill side is asked first, for one token:

    "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false,
                           "remote_engine_id": null, "remote_block_ids": null, …}

Its response has `kv_transfer_params` that the router hands to the decode side as they are. A router
whose prefill side refuses asks the decode side without them: the prompt is prefilled there.

    "kv_transfer_params": {"do_remote_prefill": true, "do_remote_decode": false,
                           "remote_host": "10.0.0.1", "remote_port": 9000, "remote_rooms": ["…"]}
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtide.engine import RequestError
from kvtide.server.handoff.handoff_fields import (
    Convention,
    HandoffAddress,
    HandoffFields,
    HandoffSide,
)
from kvtide.server.handoff.handoff_settings import HandoffSettings, Role
from kvtide.server.request_parsing import RequestFields
from kvtide.server.setting_values import is_address, is_loopback

BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
KV_TRANSFER = "kv_transfer_params"
MAX_ROOM_LETTERS = 128
MAX_PORT = 65535


@dataclass(slots=True)
class RouterConventions:
    """Reads the fields of requests to one server.

    address  where this server listens for decode servers; None if it does not
    guarded  peers prove a secret; without one, a client may name peers of this machine only
    """

    settings: HandoffSettings
    address: HandoffAddress | None = None
    guarded: bool = False

    def read(self, body: RequestFields, prompts: int, n: int) -> tuple[HandoffFields | None, ...]:
        """The handoff of every choice, `n` for each prompt; None for those that have none.

        Where prompts have a room each, the first choice of a prompt takes it: the others find its
        pages in the cache.
        """
        given = next((name for name in BOOTSTRAP if body.get(name) is not None), None)
        transfer = body.object(KV_TRANSFER)
        if given is not None and transfer.values:
            raise _refusal(f"{given} and {KV_TRANSFER} name two handoffs; send one of them", given)
        if given is not None:
            return self._bootstrap(body, prompts, n)
        if transfer.flag("do_remote_decode"):
            return self._kv_prefill(body, prompts, n)
        if transfer.flag("do_remote_prefill"):
            return self._kv_decode(transfer, prompts, n)
        return (None,) * (prompts * n)

    def answer(self, handoffs: Sequence[HandoffFields | None]) -> dict[str, Any] | None:
        """The `kv_transfer_params` of a prefill server's response, if it has them."""
        opened = [each for each in handoffs if each is not None]
        if not opened or opened[0].side is not HandoffSide.PREFILL:
            return None
        if opened[0].convention is not Convention.KV_TRANSFER:
            return None
        host, port = opened[0].peer
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": host,
            "remote_port": port,
            "remote_rooms": [each.room for each in opened],
        }

    # -- bootstrap --------------------------------------------------------------------------

    def _bootstrap(
        self, body: RequestFields, prompts: int, n: int
    ) -> tuple[HandoffFields | None, ...]:
        hosts, ports, rooms = (_each(body.get(name), name, prompts, n) for name in BOOTSTRAP)
        found: list[HandoffFields | None] = []
        for host, port, room in zip(hosts, ports, rooms, strict=True):
            if host is room is None:
                found.append(None)
                continue
            side = self._side(host, port)
            if side is HandoffSide.DECODE:
                self._check_receiving("bootstrap_room")
            peer = self._listening() if side is HandoffSide.PREFILL else self._peer(host, port)
            named = _room(room, "bootstrap_room")
            found.append(HandoffFields(side, peer, named, Convention.BOOTSTRAP))
        return tuple(found)

    def _side(self, host: object, port: object) -> HandoffSide:
        """What this server does for a room of a prefill server."""
        if self.settings.role is not Role.BOTH:
            return HandoffSide(self.settings.role.value)
        own = self.address
        if own is None or port != own.port or not isinstance(host, str):
            return HandoffSide.DECODE
        if host == own.host or (is_loopback(host) and is_loopback(own.host)):
            return HandoffSide.PREFILL
        if not is_address(host):
            raise _refusal(
                f"bootstrap_host is {host!r}, which may be this server or another one; give the "
                "router the address of --handoff-host",
                "bootstrap_host",
            )
        return HandoffSide.DECODE

    def _check_receiving(self, param: str) -> None:
        if not self.settings.receives:
            raise _refusal(
                f"{param} names pages of another server, and this one receives none; start it "
                "with --role decode, or with --prefill-from",
                param,
            )

    def _listening(self) -> HandoffAddress:
        if self.address is None:
            raise _refusal(
                "this server hands no pages over; start it with --role prefill, or with a "
                "--handoff-port",
                KV_TRANSFER,
            )
        return self.address

    def _peer(self, host: object, port: object, prefix: str = "bootstrap") -> HandoffAddress:
        """The prefill server that a request names."""
        if not isinstance(host, str) or not host:
            raise _refusal(f"{prefix}_host is {host!r}; send the prefill server's", prefix)
        if type(port) is not int or not 0 < port <= MAX_PORT:
            raise _refusal(
                f"{prefix}_port is {port!r}; give the router the prefill server's --handoff-port, "
                "as in --prefill URL PORT",
                f"{prefix}_port",
            )
        if not self.guarded and not is_loopback(host):
            raise _refusal(
                f"{prefix}_host is {host!r}, which is another machine, and this server has no "
                "secret to meet it with; start both with --handoff-secret-file",
                f"{prefix}_host",
            )
        return HandoffAddress(host, port)

    # -- kv_transfer_params -----------------------------------------------------------------

    def _kv_prefill(
        self, body: RequestFields, prompts: int, n: int
    ) -> tuple[HandoffFields | None, ...]:
        """The first choice of each prompt gets a room, which the response names."""
        if self.settings.role is Role.DECODE:
            raise _refusal(
                f"{KV_TRANSFER} asks for a prefill, and this server has the role decode; send it "
                "to a prefill server",
                KV_TRANSFER,
            )
        address = self._listening()
        if body.flag("stream"):
            raise _refusal(
                f"{KV_TRANSFER} come back in a whole response; send do_remote_decode without "
                "stream",
                KV_TRANSFER,
            )
        rooms = [secrets.token_hex(16) if n and not i % n else None for i in range(prompts * n)]
        side, convention = HandoffSide.PREFILL, Convention.KV_TRANSFER
        return tuple(
            None if room is None else HandoffFields(side, address, room, convention)
            for room in rooms
        )

    def _kv_decode(
        self, transfer: RequestFields, prompts: int, n: int
    ) -> tuple[HandoffFields | None, ...]:
        self._check_receiving(KV_TRANSFER)
        peer = self._peer(transfer.get("remote_host"), transfer.get("remote_port"), "remote")
        rooms = _each(transfer.get("remote_rooms"), "remote_rooms", prompts, n)
        side, convention = HandoffSide.DECODE, Convention.KV_TRANSFER
        return tuple(
            None
            if room is None
            else HandoffFields(side, peer, _room(room, "remote_rooms"), convention)
            for room in rooms
        )


def _each(given: object, name: str, prompts: int, n: int) -> list[object]:
    """A field's value for every choice: one for each, or one for each prompt."""
    listed = given if isinstance(given, list) else [given]
    if len(listed) == prompts * n:
        return listed
    if len(listed) == prompts:
        return [value for each in listed for value in (each, *[None] * (n - 1))]
    raise _refusal(
        f"{name} has {len(listed)} values for {prompts} prompts with {n} choices each; send one "
        "for each prompt, or one for each choice",
        name,
    )


def _room(room: object, name: str) -> str:
    text = str(room) if type(room) is int else room
    if not isinstance(text, str) or not 0 < len(text) <= MAX_ROOM_LETTERS:
        raise _refusal(f"{name} is {room!r:.60}; send a number, or a text that is not empty", name)
    return text


def _refusal(message: str, param: str) -> RequestError:
    return RequestError(message, "invalid_value", param)
