"""What routers make of clients' requests: recorded from the real ones, and replayed without them.

`requests.json` has the bodies that each router sent to the prefill and to the decode server
for every case, as they were but for marks where a value is new each time:

| mark       | what                                                             |
|------------|------------------------------------------------------------------|
| `PROMPT 1` | a prompt                                                         |
| `PORT`     | the prefill server's port for handoffs                           |
| `ROOM 1`   | a number that the router took by chance                          |
| `ANSWER`   | `kv_transfer_params` of the prefill server's response, unchanged |

`recording` records them again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.server.handoff.routers.real_routers import RouterKind
from tests.server.talking import Client, Json, Open, joined

RECORDED = Path(__file__).with_suffix(".json")
SIDES = ("prefill", "decode")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Two of the routers round fractions to 32 bits: these are the same then.
COMMON: Json = {
    "model": "tiny",
    "max_tokens": 12,
    "temperature": 0.5,
    "seed": 5,
    "top_k": 40,
    "min_p": 0.125,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "cache_salt": "a tenant",
    "session_id": "a conversation",
    "priority": 1,
    "return_token_ids": True,
    "return_cached_tokens_details": True,
}
STREAMED: Json = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Case:
    """A client's request, with marks for its prompts. `n` choices for each."""

    name: str
    path: str
    body: Mapping[str, Any]
    prompts: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def n(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream", False))

    def states(self, kind: RouterKind) -> dict[str, int]:
        """How its handoffs end on the decode side, if all goes well.

        A chat has a room for each choice, if its router has rooms; the second choice finds the
        pages that the first one was given.
        """
        second = self.n - 1 if kind.bootstrap and self.path == CHAT else 0
        return {"decoding": self.prompts} | ({"declined": second} if second else {})


_CHAT: Json = {
    **COMMON,
    "messages": [{"role": "user", "content": "PROMPT 1"}],
    "logprobs": True,
    "top_logprobs": 2,
}
_TEXT: Json = {**COMMON, "prompt": "PROMPT 1", "logprobs": 2}
CASES = (
    Case("chat", CHAT, _CHAT),
    Case("chat-streamed", CHAT, {**_CHAT, **STREAMED}),
    Case("chat-choices", CHAT, {**_CHAT, "n": 2}),
    Case("completion", COMPLETIONS, _TEXT),
    Case("completion-streamed", COMPLETIONS, {**_TEXT, **STREAMED}),
    Case("prompts", COMPLETIONS, {**_TEXT, "prompt": ["PROMPT 1", "PROMPT 2"]}, prompts=2),
    Case("completion-choices", COMPLETIONS, {**_TEXT, "n": 2}),
    Case(
        "prompts-choices",
        COMPLETIONS,
        {**_TEXT, "prompt": ["PROMPT 1", "PROMPT 2"], "n": 2},
        prompts=2,
    ),
)


def recorded(kind: RouterKind, case: Case, side: str) -> Json:
    """The body that a router sent to a side, with marks."""
    return json.loads(RECORDED.read_text())[kind.package][case.name][side]


def filled(body: Any, values: Mapping[str, Any]) -> Any:
    """The body with values in the place of its marks."""
    if isinstance(body, Mapping):
        return {name: filled(value, values) for name, value in body.items()}
    if isinstance(body, list):
        return [filled(value, values) for value in body]
    return values.get(body, body) if isinstance(body, str) else body


# -- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A status, and of a success all choices; of a stream the text of each.

    whole  the response, the chunks of a stream, or the text of an error

    Without `token_ids`: a router may have dropped the field that asks for them. Routers write the
    numbers of a whole response anew, and may change the last of 16 digits: they are compared as the
    32 bits that they were computed with.
    """

    status: int
    choices: Any = None
    whole: Json = field(default=None, compare=False)


def answer_of(request: Open, case: Case) -> Answer:
    """Read what came for a request of a case."""
    response = request.answer()
    body = response.read()
    request.leave()
    if response.status != 200:
        return Answer(response.status, None, body.decode())
    if not case.streamed:
        found = json.loads(body, parse_float=_single)
        for choice in found["choices"]:
            choice.pop("token_ids", None)
        return Answer(200, found["choices"], found)
    *lines, last = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line]
    assert last == b"[DONE]", body
    chunks = [json.loads(line) for line in lines]
    return Answer(200, [joined(chunks, n) for n in range(case.prompts * case.n)], chunks)


def _single(digits: str) -> float:
    return float(np.float32(digits))


def ask(client: Client, case: Case, prompts: Mapping[str, str]) -> Answer:
    """Send a case as a client does, to a router or to a server."""
    return answer_of(start(client, case.path, filled(case.body, prompts)), case)


def start(client: Client, path: str, body: Json) -> Open:
    """Send a request as JSON, which routers expect, and do not wait."""
    return client.open(
        "POST", path, json.dumps(body).encode(), **{"Content-Type": "application/json"}
    )


# -- replaying ------------------------------------------------------------------------------------


@dataclass
class Replay:
    """Does with two servers what a router does with one request."""

    kind: RouterKind
    prefill: Client
    decode: Client
    port: int

    def start(self, side: str, case: Case, values: Mapping[str, Any]) -> Open:
        client = self.prefill if side == "prefill" else self.decode
        body = filled(recorded(self.kind, case, side), {"PORT": self.port, **values})
        return start(client, case.path, body)

    def ask(self, case: Case, prompts: Mapping[str, str]) -> Answer:
        if not self.kind.bootstrap:
            prefill = self.start("prefill", case, prompts).answer()
            answer = json.loads(prefill.read())
            assert prefill.status == 200, answer
            values = {**prompts, "ANSWER": answer["kv_transfer_params"]}
            return answer_of(self.start("decode", case, values), case)
        values = {**prompts, **rooms()}
        both = [self.start(side, case, values) for side in SIDES]
        # The client has its answer when the prefill side has given its own.
        assert answer_of(both[0], case).status == 200
        return answer_of(both[1], case)


def rooms() -> dict[str, int]:
    """New ones for the marks of a request."""
    return {f"ROOM {number}": secrets.randbits(63) for number in (1, 2)}
