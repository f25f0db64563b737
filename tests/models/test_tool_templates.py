"""What templates take is found out by rendering, and conversations are made to fit."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.models.chat import ChatTemplate, Conversation
from kvtide.models.checkpoint import Checkpoint
from kvtide.models.spoken_tools import PYTHONIC
from kvtide.models.tokenizer import load_tokenizer
from kvtide.models.tool_templates import ToolTemplate

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
OBJECTS = (
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content or '' }}{% for c in m.tool_calls %}<c>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}{% endfor %}"
    "{% endfor %}"
)
TEXTS = (
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{{ '[' + m.role + ']' }}{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}{{ '<c>' + c.function.name + c.function.arguments }}"
    "{% endfor %}{% endfor %}"
)
ONE_CALL = OBJECTS.replace(
    "{% for c in m.tool_calls %}",
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    "{% for c in m.tool_calls %}",
)
IN_TURN = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles take turns') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "go"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "one"},
    {"role": "tool", "tool_call_id": "2", "content": "two"},
    {"role": "user", "content": "on"},
]


def written(source: str, messages: Any = HISTORY, tools: Any = (TOOL,), **options: Any) -> str:
    template = ChatTemplate(source, {})
    asked = Conversation(messages, tools=tools)
    return template.render(ToolTemplate(template).prepare(asked, **options))


def test_templates_get_arguments_as_they_want_them() -> None:
    assert "[assistant]<c>f a=1<c>g[tool]one[tool]two[user]on" in written(OBJECTS)
    assert '[assistant]<c>f{"a":1}<c>g{}[tool]one' in written(TEXTS)


def test_calls_come_one_by_one_where_a_template_wants_that() -> None:
    assert written(ONE_CALL).endswith(
        "[assistant]<c>f a=1[tool]one[assistant]<c>g[tool]two[user]on"
    )


def test_a_template_without_tools_gets_them_described() -> None:
    text = written(PLAIN)
    assert text.startswith("[system]You can call functions.")
    assert '{"type": "function", "function": {"name": "f"' in text
    assert text.endswith(
        '[user]go[assistant]<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>[user]<tool_response>\none\n'
        "</tool_response>\n<tool_response>\ntwo\n</tool_response>[user]on"
    )
    system = {"role": "system", "content": "Be kind."}
    assert written(PLAIN, [system, *HISTORY]).startswith("[system]Be kind.\n\nYou can call")
    assert written(NO_SYSTEM).startswith("[user]go\n\nYou can call functions.")
    assert written(PLAIN, describe=False).startswith("[user]go[assistant]<tool_call>")


def test_tools_are_described_called_and_answered_as_python() -> None:
    text = written(PLAIN, form=PYTHONIC)
    assert text.startswith("[system]You can call functions.")
    assert '\n[\n{"name": "f", "parameters": {"type": "object"}}\n]\n' in text
    assert text.endswith(
        "[user]go[assistant][f(a=1), g()][user]```tool_output\none\n```\n```tool_output\ntwo\n```"
        "[user]on"
    )


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ('{"a": "x\\"y", "b": [1, null, true]}', 'f(a="x\\"y", b=[1, null, true])'),
        ('{"city": "Köln"}', 'f(city="Köln")'),
        ("", "f()"),
        ("[1]", "f([1])"),
        ("{broken", "f({broken)"),
    ],
)
def test_arguments_are_written_as_python(arguments: str, call: str) -> None:
    assert PYTHONIC.call([{"name": "f", "arguments": arguments}]) == f"[{call}]"


def test_results_and_what_a_user_says_next_are_one_message_where_roles_take_turns() -> None:
    text = written(IN_TURN, form=PYTHONIC)
    assert text.endswith("[user]```tool_output\none\n```\n```tool_output\ntwo\n```\non")
    assert "</tool_response>[user]on" in written(PLAIN)


def test_conversations_without_tools_stay_as_they_are() -> None:
    asked = Conversation([{"role": "user", "content": "go"}])
    for source in (PLAIN, OBJECTS, TEXTS, "{{ raise_exception('never') }}"):
        assert ToolTemplate(ChatTemplate(source, {})).prepare(asked) == asked


@pytest.mark.parametrize(("source", "renders"), [(PLAIN, False), (OBJECTS, True), (TEXTS, True)])
def test_whether_a_template_renders_tools_is_found_out(source: str, renders: bool) -> None:
    assert ToolTemplate(ChatTemplate(source, {})).renders_tools == renders


def test_smollm2_knows_no_tools(smollm2: Checkpoint) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer is not None and tokenizer.chat is not None
    template = ToolTemplate(tokenizer.chat)
    assert not template.renders_tools
    text = tokenizer.render(template.prepare(Conversation(HISTORY, tools=[TOOL])))
    assert text.startswith("<|im_start|>system\nYou can call functions.")
    assert "<|im_start|>user\n<tool_response>\none" in text
