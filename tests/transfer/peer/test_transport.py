"""Batches are cut and checked, rows are copied, libraries that are missing are named."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

import numpy as np
import pytest

from kvtide.tiers.arena import host_arena
from kvtide.transfer.peer.cpu_copies import SMALL_BYTES, copies, joined
from kvtide.transfer.peer.send_staging import STAGING_BYTES, SendStaging
from kvtide.transfer.peer.transport import (
    Region,
    TransportError,
    TransportSettings,
    TransportUnavailableError,
    WriteBatch,
    write,
)
from kvtide.transfer.peer.transport_registry import open_transport
from kvtide.transfer.peer.worker_link import WorkerLink

DEADLINE_S = 60.0


# -- batches --------------------------------------------------------------------------------


def _bytes_of(batch: WriteBatch) -> set[tuple[int, int, int]]:
    return {
        (s + n, r, t + n)
        for s, r, t, size in zip(batch.source, batch.region, batch.target, batch.bytes, strict=True)
        for n in range(size)
    }


@pytest.mark.parametrize("max_bytes", [1, 7, 64, 100, 10_000])
def test_parts_have_every_byte_once_and_no_more_than_allowed(max_bytes: int) -> None:
    sizes = np.array([0, 1, 63, 64, 65, 0, 200, 3])
    batch = WriteBatch.of(np.arange(8) * 1000, np.arange(8) * 500, sizes, np.arange(8) % 3)
    parts = batch.parts(max_bytes)
    assert all(0 < part.total_bytes <= max_bytes for part in parts)
    assert sum(part.total_bytes for part in parts) == batch.total_bytes
    assert set().union(*map(_bytes_of, parts)) == _bytes_of(batch)


def test_a_batch_of_nothing_has_no_parts() -> None:
    assert WriteBatch.of([], [], [], []).parts(10) == []
    assert WriteBatch.of([1, 2], [1, 2], [0, 0]).parts(10) == []


@pytest.mark.parametrize(
    ("target", "size", "region", "reason"),
    [
        (90, 11, 0, "row 1: 11 B to offset 90 of region 0, which has 100 B"),
        (-1, 1, 0, "row 1: 1 B to offset -1"),
        (0, 1, 2, "region 2, which is not one of 2"),
        (0, 1, -1, "region -1, which is not one of 2"),
        (5, -5, 0, "row 1: -5 B"),
    ],
)
def test_rows_outside_the_regions_are_named(target, size, region, reason) -> None:
    batch = WriteBatch.of([0, 0], [0, target], [10, size], [0, region])
    with pytest.raises(TransportError, match=reason) as error:
        batch.check([100, 50])
    assert error.value.silent
    WriteBatch.of([0, 0], [90, 50], [10, 0], [0, 1]).check([100, 50])


# -- copies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_all_sizes_are_copied_and_nothing_else(seed: int) -> None:
    chance = np.random.default_rng(seed)
    source = chance.integers(1, 256, 4 << 20, np.uint8)
    target = np.zeros(4 << 20, np.uint8)
    expected = target.copy()
    sizes = chance.choice((0, 1, 3, 16, 512, 4096, SMALL_BYTES, 3 * SMALL_BYTES + 1), 150)
    slots = chance.permutation(150) * 26_000 + (chance.integers(0, 100) if seed % 2 else 0)
    starts = chance.integers(0, len(source) - 26_000, 150)
    for start, slot, size in zip(starts, slots, sizes, strict=True):
        expected[slot : slot + size] = source[start : start + size]
    for _ in copies(source.ctypes.data + starts, target.ctypes.data + slots, sizes):
        pass
    assert np.array_equal(target, expected)


def test_only_rows_that_follow_on_both_sides_are_joined() -> None:
    source = np.array([0, 10, 20, 100, 110])
    target = np.array([50, 60, 90, 100, 120])
    sizes = np.full(5, 10)
    found = [column.tolist() for column in joined(source, target, sizes)]
    assert found == [[0, 20, 100, 110], [50, 90, 100, 120], [20, 10, 10, 10]]


def test_copies_let_other_threads_run() -> None:
    """The interpreter's lock is free while rows are copied."""
    memory = np.zeros(64 << 20, np.uint8)
    half, stop, turns = 32 << 20, threading.Event(), [0]

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    for _ in range(20):
        ctypes.memmove(memory.ctypes.data + half, memory.ctypes.data, 1 << 20)
        rows = np.random.default_rng(1).permutation(8192) * 4096
        for _ in copies(
            memory.ctypes.data + rows, memory.ctypes.data + half + rows, rows * 0 + 512
        ):
            pass
    stop.set()
    thread.join()
    assert turns[0] > 1000


def test_staging_makes_one_request_of_rows_that_lie_together_in_the_target() -> None:
    source = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    known, base = [], source.ctypes.data
    staging = SendStaging(lambda address, size: known.append((address, size)) or known.clear, None)
    order = np.random.default_rng(1).permutation(256) * 4096
    batch = WriteBatch.of(base + order, 0, 4096)
    target = np.arange(256) * 4096 + (1 << 40)
    assert staging.requests(batch, target) is None
    gathered = staging.gathered(batch, target, time.monotonic() + DEADLINE_S)
    assert gathered.target.tolist() == [1 << 40]
    assert gathered.bytes.tolist() == [1 << 20]
    assert known == [(int(gathered.source[0]), STAGING_BYTES)]
    sent = ctypes.string_at(int(gathered.source[0]), 1 << 20)
    assert sent == b"".join(source[start : start + 4096].tobytes() for start in order)
    apart = np.arange(256) * 8192
    assert staging.requests(batch, apart) is not None
    staging.close()
    assert known == []


# -- links whose library blocks -------------------------------------------------------------


class Library:
    """Calls block until the test lets them go."""

    def __init__(self) -> None:
        self.calls = 0
        self.gate = threading.Event()
        self.error: Exception | None = None
        self.let_go = 0

    def __call__(self, requests: object, deadline: float) -> None:
        self.calls += 1
        self.gate.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def link(self) -> WorkerLink:
        def count() -> None:
            self.let_go += 1

        return WorkerLink(
            "library", [0], [1000], self, SendStaging(lambda a, s: count, None), count
        )


BATCH = WriteBatch.of([0], [0], [10])


def test_a_call_that_does_not_return_is_given_up_and_the_link_is_dead() -> None:
    library = Library()
    link = library.link()
    with pytest.raises(TransportError, match=r"not written within 0\.05 s") as error:
        write(link, BATCH, 0.05)
    assert not error.value.silent
    assert not link.alive()
    with pytest.raises(TransportError, match="an earlier write did not end") as error:
        link.begin(BATCH, 1.0)
    assert error.value.silent
    link.close()
    assert not link.join(0.05)
    assert library.let_go == 0
    library.gate.set()
    assert link.join(DEADLINE_S)
    assert (library.calls, library.let_go) == (1, 1)


def test_a_write_behind_a_stuck_one_never_begins_and_is_silent() -> None:
    library = Library()
    link = library.link()
    first, second = link.begin(BATCH, 0.05), link.begin(BATCH, 0.05)
    while library.calls == 0:
        time.sleep(0.001)
    time.sleep(0.06)
    with pytest.raises(TransportError) as error:
        second.poll()
    assert error.value.silent
    with pytest.raises(TransportError) as error:
        first.poll()
    assert not error.value.silent
    library.gate.set()
    link.close()
    assert link.join(DEADLINE_S)
    assert library.calls == 1


@pytest.mark.parametrize(
    ("raised", "silent"),
    [
        (TransportError("refused", silent=True), True),
        (TransportError("lost", silent=False), False),
        (OSError("library"), False),
    ],
)
def test_what_a_library_raises_fails_the_write(raised: Exception, silent: bool) -> None:
    library = Library()
    library.gate.set()
    library.error = raised
    link = library.link()
    with pytest.raises(TransportError, match=str(raised)) as error:
        write(link, BATCH, DEADLINE_S)
    assert error.value.silent is silent
    assert link.alive() is silent
    link.close()


# -- what a machine has ---------------------------------------------------------------------


def test_transports_that_do_not_exist_are_refused_by_name() -> None:
    for name in ("pigeon", "pigeon:", "no.such.module:Transport"):
        with pytest.raises(TransportUnavailableError, match=f"transport {name}"):
            open_transport(name)


@pytest.mark.parametrize(
    ("name", "hidden"),
    [("mooncake", "mooncake"), pytest.param("nixl", "nixl_cu13", marks=pytest.mark.full)],
)
def test_a_missing_library_is_refused_with_what_to_install(name: str, hidden: str) -> None:
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys(['{hidden}', 'nixl_cu12']))\n"
        "from kvtide.transfer.peer.transport_registry import open_transport\n"
        f"open_transport('{name}')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"transport {name}: " in run.stderr
    assert f"pip install 'kvtide[{name}]'" in run.stderr


def test_a_protocol_that_mooncake_does_not_speak_is_refused() -> None:
    with pytest.raises(TransportUnavailableError, match="protocol quic is not tcp or rdma"):
        open_transport("mooncake", TransportSettings(protocol="quic"))


@pytest.mark.parametrize("chosen", ["all", "tcp,sm", "cma", "^cma", "^xpmem,knem"])
def test_nixl_refuses_ways_of_ucx_that_cannot_be_revoked(chosen, monkeypatch) -> None:
    monkeypatch.setenv("UCX_TLS", chosen)
    with pytest.raises(TransportUnavailableError, match="which cannot be revoked"):
        open_transport("nixl")


def test_nixl_refuses_an_address_that_the_machine_does_not_have(monkeypatch) -> None:
    if not (find_spec("nixl_cu13") or find_spec("nixl_cu12")):
        pytest.skip("NIXL is not installed")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with pytest.raises(TransportUnavailableError, match="no interface of this machine"):
        open_transport("nixl", TransportSettings(host="203.0.113.9"))


def test_memory_that_is_not_shared_cannot_be_exposed_by_shm() -> None:
    with (
        host_arena(4096, pinned=False) as arena,
        pytest.raises(TransportUnavailableError, match="shared=True"),
    ):
        open_transport("shm").expose([Region.of(arena)])
