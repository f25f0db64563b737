"""A prefill and a decode server, each a process of its own, that may be killed and started anew."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from tests.processes import free_port, freeze
from tests.server.serving import PAGE, ForkedChild
from tests.server.talking import Client, Open

Json = dict[str, Any]
Wanted = Callable[[Json], object]

PATH = "/v1/completions"
DEADLINE_S = 60.0
POLL_S = 0.005
CLOSE = 1e-5
"""How far logprobs of tensor ranks may be from those of one rank."""
PATIENCE_S = 300.0
"""How long a server may take until it listens."""
COMMON = ("--deterministic", "--page-tokens", str(PAGE), "--storage", "none")
LOST = (http.client.HTTPException, OSError)
"""What a client sees of a server that is gone."""


class ServerProcess:
    """`kvtide serve`, on a port that a later process takes over."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        before: str = "",
        port: int | None = None,
    ) -> None:
        self.port = free_port() if port is None else port
        words = (*arguments, "--port", str(self.port))
        self.child = ForkedChild(words, environment, before, patience_s=PATIENCE_S)
        self.child.__enter__()
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = self.child.client()
        return self._client

    @property
    def pid(self) -> int:
        return self.child.process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def runs(self) -> bool:
        return self.child.process.poll() is None

    def report(self) -> Json:
        """What `/admin/cache` says."""
        found: Json = self.client.get("/admin/cache").json()
        return found

    def handoff(self) -> Json:
        found: Json = self.report()["handoff"]
        return found

    def until(self, wanted: Wanted, within_s: float = DEADLINE_S) -> Json:
        """The first report of the cache that is as wanted."""
        deadline = time.monotonic() + within_s
        while not wanted(report := self.report()):
            assert time.monotonic() < deadline, f"never came to be: {report}\n{self.child.printed}"
            time.sleep(POLL_S)
        return report

    def until_state(self, state: str, count: int = 1) -> Json:
        """Wait for so many open handoffs of a state."""
        return self.until(lambda report: report["handoff"]["incoming"].get(state, 0) == count)

    def settled(self) -> Json:
        """The report once nothing runs, waits, moves or is held for a peer."""
        report = self.until(_is_quiet)
        assert report["violations"] == []
        return report

    def freeze(self) -> None:
        freeze(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Without a warning; a frozen one too."""
        self.child.process.kill()
        self.child.process.wait(10)

    def close(self) -> None:
        self.child.__exit__(None, None, None)


def _is_quiet(report: Json) -> bool:
    requests, handoff = report["requests"], report["handoff"]
    busy = (requests["running"], requests["waiting"], report["in_flight"], handoff["outgoing"])
    held = (handoff["incoming"], handoff["quarantined"]["handoffs"])
    return not any((*busy, *held)) and all(
        pool["capacity_pages"] - pool["free_pages"] == pool["resident_pages"]
        for pools in report["tiers"].values()
        for pool in pools.values()
    )


@dataclass
class ServerPair:
    """Two servers of one model. Either may be started again, the prefill server under its URL.

    before  Python that runs in both processes before they serve
    """

    model: Path
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    common: tuple[str, ...] = COMMON
    environment: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    min_tokens: int = 16

    def __enter__(self) -> Self:
        self.prefill = self._start_prefill()
        self.decode = self._start_decode()
        self.listening()
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self.decode, self.prefill):
            server.close()

    def _start_prefill(self, port: int | None = None) -> ServerProcess:
        words = (str(self.model), *self.common, "--role", "prefill", *self.prefill_flags)
        return ServerProcess(words, self.environment, self.before, port)

    def _start_decode(self) -> ServerProcess:
        words = (str(self.model), *self.common, "--role", "decode", *self.decode_flags)
        minimum = ("--handoff-min-tokens", str(self.min_tokens))
        peer = ("--prefill-from", self.prefill.url)
        return ServerProcess((*words, *minimum, *peer), self.environment, self.before)

    def listening(self) -> None:
        """Wait until both do."""
        for server in (self.prefill, self.decode):
            assert server.client.get("/health").status == 200

    def restart_prefill(self) -> None:
        self.prefill.close()
        self.prefill = self._start_prefill(self.prefill.port)
        self.listening()

    def restart_decode(self) -> None:
        self.decode.close()
        self.decode = self._start_decode()
        self.listening()

    def restore(self) -> None:
        """Start what is gone, and thaw what is frozen."""
        for server in (self.prefill, self.decode):
            if server.runs:
                server.thaw()
        if not self.prefill.runs:
            self.restart_prefill()
        if not self.decode.runs:
            self.restart_decode()

    def settled(self) -> tuple[Json, Json]:
        return self.prefill.settled(), self.decode.settled()

    def until_handed_over(self, new_prompt: Callable[[], Sequence[int]]) -> None:
        """A prefill server that was started anew is found, wherever it listens now."""
        for _ in range(200):
            if handoff_of(ask(self.decode.client, new_prompt())).get("state") == "decoding":
                return
        raise AssertionError(f"{self.decode.handoff()}\n{self.decode.child.printed}")

    def asking(self, prompt: Sequence[int] | str, **fields: Any) -> Open:
        """Ask the decode server, and do not wait: the client may read the answer or hang up."""
        return self.decode.client.start(PATH, **body_of(prompt, **fields))


def body_of(prompt: Sequence[int] | str, **fields: Any) -> Json:
    return {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 3,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_cached_tokens_details": True,
        **fields,
    }


def ask(client: Client, prompt: Sequence[int] | str, **fields: Any) -> Json:
    return read(client.start(PATH, **body_of(prompt, **fields)))


def read(request: Open) -> Json:
    """The answer to a request, which must succeed."""
    response = request.answer()
    body = response.read()
    request.leave()
    assert response.status == 200, body
    found: Json = json.loads(body)
    return found


def answer(found: Json) -> str:
    """All that a client may not be able to tell apart."""
    return json.dumps(found["choices"], sort_keys=True)


def assert_close(found: Json, wanted: Json) -> None:
    """The same tokens, and logprobs as of sums in another order."""
    for ours, theirs in zip(found["choices"], wanted["choices"], strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
        here, there = (each["logprobs"]["token_logprobs"] for each in (ours, theirs))
        assert here == pytest.approx(there, abs=CLOSE)


def handoff_of(found: Json) -> Json:
    """The one handoff of a response; empty if the prompt was not offered to another server."""
    handoffs: list[Json] = found["usage"]["handoffs"]
    assert len(handoffs) <= 1
    return handoffs[0] if handoffs else {}
