"""Real servers for tests: started on a free port, frozen, killed and started again.

`./check` installs them. A test that needs one which is not there fails and says so.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import obstore
from obstore.exceptions import GenericError
from obstore.store import S3Store

from tests.processes import free_port, freeze

START_S = 60.0


def program(name: str) -> str:
    """A program of the virtual environment that runs the tests, or else of this machine."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is not installed: run ./check, which installs it, or do it yourself"
    return found


class Server:
    """A process that listens on a port. Starting it again keeps port, folder and arguments."""

    def __init__(self, folder: Path, *command: str, port: int, env: dict[str, str] | None = None):
        self.folder, self.port = folder, port
        self._command, self._env = command, {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(
            self._command, cwd=self.folder, env=self._env, stdout=self._log, stderr=self._log
        )
        deadline = time.monotonic() + START_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                log = (self.folder / "log").read_text("utf-8", "replace")[-2000:]
                raise AssertionError(f"{self._command[0]} does not listen; its log:\n{log}")
            time.sleep(0.02)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def freeze(self) -> None:
        freeze(self._process.pid)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self._log.close()


def redis(folder: Path, *arguments: str) -> Server:
    """A Redis that keeps nothing when it ends, unless the arguments say so."""
    port = free_port()
    command = (program("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--save", "")
    return Server(folder, *command, *arguments, port=port)


def s3(folder: Path, bucket: str, key: str, secret: str) -> Server:
    """rclone as an S3 server. Objects are files in `folder/buckets/<bucket>`."""
    (folder / "buckets" / bucket).mkdir(parents=True)
    return _rclone(folder, str(folder / "buckets"), key, secret)


def s3_in_memory(folder: Path, bucket: str, key: str, secret: str) -> Server:
    """The same with objects in its memory, started.

    With files it may list a folder while the first objects are being written to it, and then
    breaks off whenever it is asked for one of them.
    """
    server = _rclone(folder, ":memory:", key, secret)
    server.start()
    # The name of an object in a virtual-hosted bucket is the path: the bucket's own, this time.
    root = S3Store(
        "any",
        endpoint=f"http://127.0.0.1:{server.port}",
        virtual_hosted_style_request=True,
        client_options={"allow_http": True},
        access_key_id=key,
        secret_access_key=secret,
    )
    with suppress(GenericError):  # It is made, but the answer has no ETag as an object's would.
        obstore.put(root, bucket, b"")
    return server


def _rclone(folder: Path, remote: str, key: str, secret: str) -> Server:
    port = free_port()
    command = (program("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}")
    keys = ("--auth-key", f"{key},{secret}", remote)
    return Server(folder, *command, *keys, port=port, env={"RCLONE_CONFIG": os.devnull})


class Scripted:
    """A server of one's own: for every connection, the script is called with its socket."""

    def __init__(self, script) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(one,), daemon=True).start()

    def _serve(self, one: socket.socket) -> None:
        try:
            self._script(one)
        except OSError:
            pass
        finally:
            one.close()

    def close(self) -> None:
        self._listener.close()
