"""Dynamo's indexer as a process, a real consumer of KV events, asked over HTTP; a lossy route."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import zmq

from kvtide.index import DEFAULT_NAMESPACE, Namespace
from tests.processes import free_port
from tests.server.installing import installed

PACKAGE = "ai-dynamo-runtime==1.6.1"
MODEL = "tiny"
MAX_S = 60.0


def install() -> Path:
    return installed("indexer", [PACKAGE])


class Indexer:
    """`python -m dynamo.indexer`. Leaving the context kills it."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self._folder, self._port = folder, free_port()
        self._log = logs / f"indexer-{self._port}.log"

    def __enter__(self) -> Self:
        environment = {**os.environ, "PYTHONPATH": str(self._folder)}
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self._port)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--threads", "1"], env=environment, stdout=log, stderr=log
            )
        deadline = time.monotonic() + MAX_S
        while not self._is_up():
            assert self._process.poll() is None and time.monotonic() < deadline, self.printed
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)

    @property
    def printed(self) -> str:
        return self._log.read_text()

    def _is_up(self) -> bool:
        try:
            self._ask("/health")
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def register(self, instance: int, endpoint: str, replay: str, block_tokens: int) -> None:
        """Follow a server's events."""
        self._ask(
            "/register",
            instance_id=instance,
            endpoint=endpoint,
            replay_endpoint=replay,
            model_name=MODEL,
            block_size=block_tokens,
        )

    def cached(
        self, instance: int, tokens: Sequence[int], namespace: Namespace = DEFAULT_NAMESPACE
    ) -> tuple[int, int, int]:
        """The prompt's cached tokens: on the device; then on the host; then in storage."""
        body: dict[str, Any] = {"token_ids": list(tokens), "model_name": MODEL}
        if namespace.adapter:
            body["lora_name"] = namespace.adapter
        if namespace.cache_salt:
            body["cache_salt"] = namespace.cache_salt
        found = json.loads(self._ask("/query", **body))["instances"].get(str(instance))
        return (found["gpu"], found["cpu"], found["disk"]) if found else (0, 0, 0)

    def _ask(self, path: str, **body: Any) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            json.dumps(body).encode() if body else None,
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            text: str = answer.read().decode()
            return text


class LossyRoute:
    """Passes on what a publisher sends to all, and drops it while it `loses`."""

    def __init__(self, endpoint: str) -> None:
        self.loses = False
        self.dropped = 0
        self._context = zmq.Context()
        self._from = self._context.socket(zmq.SUB)
        self._from.subscribe("")
        self._from.connect(endpoint)
        self._to = self._context.socket(zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self._to.bind_to_random_port('tcp://127.0.0.1')}"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(10)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._from.poll(20):
                frames = self._from.recv_multipart()
                if self.loses:
                    self.dropped += 1
                else:
                    self._to.send_multipart(frames)
