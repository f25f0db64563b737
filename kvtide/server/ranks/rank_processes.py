"""The processes of a server with several ranks: how they start, meet and exit.

    kvtide serve --tp 2            rank 0: HTTP, and the leader
        └─ python -m … worker      rank 1: applies the leader's commands

The leader starts the workers and sends each its rank and settings in one line. The ranks meet at a
file in a folder that only this user can read. A worker exits when the leader closes it, or when
the leader has died and the pipe to the worker's standard input ends. A worker reports a failure on
its standard output and ignores signals, which the leader handles. A worker that exits by itself
ends the server.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Self

import torch

from kvtide.engine import RankTopology
from kvtide.engine.rank_topology import LEADER, join_ranks, leave_ranks
from kvtide.server.settings import Settings

WORKER = "kvtide.server.ranks.rank_worker"
EXIT_S = 10.0
"""Workers get this long to exit after the last command."""
GRACE_S = 5.0
"""The server gets this long to exit by itself after losing a worker: it may be waiting for it."""
PEER_LOST = 3
"""A worker's exit code after a broken connection: the rank that exited first is the cause."""
SETTLE_S = 1.0
"""A process's exit may be noticed this much later than its broken connections."""


class WorkerLostError(Exception):
    """A rank has exited, and the others cannot go on without it."""


class RankProcesses:
    """The workers: all ranks but the leader, which is this process.

    lost     the sentence about a worker that exited by itself
    closing  whether the workers have been sent their last command
    """

    def __init__(self, settings: Settings) -> None:
        self.lost: str | None = None
        self.closing = False
        self._exiting = False
        # A single rank needs no meeting folder, and may have nowhere to write one.
        self._folder = Path(tempfile.mkdtemp(prefix="kvtide-")) if settings.ranks > 1 else None
        self._workers = [self._start(rank, settings) for rank in range(1, settings.ranks)]
        self._watchers = [
            threading.Thread(target=self._watch, args=each, daemon=True)
            for each in enumerate(self._workers, 1)
        ]
        for watcher in self._watchers:
            watcher.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for workers that are closing; kill the others."""
        self._exiting = True
        deadline = time.monotonic() + (EXIT_S if self.closing else 0.0)
        for worker in self._workers:
            try:
                worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        for watcher in self._watchers:
            watcher.join(1.0)
        if self.closing:
            leave_ranks()  # Otherwise a thread may still wait there for a lost rank.
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int, settings: Settings) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        config = {"rank": rank, "folder": str(self._folder), "settings": asdict(settings)}
        assert worker.stdin is not None
        with suppress(BrokenPipeError):  # Its watcher reports how it exited.
            print(json.dumps(config), file=worker.stdin, flush=True)
        return worker

    def topology(self, settings: Settings) -> tuple[Settings, RankTopology]:
        """The leader's settings and topology, once all ranks have joined."""
        return join_topology(LEADER, self._folder, settings)

    def settle(self) -> None:
        """After an error, wait until a lost worker is noticed, if one is the cause."""
        deadline = time.monotonic() + SETTLE_S
        while self._workers and self.lost is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def check(self) -> None:
        """Raise `WorkerLostError` if a worker has exited by itself."""
        self.settle()
        if self.lost is not None:
            raise WorkerLostError(self.lost)

    def _watch(self, rank: int, worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        reason = worker.stdout.read().strip()
        code = worker.wait()
        if code == PEER_LOST:
            time.sleep(SETTLE_S / 4)
        if self._exiting or self.closing:
            return
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        lost = f"rank {rank} {how}{': ' + reason if reason else ''}; all ranks end with it"
        self.lost = self.lost or lost
        time.sleep(GRACE_S)
        if not self._exiting:
            print(f"kvtide serve: {self.lost}", file=sys.stderr, flush=True)
            self._remove_folder()
            os._exit(1)


def join_topology(
    rank: int, folder: Path | None, settings: Settings
) -> tuple[Settings, RankTopology]:
    """Join the other ranks: this rank's settings and topology. `folder` is None for one rank."""
    if folder is None:
        return settings, RankTopology()
    device = torch.device(settings.device)
    if device.type == "cuda":
        settings = replace(settings, device=f"cuda:{rank}")
        torch.cuda.set_device(rank)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // settings.ranks))
    join_ranks(rank, settings.ranks, folder / "meeting")
    return settings, RankTopology.joined(settings.pp, settings.tp, device)


def exit_with_leader(pipe: IO[str], folder: Path) -> None:
    """Exit when the pipe from the leader ends, and ignore signals.

    A leader that was killed has left the meeting folder behind, so the worker removes it.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)

    def wait() -> None:
        pipe.read()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def freeze_gc() -> None:
    """Exempt all present objects from garbage collection, which would pause steps for 70 ms."""
    gc.collect()
    gc.freeze()
