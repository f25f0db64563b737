"""A server with several ranks, from the leader's side: how ranks start, meet and exit.

    kvtide serve --tp 2            rank 0: HTTP, and the leader
        └─ python -m … worker      rank 1: applies the leader's commands

The leader awaits the other ranks at the meeting place, which other nodes know by `--rendezvous`. It
starts those of its own machine. Each has a channel to the leader; then all join the process group.

| what happens        | is noticed by                                    | then            |
|---------------------|--------------------------------------------------|-----------------|
| a worker exits      | the pipe from its standard output, or its        | the server ends |
|                     | channel if it is on another machine              |                 |
| a worker freezes    | no heartbeat for `rank_timeout_seconds`          | the server ends |
| a step does not end | `StepWatch`, after `step_timeout_seconds`        | the server ends |
| the leader freezes  | no heartbeat for `rank_timeout_seconds`          | workers exit    |
| the leader dies     | the pipe to a worker's standard input ends, or   | workers exit    |
|                     | its channel                                      |                 |
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from typing import Self

from kvtide.engine import RankTopology
from kvtide.engine.rank_topology import LEADER, leave_ranks, open_store
from kvtide.server.ranks.rank_channels import RankChannels
from kvtide.server.ranks.rank_group import join_group
from kvtide.server.ranks.rank_nodes import RankNodes, difference, shared_settings
from kvtide.server.ranks.step_watch import StepClock, StepWatch, StuckStep
from kvtide.server.ranks.worker_processes import PEER_LOST, WorkerProcesses
from kvtide.server.setting_values import SettingsError
from kvtide.server.settings import Settings
from kvtide.transfer.peer.channel import ChannelError, WireMessage

EXIT_S = 10.0
"""Workers get this long to exit after the last command."""
GRACE_S = 5.0
"""The server gets this long to exit by itself after losing a worker: it may be waiting for it."""
SETTLE_S = 1.0
"""A process's exit may be noticed this much later than its broken connections."""
STUCK_SETTLE_S = 2.0
"""Reports of one stuck step arrive within this time."""
JOIN_S = 600.0
"""How long the leader waits for the other ranks to come, and they for the leader."""
_POLL_S = 0.05

log = logging.getLogger("kvtide")


class WorkerLostError(Exception):
    """A rank has exited, and the others cannot go on without it."""


class RankProcesses:
    """All ranks but the leader, which is this process; those of its machine are started here.

    lost     the sentence about a rank that exited by itself, froze, or does not end a step
    closing  whether the workers have been sent their last command
    """

    def __init__(self, settings: Settings) -> None:
        self.lost: str | None = None
        self.closing = False
        self._exiting = False
        self._settings = settings
        self._ranks: _OtherRanks | None = None
        self._stuck: dict[int, StuckStep] = {}
        self._watch: StepWatch | None = None
        if settings.ranks > 1:  # A single rank needs no port and no process.
            self._ranks = _OtherRanks(settings, RankNodes.of(settings), self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for workers that are closing; kill the others."""
        self._exiting = True
        if self._watch is not None:
            self._watch.close()
        if self._ranks is not None:
            self._ranks.close(EXIT_S if self.closing else 0.0)
        if self.closing:
            leave_ranks()  # Otherwise a thread may still wait there for a lost rank.

    def topology(self, settings: Settings) -> tuple[Settings, RankTopology]:
        """The leader's settings and topology, once all ranks have joined."""
        if self._ranks is None:
            return settings, RankTopology()
        self._await(self._ranks)
        place, store = self._ranks.channels.place, self._ranks.store
        return join_group(LEADER, settings, store, place.host, place.port)

    def _await(self, ranks: _OtherRanks) -> None:
        """Wait until every rank has a channel."""
        deadline, logged = time.monotonic() + JOIN_S, self._settings.nodes == 1
        while missing := ranks.channels.missing(_POLL_S):
            if self.lost is not None:
                raise WorkerLostError(self.lost)
            place, which = self._settings.rendezvous, ", ".join(map(str, missing))
            if time.monotonic() > deadline:
                raise WorkerLostError(f"rank {which} has not come within {JOIN_S:.0f} s")
            if not logged:
                log.info("waiting for rank %s at %s", which, place)
                logged = True

    def settle(self) -> None:
        """After an error, wait until a lost worker is noticed, if one is the cause."""
        deadline = time.monotonic() + SETTLE_S
        while self._ranks is not None and self.lost is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def check(self) -> None:
        """Raise `WorkerLostError` if a worker is lost."""
        self.settle()
        if self.lost is not None:
            raise WorkerLostError(self.lost)

    def watch_steps(self, clock: StepClock) -> None:
        """Notice steps of the leader that do not end; other ranks report theirs."""
        if self._ranks is not None:
            limit_s = self._settings.step_timeout_seconds
            self._watch = StepWatch(clock, limit_s, lambda step: self.on_stuck(LEADER, step))

    # -- losing a rank ----------------------------------------------------------------------

    def on_exit(self, rank: int, code: int, how: str) -> None:
        """A worker of this machine has exited."""
        if code == PEER_LOST:
            time.sleep(SETTLE_S / 4)
        self._lose(f"rank {rank} {how}; all ranks end with it")

    def on_lost(self, rank: int, reason: str, blameless: bool) -> None:
        assert self._ranks is not None, "it came to the meeting place"
        workers = self._ranks.workers
        if rank in workers and workers.has_exited(rank, SETTLE_S):
            return  # `on_exit` says how.
        if blameless:
            time.sleep(SETTLE_S / 4)
        self._lose(f"rank {rank}: {reason}; all ranks end with it")

    def on_signal(self, number: int) -> None:
        """As if it had been sent to this process."""
        os.kill(os.getpid(), number)

    def on_stuck(self, rank: int, step: StuckStep) -> None:
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
            if self._ranks is not None:
                self._ranks.workers.kill()  # A frozen one would not notice the leader's end.
            os._exit(1)


class _OtherRanks:
    """The meeting place, the ranks' channels, and the workers of this machine."""

    def __init__(self, settings: Settings, nodes: RankNodes, events: RankProcesses) -> None:
        self._shared = shared_settings(settings)
        others, silence_s = range(LEADER + 1, settings.ranks), settings.rank_timeout_seconds
        try:
            self.store, self._store_port = open_store(nodes.place.host)
            self.channels = RankChannels(nodes.place, others, silence_s, self._answer, events)
        except (ChannelError, OSError) as error:
            raise SettingsError(
                f"ranks cannot meet at {nodes.place.host}:{nodes.place.port} ({error}); "
                "--rendezvous is a free port of node 0"
            ) from None
        place, here = self.channels.place, nodes.ranks[1:]
        self.workers = WorkerProcesses(here, settings, place, events.on_exit)

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self.workers.close(timeout_s)
        self.channels.close(max(0.0, deadline - time.monotonic()))

    def _answer(self, hello: WireMessage) -> WireMessage:
        if (flaw := difference(self._shared, hello["settings"])) is not None:
            raise ChannelError(flaw)
        return {"store_port": self._store_port}


def freeze_gc() -> None:
    """Exempt all present objects from garbage collection, which would pause steps for 70 ms."""
    gc.collect()
    gc.freeze()
