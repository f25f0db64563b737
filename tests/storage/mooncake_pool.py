"""A real pool for tests: its master and its members are processes of their own.

The library is native: what uses it runs apart, where it can crash or hang without taking the tests
with it. Whatever a test starts ends with it, stopped processes too.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtide.storage import open_store
from kvtide.storage.mooncake import MooncakeStore
from tests.processes import free_port, freeze

ROOT = Path(__file__).resolve().parents[2]
REMEDY = "run ./check once, or: pip install -e '.[mooncake]' and apt-get install libibverbs1"
LEASE_MS = 10_000
CLIENT_TTL_S = 3


def apart(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test in a process of its own."""

    @functools.wraps(test)
    def run() -> None:
        Apart(f"from {test.__module__} import {test.__name__} as t; t.__wrapped__()").finish()

    return run


class Apart:
    """Code in a process of its own. Everything that it started ends with it."""

    def __init__(self, code: str) -> None:
        # A file, not a pipe: what the process started may hold it open for longer.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def finish(self) -> None:
        try:
            status: object = self._process.wait(60)
        except subprocess.TimeoutExpired:
            status = "none within a minute"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.seek(0)
        output = self._output.read().decode(errors="replace")
        assert status == 0, f"exit status {status}\n{output[-6000:]}"


class Process:
    """Something that can be killed, stopped and let go on."""

    process: subprocess.Popen[str]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        freeze(self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Master(Process):
    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def start(self) -> None:
        found = importlib.util.find_spec("mooncake")
        assert found is not None and found.origin is not None, f"no mooncake_master; {REMEDY}"
        self.process = subprocess.Popen(
            [
                Path(found.origin).parent / "mooncake_master",
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self.port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={free_port()}",
                f"--default_kv_lease_ttl={LEASE_MS}",
                f"--client_ttl={CLIENT_TTL_S}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._await()

    def _await(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"mooncake_master does not start; {REMEDY}"
            try:
                return socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.05)
        raise AssertionError("mooncake_master does not listen")

    def url(self, segment: str = "0", **settings: object) -> str:
        settings = {"segment": segment, "timeout": 2, **settings}
        text = "&".join(f"{name}={value}" for name, value in settings.items())
        return f"mooncake://127.0.0.1:{self.port}?{text}"

    def open(self, segment: str = "0", **settings: object) -> MooncakeStore:
        store = open_store(self.url(segment, **settings), bytes(32))
        assert isinstance(store, MooncakeStore)
        return store


class Member(Process):
    """A process that gives memory to the pool."""

    def __init__(self, master: Master, segment: str = "64MB") -> None:
        code = (
            "import sys; from kvtide.storage import open_store\n"
            f"store = open_store({master.url(segment)!r}, bytes(32))\n"
            "print('ready', flush=True); sys.stdin.read()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"


@contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < seconds, f"took {took:.2f} s, not {seconds} s"


def eventually(holds: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)


def key() -> bytes:
    return secrets.token_bytes(32)


def content(size: int = 100_000) -> memoryview:
    return memoryview(secrets.token_bytes(size))
