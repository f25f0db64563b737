"""Which network interface an address is on: gloo and NCCL take interfaces, not addresses."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
import sys
from pathlib import Path

_SIOCGIFCONF = 0x8912
_ENTRIES, _ENTRY_BYTES, _NAME_BYTES, _ADDRESS_AT = 256, 40, 16, 20
_IPV6_TABLE = Path("/proc/net/if_inet6")


def local_address(host: str, port: int) -> str:
    """The address from which this machine reaches a host. Nothing is sent."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, _, _, place = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The interface that has the address, on Linux; None if there is none, and elsewhere."""
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    table = _ipv4() if wanted.version == 4 else _ipv6()
    if wanted not in table and wanted.is_loopback:  # All of 127.0.0.0/8 is there.
        return next((name for found, name in table.items() if found.is_loopback), None)
    return table.get(wanted)


InterfaceNames = dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]


def _ipv4() -> InterfaceNames:
    room = array.array("B", bytes(_ENTRIES * _ENTRY_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("iL", len(room), room.buffer_info()[0])
        filled, _ = struct.unpack("iL", fcntl.ioctl(any_socket, _SIOCGIFCONF, asked))
    table: InterfaceNames = {}
    for at in range(0, filled, _ENTRY_BYTES):
        name = bytes(room[at : at + _NAME_BYTES]).partition(b"\0")[0].decode()
        number = bytes(room[at + _ADDRESS_AT : at + _ADDRESS_AT + 4])
        table[ipaddress.IPv4Address(number)] = name
    return table


def _ipv6() -> InterfaceNames:
    if not _IPV6_TABLE.exists():
        return {}
    rows = (line.split() for line in _IPV6_TABLE.read_text().splitlines())
    return {ipaddress.IPv6Address(bytes.fromhex(row[0])): row[-1] for row in rows}
