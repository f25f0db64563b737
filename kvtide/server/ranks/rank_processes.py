"""The processes of a server with several ranks: how they start, meet and exit.

    kvtide serve --tp 2            rank 0: HTTP, and the leader
        └─ python -m … worker      rank 1: applies the leader's commands

The leader starts the workers and sends each its rank and settings in one line. The ranks meet at a
file in a folder that only this user can read, and each worker has a channel to the leader.

| what happens        | is noticed by                                    | then            |
|---------------------|--------------------------------------------------|-----------------|
| a worker exits      | the pipe from its standard output ends           | the server ends |
| a worker freezes    | no heartbeat for `rank_timeout_seconds`          | the server ends |
| a step does not end | `StepWatch`, after `step_timeout_seconds`        | the server ends |
| the leader freezes  | no heartbeat for `rank_timeout_seconds`          | workers exit    |
| the leader dies     | the pipe to a worker's standard input ends       | workers exit    |

A worker reports a failure on its standard output and ignores signals, which the leader handles.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
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
from kvtide.server.ranks.rank_channels import MeetingPlace, RankChannels
from kvtide.server.ranks.step_watch import StepClock, StepWatch, StuckStep
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
STUCK_SETTLE_S = 2.0
"""Reports of one stuck step arrive within this time."""
JOIN_S = 600.0
"""How long the leader waits for the other ranks to come."""
_POLL_S = 0.05
_LOOPBACK = "127.0.0.1"


class WorkerLostError(Exception):
    """A rank has exited, and the others cannot go on without it."""


class RankProcesses:
    """The workers: all ranks but the leader, which is this process.

    lost     the sentence about a rank that exited by itself, froze, or does not end a step
    closing  whether the workers have been sent their last command
    """

    def __init__(self, settings: Settings) -> None:
        self.lost: str | None = None
        self.closing = False
        self._exiting = False
        self._stuck: dict[int, StuckStep] = {}
        self._step_limit_s = settings.step_timeout_seconds
        self._watch_of_steps: StepWatch | None = None
        # A single rank needs no meeting folder, and may have nowhere to write one.
        self._folder = Path(tempfile.mkdtemp(prefix="kvtide-")) if settings.ranks > 1 else None
        self._channels: RankChannels | None = None
        others = range(LEADER + 1, settings.ranks)
        if others:
            place = MeetingPlace(_LOOPBACK, 0, secrets.token_bytes(32))
            silence_s = settings.rank_timeout_seconds
            self._channels = RankChannels(place, others, silence_s, self._hear_stuck, self._miss)
        self._workers = {rank: self._start(rank, settings) for rank in others}
        self._watchers = [
            threading.Thread(target=self._watch, args=each, daemon=True)
            for each in self._workers.items()
        ]
        for watcher in self._watchers:
            watcher.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for workers that are closing; kill the others."""
        self._exiting = True
        deadline = time.monotonic() + (EXIT_S if self.closing else 0.0)
        for worker in self._workers.values():
            try:
                worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        for watcher in self._watchers:
            watcher.join(1.0)
        if self._watch_of_steps is not None:
            self._watch_of_steps.close()
        if self._channels is not None:
            self._channels.close(max(0.0, deadline - time.monotonic()))
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
        assert worker.stdin is not None and self._channels is not None
        config = {
            "rank": rank,
            "folder": str(self._folder),
            "meeting": self._channels.place.to_json(),
            "settings": asdict(settings),
        }
        with suppress(BrokenPipeError):  # Its watcher reports how it exited.
            print(json.dumps(config), file=worker.stdin, flush=True)
        return worker

    def topology(self, settings: Settings) -> tuple[Settings, RankTopology]:
        """The leader's settings and topology, once all ranks have joined."""
        self._await_ranks()
        return join_topology(LEADER, self._folder, settings)

    def _await_ranks(self) -> None:
        """Wait until every rank has a channel."""
        deadline = time.monotonic() + JOIN_S
        while self._channels is not None and (missing := self._channels.missing(_POLL_S)):
            if self.lost is not None:
                raise WorkerLostError(self.lost)
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing))
                raise WorkerLostError(f"ranks {ranks} have not come within {JOIN_S:.0f} s")

    def settle(self) -> None:
        """After an error, wait until a lost worker is noticed, if one is the cause."""
        deadline = time.monotonic() + SETTLE_S
        while self._workers and self.lost is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def check(self) -> None:
        """Raise `WorkerLostError` if a worker is lost."""
        self.settle()
        if self.lost is not None:
            raise WorkerLostError(self.lost)

    # -- losing a rank ----------------------------------------------------------------------

    def watch_steps(self, clock: StepClock) -> None:
        """Notice steps of the leader that do not end; workers report theirs."""
        if self._workers:
            limit_s = self._step_limit_s
            self._watch_of_steps = StepWatch(
                clock, limit_s, lambda step: self._hear_stuck(LEADER, step)
            )

    def _watch(self, rank: int, worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        reason = worker.stdout.read().strip()
        code = worker.wait()
        if code == PEER_LOST:
            time.sleep(SETTLE_S / 4)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        self._lose(f"rank {rank} {how}{': ' + reason if reason else ''}; all ranks end with it")

    def _miss(self, rank: int, reason: str, blameless: bool) -> None:
        """A channel has closed: the process has exited, which its watcher reports, or froze."""
        with suppress(subprocess.TimeoutExpired):
            self._workers[rank].wait(SETTLE_S)
            return
        self._lose(f"rank {rank}: {reason}; all ranks end with it")

    def _hear_stuck(self, rank: int, step: StuckStep) -> None:
        self._stuck[rank] = step
        if len(self._stuck) == 1:
            threading.Timer(STUCK_SETTLE_S, self._lose_stuck).start()

    def _lose_stuck(self) -> None:
        """All ranks wait for the one whose step does not end."""
        stuck = sorted(self._stuck.items(), key=lambda found: found[1].waits)
        rank, step = stuck[0]
        what = "waits for another rank" if step.waits else "is"
        self._lose(
            f"rank {rank} {what} in {step.place}, in a step of {step.seconds:.0f} s; "
            "all ranks end with it"
        )

    def _lose(self, sentence: str) -> None:
        if not self._exiting and not self.closing:
            self.lost = self.lost or sentence
            threading.Thread(target=self._exit_late, daemon=True).start()

    def _exit_late(self) -> None:
        time.sleep(GRACE_S)
        if not self._exiting:
            print(f"kvtide serve: {self.lost}", file=sys.stderr, flush=True)
            self._remove_folder()
            for worker in self._workers.values():
                worker.kill()  # A frozen one would not notice the leader's end.
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
