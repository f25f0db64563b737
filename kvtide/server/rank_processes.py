"""The processes of a server that has several ranks: how they meet, and how they end.

    kvtide serve --tp 2            rank 0: HTTP, and the leader
        └─ python -m … worker      rank 1: does what the leader says

The leader starts the others and tells each in a line what it is. They meet at a file in a folder
that nobody else can read. A worker lives until the leader closes it, or is gone: then the pipe to
its standard input ends. What a worker has to say at its end comes back on its standard output;
signals are for the leader. A worker that ends by itself takes the server with it.
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

WORKER = "kvtide.server.rank_worker"
END_S = 10.0
"""What workers get to end once they were told to."""
GRACE_S = 5.0
"""What the server has to end by itself when a worker is gone: it may be waiting for it."""
CUT_OFF = 3
"""A worker's exit code where it may be that another rank is gone: that one is the reason."""
SETTLE_S = 1.0
"""How much later than a broken connection the end of a process may be seen."""


class WorkerLostError(Exception):
    """A rank is gone, and the others can do nothing without it."""


class RankProcesses:
    """All ranks but this one, which leads them; none if the settings say so.

    lost  says in a sentence which of them is gone that should not be
    told  whether they were told to end
    """

    def __init__(self, settings: Settings) -> None:
        self.lost: str | None = None
        self.told = False
        self._ending = False
        # Who is alone meets nobody, and may have nowhere to write.
        self._folder = Path(tempfile.mkdtemp(prefix="kvtide-")) if settings.ranks > 1 else None
        self._workers = [self._started(rank, settings) for rank in range(1, settings.ranks)]
        self._watchers = [
            threading.Thread(target=self._watch, args=each, daemon=True)
            for each in enumerate(self._workers, 1)
        ]
        for watcher in self._watchers:
            watcher.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for those that were told to end; others end now."""
        self._ending = True
        deadline = time.monotonic() + (END_S if self.told else 0.0)
        for worker in self._workers:
            try:
                worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        for watcher in self._watchers:
            watcher.join(1.0)
        if self.told:
            leave_ranks()  # Else somebody may still wait there for a rank that is gone.
        self._clear_up()

    def _clear_up(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _started(self, rank: int, settings: Settings) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        words = {"rank": rank, "folder": str(self._folder), "settings": asdict(settings)}
        assert worker.stdin is not None
        with suppress(BrokenPipeError):  # Whoever watches it will say how it ended.
            print(json.dumps(words), file=worker.stdin, flush=True)
        return worker

    def topology(self, settings: Settings) -> tuple[Settings, RankTopology]:
        """The leader's, when all are there."""
        return take_seat(LEADER, self._folder, settings)

    def settle(self) -> None:
        """Something is wrong. If a worker is the reason, it is known by now, or in a moment."""
        deadline = time.monotonic() + SETTLE_S
        while self._workers and self.lost is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def check(self) -> None:
        """Raises if a worker is gone."""
        self.settle()
        if self.lost is not None:
            raise WorkerLostError(self.lost)

    def _watch(self, rank: int, worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        said = worker.stdout.read().strip()
        code = worker.wait()
        if code == CUT_OFF:
            time.sleep(SETTLE_S / 4)
        if self._ending or self.told:
            return
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        lost = f"rank {rank} {how}{': ' + said if said else ''}; all ranks end with it"
        self.lost = self.lost or lost
        time.sleep(GRACE_S)
        if not self._ending:
            print(f"kvtide serve: {self.lost}", file=sys.stderr, flush=True)
            self._clear_up()
            os._exit(1)


def take_seat(rank: int, folder: Path | None, settings: Settings) -> tuple[Settings, RankTopology]:
    """Meet the others: the settings of this rank, and its topology. Alone there is nobody to
    meet."""
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


def outlive_nobody(words: IO[str], folder: Path) -> None:
    """End this process when the leader is gone, and not by the signals that it is sent.

    A leader that was killed has left the folder in which they met.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)

    def wait() -> None:
        words.read()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def freeze() -> None:
    """What is here stays: to look for garbage in it would stop an engine for 70 ms at times."""
    gc.collect()
    gc.freeze()
