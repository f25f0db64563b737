"""Outputs, whole and broken, in pieces of any size; and outputs that are noise."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import count

import pytest

from kvtide.server.tools.marker_parser import OfferedTools
from kvtide.server.tools.output_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    TextDelta,
    joined,
)
from kvtide.server.tools.parser_registry import FORMATS
from kvtide.server.tools.tool_spec import FunctionTool
from tests.grids import everything
from tests.server.tools.generated import GENERATED
from tests.server.tools.posted import POSTED
from tests.server.tools.recorded import ALL as WRITTEN
from tests.server.tools.recorded import TOOLS, Recorded

ALL = [*WRITTEN, *POSTED, *GENERATED]
BY_NAME = {f"{each.format}: {each.name}": each for each in ALL}


def new_parser(name: str, tools: Sequence[FunctionTool] = TOOLS) -> OutputParser:
    numbers = count()
    return FORMATS[name].parser(OfferedTools.of(tools, lambda: f"call_{next(numbers)}"))


def parse(parser: OutputParser, *pieces: str) -> list[OutputEvent]:
    return joined([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), rng.randint(0, min(len(text), 12))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def text_of(events: list[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def calls(events: list[OutputEvent]) -> list[tuple[str, str]]:
    begins = {event.index: event for event in events if isinstance(event, CallBegin)}
    texts = dict.fromkeys(begins, "")
    for event in events:
        if isinstance(event, CallArguments):
            texts[event.index] += event.text
    return [(begin.name, texts[index]) for index, begin in begins.items()]


def check_order(events: list[OutputEvent]) -> None:
    """Calls are numbered from 0, are begun before their arguments, and end."""
    open_call, calls_begun = None, 0
    for event in events:
        match event:
            case CallBegin():
                assert open_call is None and event.index == calls_begun
                open_call, calls_begun = event.index, calls_begun + 1
            case CallArguments():
                assert event.index == open_call
            case CallEnd():
                assert event.index == open_call
                open_call = None
            case TextDelta() | ReasoningDelta():
                assert open_call is None
    assert open_call is None


@pytest.mark.parametrize("recorded", BY_NAME.values(), ids=BY_NAME.keys())
def test_a_recorded_output_means_what_it_says(recorded: Recorded) -> None:
    events = parse(new_parser(recorded.format, recorded.tools), recorded.output)
    check_order(events)
    assert text_of(events) == recorded.text
    assert calls(events) == list(recorded.calls)
    reasoned = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    assert reasoned == recorded.reasoning
    for _, arguments in recorded.calls if recorded.whole else ():
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("recorded", BY_NAME.values(), ids=BY_NAME.keys())
def test_events_do_not_depend_on_where_the_text_is_cut(recorded: Recorded) -> None:
    rng = random.Random(recorded.name)
    form, tools = recorded.format, recorded.tools
    whole = parse(new_parser(form, tools), recorded.output)
    assert parse(new_parser(form, tools), *recorded.output) == whole
    for _ in range(30 if everything() else 8):
        pieces = cut(recorded.output, rng)
        assert parse(new_parser(form, tools), *pieces) == whole, pieces


@pytest.mark.parametrize("name", FORMATS)
def test_noise_never_raises_and_cutting_it_changes_nothing(name: str) -> None:
    rng = random.Random(name)
    form = FORMATS[name]
    outputs = [each.output for each in ALL if FORMATS[each.format].parser is form.parser]
    for _ in range(100 if everything() else 15):
        noise = "".join(
            fragment[a : a + rng.randint(1, 40)]
            for fragment in rng.choices(outputs, k=rng.randint(1, 5))
            for a in [rng.randint(0, len(fragment))]
        )
        whole = parse(new_parser(name), noise)
        check_order(whole)
        assert parse(new_parser(name), *cut(noise, rng)) == whole, noise
        assert parse(new_parser(name), *noise) == whole, noise


@pytest.mark.parametrize("name", FORMATS)
def test_every_beginning_of_an_output_can_be_its_end(name: str) -> None:
    for recorded in (each for each in ALL if each.format == name):
        for end in range(0, len(recorded.output), 1 if everything() else 3):
            check_order(parse(new_parser(name, recorded.tools), recorded.output[:end]))


def test_arguments_come_while_they_are_generated() -> None:
    parser = new_parser("hermes")
    events = parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa')
    assert joined(events)[1] == CallArguments(0, '{"city": "Pa')
    assert parser.feed("ri") == [CallArguments(0, "ri")]
    coder = new_parser("qwen3_coder")
    coder.feed("<tool_call><function=get_weather><parameter=city>\n")
    assert coder.feed("Pa") == [CallArguments(0, "Pa")]


def test_a_call_keeps_the_id_that_the_model_wrote() -> None:
    """Kimi's template writes ids, and no names, back into the prompt."""
    outputs = [each.output for each in ALL if each.format == "kimi" and each.whole]
    events = [event for output in outputs for event in parse(new_parser("kimi"), output)]
    ids = [event.id for event in events if isinstance(event, CallBegin)]
    assert ids[:3] == ["functions.get_weather:0", "functions.now:1", "search-files:12"]


def test_text_is_not_held_back_longer_than_needed() -> None:
    parser = new_parser("hermes")
    assert parser.feed("so 1 <t") == [TextDelta("so 1")]
    assert parser.feed("wo") == [TextDelta(" <two")]
