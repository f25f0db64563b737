"""OpenAI's Responses: its own client against this server, and what bodies become."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pydantic
import pytest

from kvtide.engine import Finish, RequestError
from kvtide.server.chat.event_formatter import Ending, TokenCounts
from kvtide.server.request_parsing import RequestFields
from kvtide.server.responses.encrypted_reasoning import INCLUDED, MARK
from kvtide.server.responses.response_history import ResponseHistory
from kvtide.server.responses.responses_request import ResponsesRequest, read_request
from kvtide.server.responses.responses_response import ResponsesWriter
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
from tests.server.serving import PAGE, POSITIONS, InProcess
from tests.server.talking import Client

openai = Deferred("openai")

MODEL = "tiny-0.1"
PATH = "/v1/responses"

Connect = Callable[..., "openai.OpenAI"]
Json = dict[str, Any]


@pytest.fixture
def connect() -> Iterator[Connect]:
    opened: list[openai.OpenAI] = []

    def to(server: InProcess, key: str = "none") -> openai.OpenAI:
        base = f"{server.url}/v1"
        opened.append(openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=30))
        return opened[-1]

    yield to
    for client in opened:
        client.close()


@pytest.fixture
def ai(server: InProcess, connect: Connect) -> openai.OpenAI:
    return connect(server)


def asked(content: Any = "that", /, **fields: Any) -> Any:
    greedy = {"model": MODEL, "max_output_tokens": 20, "temperature": 0, "input": content}
    return {**greedy, **fields}


# -- answers --------------------------------------------------------------------------------------


def test_a_response_is_what_a_chat_says(client: Client, ai: openai.OpenAI) -> None:
    response = ai.responses.create(**asked(instructions="the hat", metadata={"a": "b"}))
    chat = client.chat({"role": "system", "content": "the hat"}, "that", max_tokens=20,
                       temperature=0)  # fmt: skip
    assert response.output_text == chat["choices"][0]["message"]["content"] != ""
    assert (response.object, response.model, response.metadata) == ("response", MODEL, {"a": "b"})
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.instructions == "the hat"
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (20, 0)
    assert usage.total_tokens == usage.input_tokens + 20


def test_an_answer_that_ends_by_itself_is_completed(client: Client, ai: openai.OpenAI) -> None:
    chat = client.chat("that", max_tokens=5, temperature=0, return_token_ids=True)
    last = chat["choices"][0]["token_ids"][4]
    response = ai.responses.create(**asked(), extra_body={"stop_token_ids": [last]})
    assert (response.status, response.incomplete_details) == ("completed", None)
    (message,) = response.output
    assert message.type == "message" and message.status == "completed"


def test_a_stream_adds_up_to_the_response(client: Client, ai: openai.OpenAI) -> None:
    chat = client.chat("the cat sat", max_tokens=30, temperature=0, return_token_ids=True)
    body = asked("the cat sat", max_output_tokens=30)
    last = {"stop_token_ids": [chat["choices"][0]["token_ids"][-1]]}
    whole = ai.responses.create(**body, extra_body=last)
    with ai.responses.stream(**body, extra_body=last) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done",
                          "response.output_item.done", "response.completed"]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == whole.output_text != ""
    assert final.usage is not None and whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens


def test_a_stream_that_is_cut_is_incomplete(ai: openai.OpenAI) -> None:
    events = list(ai.responses.create(**asked(max_output_tokens=3, stream=True)))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert events[0].type == "response.created" and events[0].response.output == []


def test_items_become_turns(client: Client, ai: openai.OpenAI) -> None:
    items = [
        {"role": "developer", "content": "and then"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "cat"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"},
        {"role": "user", "content": "sat"},
    ]
    response = ai.responses.create(**asked(items))
    system = {"role": "system", "content": "and then"}
    assistant = {"role": "assistant", "content": "cat"}
    chat = client.chat(system, "the", assistant, "sat", max_tokens=20, temperature=0)
    assert response.output_text == chat["choices"][0]["message"]["content"]


def test_unknown_tools_are_ignored_with_a_note(ai: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "web_search"}, {"type": "web_search"}, {"type": "custom"}]
    response: Any = ai.responses.create(**asked(tools=tools, tool_choice="auto"))
    assert [warning.split(" are ignored")[0] for warning in response.warnings] == [
        "tools of type web_search",
        "tools of type custom",
    ]
    assert response.output_text == ai.responses.create(**asked()).output_text
    assert not hasattr(ai.responses.create(**asked()), "warnings")


def test_a_response_without_a_limit_gets_more_than_a_chat(
    server: InProcess, ai: openai.OpenAI
) -> None:
    body = asked(max_output_tokens=None, stream=True)
    with ai.responses.create(**body, extra_body={"ignore_eos": True}) as stream:
        next(event for event in stream if event.type == "response.output_text.delta")
        (request,) = server.engine.scheduler.running
        assert request.params.max_tokens == POSITIONS - len(request.params.tokens) > 1024


def test_an_asynchronous_client(server: InProcess, ai: openai.OpenAI) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.responses.create(**asked("hat"), stream=True)
            texts = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            return "".join(texts)

    assert asyncio.run(ask()) == ai.responses.create(**asked("hat")).output_text


# -- tools ----------------------------------------------------------------------------------------

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Ulm"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]


class Place(pydantic.BaseModel):
    city: Literal["Köln", "Ulm"]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        pytest.param({"type": "function", "name": "weather"}, marks=pytest.mark.full),
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "weather"}],
        },
    ],
    ids=str,
)
def test_a_call_that_must_be_is_valid(ai: openai.OpenAI, choice: Any) -> None:
    """Whatever the model: a grammar enforces it."""
    body = asked("weather?", tools=TOOLS, tool_choice=choice, max_output_tokens=200,
                 parallel_tool_calls=False)  # fmt: skip
    (whole,) = ai.responses.create(**body).output
    with ai.responses.stream(**body) as stream:
        events = list(stream)
        (streamed,) = stream.get_final_response().output
    assert whole.type == "function_call" and streamed.type == "function_call"
    assert (streamed.name, streamed.arguments) == (whole.name, whole.arguments)
    assert json.loads(whole.arguments)["city"] in {"Köln", "Ulm"}
    kinds = [event.type for event in events]
    assert kinds[2:4] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
    ]
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_tool_loop_over_stored_responses_keeps_its_prefix(ai: openai.OpenAI) -> None:
    asking = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
              "max_output_tokens": 200}  # fmt: skip
    given: Any = "weather, please"
    previous, length = None, 0
    for turn in range(3):
        response = ai.responses.create(**asked(given, previous_response_id=previous, **asking))
        (call,) = response.output
        assert call.type == "function_call" and response.usage is not None
        read = response.usage.input_tokens_details.cached_tokens
        assert read >= length // PAGE * PAGE, "the prompt before, and the call that answered it"
        length, previous = response.usage.total_tokens - PAGE, response.id
        result = {"type": "function_call_output", "call_id": call.call_id, "output": f"rain {turn}"}
        given = [result]


def test_formats_are_enforced_and_parsed(ai: openai.OpenAI) -> None:
    response = ai.responses.parse(**asked(max_output_tokens=200), text_format=Place)
    assert response.status == "completed"
    assert response.output_parsed is not None
    form: Any = {"format": {"type": "json_object"}}
    assert ai.responses.create(**asked(text=form)).output_text.lstrip()[0] == "{"


def test_a_form_that_cannot_be_enforced_is_named_as_this_api_names_it(client: Client) -> None:
    form = {"type": "json_schema", "name": "it", "schema": {"not": {}}}
    reply = client.post(PATH, {"input": "a", "text": {"format": form}})
    assert reply.status == 400 and "the JSON schema cannot be enforced" in reply.problem
    assert reply.json()["error"]["param"] == "text.format"
    result = {"type": "function_call_output", "call_id": "", "output": "x"}
    assert client.post(PATH, {"input": [result]}).json()["error"]["param"] == "input"


def test_reasoning_is_an_item_of_its_own_and_comes_back(
    serve: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A thought is any text before what a grammar asks for. Here the grammar has the thought.
    monkeypatch.setattr(ChatFormats, "_thought", lambda *_: "")
    server = serve(reasoning_parser="think")
    ai, spoken = connect(server), {"regex": "<think>cat</think>hat"}
    whole = ai.responses.create(**asked(), extra_body=spoken)
    *events, last = ai.responses.create(**asked(stream=True), extra_body=spoken)
    assert "response.reasoning_text.delta" in [event.type for event in events]
    assert last.type == "response.completed"
    for response in (whole, last.response):
        reasoning, _ = response.output
        assert reasoning.type == "reasoning" and reasoning.content is not None
        assert (reasoning.content[0].text, response.output_text) == ("cat", "hat")
        assert response.usage is not None
        counted = response.usage.output_tokens_details.reasoning_tokens
        assert 0 < counted < response.usage.output_tokens
    assert ai.responses.create(**asked("on", previous_response_id=whole.id)).output_text


def test_reasoning_is_encrypted_where_it_is_asked_for() -> None:
    thought = "Grüße, 世界 </think> "
    for include in ([INCLUDED], ["file_search_call.results"], []):
        writer = ResponsesWriter(read({"input": "a", "include": include}), "m", lambda _: True)
        for event in (ReasoningDelta(thought[:3]), ReasoningDelta(thought[3:]), TextDelta("a")):
            done = writer.chunk(event)
        (item,) = (each["item"] for each in done if each["type"] == "response.output_item.done")
        assert ("encrypted_content" in item) == (INCLUDED in include)
        back = {key: item[key] for key in item.keys() - {"content"}}
        (message, *_) = read({"input": [back, {"role": "user", "content": "b"}]}).chat["messages"]
        assert message.get("reasoning_content") == (thought if INCLUDED in include else None)
        assert read({"input": [item]}).chat["messages"][0]["reasoning_content"] == thought


# -- stored responses -----------------------------------------------------------------------------


def test_a_conversation_continues_and_finds_its_prefix(ai: openai.OpenAI) -> None:
    first = ai.responses.create(**asked("the cat sat on the mat " * 6, instructions="be brief"))
    assert first.usage is not None
    second = ai.responses.create(
        **asked("and then", previous_response_id=first.id, instructions="be brief")
    )
    spoken = [{"role": "user", "content": "the cat sat on the mat " * 6}, *first.output]
    alone = ai.responses.create(
        **asked([*spoken, {"role": "user", "content": "and then"}], instructions="be brief")
    )
    assert second.output_text == alone.output_text
    assert second.previous_response_id == first.id
    assert second.usage is not None and alone.usage is not None
    assert second.usage.input_tokens == alone.usage.input_tokens
    read = second.usage.input_tokens_details.cached_tokens
    assert read >= first.usage.input_tokens // PAGE * PAGE
    third = ai.responses.create(**asked("more", previous_response_id=second.id))
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens, "instructions are not carried over"


def test_stored_responses_are_found_until_they_are_deleted(ai: openai.OpenAI) -> None:
    response = ai.responses.create(**asked())
    assert ai.responses.retrieve(response.id) == response
    later = ai.responses.create(**asked("more", previous_response_id=response.id))
    ai.responses.delete(response.id)
    for call in (ai.responses.retrieve, ai.responses.delete):
        with pytest.raises(openai.NotFoundError, match="there is no stored response"):
            call(response.id)
    with pytest.raises(openai.BadRequestError, match="there is no stored response") as caught:
        ai.responses.create(**asked(previous_response_id=response.id))
    assert caught.value.code == "previous_response_not_found"
    assert ai.responses.create(**asked("on", previous_response_id=later.id)).output_text


def test_the_items_that_a_response_followed_come_page_by_page(
    ai: openai.OpenAI, client: Client
) -> None:
    first = ai.responses.create(**asked("one", max_output_tokens=3))
    then = [{"role": "user", "content": word} for word in ("two", "three")]
    second = ai.responses.create(**asked(then, previous_response_id=first.id, max_output_tokens=3))
    found = list(ai.responses.input_items.list(second.id, order="asc", limit=2))
    texts = [each.content[0].text for each in found]
    assert texts == ["one", first.output_text, "two", "three"]
    assert len({each.id for each in found}) == 4 and first.output[0].id in {e.id for e in found}
    latest = ai.responses.input_items.list(second.id, limit=1)
    assert latest.data == [found[-1]] and latest.has_more
    for query, says in (
        ("order=up", "asc or desc"),
        ("limit=0", "1 to 100"),
        ("after=x", "an id of one"),
    ):
        reply = client.get(f"{PATH}/{second.id}/input_items?{query}")
        assert reply.status == 400 and says in reply.problem
    assert client.get(f"{PATH}/resp_none/input_items").status == 404


def test_a_streamed_response_is_stored_and_one_that_is_not_to_be_is_not(ai: openai.OpenAI) -> None:
    *_, last = ai.responses.create(**asked(stream=True))
    assert last.type == "response.incomplete" and last.response.store
    assert ai.responses.retrieve(last.response.id).output_text == last.response.output_text
    fleeting = ai.responses.create(**asked(store=False))
    assert fleeting.store is False
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(fleeting.id)


def stored(number: int, text: str = "") -> Json:
    return {"id": f"r{number}", "output": [{"role": "assistant", "content": text or str(number)}]}


def remembered(history: ResponseHistory, response_id: str) -> list[str] | None:
    items = history.chain(response_id)
    return None if items is None else [item["content"] for item in items]


def turn(text: str) -> list[Json]:
    return [{"role": "user", "content": text}]


def test_history_forgets_what_was_used_longest_ago() -> None:
    history = ResponseHistory(max_responses=3)
    assert history.put(stored(0), turn("a"), None)
    assert history.put(stored(1), turn("b"), "r0")
    assert history.put(stored(2), turn("c"), None)
    assert history.get("r0")
    assert history.put(stored(3), turn("d"), "r1"), "which makes r1 the oldest"
    assert [history.get(f"r{n}") is not None for n in range(4)] == [True, False, True, True]
    assert remembered(history, "r3") == ["a", "0", "b", "1", "d", "3"], "a chain outlives its names"
    assert remembered(history, "r1") is None
    assert not history.put(stored(4), turn("e"), "r1")


def test_history_counts_bytes_until_no_conversation_needs_them() -> None:
    history = ResponseHistory(max_bytes=2000)
    assert not history.put(stored(0, "x" * 2000), turn("a"), None)
    assert (len(history), history.stored_bytes) == (0, 0)
    history.put(stored(1, "x" * 500), turn("a"), None)
    history.put(stored(2), turn("b"), "r1")
    full = history.stored_bytes
    assert history.delete("r1") and not history.delete("r1")
    assert history.stored_bytes == full, "r2 needs it"
    assert history.delete("r2")
    assert history.stored_bytes == 0


@pytest.mark.parametrize("seed", range(5))
def test_history_equals_plain_lists(seed: int) -> None:
    """Against conversations that are kept whole, while names are few and bytes are bounded."""
    rng = random.Random(seed)
    history = ResponseHistory(max_responses=6, max_bytes=1200)
    conversations: dict[str, list[str]] = {}
    for number in range(300):
        before = rng.choice([None, *[*conversations][-11:]])
        known = before is None or history.chain(before) is not None
        kept = history.put(stored(number), turn(f"u{number}"), before)
        assert known or not kept
        if kept:
            earlier = conversations[before] if before else []
            conversations[f"r{number}"] = [*earlier, f"u{number}", str(number)]
        if conversations and rng.random() < 0.1:
            history.delete(rng.choice([*conversations]))
        found = [name for name in conversations if history.get(name)]
        assert len(found) == len(history) <= 6
        assert history.stored_bytes <= 1200
        for name in found:
            assert remembered(history, name) == conversations[name]
    for name in conversations:
        history.delete(name)
    assert (len(history), history.stored_bytes) == (0, 0)


# -- errors ---------------------------------------------------------------------------------------


def read(body: Json) -> ResponsesRequest:
    return read_request(RequestFields(body), lambda _: None)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "send a text or a list"),
        ({"input": ["a"]}, "input", "no object"),
        ({"input": [{"type": "web_search_call"}]}, "input", "type web_search_call is unknown"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input", "the role robot"),
        ({"input": [{"role": "user", "content": 5}]}, "input", "is not text"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "type input_image is not supported; send parts of type input_text",
        ),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "input", "arguments"),
        ({"input": "a", "background": True}, "background", "wait for the response"),
        ({"input": "a", "conversation": "c"}, "conversation", "use previous_response_id"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt", "send its text"),
        ({"input": "a", "truncation": "auto"}, "truncation", "send disabled"),
        ({"input": "a", "metadata": {"a": 5}}, "metadata", "send one"),
        ({"input": "a", "tools": "f"}, "tools", "not a list of objects"),
        ({"input": "a", "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "send auto"),
        ({"input": "a", "previous_response_id": "x"}, "previous_response_id", "no stored response"),
        ({"input": "a", "store": 1}, "store", "send true or false"),
        ({"input": [{"type": "reasoning", "encrypted_content": MARK + "%"}]}, "input", "damaged"),
        ({"input": [{"type": "reasoning", "encrypted_content": MARK + "/w=="}]}, "input", "dama"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input", "text is not a text"),
        ({"input": "a", "include": 5}, "include", "a list of up to"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include", "chat/compl"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format", "send text, json_obj"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format", "a schema"),
    ],
    ids=str,
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(
    body: Json, param: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        read(body)
    assert caught.value.param == param and len(str(caught.value)) < 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("depth", [300, 700, 850, 900, 950, 980, 1000])
def test_depth_breaks_nothing(client: Client, depth: int, stream: bool) -> None:
    """A response repeats and stores what the request had."""
    nested = "[" * depth + "]" * depth
    for field in ("tools", "input"):
        deep = {"role": "user", "content": "a", "type": "message", "x": "DEEP"}
        given = {"input": "a", "tools": [deep]} if field == "tools" else {"input": [deep]}
        raw = json.dumps({**given, "max_output_tokens": 1, "temperature": 0, "stream": stream})
        reply = client.send("POST", PATH, raw.replace('"DEEP"', nested).encode())
        assert reply.status in (200, 400), reply.body
        assert reply.status == 400 or not stream or b"response.incomplete" in reply.body


def test_errors_have_the_shape_of_openai(ai: openai.OpenAI, serve: Any, connect: Connect) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as caught:
        ai.responses.create(**asked(temperature=-1))
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="there is no model") as missing:
        ai.responses.create(**asked(model="gpt"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="background is not supported"):
        ai.responses.create(**asked(background=True))
    with pytest.raises(openai.BadRequestError, match="not streamed again"):
        ai.responses.retrieve("resp_x", stream=True)
    keyed = serve(api_key="knock")
    with pytest.raises(openai.AuthenticationError, match="needs the API key"):
        connect(keyed, "wrong").responses.create(**asked())
    with pytest.raises(openai.AuthenticationError, match="needs the API key"):
        connect(keyed, "wrong").responses.retrieve("resp_x")


def test_a_stream_that_breaks_has_failed(
    serve: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    body = asked(max_output_tokens=4000, stream=True)
    stream = connect(server).responses.create(**body, extra_body={"ignore_eos": True})
    events = iter(stream)
    assert next(events).type == "response.created"

    def step() -> None:
        raise RuntimeError("a fault of the test")

    monkeypatch.setattr(server.engine, "step", step)
    *_, last = events
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.error.message == "the engine has stopped; restart the server"
    with pytest.raises(openai.NotFoundError):
        connect(server).responses.retrieve(last.response.id)


# -- bodies ---------------------------------------------------------------------------------------


def test_a_tool_loop_becomes_a_chat() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    call = {"type": "function_call", "id": "fc", "status": "completed"}
    form = {"type": "json_schema", "name": "n", "schema": {}, "strict": True}
    request = read({
        "model": MODEL,
        "instructions": "be brief",
        "max_output_tokens": 9,
        "input": [
            {"role": "developer", "content": "and kind"},
            {"role": "user", "content": "weather?"},
            {"type": "reasoning", "id": "r", "summary": [],
             "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "So"}]},
            {**call, "call_id": "c0", "name": "weather", "arguments": '{"city": "Köln"}'},
            {**call, "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c0", "output": "rain"},
            {"type": "function_call_output", "call_id": "c1",
             "output": [{"type": "input_text", "text": "sun"}]},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": schema, "strict": True}],
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "text": {"format": form, "verbosity": "low"},
        "store": False,
        "cache_salt": "s",
    })  # fmt: skip
    function = {"name": "weather", "parameters": schema, "strict": True}
    made = [
        {"id": "c0", "type": "function",
         "function": {"name": "weather", "arguments": '{"city": "Köln"}'}},
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
    ]  # fmt: skip
    assert request.chat == {
        "model": MODEL,
        "max_completion_tokens": 9,
        "messages": [
            {"role": "system", "content": "be brief\n\nand kind"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "So", "reasoning_content": "Hm.", "tool_calls": made},
            {"role": "tool", "tool_call_id": "c0", "content": "rain"},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {}, "strict": True},
        },
        "chat_template_kwargs": {"reasoning_effort": "low", "verbosity": "low"},
        "cache_salt": "s",
    }
    assert (request.store, request.warnings) == (False, [])


def test_history_comes_before_the_input() -> None:
    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    body = {"input": "c", "previous_response_id": "r"}
    request = read_request(RequestFields(body), lambda _: earlier)
    assert [message["content"] for message in request.chat["messages"]] == ["a", "b", "c"]
    assert request.items == [{"role": "user", "content": "c"}], "which alone is stored"


# -- events ---------------------------------------------------------------------------------------

COUNTS = TokenCounts(prompt=50, cached=16, written=32, output=7, reasoning=2, drafts={}, details={})


def written(finish: Finish, *events: OutputEvent) -> list[Json]:
    writer = ResponsesWriter(read({"input": "a"}), "m", lambda _: True)
    made = [*writer.opening(), *writer.started(COUNTS)]
    made += [one for event in events for one in writer.chunk(event)]
    return [*made, *writer.closing(Ending(finish, None, COUNTS))]


def test_reasoning_text_and_calls_are_items() -> None:
    events = written(
        Finish.STOP,
        ReasoningDelta("Hm"),
        TextDelta("S"),
        TextDelta("o"),
        CallBegin(0, "c0", "f"),
        CallArguments(0, '{"a":'),
        CallArguments(0, " 1}"),
        CallEnd(0),
    )
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert (done[0]["content"][0]["text"], done[1]["content"][0]["text"]) == ("Hm", "So")
    assert (done[2]["call_id"], done[2]["name"], done[2]["arguments"]) == ("c0", "f", '{"a": 1}')
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places)
    assert events[-1]["response"]["usage"] == {
        "input_tokens": 50,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 32},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 57,
    }


# -- small routes ---------------------------------------------------------------------------------


def test_texts_become_tokens_and_back(server: InProcess, client: Client) -> None:
    text = "the cat, Grüße, 世界"
    found = client.post("/tokenize", {"model": MODEL, "prompt": text}).json()
    assert server.engine.tokenizer is not None
    assert found["tokens"] == server.engine.tokenizer.encode(text)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == server.engine.max_sequence_tokens
    assert client.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "the cat"}]
    counted = client.post("/tokenize", {"messages": messages}).json()["count"]
    assert counted == client.chat("the cat", max_tokens=1)["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "prompt and messages are missing"),
        ("/tokenize", {"prompt": 5}, "prompt is 5; send a text"),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, "there is no model 'gpt'"),
        ("/tokenize", {"messages": []}, "messages is missing"),
        ("/detokenize", {"tokens": "a"}, "send a list of whole numbers"),
        ("/detokenize", {"tokens": [-1]}, "token ids must lie in"),
        ("/detokenize", {"tokens": [10**9]}, "token ids must lie in"),
    ],
    ids=str,
)
def test_bad_tokens_are_refused(client: Client, path: str, body: Json, words: str) -> None:
    reply = client.post(path, body)
    assert reply.status in (400, 404) and words in reply.problem


def test_tokens_need_a_tokenizer_and_the_key(serve: Any, bare_folder: Any) -> None:
    server = serve(model=str(bare_folder), api_key="knock")
    assert "came without a tokenizer" in server.client.post("/tokenize", {"prompt": "a"}).problem
    assert "came without a tokenizer" in server.client.post("/detokenize", {"tokens": [1]}).problem
    stranger = Client(server.address, server.port)
    for path in ("/tokenize", "/detokenize"):
        assert stranger.post(path, {"prompt": "a"}).status == 401


def test_one_model(ai: openai.OpenAI) -> None:
    assert ai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="there is no model 'org/gpt'") as caught:
        ai.models.retrieve("org/gpt")
    assert caught.value.code == "model_not_found"
