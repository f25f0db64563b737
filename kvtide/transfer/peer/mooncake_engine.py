"""`mooncake`: Mooncake's TransferEngine, over TCP or RDMA.

- A write is acknowledged by the receiver's engine after its bytes are in memory.
- A write that failed may land later: bytes wait in sockets, and a receiver that was frozen takes
  them when it continues. `revoke` ends that: the engine that listened is destroyed with its threads
  and connections, and a new one with another port registers the memory anew.
- The library refuses a batch of more requests than its queue holds, and gives a peer that froze up
  to half a minute in a later call. So batches are cut, and a link that failed is dead.
- A process that sends and receives has two engines.

The library's sockets listen on all addresses of the machine and ask no peer who it is. Keep the
ports of the engine (15000 to 17000) inside the network of the servers.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

from kvtide.storage.mooncake.library import missing_library
from kvtide.transfer.peer.send_staging import Requests, SendStaging
from kvtide.transfer.peer.transport import (
    PROTOCOLS,
    Descriptor,
    Region,
    TransportError,
    TransportSettings,
    TransportUnavailableError,
)
from kvtide.transfer.peer.worker_link import WorkerLink

MAX_REQUESTS = 512
"""Per call: half of what the library queues for a peer."""


class LibraryEngine(Protocol):
    """The used part of `TransferEngine`."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, size: int) -> int: ...
    def unregister_memory(self, address: int) -> int: ...
    def batch_transfer_sync_write(
        self, peer: str, sources: list[int], targets: list[int], sizes: list[int]
    ) -> int: ...


class MooncakeTransport:
    name = "mooncake"

    def __init__(self, settings: TransportSettings) -> None:
        if settings.protocol not in PROTOCOLS:
            raise TransportUnavailableError(
                f"transport mooncake: protocol {settings.protocol} is not {' or '.join(PROTOCOLS)}"
            )
        self._settings = settings
        self._new_engine = _load(settings)
        self._receiving: _OpenEngine | None = None
        self._exposed: tuple[Region, ...] = ()
        self._sending: _OpenEngine | None = None
        self._links: weakref.WeakSet[WorkerLink] = weakref.WeakSet()

    # -- receiver -----------------------------------------------------------------------------

    def expose(self, regions: Sequence[Region]) -> Descriptor:
        if any(region.kind == "device" for region in regions):
            raise TransportUnavailableError(
                "transport mooncake: this library writes to host memory; use host destinations"
            )
        self._exposed = tuple(regions)
        if self._receiving is None:
            self._receiving = self._open()
        for region in regions:
            self._receiving.register(region.address, region.bytes)
        return {
            "transport": self.name,
            "protocol": self._settings.protocol,
            "session": self._receiving.session,
            "regions": [{"address": one.address, "bytes": one.bytes} for one in regions],
        }

    def revoke(self) -> Descriptor:
        assert self._receiving is not None, "nothing is exposed"
        self._receiving.close()
        self._receiving = None
        return self.expose(self._exposed)

    # -- sender -------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region]) -> None:
        for region in regions:
            if region.kind == "host":
                self._sender().register(region.address, region.bytes)

    def connect(self, descriptor: Descriptor) -> WorkerLink:
        try:
            session, protocol = str(descriptor["session"]), str(descriptor["protocol"])
            bases = [int(region["address"]) for region in descriptor["regions"]]
            sizes = [int(region["bytes"]) for region in descriptor["regions"]]
        except (KeyError, TypeError, ValueError) as error:
            raise TransportError(
                f"mooncake: the descriptor is not one of mooncake ({error!r})", silent=True
            ) from error
        if protocol != self._settings.protocol:
            raise TransportError(
                f"mooncake: the receiver speaks {protocol}, and this end "
                f"{self._settings.protocol}; start both with the same protocol",
                silent=True,
            )
        sender = self._sender()
        staging = SendStaging(sender.register, self._settings.device)
        transfer = partial(_transfer, sender, session)
        link = WorkerLink(f"mooncake to {session}", bases, sizes, transfer, staging)
        self._links.add(link)
        return link

    def close(self) -> None:
        if self._receiving is not None:
            self._receiving.close()
            self._receiving = None
        links = list(self._links)
        for link in links:
            link.close()
        if self._sending is not None and all(link.join(0.1) for link in links):
            self._sending.close()
            self._sending = None

    def _sender(self) -> _OpenEngine:
        if self._sending is None:
            self._sending = self._open()
        return self._sending

    def _open(self) -> _OpenEngine:
        return _OpenEngine(self._new_engine(), self._settings)


class _OpenEngine:
    """An engine with its registered memory."""

    def __init__(self, engine: LibraryEngine, settings: TransportSettings) -> None:
        host, protocol, devices = settings.host, settings.protocol, settings.devices
        if engine.initialize(host, "P2PHANDSHAKE", protocol, devices):
            raise TransportUnavailableError(
                f"transport mooncake: the engine does not start with {protocol} on {host}, see its "
                "log above"
            )
        self._engine: LibraryEngine | None = engine
        self.session = f"{host}:{engine.get_rpc_port()}"
        self._registered: dict[int, int] = {}

    @property
    def engine(self) -> LibraryEngine:
        assert self._engine is not None, "the engine is closed"
        return self._engine

    def register(self, address: int, size: int) -> Callable[[], None]:
        """Make memory known; what undoes it."""
        if self._registered.get(address) == size or not size:
            return lambda: None
        if self.engine.register_memory(address, size):
            raise TransportUnavailableError(
                f"transport mooncake: {size:,} B of memory cannot be registered, see the log above"
            )
        self._registered[address] = size
        return partial(self._unregister, address)

    def _unregister(self, address: int) -> None:
        if self._engine is not None and self._registered.pop(address, None) is not None:
            self._engine.unregister_memory(address)

    def close(self) -> None:
        """Destroy the engine: its threads have ended when this returns."""
        if self._engine is None:
            return
        for address in self._registered:
            self._engine.unregister_memory(address)
        alive = weakref.ref(self._engine)
        self._engine = None
        assert alive() is None, "the engine is still used, so its threads still write"


def _transfer(sender: _OpenEngine, session: str, requests: Requests, deadline: float) -> None:
    """How a link writes: every call returns when its bytes are acknowledged."""
    for first in range(0, len(requests.bytes), MAX_REQUESTS):
        if time.monotonic() > deadline:
            raise TransportError("not written in time", silent=True)
        some = slice(first, first + MAX_REQUESTS)
        sources, targets, sizes = (column[some].tolist() for column in requests)
        code = sender.engine.batch_transfer_sync_write(session, sources, targets, sizes)
        if code:
            raise TransportError(f"the engine failed with {code}", silent=False)


def _load(settings: TransportSettings) -> Callable[[], LibraryEngine]:
    stall_s = str(max(1, int(settings.stall_s)))
    wanted = {
        "MC_LOG_LEVEL": "ERROR",
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": stall_s,
        "MC_TCP_STATUS_TIMEOUT_SEC": stall_s,
    }
    if settings.protocol == "tcp":
        wanted["MC_FORCE_TCP"] = "1"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)  # What the user has set stays.
    try:
        return cast(Callable[[], LibraryEngine], library_engine())
    except ImportError as error:
        raise TransportUnavailableError(f"transport mooncake: {missing_library(error)}") from error


def library_engine() -> Any:
    """The library's class. It is optional, and reads the environment when it is loaded."""
    from mooncake.engine import TransferEngine

    return TransferEngine
