"""Which side of handoffs a server is, and how it meets its peers.

    decode ──TCP, both prove the secret──▶ prefill, which listens on the handoff address

| role    | listens                 | receives pages                          |
|---------|-------------------------|-----------------------------------------|
| prefill | yes                     | no                                      |
| decode  | no                      | yes: from `prefill_from`, or as a router says |
| both    | if it has a port        | if it has `prefill_from`                |

The secret comes from a file or from the environment: a command line is seen by every user.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

from kvtide.server.setting_values import SettingsError, is_loopback, read_secret

SECRET_VARIABLE = "KVTIDE_HANDOFF_SECRET"


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """The settings of handoffs, which fit each other.

    prefill_from  URLs of servers that prefill for this one
    host          the address to listen on, and the one that peers get
    port          to listen on; 0 for any that is free; None: the role decides
    protocol      of Mooncake's engine
    devices       network devices that the transport may use; empty: all
    min_tokens    prompts that lack fewer tokens here are prefilled here
    bytes_per_s   the most that is written to peers; None: as much as the link takes
    """

    role: Role = Role.BOTH
    prefill_from: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int | None = None
    transport: str = "shm"
    protocol: str = "tcp"
    devices: str = ""
    min_tokens: int = 256
    timeout_s: float = 30.0
    secret_file: str | None = None
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.role is Role.PREFILL and self.prefill_from:
            raise SettingsError(
                "--role prefill computes prompts for others, and --prefill-from has them computed "
                "elsewhere; drop one of them"
            )
        if self.role is Role.DECODE and self.port is not None:
            raise SettingsError(
                f"--handoff-port {self.port} is where a prefill server listens, and --role decode "
                "connects to one; drop one of them"
            )
        if self.protocol != "tcp" and self.transport != "mooncake":
            raise SettingsError(
                f"--handoff-protocol {self.protocol} is for Mooncake, and the transport is "
                f"{self.transport}; use --handoff-transport mooncake"
            )
        if self.devices and self.transport == "shm":
            raise SettingsError(
                f"--handoff-devices {self.devices} is for a network, and the transport is shm; use "
                "--handoff-transport mooncake or nixl"
            )
        if _is_any(self.host):
            raise SettingsError(
                f"--handoff-host {self.host} names no machine; use the address by which the other "
                "side reaches this one"
            )

    @property
    def listens(self) -> bool:
        """Whether pages are handed over to peers, which connect to this server."""
        return self.role is Role.PREFILL or (self.role is Role.BOTH and self.port is not None)

    @property
    def receives(self) -> bool:
        """Whether pages come from peers."""
        return self.role is Role.DECODE or bool(self.prefill_from)

    @property
    def remote(self) -> tuple[str, ...]:
        """Hosts of these settings that other machines reach, or are."""
        peers = (urlsplit(url).hostname or "" for url in self.prefill_from)
        hosts = (*([self.host] if self.listens or self.receives else []), *peers)
        return tuple(host for host in hosts if not is_loopback(host))

    def secret(self, environment: Mapping[str, str]) -> bytes | None:
        """The secret that both sides know; None if there is none, which loopback allows."""
        option = "--handoff-secret-file"
        secret = read_secret(option, self.secret_file, SECRET_VARIABLE, environment)
        if secret is not None:
            return secret
        if self.remote:
            raise SettingsError(
                f"handoffs with {self.remote[0]} leave this machine, and there is no secret; give "
                f"both sides the same --handoff-secret-file, or set {SECRET_VARIABLE}"
            )
        return None


def parse_urls(value: str) -> str:
    """URLs of servers, with commas between them, without what follows the port."""
    return ",".join(dict.fromkeys(_url(part.strip()) for part in value.split(",")))


def _url(value: str) -> str:
    remedy = "use http://HOST:PORT, with commas between several"
    try:
        parts = urlsplit(value)
        host, _ = parts.hostname, parts.port
    except ValueError as flaw:
        raise SettingsError(f"has '{value}' ({flaw}); {remedy}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise SettingsError(f"has '{value}', which is no server; {remedy}")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise SettingsError(f"has '{value}', which is more than a server; {remedy}")
    return f"{parts.scheme}://{parts.netloc}"


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
