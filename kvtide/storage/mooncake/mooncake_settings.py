"""The settings of a Mooncake URL, and the environment that the library reads."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from kvtide.storage.store import StoreError
from kvtide.storage.url import StoreURL

DEFAULT_PORT = 50051
DEFAULT_SEGMENT_BYTES = 4 * 10**9
DEFAULT_BUFFER_BYTES = 64 * 10**6
MIN_SEGMENT_BYTES = 16 << 20
"""Less is refused by the library."""
PROTOCOLS = ("tcp", "rdma")


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """`mooncake://host:port?segment=4GB&buffer=64MB&local=…&protocol=tcp&devices=…&timeout=5`

    segment_bytes  memory this process adds to the pool; 0: it only uses that of others
    buffer_bytes   registered memory for objects that do not lie in lent memory
    local          the address under which other machines reach this one
    devices        RDMA devices, with commas between them
    """

    name: str
    host: str
    port: int
    local: str
    protocol: str
    devices: str
    segment_bytes: int
    buffer_bytes: int
    timeout_s: float

    @classmethod
    def of(cls, url: StoreURL) -> MooncakeSettings:
        url.only("segment", "buffer", "local", "protocol", "devices", "timeout")
        if not url.host or url.path.strip("/"):
            raise StoreError(f"storage {url}: write mooncake://host:port, the master's address")
        protocol = url.settings.get("protocol", "tcp")
        if protocol not in PROTOCOLS:
            raise StoreError(f"storage {url}: protocol={protocol} is not {' or '.join(PROTOCOLS)}")
        port = url.port or DEFAULT_PORT
        buffer_bytes = url.bytes("buffer", DEFAULT_BUFFER_BYTES)
        if not buffer_bytes:
            raise StoreError(f"storage {url}: buffer=0; make it hold the largest object")
        segment_bytes = url.bytes("segment", DEFAULT_SEGMENT_BYTES)
        if 0 < segment_bytes < MIN_SEGMENT_BYTES:
            got = url.settings["segment"]
            raise StoreError(f"storage {url}: segment={got} is too small; use 16MiB or more, or 0")
        return cls(
            name=str(url),
            host=url.host,
            port=port,
            local=url.settings.get("local") or _own_address(url, port),
            protocol=protocol,
            devices=url.settings.get("devices", ""),
            segment_bytes=segment_bytes,
            buffer_bytes=buffer_bytes,
            timeout_s=url.seconds(),
        )

    def lingers_s(self, objects: int) -> float:
        """How long the library may use the memory of a call that was given up.

        It drops a TCP connection on which nothing moves, but may come to the objects of a batch
        one after the other. With RDMA it waits for up to a minute.
        """
        return 60.0 + objects * float(os.environ.get(_PROGRESS, "30"))

    def set_environment(self) -> None:
        """What the library reads once per process; what the user has set stays.

        Its own time-outs are shorter than ours, so that a frozen machine costs the objects on it
        rather than the whole call: two of them fit into one of ours, as a transfer may wait for
        its bytes to be taken and then for the answer. They are whole seconds, so below 2.5 s of
        ours the whole call may be lost.
        """
        moving_s = str(max(1, int(self.timeout_s * 0.4)))
        wanted = {
            "MC_LOG_LEVEL": "ERROR",
            "MC_RPC_TIMEOUT_MS": str(int(max(0.25, self.timeout_s / 2) * 1000)),
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
            _PROGRESS: moving_s,
            "MC_TCP_STATUS_TIMEOUT_SEC": moving_s,
        }
        if self.protocol == "tcp":
            wanted["MC_FORCE_TCP"] = "1"
        for name, value in wanted.items():
            os.environ.setdefault(name, value)


_PROGRESS = "MC_TCP_PROGRESS_TIMEOUT_SEC"


def _own_address(url: StoreURL, port: int) -> str:
    """The address of this machine on the way to the master. Nothing is sent."""
    try:
        family, kind, *_, address = socket.getaddrinfo(url.host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreError(f"storage {url}: no way to {url.host} ({error})") from error
