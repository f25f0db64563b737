"""Users who ask over HTTP, in a process of their own: `python -m kvtide.bench.http.http_users`.

    parent ──spec──▶ this: a connection per user
           ◀─ready──
           ──go────▶ all users ask, turn after turn
           ◀─turns──

Each user has a socket and no HTTP library: reading a stream costs a few microseconds per token, so
that the clients do not bound what is measured. Answers are taken apart after their end.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass
from typing import Any

from kvtide.bench.conversations import Load
from kvtide.bench.http.turn_times import TurnTimes

_IDS = re.compile(rb'"token_ids":\[([\d,]*)\]')
_FIRST = b'"token_ids":['
_END = b"0\r\n\r\n"
_OK = b"HTTP/1.1 200"
_READ_BYTES = 1 << 16


class HttpUserError(Exception):
    """The server answered something else than a stream of tokens."""


@dataclass(frozen=True, slots=True)
class UserSpec:
    """Which users of a load ask, at which port of this machine."""

    port: int
    load: Load
    round: int
    first_user: int
    end_user: int

    def to_json(self) -> str:
        load = {name: getattr(self.load, name) for name in Load.__slots__}
        own = {name: getattr(self, name) for name in self.__slots__ if name != "load"}
        return json.dumps({**own, "load": load})

    @classmethod
    def from_json(cls, text: str) -> UserSpec:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "load": Load(**fields["load"])})


class _User:
    """One conversation over one connection."""

    def __init__(
        self,
        spec: UserSpec,
        number: int,
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._spec, self._number = spec, number
        self._reader, self._writer = connection
        self._history = _joined(spec.load.system(spec.round))
        self._prompt_tokens = spec.load.system_tokens

    async def converse(self) -> list[TurnTimes]:
        turns = [await self._turn(turn) for turn in range(self._spec.load.turns)]
        self._writer.close()
        return turns

    async def _turn(self, turn: int) -> TurnTimes:
        question = self._spec.load.question(self._spec.round, self._number, turn)
        self._history += b"," + _joined(question)
        self._prompt_tokens += len(question)
        asked_s = time.monotonic()
        self._writer.write(self._request())
        answer, first_s = await self._answer()
        ended_s = time.monotonic()
        tokens = [id_ for ids in _IDS.findall(answer) for id_ in ids.split(b",") if id_]
        if b"data: [DONE]" not in answer or len(tokens) != self._spec.load.answer_tokens:
            shown = answer[-500:].decode("utf-8", "replace")
            raise HttpUserError(f"user {self._number} got {len(tokens)} tokens: {shown}")
        prompt_tokens = self._prompt_tokens
        self._history += b"," + b",".join(tokens)
        self._prompt_tokens += len(tokens)
        return TurnTimes(self._number, turn, prompt_tokens, len(tokens), asked_s, first_s, ended_s)

    def _request(self) -> bytes:
        body = b'{"prompt":[%s],"max_tokens":%d,%s}' % (
            self._history,
            self._spec.load.answer_tokens,
            b'"temperature":0,"ignore_eos":true,"stream":true,"return_token_ids":true',
        )
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        return head % len(body) + body

    async def _answer(self) -> tuple[bytes, float]:
        """The response as it came, and when its first token did."""
        parts: list[bytes] = []
        first_s = 0.0
        while data := await self._reader.read(_READ_BYTES):
            parts.append(data)
            if not first_s and _FIRST in data:
                first_s = time.monotonic()
            if data.endswith(_END) or not parts[0].startswith(_OK):
                break
        return b"".join(parts), first_s


def _joined(ids: list[int]) -> bytes:
    return ",".join(map(str, ids)).encode()


async def _converse(spec: UserSpec) -> dict[str, Any]:
    users = []
    for number in range(spec.first_user, spec.end_user):
        connection = await asyncio.open_connection("127.0.0.1", spec.port)
        users.append(_User(spec, number, connection))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    began = time.process_time()
    turns = await asyncio.gather(*(user.converse() for user in users))
    return {
        "turns": [turn for own in turns for turn in own],
        "cpu_s": time.process_time() - began,
    }


def main() -> None:
    spec = UserSpec.from_json(sys.stdin.readline())
    try:
        found = asyncio.run(_converse(spec))
    except (HttpUserError, OSError) as error:
        found = {"error": str(error)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
