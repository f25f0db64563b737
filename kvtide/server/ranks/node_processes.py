"""`kvtide serve --node 1`: the ranks of a machine that is not the leader's.

The ranks connect to the leader by themselves. This process starts them, passes signals on to the
leader, which drains all ranks, and exits with them.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from kvtide.server.ranks.rank_nodes import RankNodes
from kvtide.server.ranks.worker_processes import PEER_LOST, WorkerProcesses
from kvtide.server.settings import Settings

PATIENT_SIGNALS = 2
"""So many signals are passed on; one more ends the ranks of this node at once."""
EXIT_S = 10.0
"""After a rank of this node has failed, the others get this long to exit."""
_POLL_S = 0.1


class NodeProcesses:
    """The workers of this node, up to their end."""

    def __init__(self, settings: Settings, nodes: RankNodes) -> None:
        self._failures: list[tuple[bool, str]] = []
        self._signals = 0
        self._workers = WorkerProcesses(nodes.ranks, settings, nodes.place, self._note_exit)

    def run(self) -> int:
        """The exit code: 0 if all ranks have ended as the leader asked."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        while not self._workers.wait(_POLL_S):
            if self._failures:
                self._workers.close(EXIT_S)
        if not self._failures:
            return 0
        # A rank that lost its connection to another one is not the cause.
        _, sentence = min(self._failures)
        print(f"kvtide serve: {sentence}", file=sys.stderr, flush=True)
        return 1

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self._signals += 1
        if self._signals <= PATIENT_SIGNALS:
            self._workers.pass_on(number)
        else:
            self._workers.kill()

    def _note_exit(self, rank: int, code: int, how: str) -> None:
        if code != 0:
            self._failures.append((code == PEER_LOST, f"rank {rank} {how}"))
