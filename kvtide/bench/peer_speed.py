"""How fast rows land in another process's memory, beside what the way there gives at best.

    python -m kvtide.bench.peer_speed shm mooncake nixl [--rows 64KiB,1MiB] [--total 128MiB]

Rows are written by the page sender into a receiver of another process. Each round is timed in turns
with its *limit*: plain copies of as many bytes to memory of the same kind for `shm` (from the GPU
if there is one), the library's own batch call with the same rows for `mooncake`. `nixl` has no call
of its own that waits, so it is beside plain copies, too. `of limit` is the median over the rounds.

    scattered  rows at random places on both sides
    gathered   rows at random places of the source, one after the other in the target
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtide.byte_sizes import parse_bytes
from kvtide.tiers import Arena, device_arena, host_arena
from kvtide.transfer.peer.conformance.conformance_peer import ReceiverProcess
from kvtide.transfer.peer.mooncake_engine import library_engine
from kvtide.transfer.peer.page_sender import PageSender, SendJob
from kvtide.transfer.peer.transport import (
    Descriptor,
    PeerLink,
    Region,
    TransportError,
    TransportSettings,
    TransportUnavailableError,
    WriteBatch,
)
from kvtide.transfer.peer.transport_registry import open_transport

ROUNDS = 7
TIMEOUT_S = 60.0
CALL_ROWS = 512
"""Rows per call of Mooncake's; it refuses much longer batches."""


@dataclass(frozen=True, slots=True)
class PeerSpeed:
    """Bytes per second of rows of one size, and of the limit beside them."""

    transport: str
    row_bytes: int
    places: str
    bytes_s: float
    limit_bytes_s: float
    of_limit: float


class _Bench:
    """A receiver, a sender with its sources, and the link between them."""

    def __init__(self, transport: str, total_bytes: int, device: torch.device | None) -> None:
        settings = TransportSettings(device=device)
        self.total_bytes = total_bytes
        self._transport = open_transport(transport, settings)
        self._receiver = ReceiverProcess(transport, TransportSettings(), [total_bytes])
        self.descriptor: Descriptor = self._receiver.descriptor
        on_gpu = device is not None
        self.sources = device_arena(total_bytes, device) if device else _filled(total_bytes)
        self.kind = Region.of(self.sources).kind
        self._transport.register([Region.of(self.sources)])
        self.link: PeerLink = self._transport.connect(self.descriptor)
        self.plain = host_arena(total_bytes, pinned=on_gpu, shared=True)
        self._sender = PageSender()

    def write(self, batch: WriteBatch) -> float:
        """Seconds of a job of the page sender."""
        over, errors = threading.Event(), list[str | None]()

        def done(error: str | None, silent: bool) -> None:
            errors.append(error)
            over.set()

        start = time.perf_counter()
        job = SendJob("bench", 1, [(self.link, batch)], done, timeout_s=TIMEOUT_S)
        self._sender.submit(job)
        over.wait()
        if errors[0] is not None:
            raise TransportError(errors[0], silent=False)
        return time.perf_counter() - start

    def copy(self, batch: WriteBatch) -> float:
        """Seconds of a plain copy of as many bytes."""
        start = time.perf_counter()
        self.plain.data.copy_(self.sources.data, non_blocking=True)
        if self.kind == "device":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def close(self) -> None:
        self._sender.close(TIMEOUT_S)
        self.link.close()
        self._transport.close()
        self._receiver.kill()
        self.sources.close()
        self.plain.close()


def _filled(total_bytes: int) -> Arena:
    arena = host_arena(total_bytes, pinned=False)
    arena.data.random_(0, 256)
    return arena


def _mooncake_calls(bench: _Bench) -> Callable[[WriteBatch], float]:
    """The library's own batch call."""
    engine, session = library_engine()(), bench.descriptor["session"]
    address = bench.descriptor["regions"][0]["address"]
    host = session.rpartition(":")[0]
    assert engine.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(bench.sources.data.data_ptr(), bench.total_bytes) == 0

    def call(batch: WriteBatch) -> float:
        columns = [c.tolist() for c in (batch.source, batch.target + address, batch.bytes)]
        start = time.perf_counter()
        for first in range(0, len(batch), CALL_ROWS):
            some = [column[first : first + CALL_ROWS] for column in columns]
            assert engine.batch_transfer_sync_write(session, *some) == 0
        return time.perf_counter() - start

    return call


def measure(
    transport: str, row_bytes: Sequence[int], total_bytes: int, device: torch.device | None = None
) -> list[PeerSpeed]:
    """All cases of one transport. `device`: where sources lie, if they lie on a GPU."""
    bench = _Bench(transport, total_bytes, device)
    try:
        limit = _mooncake_calls(bench) if transport == "mooncake" else bench.copy
        return [
            _case(bench, transport, limit, size, places)
            for size in row_bytes
            for places in ("scattered", "gathered")
        ]
    finally:
        bench.close()


def _case(
    bench: _Bench, transport: str, limit: Callable[[WriteBatch], float], size: int, places: str
) -> PeerSpeed:
    count = bench.total_bytes // size
    chance = np.random.default_rng(24)
    source = bench.sources.data.data_ptr() + chance.permutation(count) * size
    target = chance.permutation(count) if places == "scattered" else np.arange(count)
    batch = WriteBatch.of(source, target * size, size, 0, bench.kind)
    bench.write(batch)
    limit(batch)
    pairs = [(bench.write(batch), limit(batch)) for _ in range(ROUNDS)]
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    of_limit = statistics.median(plain / written for written, plain in pairs)
    total = count * size
    return PeerSpeed(transport, size, places, total / ours, total / theirs, of_limit)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvtide.bench.peer_speed")
    parser.add_argument("transports", nargs="+", metavar="TRANSPORT")
    parser.add_argument("--rows", default="4KiB,64KiB,1MiB")
    parser.add_argument("--total", default="128MiB")
    given = parser.parse_args(arguments)
    device = torch.device("cuda") if torch.cuda.is_available() else None
    sizes = [parse_bytes(one) for one in given.rows.split(",")]
    print(f"{'transport':10} {'row':>10} {'places':10} {'GB/s':>7} {'limit':>7} {'of limit':>8}")
    for name in given.transports:
        try:
            found = measure(name, sizes, parse_bytes(given.total), device)
        except TransportUnavailableError as error:
            print(error, file=sys.stderr)
            continue
        for one in found:
            speeds = f"{one.bytes_s / 1e9:7.2f} {one.limit_bytes_s / 1e9:7.2f} {one.of_limit:8.0%}"
            print(f"{name:10} {one.row_bytes:10,} {one.places:10} {speeds}", flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
