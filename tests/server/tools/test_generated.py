"""What installed models write where no grammar holds them: parsers read it the same token by token.

Models of this size seldom call unasked. So some answers are begun for them: what they make of that
is mostly no valid call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtide.engine.request import RequestParams, RequestState
from kvtide.models.chat import Conversation
from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import Serving, open_engine
from kvtide.server.tools.parser_registry import FORMATS
from kvtide.server.tools.tool_spec import ChoiceMode, ToolChoice, ToolRequest
from tests import gemma3_file
from tests.server.tools.recorded import TOOLS
from tests.server.tools.test_parsers import calls, check_order, new_parser, parse

ASKED = ToolRequest(TOOLS, ToolChoice(ChoiceMode.AUTO))
QUESTIONS = (
    "What is the weather in Oslo for the next 3 days?",
    "What time is it?",
    'Find files that mention "invoice" and are tagged "paid".',
    "Weather in Rome and in Cairo, please.",
    'Search for "a {b} [c]" deeply, at most 5.',
    "Say hello.",
    "How warm is São Paulo (世界) in fahrenheit?",
)
BEGUN = {
    "smollm2": (
        "",
        '<tool_call>\n{"name": "get_weather", "arguments": {',
        "<tool_call>\n<function=search-files>\n<parameter=",
    ),
    "gemma3": ("", "[get_weather(", "```tool_code\nprint(get_weather("),
}
"""How answers begin: as the model's format does, or not at all."""
MAX_TOKENS = 64
NAMES = {tool.name for tool in TOOLS}


@contextmanager
def served(name: str, config: pytest.Config, folder: Path) -> Iterator[Serving]:
    chosen: dict[str, Any] = {"port": 0, "storage": "none", "speculate": "none"}
    if name == "gemma3":
        (folder / "gemma.jinja").write_text(gemma3_file.TEMPLATE)
        chosen |= {"chat_template": str(folder / "gemma.jinja"), "page_tokens": None}
        chosen |= {"model": str(gemma3_file.gemma3_file(config))}
    serving = open_engine(Settings(**chosen))
    yield serving
    serving.engine.cache.close()


def generated(serving: Serving, begun: tuple[str, ...]) -> list[list[str]]:
    """Answers in pieces: the letters that each begins with, and the text of every token."""
    engine, formats = serving.engine, serving.formats
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    keep = frozenset(formats.special_ids(ASKED).values())
    described = [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
        for tool in TOOLS
    ]
    answers = {}
    for begin in begun:
        for question in QUESTIONS:
            asked = Conversation([{"role": "user", "content": question}], tools=described)
            prompt = tokenizer.encode(formats.render(asked) + begin, add_special=False)
            stops = tokenizer.special.stop_ids
            params = RequestParams(tuple(prompt), MAX_TOKENS, stop_ids=stops, keep_special=keep)
            answers[engine.submit(params)] = [*begin]
    while any(request.state is not RequestState.FINISHED for request in answers):
        for update in engine.step():
            answers[update.request].append(update.text)
    return list(answers.values())


def meant(text: str) -> list[tuple[str, Any]]:
    """The calls of an answer, as readers of JSON and of Python find them where it has no fault."""
    found = [_decoded(each) for each in re.findall(r"(?s)<tool_call>(.+?)</tool_call>", text)]
    return [each for each in found if each is not None] or _listed(text.partition("\n")[0])


def _decoded(call: str) -> tuple[str, Any] | None:
    try:
        read = json.loads(call)
    except ValueError:
        return None
    named = isinstance(read, dict) and read.keys() == {"name", "arguments"}
    return (read["name"], read["arguments"]) if named and read["name"] in NAMES else None


def _listed(text: str) -> list[tuple[str, Any]]:
    try:
        read = ast.parse(text, mode="eval").body
        return [_call(each) for each in read.elts] if isinstance(read, ast.List) else []
    except (SyntaxError, ValueError):
        return []


def _call(node: ast.AST) -> tuple[str, Any]:
    match node:
        case ast.Call(ast.Name(name), [], keywords) if name in NAMES:
            return name, {str(each.arg): ast.literal_eval(each.value) for each in keywords}
    raise ValueError("no call")


@pytest.mark.full
@pytest.mark.parametrize("name", BEGUN)
def test_what_a_model_writes_is_read_token_by_token_as_it_is_whole(
    name: str, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    with served(name, pytestconfig, tmp_path) as serving:
        answers = generated(serving, BEGUN[name])
        own = serving.formats.parser_factory(ASKED, "")
        assert serving.formats.tool_parser == {"smollm2": "hermes", "gemma3": "pythonic"}[name]
    assert len(answers) == len(QUESTIONS) * len(BEGUN[name])
    read = []
    for pieces in answers:
        whole = "".join(pieces)
        for form in FORMATS:
            events = parse(new_parser(form), whole)
            check_order(events)
            assert parse(new_parser(form), *pieces) == events, (form, pieces)
        found = calls(parse(own(), *pieces))
        read += found
        wanted = meant(whole)
        assert wanted == [(called, json.loads(given)) for called, given in found[: len(wanted)]]
    assert read, "some of it is calls"
