"""The library: loading it, finding its master, and the meaning of its codes."""

from __future__ import annotations

import atexit
import ctypes
import socket
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol, cast

from kvtide.storage.mooncake.mooncake_settings import MooncakeSettings
from kvtide.storage.store import StoreError

PROBE_EVERY_S = 1.0


class Code(IntEnum):
    """The codes of the library that the store distinguishes; all are 0 or below."""

    OK = 0
    POOL_FULL = -200
    TRANSFER_FAILED = -800
    MASTER_GONE = -900
    MASTER_SILENT = -901


MASTER_AWAY = frozenset({Code.MASTER_GONE, Code.MASTER_SILENT})


class MooncakeClient(Protocol):
    """The used part of `MooncakeDistributedStore`. Calling a closed one crashes the process."""

    def setup(
        self, local: str, metadata: str, segment: int, buffer: int,
        protocol: str, devices: str, master: str,
    ) -> int: ...  # fmt: skip

    def register_buffer(self, address: int, size: int) -> int: ...
    def unregister_buffer(self, address: int) -> int: ...
    def batch_is_exist(self, names: Sequence[str]) -> list[int]: ...
    def batch_get_into(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]: ...
    def batch_put_from(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]: ...
    def batch_remove(self, names: Sequence[str], force: bool) -> list[int]: ...
    def remove_by_regex(self, pattern: str, force: bool) -> int: ...
    def close(self) -> int: ...


PACKAGES = {"libibverbs": "libibverbs1", "libnuma": "libnuma1", "libcurl": "libcurl4"}
"""Debian's packages of what the library needs and does not bring with it."""


def load(settings: MooncakeSettings) -> Callable[[], MooncakeClient]:
    """Load the library; a factory of clients, which are not set up yet."""
    settings.set_environment()
    try:
        # Optional, and it reads the environment when it is loaded.
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise StoreError(f"storage {settings.name}: {missing_library(error)}") from error

    def new_client() -> MooncakeClient:
        client = cast(MooncakeClient, MooncakeDistributedStore())
        _OPEN.append(client)
        return client

    return new_client


def close(client: MooncakeClient) -> None:
    client.close()
    _OPEN.remove(client)


_OPEN: list[MooncakeClient] = []
"""Clients that were not closed, perhaps because calls are stuck in them."""


@atexit.register
def _spare_what_is_open() -> None:
    """End the process without destroying open clients: that waits for the master, or crashes.

    Their objects are not destroyed with the interpreter, and what the library would do after it
    is left out. The exit status stays.
    """
    if _OPEN:
        for client in _OPEN:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)


def missing_library(error: ImportError) -> str:
    missing = next((deb for lib, deb in PACKAGES.items() if lib in str(error)), None)
    if missing is not None:
        return f"the Mooncake library cannot be loaded ({error}); apt-get install {missing}"
    return f"the Mooncake library is not there ({error}); pip install 'kvtide[mooncake]'"


def set_up(client: MooncakeClient, settings: MooncakeSettings) -> int:
    return client.setup(
        settings.local,
        "P2PHANDSHAKE",
        settings.segment_bytes,
        0,  # Its own buffer, for calls that this store does not use.
        settings.protocol,
        settings.devices,
        f"{settings.host}:{settings.port}",
    )


class Master:
    """Whether the master is reachable: probed when in doubt, and a failure counts for a second.

    The library takes four seconds to find that no master listens. It reconnects by itself when the
    master returns, and mounts this process's segment again.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._doubted = True
        self._asked_at = float("-inf")
        self._refusal: OSError | None = None

    def doubt(self) -> None:
        self._doubted = True

    def trust(self) -> None:
        self._doubted = False

    def check(self) -> None:
        """Raise if the master cannot be reached."""
        if not self._doubted:
            return
        with self._lock:
            if self._refusal is None or time.monotonic() - self._asked_at >= PROBE_EVERY_S:
                self._refusal = self._ask()
                self._asked_at = time.monotonic()
            refusal = self._refusal
        if refusal is not None:
            raise self.error(f"no master there ({refusal})") from refusal

    def _ask(self) -> OSError | None:
        address = (self._settings.host, self._settings.port)
        try:
            socket.create_connection(address, min(1.0, self._settings.timeout_s / 2)).close()
        except OSError as error:
            return error
        return None

    def error(self, what: str) -> StoreError:
        port = self._settings.port
        remedy = f"is the master running? mooncake_master --rpc_port={port}"
        return StoreError(f"storage {self._settings.name}: {what}; {remedy}")
