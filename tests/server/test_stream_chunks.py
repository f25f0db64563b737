"""The events of a stream, byte by byte: what all of them share is encoded once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvtide.engine import CheckedRequest, Finish, RequestParams, SampledToken, Update
from kvtide.server.request_parsing import ParsedRequest
from kvtide.server.response_formatting import Answer, Delta, ResponseFormatter
from kvtide.server.tools.output_events import PlainText

PARSED = ParsedRequest((CheckedRequest(RequestParams((1, 2), 3), b""),), 1, chat=False, stream=True)
TEXTS = ["", " the", 'a "quoted"\n line\\', "Grüße, 世界", "\ud83d", "\x00\x7f\u2028"]
USAGE = {"prompt_tokens": 2, "completion_tokens": 3}


def formatter(**fields: Any) -> ResponseFormatter:
    return ResponseFormatter(replace(PARSED, **fields), Answer('a "name"', None, (), lambda: USAGE))


def events(sent: bytes) -> list[Any]:
    """The JSON of each event, which has nothing but what JSON needs."""
    found = []
    *whole, rest = sent.split(b"\n\n")
    assert rest == b""
    for each in whole:
        data = each.removeprefix(b"data: ")
        if data == b"[DONE]":
            found.append(data.decode())
            continue
        found.append(json.loads(data))
        compact = json.dumps(found[-1], ensure_ascii=False, separators=(",", ":"))
        assert each == b"data: " + compact.encode()
    return found


def chunk(of: ResponseFormatter, text: str, finish: Finish | None = None) -> bytes:
    delta = Delta()
    delta.add(Update(None, SampledToken(7, -0.5), text, finish), PlainText())  # type: ignore[arg-type]
    return of.chunk(0, delta)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.quick(2)
def test_a_chunk_is_the_json_of_its_parts(chat: bool, ids: bool, usage: bool) -> None:
    of = formatter(chat=chat, token_ids=ids, stream_usage=usage)
    for text in TEXTS:
        for finish in (None, Finish.LENGTH):
            (found,) = events(chunk(of, text, finish))
            assert [*found] == ["id", "created", "model", "object", "choices"] + ["usage"] * usage
            assert found["model"] == 'a "name"' and found.get("usage") is None
            assert found["object"] == ("chat.completion.chunk" if chat else "text_completion")
            shown = text.encode("utf-8", "replace").decode()
            own = {"delta": {"content": shown}} if chat else {"text": shown}
            assert found["choices"] == [
                {
                    "index": 0,
                    **own,
                    "logprobs": None,
                    "finish_reason": finish and finish.value,
                    **({"token_ids": [7]} if ids else {}),
                }
            ]


def test_a_chat_opens_with_its_role_and_a_completion_with_nothing() -> None:
    (first,) = events(formatter(chat=True).opening(2))
    assert first["choices"] == [
        {"index": 2, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    ]
    assert formatter().opening(0) == b""


@pytest.mark.parametrize("fields", [{"stream_usage": True}, {"cache_details": True}])
def test_a_stream_closes_with_its_usage_where_that_is_asked_for(fields: dict[str, bool]) -> None:
    assert events(formatter().closing()) == ["[DONE]"]
    usage, end = events(formatter(**fields).closing())
    assert end == "[DONE]" and usage["choices"] == [] and usage["usage"] == USAGE


def test_all_events_of_a_response_have_one_id_and_time() -> None:
    of = formatter(chat=True, stream_usage=True)
    sent = of.opening(0) + chunk(of, "a") + chunk(of, "b", Finish.STOP) + of.closing()
    *all_events, end = events(sent)
    assert end == "[DONE]" and len(all_events) == 4
    assert len({(each["id"], each["created"]) for each in all_events}) == 1
    assert events(chunk(formatter(), "a"))[0]["id"] != events(chunk(formatter(), "a"))[0]["id"]
