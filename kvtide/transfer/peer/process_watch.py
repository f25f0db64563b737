"""Is a process of this machine still there? Asked of the kernel, so that the answer is final.

A process that is gone writes no more, not even by copies that it had queued on a GPU: the kernel
closes its devices before it reports the end. A frozen process is there.
"""

from __future__ import annotations

import os
import select
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

_PROC = Path("/proc")


class OtherMachineError(ValueError):
    """A process that cannot be seen from here. The message says why."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process by more than its number, which the kernel uses again.

    boot       the machine, and that it was not started anew
    namespace  the PID namespace: containers have their own
    started    when the process began, in the kernel's ticks
    """

    boot: str
    namespace: int
    pid: int
    started: int

    @classmethod
    def own(cls) -> Self:
        return cls(*_here(), os.getpid(), _started(os.getpid()))

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Self:
        return cls(
            str(body["boot"]), int(body["namespace"]), int(body["pid"]), int(body["started"])
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class ProcessWatch:
    """Raises OtherMachineError for a process of another machine, container, or of the past."""

    def __init__(self, process: ProcessIdentity) -> None:
        boot, namespace = _here()
        if process.boot != boot:
            raise OtherMachineError("the process runs on another machine")
        if process.namespace != namespace:
            raise OtherMachineError(
                "the process runs in another PID namespace; start both containers with a common "
                "one (--pid)"
            )
        self.process = process
        self._fd: int | None = None
        try:
            fd = os.pidfd_open(process.pid)
        except OSError as error:
            raise OtherMachineError(f"process {process.pid} is gone ({error.strerror})") from error
        # The number may have been used again before it was opened, and not since.
        if _started(process.pid) != process.started:
            os.close(fd)
            raise OtherMachineError(f"process {process.pid} is gone, and another has its number")
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def alive(self) -> bool:
        """False from the moment on at which the process can write no more."""
        return self._fd is not None and not self._poll.poll(0)

    def fileno(self) -> int:
        """Readable when the process is gone, for an event loop."""
        assert self._fd is not None, "the watch is closed"
        return self._fd

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _here() -> tuple[str, int]:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return boot, (_PROC / "self/ns/pid").stat().st_ino


def _started(pid: int) -> int:
    """0 if there is no such process."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
