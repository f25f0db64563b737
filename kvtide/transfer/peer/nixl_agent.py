"""`nixl`: NIXL's agents over UCX.

- A write that is DONE has been flushed: its bytes are in the receiver's memory.
- A frozen receiver leaves a write in progress for ever, so the deadline is ours. Its bytes may land
  later, also after the handle was released. `revoke` ends that: the memory is deregistered, the
  agent destroyed with its connections, and a new agent registers the memory anew.
- UCX writes by itself into the memory of a process on the same machine (cma, xpmem, knem), and does
  not ask that process. Such a write cannot be revoked, so these ways are left out; on one machine
  `shm` is faster anyway.
- Between machines without RDMA, UCX speaks TCP on the interface of `host`.
"""

from __future__ import annotations

import base64
import fcntl
import importlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from kvtide.transfer.peer.send_staging import Requests, SendStaging
from kvtide.transfer.peer.transport import (
    Column,
    Descriptor,
    Region,
    TransportError,
    TransportSettings,
    TransportUnavailableError,
)
from kvtide.transfer.peer.worker_link import WorkerLink

LIBRARIES = ("nixl_cu13._api", "nixl_cu12._api")
BY_THEMSELVES = ("cma", "xpmem", "knem")
"""UCX's ways of writing that the receiver has no part in."""
WITH_THEM = frozenset({*BY_THEMSELVES, "all", "sm", "shm"})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 500e-6
_SIOCGIFADDR = 0x8915


class LibraryAgent(Protocol):
    """The used part of `nixl_agent`. It raises exceptions of its own."""

    def register_memory(self, memory: list[tuple[int, int, int, str]], kind: str) -> object: ...
    def deregister_memory(self, registered: object) -> object: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> str | bytes: ...
    def remove_remote_agent(self, name: str | bytes) -> object: ...
    def get_xfer_descs(self, rows: npt.NDArray[np.uint64], kind: str) -> object: ...
    def initialize_xfer(
        self, verb: str, near: object, far: object, peer: str | bytes
    ) -> object: ...
    def transfer(self, handle: object) -> str: ...
    def check_xfer_state(self, handle: object) -> str: ...
    def release_xfer_handle(self, handle: object) -> object: ...


class NixlTransport:
    name = "nixl"

    def __init__(self, settings: TransportSettings) -> None:
        self._settings = settings
        self._library = _load(settings)
        self._receiving: _OpenAgent | None = None
        self._exposed: tuple[Region, ...] = ()
        self._sending: _OpenAgent | None = None
        self._links: list[WorkerLink] = []

    # -- receiver -----------------------------------------------------------------------------

    def expose(self, regions: Sequence[Region]) -> Descriptor:
        if any(region.kind == "device" for region in regions):
            raise TransportUnavailableError(
                "transport nixl: device destinations are not written to; use host destinations"
            )
        self._exposed = tuple(regions)
        if self._receiving is None:
            self._receiving = self._open()
        for region in regions:
            self._receiving.register(region.address, region.bytes)
        return {
            "transport": self.name,
            "metadata": self._receiving.metadata(),
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
            metadata = base64.b64decode(descriptor["metadata"])
            bases = [int(region["address"]) for region in descriptor["regions"]]
            sizes = [int(region["bytes"]) for region in descriptor["regions"]]
        except (KeyError, TypeError, ValueError) as error:
            raise TransportError(
                f"nixl: the descriptor is not one of nixl ({error!r})", silent=True
            ) from error
        sender = self._sender()
        peer = sender.add(metadata)
        staging = SendStaging(sender.register, self._settings.device)
        let_go = partial(sender.remove, peer)
        link = WorkerLink("nixl", bases, sizes, partial(_transfer, sender, peer), staging, let_go)
        self._links = [one for one in self._links if not one.join(0)] + [link]
        return link

    def close(self) -> None:
        if self._receiving is not None:
            self._receiving.close()
            self._receiving = None
        for link in self._links:
            link.close()
        if self._sending is not None and all(link.join(0.1) for link in self._links):
            self._sending.close()
            self._sending = None

    def _sender(self) -> _OpenAgent:
        if self._sending is None:
            self._sending = self._open()
        return self._sending

    def _open(self) -> _OpenAgent:
        # Names must differ between all agents that ever meet.
        name = f"kvtide-{secrets.token_hex(8)}"
        config = self._library.nixl_agent_config(backends=["UCX"])
        try:
            return _OpenAgent(cast(LibraryAgent, self._library.nixl_agent(name, config)))
        except Exception as error:  # The library has no common base of its exceptions.
            raise TransportUnavailableError(
                f"transport nixl: the agent does not start ({error})"
            ) from error


class _OpenAgent:
    """An agent with its registered memory. Its calls are short, and made one at a time."""

    def __init__(self, agent: LibraryAgent) -> None:
        self._agent: LibraryAgent | None = agent
        self._registered: dict[int, tuple[int, object]] = {}
        self._lock = threading.Lock()

    @property
    def agent(self) -> LibraryAgent:
        assert self._agent is not None, "the agent is closed"
        return self._agent

    def register(self, address: int, size: int) -> Callable[[], None]:
        """Make memory known; what undoes it."""
        with self._lock:
            if not size or self._registered.get(address, (0, None))[0] == size:
                return lambda: None
            try:
                known = self.agent.register_memory([(address, size, 0, "")], "DRAM")
            except Exception as error:  # As above.
                raise TransportUnavailableError(
                    f"transport nixl: {size:,} B of memory cannot be registered ({error})"
                ) from error
            self._registered[address] = (size, known)
        return partial(self._unregister, address)

    def _unregister(self, address: int) -> None:
        with self._lock:
            if self._agent is not None and address in self._registered:
                self._agent.deregister_memory(self._registered.pop(address)[1])

    def metadata(self) -> str:
        with self._lock:
            return base64.b64encode(self.agent.get_agent_metadata()).decode()

    def add(self, metadata: bytes) -> str | bytes:
        with self._lock:
            try:
                return self.agent.add_remote_agent(metadata)
            except Exception as error:  # As above.
                raise TransportError(
                    f"nixl: the receiver's metadata is refused ({error})", silent=True
                ) from error

    def remove(self, peer: str | bytes) -> None:
        with self._lock:
            if self._agent is not None:
                self._agent.remove_remote_agent(peer)

    def begin(self, peer: str | bytes, requests: Requests) -> tuple[object, str]:
        with self._lock:
            near = self.agent.get_xfer_descs(_rows(requests.source, requests.bytes), "DRAM")
            far = self.agent.get_xfer_descs(_rows(requests.target, requests.bytes), "DRAM")
            handle = self.agent.initialize_xfer("WRITE", near, far, peer)
            return handle, self.agent.transfer(handle)

    def state(self, handle: object) -> str:
        with self._lock:
            return self.agent.check_xfer_state(handle)

    def release(self, handle: object) -> None:
        with self._lock:
            self.agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Destroy the agent: its threads have ended when this returns."""
        with self._lock:
            if self._agent is None:
                return
            for _, known in self._registered.values():
                self._agent.deregister_memory(known)
            self._registered.clear()
            self._agent = None


def _rows(addresses: Column, sizes: Column) -> npt.NDArray[np.uint64]:
    rows = np.zeros((len(sizes), 3), np.uint64)
    rows[:, 0], rows[:, 1] = addresses, sizes
    return rows


def _transfer(sender: _OpenAgent, peer: str | bytes, requests: Requests, deadline: float) -> None:
    """How a link writes: until the write is done, or its deadline has passed."""
    if not len(requests.bytes):
        return
    handle, state = sender.begin(peer, requests)
    pause_s = _FIRST_PAUSE_S
    try:
        while state == "PROC":
            if time.monotonic() > deadline:
                raise TransportError("not written in time", silent=False)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            state = sender.state(handle)
    finally:
        sender.release(handle)
    if state != "DONE":
        raise TransportError(f"the transfer ended as {state}", silent=False)


# -- the library ----------------------------------------------------------------------------


def _load(settings: TransportSettings) -> ModuleType:
    """The library, for the CUDA that torch has, or for any: without a GPU they are the same."""
    _set_environment(settings)
    cuda = (torch.version.cuda or "13").partition(".")[0]
    errors = []
    for name in sorted(LIBRARIES, key=lambda one: f"cu{cuda}" not in one):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            errors.append(str(error))
    raise TransportUnavailableError(
        f"transport nixl: the NIXL library is not there ({errors[0]}); pip install 'kvtide[nixl]'"
    )


def _set_environment(settings: TransportSettings) -> None:
    """What UCX reads once per process. What the user has set stays, unless it breaks a promise."""
    chosen = os.environ.setdefault("UCX_TLS", "^" + ",".join(BY_THEMSELVES))
    words = {word.strip() for word in chosen.lstrip("^").split(",")}
    left_out = chosen.startswith("^")
    if (left_out and not words >= set(BY_THEMSELVES)) or (not left_out and words & WITH_THEM):
        raise TransportUnavailableError(
            f"transport nixl: UCX_TLS={chosen} lets a sender write into the memory of a process on "
            f"the same machine, which cannot be revoked; leave out {', '.join(BY_THEMSELVES)}"
        )
    if settings.devices:
        os.environ.setdefault("UCX_NET_DEVICES", settings.devices)
    elif not Path("/sys/class/infiniband").exists():
        os.environ.setdefault("UCX_NET_DEVICES", _interface(settings.host))
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")


def _interface(host: str) -> str:
    """The network interface that has this address."""
    try:
        wanted = socket.gethostbyname(host)
    except OSError as error:
        raise TransportUnavailableError(f"transport nixl: {host} is not known ({error})") from error
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                asked = struct.pack("256s", name.encode()[:15])
                answer: Any = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
            except OSError:
                continue  # It has no address.
            if socket.inet_ntoa(answer[20:24]) == wanted:
                return name
    raise TransportUnavailableError(
        f"transport nixl: no interface of this machine has the address {wanted}; give the address "
        "under which other machines reach it"
    )
