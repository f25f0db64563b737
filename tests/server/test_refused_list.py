"""The list of what is refused, in docs/SERVING.md: every entry is, on its route, in a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtide.server.refused_fields import CHAT as OF_CHATS
from kvtide.server.refused_fields import COMPLETION as OF_COMPLETIONS
from kvtide.server.refused_fields import MESSAGES as OF_MESSAGES
from kvtide.server.refused_fields import RESPONSES as OF_RESPONSES
from tests.server.talking import Client, Json, as_messages

ROOT = Path(__file__).parent.parent.parent
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USUAL: dict[str, Json] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": as_messages("a")},
    RESPONSES: {"input": "a"},
    MESSAGES: {"messages": as_messages("a"), "max_tokens": 5},
}
FIELDS = {
    COMPLETIONS: OF_COMPLETIONS,
    CHAT: OF_CHATS,
    RESPONSES: OF_RESPONSES,
    MESSAGES: OF_MESSAGES,
}


def parts(kind: str) -> Json:
    return [{"role": "user", "content": [{"type": kind, kind: "data:"}]}]


STRUCTURAL = {"response_format": {"type": "structural_tag", "structures": []}}
CONTENTS: dict[str, list[tuple[str, Json]]] = {
    "function": [(CHAT, {"messages": [{"role": "function", "name": "f", "content": "5"}]})],
    "image_url": [(CHAT, {"messages": parts("image_url")})],
    "input_audio": [(CHAT, {"messages": parts("input_audio")})],
    "file": [(CHAT, {"messages": parts("file")})],
    "structural_tag": [(COMPLETIONS, STRUCTURAL), (CHAT, STRUCTURAL)],
    "web_search_call": [(RESPONSES, {"input": [{"type": "web_search_call", "id": "w"}]})],
    "item_reference": [(RESPONSES, {"input": [{"type": "item_reference", "id": "i"}]})],
    "input_image": [(RESPONSES, {"input": parts("input_image")})],
    "web_search_20250305": [
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]})
    ],
    "image": [(MESSAGES, {"messages": parts("image")})],
    "document": [(MESSAGES, {"messages": parts("document")})],
    "assistant": [
        (MESSAGES, {"messages": [*as_messages("a"), {"role": "assistant", "content": "b"}]})
    ],
}
ENTRIES: dict[str, list[tuple[str, Json]]] = {
    name: [(path, {name: "a"}) for path, fields in FIELDS.items() if name in fields]
    for name in {name: None for fields in FIELDS.values() for name in fields}
} | CONTENTS
"""What the list names, and requests that have it."""


def listed() -> list[str]:
    """The code words in the first column of the list."""
    text = (ROOT / "docs/SERVING.md").read_text()
    table = text.partition("### What is refused\n")[2].partition("\n|---")[2].partition("\n\n")[0]
    first = [row.split("|")[1] for row in table.splitlines()[1:]]
    return [word for column in first for word in re.findall(r"`(\w+)`", column)]


def test_the_list_is_what_is_tried_here() -> None:
    assert set(listed()) == ENTRIES.keys()


@pytest.mark.parametrize("name", ENTRIES)
def test_what_the_list_names_is_refused_in_a_sentence(client: Client, name: str) -> None:
    for path, fields in ENTRIES[name]:
        reply = client.post(path, {**USUAL[path], **fields})
        assert reply.status == 400, (path, reply.body)
        sentence = reply.json()["error"]["message"]
        assert "; " in sentence and len(sentence) < 250
        assert name in sentence, (path, sentence)


@pytest.mark.parametrize("path", USUAL)
def test_the_same_requests_without_it_are_answered(client: Client, path: str) -> None:
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 2}
    assert client.post(path, {**USUAL[path], **limit}).status == 200
    fields = FIELDS[path]
    for number in range(max(len(field.neutral) for field in fields.values())):
        values = {
            name: (*field.neutral, *[None] * number)[number] for name, field in fields.items()
        }
        reply = client.post(path, {**values, **USUAL[path], **limit})
        assert reply.status == 200, (values, reply.body)


def test_a_prompt_has_the_refusals_of_its_request(client: Client) -> None:
    asked = {"messages": as_messages("a"), "documents": [{"text": "b"}]}
    for path in ("/tokenize", "/v1/prefetch", CHAT):
        assert client.post(path, asked).status == 400, path
    counted = {**USUAL[MESSAGES], "thread": {"type": "create"}}
    assert client.post("/v1/messages/count_tokens", counted).status == 400
    assert client.post("/v1/prefetch", {"prompt": "a", "suffix": "b"}).status == 400


def answered(client: Client, path: str, **fields: Json) -> str:
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 20, "temperature": 0}
    reply = client.post(path, {**USUAL[path], **limit, **fields}).json()
    if path == CHAT:
        return str(reply["choices"][0]["message"]["content"])
    (part,) = reply["output"][0]["content"] if path == RESPONSES else reply["content"]
    return str(part["text"])


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_penalties_and_stops_are_honoured_in_every_shape(client: Client, path: str) -> None:
    plain = answered(client, path)
    for name in ("frequency_penalty", "presence_penalty"):
        assert answered(client, path, **{name: 2.0}) != plain
    stop = plain[3:5]
    named = {"stop_sequences": [stop]} if path == MESSAGES else {"stop": stop}
    assert answered(client, path, **named) == plain[: plain.index(stop)]
