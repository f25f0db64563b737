"""Tools over HTTP, with the real client: forced calls, streams, messages, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tokenizers
import torch
import transformers

from kvtide.models.chat_templates.builtin import builtin_template
from kvtide.server.settings import Settings
from kvtide.server.tools.parser_registry import FORMATS, ChatFormats
from tests import gemma3_file
from tests.deferred import Deferred
from tests.grids import everything
from tests.models import gguf_files, tiny
from tests.server.serving import InProcess, save_tokenizer
from tests.server.talking import Client, Json, as_messages

openai = Deferred("openai")

PATH = "/v1/chat/completions"
MODEL = "tiny-0.1"
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": DIGIT},
                "required": ["city", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": as_messages("What is the weather?"),
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 200,
    "seed": 5,
}


@pytest.fixture
def ai(server: InProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def check_call(name: str, arguments: str) -> None:
    values = json.loads(arguments)
    if name == "now":
        assert values == {}
    else:
        assert name == "get_weather" and values.keys() == {"city", "days"}
        assert values["city"] in ("Paris", "Oslo") and 0 <= values["days"] <= 9


def streamed(chunks: Any, choice: int = 0) -> tuple[list[list[str]], str, str | None]:
    """The calls of a stream (id, name, arguments), its text, and why it ended."""
    calls: list[list[str]] = []
    text, finish = "", None
    for chunk in chunks:
        for one in (each for each in chunk.choices if each.index == choice):
            text += one.delta.content or ""
            finish = one.finish_reason or finish
            for call in one.delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(calls) and call.type == "function"
                    calls.append([call.id, call.function.name, ""])
                assert call.index == len(calls) - 1
                calls[-1][2] += call.function.arguments
    return calls, text, finish


def test_a_required_call_is_made(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(**ASKED, n=3)
    ids = set()
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None and choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        check_call(call.function.name, call.function.arguments)
        ids.add(call.id)
    assert len(ids) == 3


def test_a_stream_has_the_same_calls_in_pieces(ai: openai.OpenAI) -> None:
    asked = {**ASKED, "tool_choice": NAMED, "n": 2}
    whole = ai.chat.completions.create(**asked)
    usage = {"stream_options": {"include_usage": True}}
    chunks = list(ai.chat.completions.create(**asked, stream=True, **usage))
    for choice in whole.choices:
        calls, text, finish = streamed(chunks, choice.index)
        assert choice.message.tool_calls is not None
        expected = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
        assert [(name, arguments) for _, name, arguments in calls] == expected
        assert (text, finish) == ("", "tool_calls")
    pieces = [d.tool_calls for c in chunks for d in (x.delta for x in c.choices) if d.tool_calls]
    assert len(pieces) > 4, "arguments come as they are generated"
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_client_joins_a_stream(ai: openai.OpenAI) -> None:
    with ai.chat.completions.stream(**ASKED) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.tool_calls is not None
    (call,) = final.message.tool_calls
    check_call(call.function.name, call.function.arguments)


def test_a_named_function_is_called_once(ai: openai.OpenAI) -> None:
    asked = {**ASKED, "tool_choice": NAMED, "parallel_tool_calls": True}
    message = ai.chat.completions.create(**asked).choices[0].message
    assert message.tool_calls is not None
    assert [call.function.name for call in message.tool_calls] == ["get_weather"]


def test_parallel_calls_end(ai: openai.OpenAI) -> None:
    asked = {**ASKED, "parallel_tool_calls": True, "max_tokens": 2000}
    choice = ai.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    for call in choice.message.tool_calls:
        check_call(call.function.name, call.function.arguments)


def test_a_call_that_is_cut_short_ends_with_length(ai: openai.OpenAI) -> None:
    choice = ai.chat.completions.create(**{**ASKED, "max_tokens": 5}).choices[0]
    assert choice.finish_reason == "length"


@pytest.mark.quick(name=["llama3", "glm"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_calls_over_http(
    server: InProcess, ai: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spoken = "harmony" if name == "harmony" else "none"
    formats = ChatFormats(server.engine.tokenizer, "", name, spoken)
    monkeypatch.setattr(server.app._parser, "_formats", formats)
    asked = {**ASKED, "tool_choice": NAMED, "max_tokens": 200 if name == "harmony" else 400}
    # An analysis before the call, which harmony may have, has no end that a random model finds.
    seeds = range(6) if name == "harmony" else range(3 if everything() else 1)
    answers = (ai.chat.completions.create(**{**asked, "seed": seed}) for seed in seeds)
    choices = [answer.choices[0] for answer in answers]
    called = [choice for choice in choices if choice.message.tool_calls]
    assert called and (name == "harmony" or called == choices)
    for choice in called:
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        check_call(call.function.name, call.function.arguments)


def test_only_allowed_tools_are_called_and_the_prompt_has_all(ai: openai.OpenAI) -> None:
    listed = [{"type": "function", "function": {"name": "now"}}]
    allowed = {"mode": "required", "tools": listed}
    asked = {**ASKED, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}, "n": 4}
    answer = ai.chat.completions.create(**asked)
    for choice in answer.choices:
        assert choice.message.tool_calls is not None
        assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    usual = ai.chat.completions.create(**ASKED)
    assert usual.usage is not None and answer.usage is not None
    assert answer.usage.prompt_tokens == usual.usage.prompt_tokens


def test_strict_tools_leave_the_model_free(ai: openai.OpenAI) -> None:
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    asked = {**ASKED, "tools": [strict], "tool_choice": "auto", "max_tokens": 20}
    choice = ai.chat.completions.create(**asked).choices[0]
    assert choice.message.content and choice.finish_reason in ("length", "stop")


# -- special tokens -------------------------------------------------------------------------------


@pytest.fixture
def marked(serve: Callable[..., InProcess], model_folder: Path, tmp_path: Path) -> InProcess:
    """A server of a model whose markers of calls are special tokens."""
    folder = tmp_path / MODEL
    shutil.copytree(model_folder, folder)
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_special_tokens(["<tool_call>", "</tool_call>"])
    core.save(str(folder / "tokenizer.json"))
    return serve(model=str(folder))


def test_markers_that_are_special_tokens_are_generated_and_read(marked: InProcess) -> None:
    asked = {**ASKED, "return_token_ids": True}
    (choice,) = marked.client.chat(*asked.pop("messages"), **asked)["choices"]
    tokenizer = marked.engine.tokenizer
    assert tokenizer is not None
    begin, end = (tokenizer.special_id(text) for text in ("<tool_call>", "</tool_call>"))
    assert choice["token_ids"][0] == begin and end in choice["token_ids"]
    (call,) = choice["message"]["tool_calls"]
    check_call(call["function"]["name"], call["function"]["arguments"])
    assert choice["message"]["content"] is None


# -- templates of a family, of a file, of GGUF ----------------------------------------------------

HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}"
    "{% endfor %}\n</tools>\nWrite <tool_call>{name, arguments}</tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for call in m.tool_calls %}{{ '\n<tool_call>\n' + call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_gguf_file_calls_tools_as_its_template_says(
    serve: Callable[..., InProcess], tmp_path: Path
) -> None:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    markers = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    pair = [letters[0] * 2]
    file = tmp_path / "hermes.gguf"
    gguf_files.tiny_llama(file, [*letters, *pair, *markers], len(markers), HERMES)
    server = serve(model=str(file))
    assert server.serving.formats.tool_parser == "hermes" and server.serving.formats.remark == ""
    asked = {**ASKED, "model": server.serving.name}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:
        calls, text, finish = streamed(ai.chat.completions.create(**asked, stream=True))
        ((call_id, name, arguments),) = calls
        assert (text, finish) == ("", "tool_calls")
        check_call(name, arguments)
        function = {"name": name, "arguments": arguments}
        turn = {"role": "assistant", "content": None, "tool_calls": [
            {"id": call_id, "type": "function", "function": function}]}  # fmt: skip
        result = {"role": "tool", "tool_call_id": call_id, "content": "Sunny."}
        asked["messages"] = [*asked["messages"], turn, result]
        assert ai.chat.completions.create(**{**asked, "tool_choice": "none"}).choices
    fields = {"messages": asked["messages"], "tools": TOOLS}
    tokens = server.client.post("/tokenize", fields).json()["tokens"]
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    begin = tokenizer.special_id("<tool_call>")
    prompt = tokenizer.detokenizer(keep=tokenizer.special_ids).feed(tokens)
    assert tokens.count(begin) == 2 and '"name": "get_weather", "description"' in prompt
    assert f'<tool_call>\n{{"name": "{name}", "arguments": {{' in prompt


def prompt_of(server: InProcess, **fields: Json) -> str:
    """The text of a chat's prompt, with its special tokens."""
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    tokens = server.client.post("/tokenize", fields).json()["tokens"]
    return tokenizer.detokenizer(keep=tokenizer.special_ids).feed(tokens)


PLAIN = HERMES.partition("{% endif %}")[2]


@pytest.mark.parametrize("kind", ["gguf", "list", "files"])
def test_a_template_for_tools_is_used_where_tools_are_sent(
    serve: Callable[..., InProcess], model_folder: Path, tmp_path: Path, kind: str
) -> None:
    model = tmp_path / "tiny"
    if kind == "gguf":
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        tokens = [*letters, letters[0] * 2, "<|im_end|>"]
        model = gguf_files.tiny_llama(tmp_path / "tiny.gguf", tokens, 1, PLAIN, HERMES)
    else:
        shutil.copytree(model_folder, model)
        listed = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": HERMES}]
        settings = {"chat_template": listed if kind == "list" else "none of these"}
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
    if kind == "files":
        (model / "additional_chat_templates").mkdir()
        (model / "chat_template.jinja").write_text(PLAIN)
        (model / "additional_chat_templates/tool_use.jinja").write_text(HERMES)
    server = serve(model=str(model))
    assert server.serving.formats.tool_parser == "hermes" and server.serving.formats.remark == ""
    plain = prompt_of(server, messages=as_messages("go"))
    tooled = prompt_of(server, messages=as_messages("go"), tools=TOOLS)
    assert plain == "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    assert tooled.startswith("<|im_start|>system\n<tools>{") and tooled.endswith(plain)
    fields = {key: value for key, value in ASKED.items() if key not in ("model", "messages")}
    (choice,) = server.client.chat(*ASKED["messages"], **fields)["choices"]
    (call,) = choice["message"]["tool_calls"]
    check_call(call["function"]["name"], call["function"]["arguments"])


DSML = ["deepseek_v32", "deepseek_v4"]


@pytest.mark.full
@pytest.mark.parametrize("family", DSML)
def test_a_template_in_a_file_decides_how_calls_are_written(
    serve: Callable[..., InProcess], tmp_path: Path, family: str
) -> None:
    source = builtin_template(family)
    assert source is not None
    (tmp_path / "chat.jinja").write_text(source)
    server = serve(chat_template=str(tmp_path / "chat.jinja"), reasoning_parser="none")
    check_dsml(server, family, MODEL)


def check_dsml(server: InProcess, family: str, model: str) -> None:
    """Without reasoning, which has no end that a random model finds."""
    assert server.serving.formats.tool_parser == family and server.serving.formats.remark == ""
    thinking = {"extra_body": {"chat_template_kwargs": {"thinking": False}}}
    asked = {**ASKED, "model": model, "max_tokens": 400, **thinking}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:
        choice = ai.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        check_call(call.function.name, call.function.arguments)
        calls, _, finish = streamed(ai.chat.completions.create(**asked, stream=True))
    assert finish == "tool_calls"
    assert [made[1:] for made in calls] == [[call.function.name, call.function.arguments]]


@pytest.mark.full
@pytest.mark.parametrize("family", DSML)
def test_a_checkpoint_without_a_template_calls_tools_as_its_family_does(
    serve: Callable[..., InProcess], tmp_path: Path, family: str
) -> None:
    """As DeepSeek publishes them: markers are special tokens, and no file has a template."""
    folder = tmp_path / "published"
    config = tiny.config_of(family)
    config.vocab_size, config.max_position_embeddings = 320, 4096
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_special_tokens(["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"])
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    server = serve(model=str(folder), page_tokens=None, reasoning_parser="none")
    check_dsml(server, family, "published")


# -- messages back in -----------------------------------------------------------------------------


def test_a_loop_of_tools_keeps_its_prefix(server: InProcess, ai: openai.OpenAI) -> None:
    """The next turn finds the pages of the prompt and of the call that the model wrote."""
    extra = {"extra_body": {"cache_salt": "loop", "return_cached_tokens_details": True}}
    asked = {**ASKED, "messages": as_messages("What is the weather? " * 20)}
    first = ai.chat.completions.create(**asked, **extra)
    message = first.choices[0].message
    assert message.tool_calls is not None and first.usage is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."}
    turns = [*asked["messages"], message.model_dump(exclude_none=True), result]
    second = ai.chat.completions.create(**{**asked, "messages": turns}, **extra)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached > first.usage.total_tokens - 2 * 16


# -- reasoning ------------------------------------------------------------------------------------


def test_reasoning_is_a_field_of_its_own(
    server: InProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    thinking = ChatFormats(server.engine.tokenizer, "", None, "think")
    asked = {"messages": as_messages("Hm. <think>"), "temperature": 0, "max_tokens": 20}
    asked |= {"ignore_eos": True}
    plain = client.post(PATH, asked).json()
    monkeypatch.setattr(server.app._parser, "_formats", thinking)
    monkeypatch.setattr("kvtide.server.tools.reasoning.opened_by", lambda prompt: "</think>")
    thought = client.post(PATH, asked).json()
    message = thought["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"] == plain["choices"][0]["message"]["content"].strip()
    assert thought["usage"]["completion_tokens"] == 20
    chunks = client.stream(PATH, **asked)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    joined = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert joined == message["reasoning_content"]


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "param", "words"),
    [
        ({"tools": "f"}, "tools", "not a list"),
        ({"tools": [TOOLS[0]] * 2}, "tools", "two tools are named"),
        ({"tool_choice": "any"}, "tool_choice", "send auto, none, required"),
        ({"tool_choice": "required", "tools": None}, "tool_choice", "there are no tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
        ({"functions": [{"name": "f"}]}, "functions", "send tools instead"),
        ({"function_call": "auto"}, "function_call", "send tool_choice instead"),
        ({"messages": [{"role": "tool", "content": "5"}]}, "messages", "tool_call_id"),
    ],
)
def test_what_is_no_tool_is_refused(client: Client, field: Json, param: str, words: str) -> None:
    asked = {"messages": as_messages("a"), "tools": TOOLS, **field}
    reply = client.post(PATH, asked)
    assert reply.status == 400 and words in reply.problem
    assert reply.json()["error"]["param"] == param


def test_names_are_as_long_as_each_api_has_them(client: Client) -> None:
    """OpenAI documents 64 characters for chats; Anthropic takes 128, which clients use."""
    name, schema = "mcp__plugin_" + "a" * 100 + "__read", {"type": "object"}
    chat = {"messages": as_messages("a"), "max_tokens": 2}
    function = {"type": "function", "name": name, "parameters": schema}
    reply = client.post(PATH, {**chat, "tools": [{"type": "function", "function": function}]})
    assert reply.status == 400 and "has 118 characters, and a chat takes 64" in reply.problem
    assert reply.json()["error"]["param"] == "tools"
    called = {"tools": [{"name": name, "input_schema": schema}], "tool_choice": {"type": "any"}}
    message = client.post("/v1/messages", {**chat, **called, "max_tokens": 300}).json()
    assert message["content"][0]["name"] == name
    answer = {"role": "assistant", "content": message["content"][:1]}
    result = {"type": "tool_result", "tool_use_id": message["content"][0]["id"], "content": "x"}
    turns = [*chat["messages"], answer, {"role": "user", "content": [result]}]
    again = client.post("/v1/messages", {**chat, "messages": turns, "tools": called["tools"]})
    assert again.status == 200
    asked = {"input": "a", "tools": [function], "max_output_tokens": 2}
    assert client.post("/v1/responses", asked).status == 200


def test_a_completion_takes_no_tools(client: Client) -> None:
    reply = client.post("/v1/completions", {"prompt": "a", "tools": TOOLS})
    assert reply.status == 400 and "/v1/chat/completions" in reply.problem


def test_a_strict_schema_that_cannot_be_enforced_is_refused(client: Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "own"}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    asked = {"messages": as_messages("a"), "tools": [{"type": "function", "function": function}]}
    reply = client.post(PATH, asked)
    assert reply.status == 400 and "format" in reply.problem
    assert reply.json()["error"]["param"] == "tools"
    function["strict"] = False
    assert client.post(PATH, {**asked, "max_tokens": 2}).status == 200


# -- Gemma ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_gemma_calls_tools_in_its_own_form(
    serve: Callable[..., InProcess], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Its template knows no tools, and wants roles in turn."""
    (tmp_path / "gemma.jinja").write_text(gemma3_file.TEMPLATE)
    template = {"chat_template": str(tmp_path / "gemma.jinja"), "page_tokens": None}
    server = serve(model=str(gemma3_file.gemma3_file(request.config)), **template)
    assert server.serving.formats.tool_parser == "pythonic"
    assert "described in Python's form" in server.serving.formats.remark
    messages = as_messages("What is the weather in Oslo for the next 3 days?")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:
        asked = {**ASKED, "model": server.serving.name, "temperature": 0, "messages": messages}
        calls, text, finish = streamed(ai.chat.completions.create(**asked, stream=True))
        ((call_id, name, arguments),) = calls
        assert (name, text, finish) == ("get_weather", "", "tool_calls")
        check_call(name, arguments)
        assert json.loads(arguments)["city"] == "Oslo"
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        messages = [
            *messages,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": "Rain."},
            {"role": "user", "content": "Thanks."},
        ]
        asked |= {"messages": messages, "tool_choice": "auto", "max_tokens": 5}
        assert ai.chat.completions.create(**asked).choices
    prompt = prompt_of(server, messages=messages, tools=TOOLS)
    values = ", ".join(f"{key}={json.dumps(value)}" for key, value in json.loads(arguments).items())
    assert f"<start_of_turn>model\n[get_weather({values})]<end_of_turn>" in prompt
    assert "<start_of_turn>user\n```tool_output\nRain.\n```\nThanks.<end_of_turn>" in prompt


# -- SmolLM2 --------------------------------------------------------------------------------------

SMALL_TOOLS: list[Any] = [
    TOOLS[0],
    {
        "type": "function",
        "function": {
            "name": "send_message",
            "description": "Send a message to a person",
            "parameters": {
                "type": "object",
                "properties": {
                    "to": {
                        "type": "object",
                        "properties": {"name": {"type": "string", "maxLength": 20}},
                        "required": ["name"],
                        "additionalProperties": False,
                    },
                    "text": {"type": "string", "minLength": 1, "maxLength": 80},
                    "urgent": {"type": ["boolean", "null"]},
                },
                "required": ["to", "text"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add_items",
            "description": "Add items to a shopping list",
            "parameters": {
                "type": "object",
                "properties": {
                    "items": {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": 3,
                        "items": {
                            "type": "object",
                            "properties": {
                                "name": {"type": "string", "pattern": "^[a-z ]{2,20}$"},
                                "count": {"type": "integer", "minimum": 1, "maximum": 12},
                            },
                            "required": ["name", "count"],
                            "additionalProperties": False,
                        },
                    }
                },
                "required": ["items"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    },
]
SMALL_ASKED = [
    ("What is the weather in Oslo for the next 3 days?", "get_weather"),
    ("Tell Anna that the train is late. It is urgent.", "send_message"),
    ('Write to Tom: "See you at 8".', "send_message"),
    ("Put two eggs and a bread on my shopping list.", "add_items"),
]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[InProcess]:
    """Its template knows no tools and it was hardly trained on them; a grammar makes it call."""
    server = InProcess(Settings(model=None, port=0, storage="none"))
    assert "described in Hermes' form" in server.serving.formats.remark
    yield server
    server.settled()
    server.close()


@pytest.mark.full
@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize(("text", "name"), SMALL_ASKED)
def test_smollm2_calls_tools(
    smollm2: InProcess, monkeypatch: pytest.MonkeyPatch, text: str, name: str, form: str
) -> None:
    """With free text and nested arguments, whichever form it is made to write them in."""
    formats = ChatFormats(smollm2.engine.tokenizer, "", form, "none")
    monkeypatch.setattr(smollm2.app._parser, "_formats", formats)
    chosen = {"type": "function", "function": {"name": name}}
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0) as ai:
        chunks = ai.chat.completions.create(
            model=smollm2.serving.name,
            messages=as_messages(text),
            tools=SMALL_TOOLS,
            tool_choice=chosen,
            temperature=0,
            max_tokens=300,
            stream=True,
        )
        calls, content, finish = streamed(chunks)
    ((_, called, arguments),) = calls
    assert (called, content, finish) == (name, "", "tool_calls")
    (function,) = (tool["function"] for tool in SMALL_TOOLS if tool["function"]["name"] == name)
    jsonschema.validate(json.loads(arguments), function["parameters"])
    if form == "hermes" and name == "get_weather":
        assert json.loads(arguments)["city"] == "Oslo"


@pytest.mark.full
def test_smollm2_chooses_among_its_tools(smollm2: InProcess) -> None:
    asked = {"tools": SMALL_TOOLS, "tool_choice": "required", "temperature": 0, "max_tokens": 300}
    for text, _ in SMALL_ASKED:
        (choice,) = smollm2.client.chat(text, **asked)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        for call in choice["message"]["tool_calls"]:
            named = call["function"]["name"]
            (function,) = (t["function"] for t in SMALL_TOOLS if t["function"]["name"] == named)
            jsonschema.validate(json.loads(call["function"]["arguments"]), function["parameters"])
