"""Shared memory: who may map it, when it goes, and how a peer's death is seen."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtide.tiers.arena import Arena, host_arena
from kvtide.transfer.peer.process_watch import OtherMachineError, ProcessIdentity, ProcessWatch
from kvtide.transfer.peer.shm import SharedMemory
from kvtide.transfer.peer.transport import (
    Region,
    TransportError,
    TransportSettings,
    WriteBatch,
    write,
)
from tests.processes import freeze, identity_of

DEADLINE_S = 60.0


@pytest.fixture
def arena() -> Iterator[Arena]:
    with host_arena(1 << 20, pinned=False, shared=True) as one:
        yield one


@pytest.fixture
def transport() -> SharedMemory:
    return SharedMemory(TransportSettings())


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as one:
        yield one
        one.kill()


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvtide-host")


def test_a_descriptor_is_plain_json(transport: SharedMemory, arena: Arena) -> None:
    descriptor = transport.expose([Region.of(arena)])
    assert json.loads(json.dumps(descriptor)) == descriptor
    assert transport.revoke() is None


def test_regions_of_one_file_share_a_mapping_and_a_closed_link_has_none(
    transport: SharedMemory, arena: Arena
) -> None:
    whole = Region.of(arena)
    file = dataclasses.replace(whole.shared, offset=whole.shared.offset + 4096)
    part = dataclasses.replace(whole, address=whole.address + 4096, bytes=8192, shared=file)
    before = _mapped()
    link = transport.connect(transport.expose([whole, part]))
    assert _mapped() == before + 1
    source = np.arange(100, dtype=np.uint8)
    write(link, WriteBatch.of(source.ctypes.data, 7, 100, region=1), 1.0)
    assert arena.data[4103:4203].tolist() == list(range(100))
    link.close()
    link.close()
    assert _mapped() == before
    with pytest.raises(TransportError, match="the link is closed"):
        link.begin(WriteBatch.of(source.ctypes.data, 0, 100), 1.0)


def test_a_link_outlives_the_arena_of_its_receiver(transport: SharedMemory) -> None:
    """Memory goes with its last mapping, so a late write hits no other memory."""
    arena = host_arena(1 << 20, pinned=False, shared=True)
    descriptor = transport.expose([Region.of(arena)])
    link = transport.connect(descriptor)
    arena.close()
    source = np.ones(4096, np.uint8)
    write(link, WriteBatch.of(source.ctypes.data, 0, 4096), 1.0)
    link.close()
    with pytest.raises(TransportError, match=r"cannot open|not the receiver's memory") as error:
        transport.connect(descriptor)
    assert error.value.silent


def test_a_write_past_its_deadline_stops_and_is_silent(
    transport: SharedMemory, arena: Arena
) -> None:
    link = transport.connect(transport.expose([Region.of(arena)]))
    source = np.ones(1 << 20, np.uint8)
    with pytest.raises(TransportError, match="not written within 0 s") as error:
        write(link, WriteBatch.of(source.ctypes.data, 0, 1 << 20), 0.0)
    assert error.value.silent
    link.close()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"boot": "another"}, "on another machine"),
        ({"namespace": 1}, "another PID namespace"),
        ({"started": 1}, "another has its number"),
        ({"pid": 2**22 - 3}, "is gone"),
    ],
)
def test_a_process_that_cannot_be_seen_is_refused_with_the_reason(
    transport: SharedMemory, arena: Arena, changed: dict[str, object], reason: str
) -> None:
    descriptor = transport.expose([Region.of(arena)])
    descriptor["process"] |= changed
    with pytest.raises(TransportError, match=f"{reason}.*use another transport") as error:
        transport.connect(descriptor)
    assert error.value.silent


def test_another_file_under_the_same_number_is_refused(
    transport: SharedMemory, arena: Arena
) -> None:
    descriptor = transport.expose([Region.of(arena)])
    with host_arena(1 << 20, pinned=False, shared=True) as other:
        descriptor["regions"][0]["fd"] = other.shared.fd
        with pytest.raises(TransportError, match="not the receiver's memory any more"):
            transport.connect(descriptor)


def test_a_region_that_is_longer_than_its_file_is_refused(
    transport: SharedMemory, arena: Arena
) -> None:
    descriptor = transport.expose([Region.of(arena)])
    descriptor["regions"][0]["bytes"] = 1 << 40
    before = _mapped()
    with pytest.raises(TransportError, match="less than its region"):
        transport.connect(descriptor)
    assert _mapped() == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_told_what_is_missing(transport: SharedMemory, arena: Arena) -> None:
    descriptor = json.dumps(transport.expose([Region.of(arena)]))
    code = (
        "import json, os\n"
        "from kvtide.transfer.peer.shm import SharedMemory\n"
        "from kvtide.transfer.peer.transport import TransportSettings\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"SharedMemory(TransportSettings()).connect(json.loads({descriptor!r}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "run both processes as the same user" in run.stderr


# -- the death of a process -----------------------------------------------------------------


def test_a_death_is_seen_and_a_freeze_is_none(sleeper: subprocess.Popen) -> None:
    watch = ProcessWatch(identity_of(sleeper.pid))
    assert watch.alive()
    freeze(sleeper.pid)
    assert watch.alive()
    sleeper.kill()
    deadline = time.monotonic() + DEADLINE_S
    while watch.alive():
        assert time.monotonic() < deadline
    watch.close()
    watch.close()
    assert not watch.alive()
    with pytest.raises(OtherMachineError, match="is gone"):
        ProcessWatch(dataclasses.replace(ProcessIdentity.own(), pid=2**22 - 3))


def test_an_identity_survives_json() -> None:
    own = ProcessIdentity.own()
    assert ProcessIdentity.from_json(json.loads(json.dumps(own.to_json()))) == own
    watch = ProcessWatch(own)
    assert watch.alive()
    watch.close()
