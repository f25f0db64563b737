"""Which ranks are on which machine, where they meet, and the secret that they prove.

    kvtide serve M --tp 2 --nodes 2 --node 0 --rendezvous 10.0.0.1:29500     rank 0, the leader
    kvtide serve M --tp 2 --nodes 2 --node 1 --rendezvous 10.0.0.1:29500     rank 1

A node starts its own ranks. The secret comes from a file or from the environment: a command line is
seen by every user. Ranks of one machine get a random one from the process that starts them.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from kvtide.server.ranks.rank_channels import MeetingPlace
from kvtide.server.setting_values import SettingsError, is_loopback, read_secret
from kvtide.server.settings import Settings, flag

SECRET_VARIABLE = "KVTIDE_RANK_SECRET"
LOOPBACK = "127.0.0.1"

LOCAL = frozenset(
    {
        *("model", "name", "draft", "address", "port", "api_key", "admin_key"),
        *("node", "rank_secret_file", "storage", "io_backend", "host_layout"),
        *("handoff_host", "handoff_secret_file"),
        *("device_tokens", "device_bytes", "host_tokens", "host_bytes", "host_ratio"),
    }
)
"""Settings in which nodes may differ; of tier sizes the smallest number of pages counts."""


@dataclass(frozen=True, slots=True)
class RankNodes:
    """`ranks` are those of this node, one of `nodes`; `place` is where all meet."""

    nodes: int
    node: int
    ranks: range
    place: MeetingPlace

    @classmethod
    def of(cls, settings: Settings, environment: Mapping[str, str] = os.environ) -> RankNodes:
        """Refuses nodes that do not divide the ranks or cannot meet."""
        _check(settings)
        each = settings.node_ranks
        ranks = range(settings.node * each, (settings.node + 1) * each)
        if settings.rendezvous is None:
            place = MeetingPlace(LOOPBACK, 0, secrets.token_bytes(32))
        else:
            host, port = parse_place(settings.rendezvous)
            place = MeetingPlace(host, port, _secret(settings, host, environment))
        return cls(settings.nodes, settings.node, ranks, place)


def shared_settings(settings: Settings) -> dict[str, object]:
    """Those that all ranks must have alike."""
    return {name: value for name, value in asdict(settings).items() if name not in LOCAL}


def difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """A sentence about the first setting in which another rank differs."""
    for name, value in ours.items():
        if (other := theirs.get(name)) != value:
            return (
                f"{flag(name)} is {other} there and {value} here; start all nodes with the same "
                "settings"
            )
    return None


def parse_place(text: str) -> tuple[str, int]:
    """`HOST:PORT`, or `[IPv6]:PORT`."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise SettingsError(f"--rendezvous is '{text}'; use HOST:PORT, like 10.0.0.1:29500")
    return host, int(port)


def _check(settings: Settings) -> None:
    ranks, nodes, node = settings.ranks, settings.nodes, settings.node
    if nodes > 1 and settings.rendezvous is None:
        raise SettingsError(
            f"{nodes} nodes meet somewhere; give all of them --rendezvous HOST:PORT, an address of "
            "node 0"
        )
    if nodes == 1 and settings.rendezvous is not None:
        raise SettingsError(
            "--rendezvous is where several nodes meet; give --nodes, or drop it for one machine"
        )
    if node >= nodes:
        raise SettingsError(f"--node {node} is none of {nodes} nodes; use 0 to {nodes - 1}")
    if ranks % nodes:
        raise SettingsError(
            f"{ranks} ranks do not divide over {nodes} nodes; use --tp and --pp whose product does"
        )
    _check_handoffs(settings)


def _check_handoffs(settings: Settings) -> None:
    """Ranks of other nodes report to the leader, and peers reach every rank."""
    handoff = settings.handoff
    if settings.rendezvous is None or not (handoff.listens or handoff.receives):
        return
    if is_loopback(handoff.host) and not is_loopback(parse_place(settings.rendezvous)[0]):
        raise SettingsError(
            f"--handoff-host {handoff.host} is reached from its own node alone, and the ranks are "
            f"on {settings.nodes}; give every node the address by which the others reach it"
        )


def _secret(settings: Settings, host: str, environment: Mapping[str, str]) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is not None and address.is_unspecified:
        raise SettingsError(
            f"--rendezvous {settings.rendezvous} names no machine; use the address by which the "
            "other nodes reach node 0"
        )
    secret = read_secret(
        "--rank-secret-file", settings.rank_secret_file, SECRET_VARIABLE, environment
    )
    if secret is not None:
        return secret
    if host != "localhost" and (address is None or not address.is_loopback):
        raise SettingsError(
            f"ranks that meet at {host} leave this machine, and there is no secret; give all nodes "
            f"the same --rank-secret-file, or set {SECRET_VARIABLE}"
        )
    return b""
