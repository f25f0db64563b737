"""A prefill and a decode server that know of each other by a router's requests alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Self

from tests.processes import free_port
from tests.server.handoff.server_pairs import COMMON, ServerProcess
from tests.server.serving import PAGE

NAMED = (*COMMON, "--name", "tiny")
_DECODE = ("--role", "decode", "--handoff-min-tokens", str(PAGE))


class RoutedPair:
    """Both servers, and others that a test adds. A prefill server that is started again keeps its
    ports."""

    def __init__(self, model: Path) -> None:
        self._words = (str(model), *NAMED)
        self._started: list[ServerProcess] = []
        self.handoff_port = free_port()

    def __enter__(self) -> Self:
        self.prefill = self._start(*_prefill(self.handoff_port))
        self.decode = self._start(*_DECODE)
        for server in self._started:
            assert server.client.get("/health").status == 200
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._started:
            server.close()

    def _start(self, *words: str, port: int | None = None) -> ServerProcess:
        self._started.append(ServerProcess((*self._words, *words), {}, port=port))
        return self._started[-1]

    def restart_prefill(self) -> None:
        self.prefill = self._start(*_prefill(self.handoff_port), port=self.prefill.port)

    def add_prefill(self) -> tuple[str, int]:
        """One more prefill server: its URL and its port for handoffs."""
        port = free_port()
        server = self._start(*_prefill(port))
        assert server.client.get("/health").status == 200
        return server.url, port

    def add_decode(self) -> ServerProcess:
        """One more decode server, which asks the prefill server by itself."""
        return self._start(*_DECODE, "--prefill-from", self.prefill.url)

    @property
    def urls(self) -> tuple[list[tuple[str, int]], str]:
        """As a router is given them."""
        return [(self.prefill.url, self.handoff_port)], self.decode.url

    def ended(self) -> Counter[str]:
        """Handoffs that are over on the decode side, by their last state."""
        return Counter(self.decode.handoff()["incoming_ended"])

    def settled(self) -> None:
        self.prefill.settled()
        self.decode.settled()


def _prefill(handoff_port: int) -> tuple[str, ...]:
    return ("--role", "prefill", "--handoff-port", str(handoff_port))
