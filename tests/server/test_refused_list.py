"""The list of what is refused, in docs/SERVING.md: every entry is, on its route, in a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtide.server.output_format import OTHER_NAMES
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
FUNCTION = {"name": "f", "parameters": {"type": "object"}}


def parts(kind: str) -> Json:
    return [{"role": "user", "content": [{"type": kind, kind: "data:"}]}]


STRUCTURAL = {"response_format": {"type": "structural_tag", "structures": []}}
ENTRIES: dict[str, list[tuple[str, Json]]] = {
    "functions": [(CHAT, {"functions": [FUNCTION]})],
    "function_call": [(CHAT, {"function_call": "auto"})],
    "function": [(CHAT, {"messages": [{"role": "function", "name": "f", "content": "5"}]})],
    "audio": [(CHAT, {"audio": {"voice": "ash", "format": "wav"}})],
    "modalities": [(CHAT, {"modalities": ["audio"]})],
    "image_url": [(CHAT, {"messages": parts("image_url")})],
    "input_audio": [(CHAT, {"messages": parts("input_audio")})],
    "file": [(CHAT, {"messages": parts("file")})],
    "prediction": [(CHAT, {"prediction": {"type": "content", "content": "a"}})],
    "best_of": [(COMPLETIONS, {"best_of": 2})],
    "suffix": [(COMPLETIONS, {"suffix": "b"})],
    "tools": [(COMPLETIONS, {"tools": [{"type": "function", "function": FUNCTION}]})],
    **{name: [(path, {name: "a"}) for path in USUAL] for name in OTHER_NAMES},
    "response_format": [
        (RESPONSES, {"response_format": {"type": "json_object"}}),
        (MESSAGES, {"response_format": {"type": "json_object"}}),
    ],
    "structural_tag": [(COMPLETIONS, STRUCTURAL), (CHAT, STRUCTURAL)],
    "background": [(RESPONSES, {"background": True})],
    "conversation": [(RESPONSES, {"conversation": "c"})],
    "prompt": [(RESPONSES, {"prompt": {"id": "p"}})],
    "truncation": [(RESPONSES, {"truncation": "auto"})],
    "top_logprobs": [(RESPONSES, {"top_logprobs": 2})],
    "web_search_call": [(RESPONSES, {"input": [{"type": "web_search_call", "id": "w"}]})],
    "item_reference": [(RESPONSES, {"input": [{"type": "item_reference", "id": "i"}]})],
    "input_image": [(RESPONSES, {"input": parts("input_image")})],
    "mcp_servers": [(MESSAGES, {"mcp_servers": [{"type": "url", "url": "http://a"}]})],
    "container": [(MESSAGES, {"container": "c"})],
    "web_search_20250305": [
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]})
    ],
    "image": [(MESSAGES, {"messages": parts("image")})],
    "assistant": [
        (MESSAGES, {"messages": [*as_messages("a"), {"role": "assistant", "content": "b"}]})
    ],
}
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
