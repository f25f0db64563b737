"""Processes that tests start: free ports for them, freezing them, and what identifies them."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

from kvtide.transfer.peer.process_watch import ProcessIdentity

_MAX_S = 60.0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def freeze(pid: int) -> None:
    """Stop a process. The signal returns before its threads stop, and a running thread may still
    answer, so this waits for the last one."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _MAX_S
    while _states(pid) != {"T"}:
        assert time.monotonic() < deadline, f"threads still run: {_states(pid)}"
        time.sleep(0.001)


def identity_of(pid: int) -> ProcessIdentity:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return replace(ProcessIdentity.own(), pid=pid, started=int(stat[19]))


def _states(pid: int) -> set[str]:
    """Of its threads."""
    lines = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {line.rpartition(")")[2].split()[0] for line in lines}
