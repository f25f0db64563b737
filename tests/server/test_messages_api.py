"""Anthropic's Messages: its own client against this server, and what bodies become."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvtide.engine import Finish, RequestError
from kvtide.server.anthropic.messages_request import chat_body
from kvtide.server.anthropic.messages_response import MessageWriter
from kvtide.server.chat.event_formatter import Ending, TokenCounts
from kvtide.server.request_parsing import RequestFields
from kvtide.server.tools.output_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from kvtide.server.tools.parser_registry import ChatFormats
from tests.deferred import Deferred
from tests.models import tiny
from tests.server.serving import PAGE, POSITIONS, VOCABULARY, InProcess, save_tokenizer
from tests.server.talking import Client

anthropic = Deferred("anthropic")

MODEL = "tiny-0.1"
PATH = "/v1/messages"

Connect = Callable[..., "anthropic.Anthropic"]
Json = dict[str, Any]


@pytest.fixture
def connect() -> Iterator[Connect]:
    opened: list[anthropic.Anthropic] = []

    def to(server: InProcess, key: str = "none", **options: Any) -> anthropic.Anthropic:
        keyed = {"api_key": key, "max_retries": 0, "timeout": 30, **options}
        opened.append(anthropic.Anthropic(base_url=server.url, **keyed))
        return opened[-1]

    yield to
    for client in opened:
        client.close()


@pytest.fixture
def ai(server: InProcess, connect: Connect) -> anthropic.Anthropic:
    return connect(server)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def asked(text: str = "that", *, extra: Json | None = None, **fields: Any) -> Any:
    """`extra` are fields that the client has no names for; sampling parameters are among them."""
    body = {"model": MODEL, "max_tokens": 20, "messages": user(text), **fields}
    return {**body, "extra_body": {"temperature": 0, **(extra or {})}}


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def prompt_tokens(usage: Any) -> int:
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    assert read is not None and written is not None
    return int(usage.input_tokens + read + written)


# -- answers --------------------------------------------------------------------------------------


def test_a_message_is_what_a_chat_says(client: Client, ai: anthropic.Anthropic) -> None:
    message = ai.messages.create(**asked(system="the hat"))
    chat = client.chat({"role": "system", "content": "the hat"}, "that", max_tokens=20,
                       temperature=0)  # fmt: skip
    assert text_of(message) == chat["choices"][0]["message"]["content"] != ""
    assert (message.role, message.type, message.model) == ("assistant", "message", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert prompt_tokens(message.usage) == chat["usage"]["prompt_tokens"]
    assert message.usage.output_tokens == 20


def test_a_stream_adds_up_to_the_message(ai: anthropic.Anthropic) -> None:
    whole = ai.messages.create(**asked("the cat sat", max_tokens=30))
    with ai.messages.stream(**asked("the cat sat", max_tokens=30)) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert text_of(streamed) == text_of(whole)
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)
    raw = [event for event in events if event != "text"]
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(raw[2:-3]) == {"content_block_delta"}


def test_streams_are_named_events(client: Client) -> None:
    reply = client.post(PATH, {"messages": user("that"), "max_tokens": 2, "stream": True})
    assert reply.headers["content-type"] == "text/event-stream"
    lines = reply.body.decode().split("\n\n")
    assert lines[0].startswith('event: message_start\ndata: {"type":"message_start","message":{')
    assert lines[1] == 'event: ping\ndata: {"type":"ping"}'
    assert lines[-2:] == ['event: message_stop\ndata: {"type":"message_stop"}', ""]
    assert "[DONE]" not in reply.body.decode()


def test_stop_sequences_are_named(ai: anthropic.Anthropic) -> None:
    whole = text_of(ai.messages.create(**asked(max_tokens=30)))
    wanted = {"stop_sequences": ["never written", whole[3:5]]}
    message = ai.messages.create(**asked(max_tokens=30, **wanted))
    assert text_of(message) == whole[: whole.index(whole[3:5])]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", whole[3:5])
    with ai.messages.stream(**asked(max_tokens=30, **wanted)) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", whole[3:5])


def test_an_answer_that_ends_by_itself(client: Client, ai: anthropic.Anthropic) -> None:
    chat = client.chat("that", max_tokens=5, temperature=0, return_token_ids=True)
    last = chat["choices"][0]["token_ids"][4]
    message = ai.messages.create(**asked(extra={"stop_token_ids": [last]}))
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


def test_no_tokens_are_an_empty_message(ai: anthropic.Anthropic) -> None:
    message = ai.messages.create(**asked(max_tokens=0))
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    with ai.messages.stream(**asked(max_tokens=0)) as stream:
        assert stream.get_final_message().content == []


def test_blocks_and_cache_control_change_nothing(ai: anthropic.Anthropic) -> None:
    marked = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    plain = ai.messages.create(**asked("the cat\n\nthe hat", system="and\n\nthen"))
    system = [{"type": "text", "text": "and"}, {"type": "text", "text": "then", **marked}]
    content = [{"type": "text", "text": "the cat", **marked}, {"type": "text", "text": "the hat"}]
    blocks = ai.messages.create(
        **asked(
            system=system,
            messages=[{"role": "user", "content": content}],
            metadata={"user_id": "one"},
            extra={"top_p": 0.9, "top_k": 5},
            **marked,
        )
    )
    assert text_of(blocks) == text_of(plain)
    assert prompt_tokens(blocks.usage) == prompt_tokens(plain.usage)


def test_an_asynchronous_client(server: InProcess, ai: anthropic.Anthropic) -> None:
    async def ask() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client,
            client.messages.stream(**asked("hat")) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(ask()) == text_of(ai.messages.create(**asked("hat")))


# -- tools ----------------------------------------------------------------------------------------

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Ulm"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"name": "weather", "description": "of a city", "input_schema": CITY},
    {"name": "time", "input_schema": {**CITY, "properties": {"city": {"enum": ["Bonn"]}}}},
]
CITIES = {"weather": {"Köln", "Ulm"}, "time": {"Bonn"}}


def calls_of(message: anthropic.types.Message) -> list[Any]:
    assert message.stop_reason == "tool_use"
    assert message.content and all(block.type == "tool_use" for block in message.content)
    return list(message.content)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any"}, ("weather", "time")),
        pytest.param(
            {"type": "any", "disable_parallel_tool_use": True},
            ("weather", "time"),
            marks=pytest.mark.full,
        ),
        pytest.param({"type": "tool", "name": "time"}, ("time",), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_call_that_must_be_is_valid(
    ai: anthropic.Anthropic, choice: Json, names: tuple[str, ...]
) -> None:
    """Whatever the model: a grammar enforces it."""
    body = asked("weather?", tools=TOOLS, tool_choice=choice, max_tokens=400)
    whole = calls_of(ai.messages.create(**body))
    with ai.messages.stream(**body) as stream:
        events = [event.type for event in stream]
        streamed = calls_of(stream.get_final_message())
    assert "input_json" in events and "text" not in events
    assert [(c.name, c.input) for c in streamed] == [(c.name, c.input) for c in whole]
    for call in whole:
        assert call.name in names and call.input["city"] in CITIES[call.name]
    assert len(whole) == 1 or not choice.get("disable_parallel_tool_use")
    assert len({call.id for call in [*whole, *streamed]}) == 2 * len(whole)


def test_a_tool_loop_keeps_its_prefix(ai: anthropic.Anthropic) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    messages, length = user("weather, please"), 0
    for turn in range(3):
        body = asked(messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=200)
        message = ai.messages.create(**body)
        (call,) = calls_of(message)
        read = message.usage.cache_read_input_tokens
        assert read is not None
        assert read >= length // PAGE * PAGE, "the prompt before, and the call that answered it"
        length = prompt_tokens(message.usage) + message.usage.output_tokens - PAGE
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"rain {turn}"}
        messages = [
            *messages,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]


def test_no_call_where_none_is_wanted(ai: anthropic.Anthropic) -> None:
    message = ai.messages.create(**asked(tools=TOOLS, tool_choice={"type": "none"}))
    assert [block.type for block in message.content] == ["text"]
    with pytest.raises(anthropic.BadRequestError, match="sun"):
        ai.messages.create(**asked(tools=TOOLS, tool_choice={"type": "tool", "name": "sun"}))
    with pytest.raises(anthropic.BadRequestError, match="a b"):
        ai.messages.create(**asked(tools=[{"name": "a b", "input_schema": CITY}]))


def test_an_output_format_is_enforced(ai: anthropic.Anthropic) -> None:
    form = {"format": {"type": "json_schema", "schema": CITY}}
    message = ai.messages.create(**asked(output_config=form, max_tokens=200))
    assert json.loads(text_of(message))["city"] in {"Köln", "Ulm"}
    assert message.stop_reason == "end_turn"


def test_thinking_is_a_block_of_its_own_and_comes_back(
    serve: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A thought is any text before what a grammar asks for. Here the grammar has the thought.
    monkeypatch.setattr(ChatFormats, "_thought", lambda *_: "")
    server = serve(reasoning_parser="think")
    ai, spoken = connect(server), {"regex": "<think>cat</think>hat"}
    whole = ai.messages.create(**asked(extra=spoken))
    with ai.messages.stream(**asked(extra=spoken)) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert "thinking" in events and "signature" in events
    for message in (whole, streamed):
        thinking, text = message.content
        assert thinking.type == "thinking" and thinking.thinking == "cat"
        assert text.type == "text" and text.text == "hat"
    turn = [*user("that"), {"role": "assistant", "content": whole.content}, *user("on")]
    assert ai.messages.create(**asked(messages=turn)).content


# -- tokens ---------------------------------------------------------------------------------------


def test_tokens_are_counted_as_they_are_used(ai: anthropic.Anthropic) -> None:
    body = {"system": "and then", "messages": user("the cat " * 9)}
    counted = ai.messages.count_tokens(model=MODEL, **body).input_tokens
    message = ai.messages.create(**asked(**body))
    assert counted == prompt_tokens(message.usage)
    long = ai.messages.count_tokens(model=MODEL, messages=user("the cat " * POSITIONS))
    assert long.input_tokens > POSITIONS


@pytest.fixture(scope="module")
def hybrid_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of attention layers and of layers with a recurrent state."""
    folder = tmp_path_factory.mktemp("models") / MODEL
    config = tiny.config_of("qwen3_next")
    config.vocab_size, config.max_position_embeddings = VOCABULARY, POSITIONS
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return save_tokenizer(folder)


@pytest.mark.parametrize("memory", ["full attention", "hybrid"])
def test_the_cache_is_reported_as_it_is(
    serve: Any, connect: Connect, request: pytest.FixtureRequest, memory: str
) -> None:
    name = "hybrid_folder" if memory == "hybrid" else "model_folder"
    server = serve(model=str(request.getfixturevalue(name)), page_tokens=None)
    page = server.engine.cache.memory.page_tokens
    ai, text = connect(server), "the cat sat on the mat " * (9 * page // PAGE)

    def use(*more: Any, **extra: Any) -> Any:
        body = asked(max_tokens=1, messages=[*user(text), *more], extra=extra)
        return ai.messages.create(**body).usage

    def resident() -> int:
        """Pages of the history."""
        return int(server.settled()["tiers"]["device"]["kv"]["resident_pages"])

    usage = use()
    prompt = prompt_tokens(usage)
    assert prompt % page, "the last tokens of the prompt fill no page"
    assert usage.cache_read_input_tokens == 0
    assert usage.cache_creation_input_tokens == prompt // page * page == resident() * page
    assert usage.input_tokens == prompt % page

    again = use()
    assert (again.cache_read_input_tokens, again.cache_creation_input_tokens) == (
        usage.cache_creation_input_tokens,
        0,
    )
    before = resident()
    turn = use({"role": "assistant", "content": "x"}, *user("and then " * (9 * page // PAGE)))
    assert turn.cache_read_input_tokens == usage.cache_creation_input_tokens
    assert turn.cache_creation_input_tokens == (resident() - before) * page > 0

    salted = use(cache_salt="other")
    assert (salted.cache_read_input_tokens, salted.cache_creation_input_tokens) == (
        0,
        usage.cache_creation_input_tokens,
    )
    alone = use(recompute=True)
    assert (alone.input_tokens, alone.cache_read_input_tokens) == (prompt, 0)
    assert alone.cache_creation_input_tokens == 0


def test_details_of_the_cache_are_there_on_demand(ai: anthropic.Anthropic) -> None:
    extra = {"return_cached_tokens_details": True}
    usage: Any = ai.messages.create(**asked("the mat " * 20, extra=extra)).usage
    assert usage.cached_tokens_details.keys() == {"device", "host", "storage"}
    assert usage.timing["time_to_first_token_ms"] > 0


# -- errors ---------------------------------------------------------------------------------------


def problem(body: Json) -> str:
    with pytest.raises(RequestError) as caught:
        chat_body(RequestFields({"max_tokens": 5, **body}))
    return str(caught.value)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "messages is missing"),
        ({"messages": user("a"), "max_tokens": None}, "max_tokens is missing"),
        ({"messages": "a"}, "messages is not a list of objects"),
        ({"messages": ["a"]}, "messages is not a list of objects"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "the role robot; send user"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages is not a list of objects"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "type image is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "type tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "lacks a field"),
        ({"messages": user("a"), "system": [IMAGE]}, "type image is not supported"),
        ({"messages": [*user("a"), {"role": "assistant", "content": "b"}]}, "end with a message"),
        ({"messages": user("a"), "mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"messages": user("a"), "tools": [{"name": "f"}]}, "no input_schema"),
        ({"messages": user("a"), "tools": [{"type": "web_search_20250305"}]}, "web_search"),
        (
            {"messages": user("a"), "tools": [{"name": "f", "input_schema": {}}],
             "tool_choice": {"type": "some"}},
            "send auto, any, tool or none",
        ),
        ({"messages": user("a"), "output_config": {"format": {"type": "xml"}}}, "json_schema"),
        (
            {"messages": user("a"), "output_config": {"format": {"type": "json_schema"}}},
            "the output format has no schema",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_answered_is_refused_in_a_sentence(body: Json, words: str) -> None:
    message = problem(body)
    assert words in message and len(message) < 200


def test_errors_have_the_shape_of_anthropic(ai: anthropic.Anthropic, client: Client) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature is -1") as caught:
        ai.messages.create(**asked(extra={"temperature": -1}))
    assert caught.value.body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": caught.value.body["error"]["message"],
        },
    }
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'claude'"):
        ai.messages.create(**asked(model="claude"))
    with pytest.raises(anthropic.BadRequestError, match="this engine serves"):
        ai.messages.create(**asked("a" * 9000, stream=True))
    for method, path, status, kind in [
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", PATH, 405, "invalid_request_error"),
        ("POST", PATH, 400, "invalid_request_error"),
    ]:
        reply = client.send(method, path, b"{")
        error = reply.json()
        assert (reply.status, error["type"], error["error"]["type"]) == (status, "error", kind)
        assert error["error"].keys() == {"type", "message"}
    openai = client.get("/v1/messagesque").json()["error"]
    assert openai["code"] == "unknown_url", "other routes keep OpenAI's shape"


def test_both_headers_carry_the_key(serve: Any, connect: Connect) -> None:
    server = serve(api_key="knock")
    with pytest.raises(anthropic.AuthenticationError, match="needs the API key") as caught:
        connect(server, "wrong").messages.create(**asked())
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    assert connect(server, "knock").messages.create(**asked(max_tokens=1))
    bearer = connect(server, None, auth_token="knock")
    assert bearer.messages.create(**asked(max_tokens=1))
    with pytest.raises(anthropic.AuthenticationError):
        connect(server, None, auth_token="wrong").messages.count_tokens(
            model=MODEL, messages=user("a")
        )
    keyless = Client(server.address, server.port)
    assert keyless.send("GET", "/admin/cache").status == 401
    assert keyless.send("GET", "/admin/cache", None, **{"x-api-key": "knock"}).status == 200
    assert keyless.send("GET", "/v1/models", None, **{"x-api-key": "knock "}).status == 200


def test_too_many_requests_are_a_rate_limit(serve: Any, connect: Connect) -> None:
    server = serve(max_running=1, max_waiting=0)
    here = server.client.start("/v1/completions", prompt=[5], max_tokens=4000, ignore_eos=True)
    server.until(lambda report: report["requests"]["running"] == 1)
    with pytest.raises(anthropic.RateLimitError, match="try again in") as caught:
        connect(server).messages.create(**asked())
    assert caught.value.response.headers["retry-after"] == "1"
    assert caught.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
    leaving = threading.Timer(0.3, here.leave)
    leaving.start()
    assert connect(server, max_retries=3).messages.create(**asked(max_tokens=2)).content
    leaving.join()
    server.settled()


def test_a_stream_that_breaks_raises(
    serve: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    body = asked(max_tokens=4000, stream=True, extra={"ignore_eos": True})
    stream = connect(server).messages.create(**body)
    next(iter(stream))

    def step() -> None:
        raise RuntimeError("a fault of the test")

    monkeypatch.setattr(server.engine, "step", step)
    with pytest.raises(anthropic.APIStatusError, match="the engine has stopped"):
        list(stream)
    with pytest.raises(anthropic.InternalServerError, match="the engine has stopped") as caught:
        connect(server).messages.create(**asked())
    assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


# -- bodies ---------------------------------------------------------------------------------------


def test_a_tool_loop_becomes_a_chat() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    marked = {"cache_control": {"type": "ephemeral"}}
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    calls = [
        {"type": "tool_use", "id": f"t{n}", "name": "weather", "input": {"city": city}}
        for n, city in enumerate(["Köln", "Ulm"])
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t0", "content": "rain", **marked},
        {"type": "tool_result", "tool_use_id": "t1", "is_error": True,
         "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "city"}]},
        {"type": "text", "text": "go on"},
    ]  # fmt: skip
    body = {
        "model": MODEL,
        "max_tokens": 9,
        "stop_sequences": ["\n"],
        "system": "be brief",
        "messages": [
            *user("weather?"),
            {"role": "assistant", "content": [thinking, {"type": "text", "text": "So"}, *calls]},
            {"role": "user", "content": results},
            {"role": "user", "content": "please"},
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": schema, **marked}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "session_id": "s",
    }
    function = {"name": "weather", "parameters": schema, "description": "d"}
    made = [
        {"id": "t0", "type": "function",
         "function": {"name": "weather", "arguments": '{"city": "Köln"}'}},
        {"id": "t1", "type": "function",
         "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}},
    ]  # fmt: skip
    assert chat_body(RequestFields(body)) == {
        "model": MODEL,
        "max_tokens": 9,
        "stop": ["\n"],
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "So", "reasoning_content": "Hm.", "tool_calls": made},
            {"role": "tool", "tool_call_id": "t0", "content": "rain"},
            {"role": "tool", "tool_call_id": "t1", "content": "Error: no\n\ncity"},
            {"role": "user", "content": "go on\n\nplease"},
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": True},
        "session_id": "s",
    }


def test_what_the_system_says_later_is_part_of_the_users_turn() -> None:
    """Templates take a system message at the front; clients send more of them later."""
    body = {
        "max_tokens": 5,
        "system": "be brief",
        "messages": [
            {"role": "system", "content": "and kind"},
            *user("hi"),
            {"role": "system", "content": [{"type": "text", "text": "it rains"}]},
            {"role": "assistant", "content": "yes"},
            *user("on"),
        ],
    }
    assert [(m["role"], m["content"]) for m in chat_body(RequestFields(body))["messages"]] == [
        ("system", "be brief\n\nand kind"),
        ("user", "hi\n\n<system-reminder>\nit rains\n</system-reminder>"),
        ("assistant", "yes"),
        ("user", "on"),
    ]


def test_tools_that_a_search_found_are_named_in_its_result() -> None:
    found = [{"type": "tool_reference", "tool_name": "f"}, {"type": "text", "text": "one"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": found}
    call = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
    body = {
        "max_tokens": 5,
        "messages": [
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    }
    last = chat_body(RequestFields(body))["messages"][-1]
    assert last["content"] == "The tool f is available.\n\none"


SEARCH: Json = {"name": "search", "input_schema": {"type": "object", "properties": {}}}
FOUND: Json = {
    "name": "look",
    "description": "Look into a box.",
    "input_schema": {
        "type": "object",
        "properties": {"box": {"enum": ["red", "blue"]}},
        "required": ["box"],
    },
    "defer_loading": True,
}
PLACEHOLDER = {**SEARCH, "name": "Placeholder", "defer_loading": True}


def searched(*names: str, number: int = 0) -> list[Json]:
    """A call of the search, and the tools that it found."""
    call = {"type": "tool_use", "id": f"t{number}", "name": "search", "input": {}}
    found = [{"type": "tool_reference", "tool_name": name} for name in names]
    result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": found}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def test_deferred_tools_are_defined_where_they_are_first_referred_to() -> None:
    tools = [SEARCH, FOUND, PLACEHOLDER]
    body = {"max_tokens": 5, "tools": tools, "messages": user("a")}
    assert [tool["function"]["name"] for tool in chat_body(RequestFields(body))["tools"]] == [
        "search"
    ]
    body["messages"] = [*user("a"), *searched("look", "search"), *searched("look", number=1)]
    chat = chat_body(RequestFields(body))
    search, look = chat["tools"]
    assert "defer_loading" not in search and look["defer_loading"] is True
    function = {"name": "look", "parameters": FOUND["input_schema"],
                "description": "Look into a box."}  # fmt: skip
    definition = json.dumps({"type": "function", "function": function})
    assert [m["content"] for m in chat["messages"] if m["role"] == "tool"] == [
        f"The tool look is available:\n{definition}\n\nThe tool search is available.",
        "The tool look is available.",
    ]


def test_a_tool_that_a_search_finds_leaves_the_prefix_whole(client: Client) -> None:
    """It is called as any other tool from then on, and the front of the prompt never has it."""

    def ask(messages: Json, *tools: Json, choice: Json) -> Json:
        fields = {"max_tokens": 100, "temperature": 0, "tool_choice": choice}
        reply = client.post(PATH, {"messages": messages, "tools": tools, **fields})
        assert reply.status == 200, reply.body
        return reply.json()

    asked = user("that is that " * 20)
    must = {"disable_parallel_tool_use": True}
    first = ask(asked, SEARCH, PLACEHOLDER, choice={"type": "any", **must})
    assert [block["name"] for block in first["content"]] == ["search"]
    turns = [*asked, *searched("look")]
    read = []
    for loaded in (FOUND, {**FOUND, "defer_loading": False}):
        choice = {"type": "tool", "name": "look"}
        second = ask(turns, SEARCH, PLACEHOLDER, loaded, choice=choice)
        (call,) = second["content"]
        assert call["name"] == "look" and call["input"]["box"] in ("red", "blue")
        read.append(second["usage"]["cache_read_input_tokens"])
    counted = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    prompt = sum(first["usage"][name] for name in counted)
    assert read[0] >= (prompt - PAGE) // PAGE * PAGE > 2 * read[1]


def test_a_deferred_tool_is_no_tool_before_it_is_found(client: Client) -> None:
    asked = {"max_tokens": 5, "messages": user("a"), "tools": [SEARCH, FOUND]}
    reply = client.post(PATH, {**asked, "tool_choice": {"type": "tool", "name": "look"}})
    assert reply.status == 400 and "not among the tools" in reply.json()["error"]["message"]
    reply = client.post(PATH, {**asked, "tools": [{**FOUND, "defer_loading": "yes"}]})
    assert reply.status == 400 and "defer_loading" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_choices_of_tools(given: Json | None, expected: object) -> None:
    tools = [{"type": "custom", "name": "f", "input_schema": {"type": "object"}}]
    body = {"max_tokens": 5, "messages": user("a"), "tools": tools, "tool_choice": given}
    chat = chat_body(RequestFields(body))
    assert chat.get("tool_choice") == expected
    assert "parallel_tool_calls" not in chat


def test_variables_of_the_template_come_from_fields_unless_they_are_named() -> None:
    body = {
        "max_tokens": 5,
        "messages": user("a"),
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        "chat_template_kwargs": {"reasoning_effort": "high"},
    }
    chat = chat_body(RequestFields(body))
    variables = {"enable_thinking": False, "reasoning_effort": "high"}
    assert chat["chat_template_kwargs"] == variables
    assert chat["response_format"]["json_schema"]["schema"] == {}


# -- events ---------------------------------------------------------------------------------------

COUNTS = TokenCounts(prompt=50, cached=16, written=32, output=7, reasoning=2, drafts={}, details={})


def written(finish: Finish, *events: OutputEvent) -> tuple[list[Json], Json]:
    writer = MessageWriter("m")
    made = [*writer.opening(), *writer.started(COUNTS)]
    made += [one for event in events for one in writer.chunk(event)]
    made += writer.closing(Ending(finish, None, COUNTS))
    return made, writer.whole()


def test_reasoning_text_and_calls_are_blocks() -> None:
    events, whole = written(
        Finish.STOP,
        ReasoningDelta("H"),
        ReasoningDelta("m"),
        TextDelta("So"),
        CallBegin(0, "c0", "f"),
        CallArguments(0, '{"a":'),
        CallArguments(0, " 1}"),
        CallEnd(0),
        CallBegin(1, "c1", "g"),
        CallArguments(1, "{}"),
        CallEnd(1),
    )
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Hm", "signature": "kvtide"},
        {"type": "text", "text": "So"},
        {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "c1", "name": "g", "input": {}},
    ]
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 32,
        "cache_read_input_tokens": 16,
        "output_tokens": 7,
    }
    assert [(event["type"], event.get("index")) for event in events] == [
        ("message_start", None),
        ("ping", None),
        ("content_block_start", 0),
        *[("content_block_delta", 0)] * 3,
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        *[("content_block_delta", 2)] * 2,
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("content_block_stop", 3),
        ("message_delta", None),
        ("message_stop", None),
    ]
    started = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert started[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert started[2] == {"type": "tool_use", "id": "c0", "name": "f", "input": {}}
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        "thinking_delta", "thinking_delta", "signature_delta", "text_delta",
        "input_json_delta", "input_json_delta", "input_json_delta",
    ]  # fmt: skip
    assert events[0]["message"]["content"] == []


def test_a_call_that_is_cut_has_no_input() -> None:
    _, whole = written(Finish.LENGTH, CallBegin(0, "c", "f"), CallArguments(0, '{"a'), CallEnd(0))
    assert whole["content"][0]["input"] == {}
    assert whole["stop_reason"] == "max_tokens"
