"""A prefill and a decode server in processes of their own, over shared memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.processes import free_port
from tests.server.serving import PAGE, Child, ForkedChild
from tests.server.talking import Client

COMMON = ("--deterministic", "--page-tokens", str(PAGE), "--storage", "none", "--name", "tiny")
MAX_S = 60.0
_DECODE = ("--port", "0", "--role", "decode", "--handoff-min-tokens", str(PAGE))


class Pair:
    """Both servers. The prefill server keeps its ports when it is started again."""

    def __init__(self, model: Path) -> None:
        self._model = str(model)
        self._ports = (free_port(), free_port())
        self.handoff_port = self._ports[1]
        self._children: dict[str, Child] = {}

    def __enter__(self) -> Self:
        self.start_prefill()
        self._children["decode"] = self._child(*_DECODE)
        self.prefill, self.decode = (self._children[s].client() for s in ("prefill", "decode"))
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.__exit__()

    def _child(self, *words: str) -> Child:
        return ForkedChild((self._model, *COMMON, *words)).__enter__()

    def start_prefill(self) -> None:
        self._children["prefill"] = self._child(*_prefill_words(*self._ports))

    def kill_prefill(self) -> None:
        self._children["prefill"].__exit__()

    def add_prefill(self) -> tuple[str, int]:
        """One more prefill server: its URL and its port for handoffs."""
        ports = (free_port(), free_port())
        child = self._child(*_prefill_words(*ports))
        self._children[f"prefill {len(self._children)}"] = child
        return url_of(child.client()), ports[1]

    def add_decode(self) -> Client:
        """One more decode server, which asks the prefill server by itself."""
        child = self._child(*_DECODE, "--prefill-from", url_of(self.prefill))
        self._children[f"decode {len(self._children)}"] = child
        return child.client()

    @property
    def urls(self) -> tuple[list[tuple[str, int]], str]:
        """As a router is given them."""
        return [(url_of(self.prefill), self.handoff_port)], url_of(self.decode)

    @property
    def prefill_pid(self) -> int:
        return self._children["prefill"].process.pid

    def said(self, side: str) -> str:
        return self._children[side].said

    # -- handoffs ---------------------------------------------------------------------------

    def ended(self) -> Counter[str]:
        """Handoffs that are over on the decode side, by their last state."""
        return Counter(self.decode.get("/admin/cache").json()["handoff"]["incoming_ended"])

    def settled(self, *sides: str) -> None:
        """Wait until nothing runs, waits, moves or is in quarantine; all must be as it should."""
        for side in sides or ("prefill", "decode"):
            client = self.prefill if side == "prefill" else self.decode
            report = until(client, is_quiet)
            assert report["violations"] == [], side


def _prefill_words(port: int, handoff_port: int) -> tuple[str, ...]:
    return ("--port", str(port), "--role", "prefill", "--handoff-port", str(handoff_port))


def is_quiet(report: dict[str, Any]) -> bool:
    """Whether nothing runs, waits, moves or is in quarantine, by a server's own report."""
    requests, handoff = report["requests"], report["handoff"]
    going_on = (requests["running"], requests["waiting"], report["in_flight"], handoff["outgoing"])
    quarantined = handoff["quarantined"]
    return not any((*going_on, sum(handoff["incoming"].values()), *quarantined.values()))


def until(client: Client, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first report of a server's cache that is as wanted."""
    deadline = time.monotonic() + MAX_S
    while not wanted(report := client.get("/admin/cache").json()):
        assert time.monotonic() < deadline, f"never came to be: {report}"
        time.sleep(0.01)
    return dict(report)


def url_of(client: Client) -> str:
    return f"http://{client.address}:{client.port}"
