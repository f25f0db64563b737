"""The worker processes of this machine: started, watched, ended.

A worker gets its rank, its settings and the meeting place in one line on its standard input, and
exits when that ends. It prints the reason of a failure on its standard output. It ignores signals,
which the process that started it handles.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict

from kvtide.server.ranks.rank_channels import MeetingPlace
from kvtide.server.settings import Settings

WORKER = "kvtide.server.ranks.rank_worker"
PEER_LOST = 3
"""A worker's exit code after a broken connection: the rank that exited first is the cause."""

OnExit = Callable[[int, int, str], None]
"""With a worker's rank, exit code, and how it exited as the end of a sentence."""


class WorkerProcesses:
    """`on_exit` is called for each on a thread of its own."""

    def __init__(
        self, ranks: Iterable[int], settings: Settings, place: MeetingPlace, on_exit: OnExit
    ) -> None:
        self._on_exit = on_exit
        self._processes = {rank: _start(rank, settings, place) for rank in ranks}
        self._watchers = [
            threading.Thread(target=self._watch, args=each, daemon=True)
            for each in self._processes.items()
        ]
        for watcher in self._watchers:
            watcher.start()

    def __contains__(self, rank: int) -> bool:
        return rank in self._processes

    def has_exited(self, rank: int, within_s: float) -> bool:
        try:
            self._processes[rank].wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self, timeout_s: float) -> bool:
        """Whether all have exited within this time, and every exit has been reported."""
        deadline = time.monotonic() + timeout_s
        for watcher in self._watchers:
            watcher.join(max(0.0, deadline - time.monotonic()))
        return not any(watcher.is_alive() for watcher in self._watchers)

    def pass_on(self, signal_number: int) -> None:
        """Have a worker tell the leader of a signal."""
        pipe = next(iter(self._processes.values())).stdin
        assert pipe is not None
        with suppress(OSError, ValueError):
            print(signal_number, file=pipe, flush=True)

    def close(self, timeout_s: float) -> None:
        """Wait so long for all to exit; kill the rest."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.wait(1.0)

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _watch(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        reason = process.stdout.read().strip()
        code = process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        self._on_exit(rank, code, how + (f": {reason}" if reason else ""))


def _start(rank: int, settings: Settings, place: MeetingPlace) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    config = {"rank": rank, "meeting": place.to_json(), "settings": asdict(settings)}
    with suppress(BrokenPipeError):  # Its watcher reports how it exited.
        print(json.dumps(config), file=process.stdin, flush=True)
    return process
