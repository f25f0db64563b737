"""Which format a model speaks: by setting, by template, by family; and which tokens it keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtide.models.chat import Conversation
from kvtide.server.tools.output_events import CallBegin, ReasoningDelta, TextDelta
from kvtide.server.tools.parser_registry import FAMILIES, FORMATS, ChatFormats
from kvtide.server.tools.tool_spec import ChoiceMode, ToolChoice, ToolRequest
from tests.server.tools.byte_tokenizer import tokenizer
from tests.server.tools.recorded import TOOLS

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
TOOLED = "{% for t in tools %}{{ t | tojson }}{% endfor %}" + CHATML
SPECIAL = ("<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
ASKED = ToolRequest(TOOLS, ToolChoice(ChoiceMode.AUTO))


@pytest.mark.parametrize(
    ("words", "model_type", "tools", "reasoning"),
    [
        ("", "qwen3", "hermes", "think"),
        ("", "llama", "llama3", "none"),
        ("", "gpt_oss", "harmony", "harmony"),
        ("", "glm4_moe_lite", "glm", "think"),
        ("", "deepseek_v4", "deepseek_v4", "think"),
        ("", "gemma3_text", "pythonic", "none"),
        ("", "kimi_linear", "kimi", "none"),
        ("", "nemotron_h", "qwen3_coder", "none"),
        ("<TOOLCALL> <think>", "nemotron_h", "nemotron", "think"),
        ("<tool_call> <function= <think>", "nemotron_h", "qwen3_coder", "think"),
        ("<|tool_calls_section_begin|>", "deepseek_v3", "kimi", "think"),
        ("", "another", "hermes", "none"),
        ("<tool_call>", "llama", "hermes", "none"),
        ("<tool_call> <think>", "llama", "hermes", "think"),
        ("<tool_call> <function=", "qwen3_moe", "qwen3_coder", "think"),
        ("<tool_call> <arg_key>", "another", "glm", "none"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral", "think"),
        ("[TOOL_CALLS] [ARGS]", "mistral", "mistral_args", "none"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek_v3", "deepseek_v3", "think"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3", "deepseek_v31", "think"),
        ("｜DSML｜ function_calls>", "another", "deepseek_v32", "none"),
        ("<|tool_call_start|>", "lfm2", "lfm2", "none"),
        ("<|channel|>analysis", "another", "harmony", "harmony"),
    ],
)
def test_templates_decide_before_families(
    words: str, model_type: str, tools: str, reasoning: str
) -> None:
    formats = ChatFormats(tokenizer(TOOLED + words), model_type)
    assert (formats.tool_parser, formats.reasoning) == (tools, reasoning)
    assert formats.remark == ""


def test_settings_decide_before_templates() -> None:
    formats = ChatFormats(tokenizer(TOOLED + "<tool_call> <think>"), "qwen3", "glm", "none")
    assert (formats.tool_parser, formats.reasoning) == ("glm", "none")
    other = ChatFormats(tokenizer(TOOLED), "gpt_oss", "hermes")
    assert (other.tool_parser, other.reasoning) == ("hermes", "none")


def test_a_template_without_tools_is_remarked() -> None:
    described = ChatFormats(tokenizer(CHATML), "llama")
    assert described.tool_parser == "hermes"
    assert "knows no tools: they are described in Hermes' form" in described.remark
    for gemma in (("gemma3_text", None), ("gemma2", None), ("llama", "pythonic")):
        python = ChatFormats(tokenizer(CHATML), *gemma)
        assert python.tool_parser == "pythonic"
        assert "knows no tools: they are described in Python's form" in python.remark
        asked = Conversation([{"role": "user", "content": "go"}], tools=[TOOLS[0].template_form()])
        assert '"name": "get_weather"' in python.render(asked)
    read = ChatFormats(tokenizer(CHATML), "llama", "mistral")
    assert "requests must describe the tools themselves" in read.remark
    assert ChatFormats(tokenizer(None), "llama").remark == ""


def test_every_family_has_a_format() -> None:
    assert set(FAMILIES.values()) <= set(FORMATS)


def test_markers_that_are_special_tokens_are_kept_in_the_text() -> None:
    marked = tokenizer(TOOLED + "<tool_call> <think>", SPECIAL)
    formats = ChatFormats(marked, "qwen3")
    assert set(formats.special_ids(ASKED)) == set(SPECIAL[1:])
    assert set(formats.special_ids(ToolRequest())) == {"<think>", "</think>"}
    ids = marked.encode("a<tool_call>b</tool_call><|im_end|>", add_special=False)
    keep = frozenset(formats.special_ids(ASKED).values())
    assert marked.detokenizer(keep=keep).feed(ids) == "a<tool_call>b</tool_call>"
    assert marked.detokenizer().feed(ids) == "ab"
    assert ChatFormats(tokenizer(TOOLED), "qwen3").special_ids(ASKED) == {}


def test_every_choice_gets_a_parser_of_its_own() -> None:
    new_parser = ChatFormats(None, "qwen3").parser_factory(ToolRequest(), "<think>")
    first, second = new_parser(), new_parser()
    assert first.feed("a</think>b") == [ReasoningDelta("a"), TextDelta("b")]
    assert second.feed("a") == [ReasoningDelta("a")]


def test_calls_after_the_first_are_dropped_where_one_is_wanted() -> None:
    calls = '<tool_call>{"name": "now"}</tool_call>' * 2
    for parallel, count in ((True, 2), (False, 1)):
        parser = ChatFormats(None, "").parser_factory(replace(ASKED, parallel=parallel), "")()
        begun = [e for e in (*parser.feed(calls), *parser.finish()) if isinstance(e, CallBegin)]
        assert len(begun) == count


def test_without_tools_markers_are_text() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    none = ToolRequest(TOOLS, ToolChoice(ChoiceMode.NONE))
    for request in (ToolRequest(), none):
        assert ChatFormats(None, "").parser_factory(request, "")().feed(call) == [TextDelta(call)]
