"""Processes that tests start: free ports for them, and freezing them."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

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


def _states(pid: int) -> set[str]:
    """Of its threads."""
    lines = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {line.rpartition(")")[2].split()[0] for line in lines}
