"""Built-in chat templates write what the published encoders write, and give way to any other."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from kvtide.models.chat import ChatTemplate, Conversation
from kvtide.models.chat_templates.builtin import builtin_template
from kvtide.models.checkpoint import open_checkpoint
from kvtide.models.tokenizer import load_tokenizer
from kvtide.models.tool_templates import ToolTemplate
from kvtide.server.tools.parser_registry import ChatFormats

BOS, EOS, USER, ASSISTANT = (
    f"<｜{name}｜>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")
)
V32, V4 = "deepseek_v32", "deepseek_v4"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
SCHEMAS = (
    '{"name": "get_weather", "description": "The weather", "parameters": {"type": "object", '
    '"properties": {"city": {"type": "string"}}}}\n'
    '{"name": "now", "parameters": {"type": "object"}}\n'
)


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Weather?"},
]
CALLED: list[dict[str, Any]] = [
    *ASKED,
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Paris.",
        "tool_calls": [
            call("1", "get_weather", '{"city": "Zürich", "days": [1, 2]}'),
            call("2", "now", "{}"),
        ],
    },
    {"role": "tool", "tool_call_id": "2", "content": "Noon."},
    {"role": "tool", "tool_call_id": "1", "content": "Sunny."},
]
ENDED = [
    *CALLED,
    {"role": "assistant", "content": "Sunny.", "reasoning_content": "So."},
    {"role": "user", "content": "Thanks."},
]


def written(family: str, messages: Any, tools: Any = None, **variables: object) -> str:
    source = builtin_template(family)
    assert source is not None
    template = ChatTemplate(source, {})
    asked = Conversation(messages, tools=tools, variables=variables)
    return template.render(ToolTemplate(template).prepare(asked))


def block(name: str) -> str:
    """The calls of `CALLED`."""
    return (
        f"\n\n<｜DSML｜{name}>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Zürich</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n'
        f"</｜DSML｜{name}>"
    )


def test_v32_writes_turns_and_ends_where_the_model_speaks() -> None:
    assert written(V32, ASKED) == f"{BOS}Be kind.{USER}Weather?{ASSISTANT}</think>"
    assert written(V32, ASKED, thinking=True) == f"{BOS}Be kind.{USER}Weather?{ASSISTANT}<think>"
    calls = f"I look.{block('function_calls')}{EOS}"
    results = (
        "\n\n<function_results>\n<result>Noon.</result>\n<result>Sunny.</result>\n"
        "</function_results>\n\n"
    )
    asked = f"{BOS}Be kind.{USER}Weather?{ASSISTANT}"
    assert written(V32, CALLED) == f"{asked}</think>{calls}{results}</think>"
    thought = written(V32, CALLED, thinking=True)
    assert thought == f"{asked}<think>Paris.</think>{calls}{results}<think>"
    assert written(V32, ENDED, thinking=True) == (
        f"{asked}</think>{calls}{results}</think>Sunny.{EOS}{USER}Thanks.{ASSISTANT}<think>"
    )


def test_v4_writes_results_into_the_users_turn_in_the_order_of_their_calls() -> None:
    asked = f"{BOS}Be kind.{USER}Weather?{ASSISTANT}"
    assert written(V4, ASKED, thinking=False) == f"{asked}</think>"
    assert written(V4, ASKED) == f"{asked}<think>"
    calls = f"I look.{block('tool_calls')}{EOS}"
    results = (
        f"{USER}<tool_result>Sunny.</tool_result>\n\n<tool_result>Noon.</tool_result>{ASSISTANT}"
    )
    assert written(V4, CALLED, thinking=False) == f"{asked}</think>{calls}{results}</think>"
    assert written(V4, CALLED) == f"{asked}</think>{calls}{results}<think>"
    assert written(V4, ENDED) == (
        f"{asked}</think>{calls}{results}</think>Sunny.{EOS}{USER}Thanks.{ASSISTANT}<think>"
    )
    tooled = written(V4, ENDED, TOOLS).partition(USER)[2]
    assert tooled == (
        f"Weather?{ASSISTANT}<think>Paris.</think>{calls}{results}<think>So.</think>Sunny.{EOS}"
        f"{USER}Thanks.{ASSISTANT}<think>"
    ), "with tools, reasoning of earlier turns stays"
    following = [*CALLED, {"role": "user", "content": "And?"}]
    assert written(V4, following, thinking=False).endswith(
        f"<tool_result>Noon.</tool_result>\n\nAnd?{ASSISTANT}</think>"
    )


# By DeepSeek's own description of the format, "DeepSeek-V4 Encoding":
# https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro/blob/main/encoding/README.md
DESCRIBED_TOOLS = "08db5953bebdd04aa2f9f3ca5d51f2351267037e8da3819f8bdd2829e3a63403"
"""The sha256 of its schema block, from "## Tools" on, with {tool_definitions_json} as it is."""


def test_v4_writes_what_its_description_says() -> None:
    asked = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is 2+2?"},
    ]
    text = (
        "<｜begin▁of▁sentence｜>You are a helpful assistant.<｜User｜>What is 2+2?<｜Assistant｜>"
    )
    assert written(V4, asked, thinking=True) == f"{text}<think>"
    assert written(V4, asked, thinking=False) == f"{text}</think>"
    answered = [
        *asked,
        {"role": "assistant", "reasoning_content": "Simple arithmetic.", "content": "2 + 2 = 4."},
    ]
    following = [*answered, {"role": "user", "content": "And 3+3?"}]
    answer = "2 + 2 = 4.<｜end▁of▁sentence｜><｜User｜>And 3+3?<｜Assistant｜>"
    assert written(V4, following, thinking=False) == f"{text}</think>{answer}</think>"
    assert written(V4, following, thinking=True) == f"{text}</think>{answer}<think>"
    kept, tools = described_tools()
    assert written(V4, following, TOOLS, thinking=True) == (
        f"{kept}{tools}<｜User｜>What is 2+2?<｜Assistant｜><think>Simple arithmetic.</think>"
        f"{answer}<think>"
    ), "with tools all thoughts stay"


def test_v4_writes_calls_and_results_as_its_description_says() -> None:
    turns = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Where?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I look.",
            "tool_calls": [
                call("1", "function_name", '{"param": "string_value", "count": 5}'),
                call("2", "now", '{"deep": {"a": [true, null]}}'),
            ],
        },
        {"role": "tool", "tool_call_id": "2", "content": '{"at": 2}'},
        {"role": "tool", "tool_call_id": "1", "content": '{"at": 1}'},
    ]
    kept, tools = described_tools()
    assert written(V4, turns, TOOLS, thinking=True) == (
        f"{kept}{tools}<｜User｜>Where?<｜Assistant｜><think>I look.</think>\n\n"
        "<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="function_name">\n'
        '<｜DSML｜parameter name="param" string="true">string_value</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="count" string="false">5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="now">\n'
        '<｜DSML｜parameter name="deep" string="false">{"a": [true, null]}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        "</｜DSML｜tool_calls><｜end▁of▁sentence｜>"
        '<｜User｜><tool_result>{"at": 1}</tool_result>\n\n<tool_result>{"at": 2}</tool_result>'
        "<｜Assistant｜><think>"
    )


def described_tools() -> tuple[str, str]:
    """A system message as V4 has it before the tools, and the tools, if they are as described."""
    kept = "<｜begin▁of▁sentence｜>You are a helpful assistant.\n\n"
    asked = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": ""},
    ]
    tools = written(V4, asked, TOOLS).removeprefix(kept).partition("<｜User｜>")[0]
    described = tools.replace(SCHEMAS.rstrip("\n"), "{tool_definitions_json}")
    assert hashlib.sha256(described.encode()).hexdigest() == DESCRIBED_TOOLS
    return kept, tools


@pytest.mark.parametrize(
    ("family", "name", "before", "after"),
    [
        (V32, "function_calls", "<functions>\n", "</functions>\n"),
        (
            V4,
            "tool_calls",
            "### Available Tool Schemas\n\n",
            "\nYou MUST strictly follow the above",
        ),
    ],
)
def test_tools_follow_the_system_message(family: str, name: str, before: str, after: str) -> None:
    text = written(family, ASKED, TOOLS)
    assert text.startswith(f"{BOS}Be kind.\n\n## Tools\n\nYou have access to a set of tools")
    assert f'\n<｜DSML｜{name}>\n<｜DSML｜invoke name="$' in text
    assert f"</｜DSML｜invoke>\n</｜DSML｜{name}>\n\nString " in text
    assert f"{before}{SCHEMAS}{after}" in text
    assert written(family, ASKED[1:], TOOLS).startswith(f"{BOS}\n\n## Tools\n\n")
    assert written(family, ASKED[1:]).startswith(f"{BOS}{USER}Weather?")


@pytest.mark.parametrize(
    ("variables", "v32", "v4"),
    [
        ({}, False, True),
        ({"thinking": True}, True, True),
        ({"enable_thinking": False}, False, False),
        ({"reasoning_effort": "high"}, True, True),
        ({"reasoning_effort": "none"}, False, False),
        ({"reasoning_effort": "none", "enable_thinking": True}, True, True),
    ],
)
def test_a_request_says_whether_the_model_thinks(
    variables: dict[str, object], v32: bool, v4: bool
) -> None:
    for family, thinks in ((V32, v32), (V4, v4)):
        assert written(family, ASKED, **variables).endswith("<think>") == thinks


def test_arguments_that_are_no_object_are_one_parameter() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("1", "now", "[1")]}
    text = written(V4, [*ASKED, message], TOOLS)
    assert '<｜DSML｜parameter name="arguments" string="true">[1</｜DSML｜parameter>' in text


def test_a_prefix_of_a_conversation_is_a_prefix_of_its_text() -> None:
    """While tools are called; a new turn of the user's changes where V3.2 writes reasoning."""
    for family in (V32, V4):
        first = written(family, ASKED, TOOLS, thinking=True)
        then = written(family, CALLED, TOOLS, thinking=True)
        assert then.startswith(first)
        assert written(family, ENDED[:-1], TOOLS, thinking=True).startswith(then)


# -- where they are used --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder without a chat template."""
    folder = tmp_path_factory.mktemp("bare")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.decoder = tokenizers.decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
    return folder


def _template(folder: Path, model_type: str, own: str | None, given: str | None) -> str | None:
    settings = {} if own is None else {"chat_template": own}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    tokenizer = load_tokenizer(open_checkpoint(folder), given)
    assert tokenizer is not None
    return None if tokenizer.chat is None else tokenizer.chat.source


@pytest.mark.parametrize("family", [V32, V4])
def test_a_checkpoint_without_a_template_gets_its_familys(folder: Path, family: str) -> None:
    assert _template(folder, family, None, None) == builtin_template(family)
    assert _template(folder, family, "own", None) == "own"
    assert _template(folder, family, "own", "given") == "given"
    assert _template(folder, "llama", None, None) is None


@pytest.mark.parametrize("family", [V32, V4])
def test_calls_are_read_in_the_form_that_the_template_shows(folder: Path, family: str) -> None:
    _template(folder, family, None, None)
    tokenizer = load_tokenizer(open_checkpoint(folder))
    for model_type in (family, "another"):
        formats = ChatFormats(tokenizer, model_type)
        assert (formats.tool_parser, formats.reasoning) == (family, "think")
        assert formats.remark == ""
