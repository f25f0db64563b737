"""`/v1/chat/completions`: the template, roles, streams, logprobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import InProcess
from tests.server.talking import Client, Json, as_messages, joined

PATH = "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}


def content(answer: Json) -> str:
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    return choice["message"]["content"]


def test_an_answer_has_the_shape_of_openais(client: Client) -> None:
    answer = client.chat("the cat", **GREEDY)
    assert answer.keys() == {"id", "created", "model", "object", "choices", "usage"}
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice.keys() == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"].keys() == {"role", "content"}
    assert answer["usage"]["completion_tokens"] == 30


def test_a_conversation_is_what_its_template_makes_of_it(client: Client) -> None:
    rendered = "<|system|>hat<|end|><|user|>the cat<|end|><|assistant|>"
    text = client.complete(rendered, **GREEDY)["choices"][0]["text"]
    system = {"role": "system", "content": "hat"}
    assert content(client.chat(system, "the cat", **GREEDY)) == text
    parts = {"role": "user", "content": [{"type": "text", "text": t} for t in ("the ", "cat")]}
    assert content(client.chat(system, parts, **GREEDY)) == text
    shouted = client.complete(rendered.replace("<|ass", "!<|ass"), **GREEDY)["choices"][0]["text"]
    options = {"chat_template_kwargs": {"shout": True}}
    assert content(client.chat(system, "the cat", **GREEDY, **options)) == shouted != text


@pytest.mark.parametrize("name", ["reasoning_effort", "verbosity"])
def test_the_effort_of_a_chat_is_a_variable_of_its_template(
    serve: Any, tmp_path: Path, name: str
) -> None:
    (tmp_path / "chat.jinja").write_text(f"{{{{ {name} or 'none' }}}}")
    client = serve(chat_template=str(tmp_path / "chat.jinja")).client
    asked = {"messages": as_messages("a")}

    def prompt(**fields: Json) -> str:
        tokens = client.post("/tokenize", {**asked, **fields}).json()["tokens"]
        return str(client.post("/detokenize", {"tokens": tokens}).json()["prompt"])

    assert (prompt(), prompt(**{name: "high"})) == ("none", "high")
    own = {"chat_template_kwargs": {name: "low"}}
    assert prompt(**{name: "high"}, **own) == "low"
    reply = client.post(PATH, {**asked, name: 5})
    assert reply.status == 400 and reply.problem == f"{name} is 5; send a text"


def test_a_stream_begins_with_the_role_and_says_the_same(client: Client) -> None:
    messages = as_messages("that is that")
    asked = {"messages": messages, **GREEDY, "n": 2, "stream_options": {"include_usage": True}}
    first, *rest = client.stream(PATH, **asked)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    whole = content(client.chat(*messages, **GREEDY))
    assert joined(rest, 0) == joined(rest, 1) == whole
    assert rest[-1]["usage"]["completion_tokens"] == 60
    ends = [c["finish_reason"] for chunk in rest for c in chunk["choices"] if c["finish_reason"]]
    assert ends == ["length", "length"]


def test_logprobs_come_token_by_token(server: InProcess, client: Client) -> None:
    asked = {**GREEDY, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    (choice,) = client.chat("the cat", **asked)["choices"]
    logprobs = choice["logprobs"]["content"]
    assert len(logprobs) == 30
    for one in logprobs:
        assert one.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(one["top_logprobs"]) == 2
        top = one["top_logprobs"][0]
        assert (top["token"], top["logprob"]) == (one["token"], one["logprob"])
        named = not one["token"].startswith(("bytes:", "token_id:"))
        assert not named or bytes(one["bytes"]).decode() == one["token"]
    assert server.engine.tokenizer is not None
    spelled = [list(server.engine.tokenizer.token_bytes(i)) for i in choice["token_ids"]]
    assert [one["bytes"] for one in logprobs] == spelled
    chunks = client.stream(PATH, messages=as_messages("the cat"), **asked)
    streamed = [one for c in chunks[1:] for one in c["choices"][0]["logprobs"]["content"]]
    assert streamed == logprobs
    (bare,) = client.chat("the cat", **GREEDY, logprobs=True)["choices"]
    assert all(one["top_logprobs"] == [] for one in bare["logprobs"]["content"])
    (none,) = client.chat("the cat", **GREEDY, top_logprobs=2)["choices"]
    assert none["logprobs"] is None


def test_an_answer_may_be_as_long_as_there_is_room_by_default(serve: Any) -> None:
    client = serve(device_tokens=64).client
    usage = client.chat("the cat", temperature=0, ignore_eos=True)["usage"]
    assert usage["total_tokens"] == 64


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_length_are_taken(client: Client, name: str) -> None:
    usage = client.chat("the cat", ignore_eos=True, **{name: 3})["usage"]
    assert usage["completion_tokens"] == 3


def test_a_next_turn_finds_the_turns_before(server: InProcess, client: Client) -> None:
    messages = as_messages("the cat sat on the mat " * 10)
    asked = {"max_tokens": 30, "seed": 1, "session_id": "chat", "cache_salt": "turns"}
    first = client.chat(*messages, **asked)
    messages += [first["choices"][0]["message"], *as_messages("and then?")]
    usage = client.chat(*messages, **asked, return_cached_tokens_details=True)["usage"]
    found = usage["cached_tokens_details"]["device"]
    assert first["usage"]["prompt_tokens"] - 16 < found <= first["usage"]["total_tokens"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages is missing"),
        ([], "messages is missing"),
        ("hello", "messages is missing"),
        (["hello"], "no role"),
        ([{"content": "a"}], "no role"),
        ([{"role": 5, "content": "a"}], "no role"),
        ([{"role": "user"}], "not text"),
        ([{"role": "user", "content": 5}], "not text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([{"role": "user", "content": ["a"]}], "type str"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "type text"),
        ([{"role": "user", "content": "refused"}], "no such text"),
    ],
)
def test_messages_that_are_none_are_refused(client: Client, messages: Json, words: str) -> None:
    reply = client.post(PATH, {"messages": messages})
    assert reply.status == 400
    assert words in reply.problem


@pytest.mark.parametrize(
    "field",
    [
        {"logprobs": 3},
        {"top_logprobs": 21},
        {"top_logprobs": "2"},
        {"max_completion_tokens": -1},
        {"chat_template_kwargs": []},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "poem"}},
        {"audio": {}, "modalities": ["audio"]},
    ],
)
def test_what_a_chat_cannot_have_is_refused(client: Client, field: Json) -> None:
    reply = client.post(PATH, {"messages": as_messages("a"), **field})
    assert reply.status == 400
    assert list(field)[-1] in reply.problem and "; " in reply.problem
