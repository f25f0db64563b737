"""`kvtide` in processes that are forked from the server of `tests.worlds`, which has imported it.

Most of a command's start is importing torch. Tests of what a command does after its start do
without; others start it as a shell would.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

import torch

from kvtide.cli.main import main
from tests.worlds import forkserver


class ForkedCommand:
    """A process with the parts of `subprocess.Popen` that tests of servers use."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], before: str) -> None:
        context = forkserver()
        ours, theirs = context.Pipe(duplex=False)
        arguments = (list(words), dict(environment), before, theirs)
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.stderr = os.fdopen(os.dup(ours.fileno()), encoding="utf-8")
        ours.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("kvtide", timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(
    words: Sequence[str], environment: Mapping[str, str], before: str, errors: Connection
) -> None:
    os.dup2(errors.fileno(), 2)
    errors.close()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # It depends on the environment.
    torch.set_num_threads(1)
    exec(before, {})
    sys.exit(main(words))
