"""From a name to a transport.

| name | for |
|---|---|
| `shm` | two processes on one machine: device→host copies into shared memory |
| `mooncake` | the network: Mooncake's TransferEngine over TCP or RDMA |
| `nixl` | the network: NIXL over UCX |
| `package.module:Class` | a transport of your own: called with `TransportSettings` |
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from kvtide.transfer.peer.transport import (
    Transport,
    TransportSettings,
    TransportUnavailableError,
)

TRANSPORTS = {
    "shm": "kvtide.transfer.peer.shm:SharedMemory",
    "mooncake": "kvtide.transfer.peer.mooncake_engine:MooncakeTransport",
    "nixl": "kvtide.transfer.peer.nixl_agent:NixlTransport",
}


def open_transport(name: str, settings: TransportSettings | None = None) -> Transport:
    """Open a transport, or refuse in a sentence that names the remedy."""
    path = TRANSPORTS.get(name, name)
    module, _, attribute = path.partition(":")
    if not (attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        known = ", ".join(TRANSPORTS)
        raise TransportUnavailableError(
            f"transport {name}: no such transport; use {known} or package.module:Class"
        )
    try:
        opener = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise TransportUnavailableError(
            f"transport {name}: cannot be imported ({error}); install the package it is in"
        ) from error
    return cast(Callable[[TransportSettings], Transport], opener)(settings or TransportSettings())
