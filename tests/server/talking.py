"""A client that sends any request, right or wrong."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 60

Json = Any


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Json:
        return json.loads(self.body, parse_constant=_refuse)

    @property
    def problem(self) -> str:
        """What a refusal says. Its shape is that of OpenAI's API."""
        error = self.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert self.headers["content-type"].startswith("application/json")
        return str(error["message"])


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


class Open:
    """A request that was sent, whose answer may be read, or never be."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def answer(self) -> http.client.HTTPResponse:
        return self._connection.getresponse()

    def events(self) -> Iterator[Json]:
        """What a stream sends, until it says that it is done."""
        answer = self.answer()
        assert answer.status == 200, answer.read()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        for line in answer:
            if line == b"\n" or line.startswith(b":"):
                continue
            assert line.startswith(b"data: "), line
            if line == b"data: [DONE]\n":
                assert answer.read() == b"\n"
                break
            yield json.loads(line.removeprefix(b"data: "), parse_constant=_refuse)
        self.leave()

    def leave(self) -> None:
        """Hang up, whatever comes."""
        self._connection.close()


class Client:
    def __init__(self, address: str, port: int, key: str | None = None) -> None:
        self.address = address
        self.port = port
        self.key = key

    def open(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Open:
        connection = http.client.HTTPConnection(self.address, self.port, timeout=TIMEOUT_S)
        keyed = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        connection.request(method, path, body, {**keyed, **headers})
        return Open(connection)

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        request = self.open(method, path, body, **headers)
        answer = request.answer()
        named = {name.lower(): value for name, value in answer.getheaders()}
        reply = Reply(answer.status, named, answer.read())
        request.leave()
        return reply

    def get(self, path: str) -> Reply:
        return self.send("GET", path)

    def post(self, path: str, body: Json = None) -> Reply:
        return self.send("POST", path, None if body is None else json.dumps(body).encode())

    # -- OpenAI's routes ------------------------------------------------------------------------

    def complete(self, prompt: Json, **fields: Json) -> Json:
        """The answer to a completion that must succeed."""
        return self._made("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, *messages: str | dict[str, Json], **fields: Json) -> Json:
        return self._made("/v1/chat/completions", {"messages": as_messages(*messages), **fields})

    def start(self, path: str, **fields: Json) -> Open:
        """Send a request and do not wait."""
        return self.open("POST", path, json.dumps(fields).encode())

    def stream(self, path: str, **fields: Json) -> list[Json]:
        """Everything that a stream sends."""
        return list(self.start(path, stream=True, **fields).events())

    def _made(self, path: str, body: Json) -> Json:
        reply = self.post(path, body)
        assert reply.status == 200, reply.body
        return reply.json()


def as_messages(*messages: str | dict[str, Json]) -> list[dict[str, Json]]:
    """Texts are a user's."""
    return [m if isinstance(m, dict) else {"role": "user", "content": m} for m in messages]


def joined(chunks: list[Json], index: int = 0) -> str:
    """The text of a choice of a stream."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    mine = [choice for choice in choices if choice["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in mine)
