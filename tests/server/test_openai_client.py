"""OpenAI's own client against this server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import pydantic
import pytest

from tests.deferred import Deferred
from tests.server.serving import PAGE, InProcess

openai = Deferred("openai")

MODEL = "tiny-0.1"

Connect = Callable[..., "openai.OpenAI"]


@pytest.fixture
def connect() -> Iterator[Connect]:
    opened: list[openai.OpenAI] = []

    def to(server: InProcess, key: str = "none", retries: int = 0) -> openai.OpenAI:
        opened.append(
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=retries, timeout=30)
        )
        return opened[-1]

    yield to
    for client in opened:
        client.close()


@pytest.fixture
def ai(server: InProcess, connect: Connect) -> openai.OpenAI:
    return connect(server)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_models(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == [MODEL]


def test_completions(ai: openai.OpenAI) -> None:
    answer = ai.completions.create(
        model=MODEL,
        prompt=["the cat", "the hat"],
        max_tokens=8,
        n=2,
        seed=1,
        logprobs=3,
        echo=False,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text != answer.choices[1].text
    logprobs = answer.choices[0].logprobs
    assert (
        logprobs is not None and logprobs.tokens and logprobs.top_logprobs and logprobs.text_offset
    )
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == len(logprobs.top_logprobs)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_of_a_completion(ai: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0}
    whole = ai.completions.create(**asked)
    chunks = list(
        ai.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_chats(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(
        model=MODEL, messages=user("the cat"), max_tokens=10, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.message.role for choice in answer.choices] == ["assistant", "assistant"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert all(len(one.top_logprobs) == 2 and one.bytes is not None for one in logprobs.content)


def test_a_stream_of_a_chat(ai: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": user("that"), "max_tokens": 30, "temperature": 0}
    whole = ai.chat.completions.create(**asked)
    chunks = list(
        ai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_stop_strings(ai: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": user("that"), "max_tokens": 30, "temperature": 0}
    whole = ai.chat.completions.create(**asked).choices[0].message.content
    assert whole is not None
    choice = ai.chat.completions.create(**asked, stop=[whole[3:5]]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (
        whole[: whole.index(whole[3:5])],
        "stop",
    )


def test_names_of_our_own(ai: openai.OpenAI) -> None:
    extra = {"cache_salt": "own", "session_id": "s", "priority": 1, "return_token_ids": True,
             "return_cached_tokens_details": True, "top_k": 5}  # fmt: skip
    prompt = list(range(5, 5 + 2 * PAGE + 1))
    for found in (0, 2 * PAGE):
        answer: Any = ai.completions.create(
            model=MODEL, prompt=prompt, max_tokens=2, extra_body=extra
        )
        assert answer.usage.cached_tokens_details["device"] == found
        assert answer.usage.prompt_tokens_details.cached_tokens == found
        assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens


def test_an_asynchronous_client(server: InProcess, ai: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": user("hat"), "max_tokens": 5, "temperature": 0}

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(**asked, stream=True)
            return [chunk.choices[0].delta.content or "" async for chunk in stream]

    whole = ai.chat.completions.create(**asked).choices[0].message.content
    assert whole and "".join(asyncio.run(ask())) == whole


# -- structured parse -----------------------------------------------------------------------------


class Trip(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo"]
    nights: Annotated[int, pydantic.Field(ge=1, le=9)]
    by_train: bool


def test_a_parsed_answer_is_an_object_of_the_class(ai: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": user("Where to?"), "max_tokens": 200}
    answer = ai.chat.completions.parse(**asked, response_format=Trip, n=2, seed=1)
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Trip) and choice.finish_reason == "stop"
    with ai.chat.completions.stream(**asked, response_format=Trip, seed=1) as stream:
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == answer.choices[0].message.parsed


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_parsed_call_of_a_strict_tool_has_an_object_of_its_class(
    ai: openai.OpenAI, choice: str
) -> None:
    tool = openai.pydantic_function_tool(Trip, name="book", description="Books a trip")
    assert tool["function"]["strict"] is True
    named = {"type": "function", "function": {"name": "book"}}
    answer = ai.chat.completions.parse(
        model=MODEL,
        messages=user("Book a trip."),
        tools=[tool],
        tool_choice="required" if choice == "required" else named,  # type: ignore[arg-type]
        parallel_tool_calls=False,
        max_tokens=200,
        seed=1,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "book"
    assert isinstance(call.function.parsed_arguments, Trip)


# -- errors ---------------------------------------------------------------------------------------


def test_bad_requests_raise_their_own_error(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as caught:
        ai.completions.create(model=MODEL, prompt="a", temperature=-1)
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="there is no model") as missing:
        ai.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="this engine serves") as long:
        ai.chat.completions.create(model=MODEL, messages=user("a" * 9000), stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        ai.embeddings.create(model=MODEL, input="a")


def test_wrong_keys_raise_their_own_error(serve: Any, connect: Connect) -> None:
    server = serve(api_key="knock")
    with pytest.raises(openai.AuthenticationError, match="needs the API key"):
        connect(server, "wrong").models.list()
    assert connect(server, "knock").models.list()


def test_too_many_requests_raise_their_own_error_or_are_tried_again(
    serve: Any, connect: Connect
) -> None:
    server = serve(max_running=1, max_waiting=0)
    here = server.client.start("/v1/completions", prompt=[5], max_tokens=4000, ignore_eos=True)
    server.until(lambda report: report["requests"]["running"] == 1)
    with pytest.raises(openai.RateLimitError, match="try again in") as caught:
        connect(server).completions.create(model=MODEL, prompt="a")
    assert caught.value.response.headers["retry-after"] == "1"
    leaving = threading.Timer(0.3, here.leave)
    leaving.start()
    answer = connect(server, retries=2).completions.create(model=MODEL, prompt="a", max_tokens=3)
    assert answer.choices
    leaving.join()
    server.settled()


def test_a_stream_that_breaks_raises(
    serve: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    stream = connect(server).completions.create(
        model=MODEL, prompt="a", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))

    def step() -> None:
        raise RuntimeError("a fault of the test")

    monkeypatch.setattr(server.engine, "step", step)
    with pytest.raises(openai.APIError, match="the engine has stopped"):
        list(stream)
    with pytest.raises(openai.InternalServerError, match="the engine has stopped"):
        connect(server).completions.create(model=MODEL, prompt="a")
