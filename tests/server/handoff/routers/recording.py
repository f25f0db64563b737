"""Records what real routers make of clients' requests (`requests`).

python -m tests.server.handoff.routers.recording    # write requests.json
"""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from tests.server.handoff.routers.real_routers import KINDS, Router, RouterKind, install
from tests.server.handoff.routers.requests import CASES, RECORDED, Case, ask
from tests.server.handoff.routers.routed_pair import RoutedPair
from tests.server.serving import save_model, save_tokenizer
from tests.server.talking import Client, Json

MAX_S = 60.0
Record = Callable[[Case], dict[str, Json]]
"""The bodies that a router sends for a case, with marks, by side."""


class RecordingProxy:
    """Hands requests on to a server, and keeps the bodies of POSTs and of their responses."""

    def __init__(self, server: Client) -> None:
        proxy = self
        self.sent: list[tuple[str, Json]] = []
        self.answers: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy._pass(self, server, None)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                proxy.sent.append((self.path, json.loads(body)))
                proxy._pass(self, server, body)

            def log_message(self, *_: object) -> None:
                """Silence."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _pass(self, handler: BaseHTTPRequestHandler, server: Client, body: bytes | None) -> None:
        connection = http.client.HTTPConnection(server.address, server.port, timeout=MAX_S)
        connection.request(handler.command, handler.path, body)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if body is not None:
            self.answers.append(content)
        handler.send_response(response.status)
        handler.send_header("Content-Type", response.headers["Content-Type"])
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def marked(body: Json, port: int, answer: Json = None) -> Json:
    """A body that was sent, with marks for what is new each time; its prompts are marks already."""
    found = dict(body)
    ports, numbers = found.get("bootstrap_port"), found.get("bootstrap_room")
    if numbers is not None:
        many = isinstance(numbers, list)
        taken: Sequence[Any] = numbers if many else [numbers]
        assert len(set(taken)) == len(taken) and all(0 <= one < 1 << 63 for one in taken), taken
        assert ports == ([port] * len(taken) if many else port), ports
        marks = [f"ROOM {number}" for number in range(1, len(taken) + 1)]
        found["bootstrap_room"] = marks if many else marks[0]
        found["bootstrap_port"] = ["PORT"] * len(taken) if many else "PORT"
    if answer is not None and found.get("kv_transfer_params") == answer:
        found["kv_transfer_params"] = "ANSWER"
    return found


@contextmanager
def recording(folder: Path, kind: RouterKind, logs: Path, pair: RoutedPair) -> Iterator[Record]:
    """A router in front of servers, and a function that records what it makes of a case."""
    with ExitStack() as stack:
        ours = {
            "prefill": stack.enter_context(RecordingProxy(pair.prefill.client)),
            "decode": stack.enter_context(RecordingProxy(pair.decode.client)),
        }
        urls = ([(ours["prefill"].url, pair.handoff_port)], ours["decode"].url)
        router = stack.enter_context(Router.divided(folder, kind, logs, *urls))
        client = router.client()

        def record(case: Case) -> dict[str, Json]:
            for proxy in ours.values():
                proxy.sent.clear()
                proxy.answers.clear()
            answered = ask(client, case, {})
            assert answered.status == 200, answered.whole
            deadline = time.monotonic() + MAX_S
            while not all(proxy.answers for proxy in ours.values()):
                assert time.monotonic() < deadline, router.printed
                time.sleep(0.01)
            answer = None
            if not kind.bootstrap:
                answer = json.loads(ours["prefill"].answers[0])["kv_transfer_params"]
            found = {}
            for side, proxy in ours.items():
                ((path, body),) = proxy.sent
                assert path == case.path
                found[side] = marked(body, pair.handoff_port, answer)
            return found

        yield record


def main() -> None:
    """Record all cases of all routers."""
    found: dict[str, Json] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        logs = Path(name)
        model = save_tokenizer(save_model(logs / "model"))
        pair = stack.enter_context(RoutedPair(model))
        for kind in KINDS:
            with recording(install(), kind, logs, pair) as record:
                found[kind.package] = {case.name: record(case) for case in CASES}
    RECORDED.write_text(_in_lines(found) + "\n")


def _in_lines(value: Json, depth: int = 0) -> str:
    """JSON with a line for every body."""
    if depth == 3:
        return json.dumps(value)
    rows = (f'{" " * depth} "{name}": {_in_lines(each, depth + 1)}' for name, each in value.items())
    return "{\n" + ",\n".join(rows) + "\n" + " " * depth + "}"


if __name__ == "__main__":
    main()
