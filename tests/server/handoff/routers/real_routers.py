"""Real routers: installed once into a folder of their own, and started in front of servers.

Their wheels take 300 MB, so only tests under `--all` use them. The quick run replays what they send
(`requests`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.processes import free_port
from tests.server.installing import installed
from tests.server.talking import Client

BESIDE = ("fastapi==0.162.7", "orjson==3.13.0", "setproctitle==1.3.8", "uvicorn==0.54.0")
"""What two of the routers import at their start, with what that needs."""
MAX_S = 60.0
HASTY = (
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "1"),
    *("--cb-timeout-duration-secs", "1"),
)
"""Notice within seconds that a server is gone, or back."""


@dataclass(frozen=True)
class RouterKind:
    """One of the routers.

    divides    the flag for prefill and decode servers
    ready      answers 200 once all workers are known
    bootstrap  it names rooms to both sides at once, and gets the port for handoffs
    """

    package: str
    version: str
    divides: str
    ready: str
    bootstrap: bool

    def __str__(self) -> str:
        return self.package

    @property
    def module(self) -> str:
        return f"{self.package.replace('-', '_')}.launch_router"


KINDS = (
    RouterKind("smg", "1.13.0", "--pd-disaggregation", "/readiness", bootstrap=True),
    RouterKind("sglang-router", "0.3.2", "--pd-disaggregation", "/readiness", bootstrap=True),
    RouterKind("vllm-router", "0.1.16", "--vllm-pd-disaggregation", "/health", bootstrap=False),
)


def install() -> Path:
    """The folder with the routers; made if it is not there."""
    return installed("routers", [f"{kind.package}=={kind.version}" for kind in KINDS], BESIDE)


class Router:
    """A router's process. Leaving the context kills it."""

    def __init__(self, folder: Path, kind: RouterKind, logs: Path, workers: Sequence[str]) -> None:
        self.kind, self._port = kind, free_port()
        self._log = logs / f"{kind}-{self._port}.log"
        self._folder = folder
        self._command = [
            *(sys.executable, "-m", kind.module, "--host", "127.0.0.1", "--port", str(self._port)),
            *("--prometheus-port", str(free_port()), *HASTY, *workers),
        ]

    @classmethod
    def divided(
        cls,
        folder: Path,
        kind: RouterKind,
        logs: Path,
        prefill: Sequence[tuple[str, int]],
        decode: str,
    ) -> Self:
        """In front of prefill servers, each with its port for handoffs, and of a decode server."""
        words = [kind.divides, "--policy", "round_robin"]
        for url, port in prefill:
            words += ["--prefill", url, *([str(port)] if kind.bootstrap else [])]
        return cls(folder, kind, logs, [*words, "--decode", decode])

    @classmethod
    def plain(
        cls,
        folder: Path,
        kind: RouterKind,
        logs: Path,
        urls: Sequence[str],
        policy: str = "round_robin",
    ) -> Self:
        """In front of servers that do all of a request themselves; they take turns by default."""
        return cls(folder, kind, logs, ["--policy", policy, "--worker-urls", *urls])

    def __enter__(self) -> Self:
        environment = {**os.environ, "PYTHONPATH": str(self._folder), "HF_HUB_OFFLINE": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # smg takes five seconds to end by itself.
        self._process.wait(10)

    def client(self) -> Client:
        """Waits until the router knows its workers."""
        client, deadline = Client("127.0.0.1", self._port), time.monotonic() + MAX_S
        while not self._is_ready(client):
            assert self._process.poll() is None, self.printed
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.05)
        return client

    def _is_ready(self, client: Client) -> bool:
        try:
            return client.get(self.kind.ready).status == 200
        except OSError:
            return False

    @property
    def printed(self) -> str:
        return self._log.read_text()
