"""Reasoning is split off, however the text is cut, and calls after it are read."""

from __future__ import annotations

import pytest

from kvtide.server.tools.output_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    OutputEvent,
    PlainText,
    ReasoningDelta,
    TextDelta,
    joined,
)
from kvtide.server.tools.reasoning import ReasoningAsText, ThinkParser, opened_by
from tests.server.tools.test_parsers import new_parser

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CASES: list[tuple[str | None, str, list[OutputEvent]]] = [
    (None, "<think>\nHm.\n</think>\n\nYes.", [ReasoningDelta("Hm."), TextDelta("Yes.")]),
    (None, " \n<think>a\n\nb</think>c", [ReasoningDelta("a\n\nb"), TextDelta("c")]),
    (None, "[THINK]a</think>[/THINK] c", [ReasoningDelta("a</think>"), TextDelta("c")]),
    ("</think>", "Hm.\n</think>\n\nYes. ", [ReasoningDelta("Hm."), TextDelta("Yes. ")]),
    ("</think>", "Hm. And", [ReasoningDelta("Hm. And")]),
    ("</think>", "</think>Yes", [TextDelta("Yes")]),
    ("</think>", "Hm. </thi", [ReasoningDelta("Hm. </thi")]),
    (None, "No <think>x</think>", [TextDelta("No <think>x</think>")]),
    (None, " <thin", [TextDelta(" <thin")]),
    (None, "", []),
]


@pytest.mark.parametrize(("closing", "output", "events"), CASES)
def test_reasoning_is_split_off(
    closing: str | None, output: str, events: list[OutputEvent]
) -> None:
    for size in (1, 2, 3, 5, len(output) or 1):
        parser = ThinkParser(PlainText(), closing)
        pieces = [output[at : at + size] for at in range(0, len(output), size)]
        found = [event for piece in pieces for event in parser.feed(piece)]
        assert joined([*found, *parser.finish()]) == events, size


def test_calls_follow_reasoning() -> None:
    parser = ThinkParser(new_parser("hermes"), "</think>")
    events = joined([*parser.feed(f"{CALL}\n</think>\n\n{CALL}"), *parser.finish()])
    assert events == [
        ReasoningDelta(CALL),
        CallBegin(0, "call_0", "now"),
        CallArguments(0, "{}"),
        CallEnd(0),
    ]


def test_the_prompt_may_open_the_reasoning() -> None:
    assert opened_by("<|im_start|>assistant\n<think>\n") == "</think>"
    assert opened_by("[THINK]") == "[/THINK]"
    assert opened_by("<think>\n\n</think>\n\n") is None
    assert opened_by("<|im_start|>assistant\n") is None


def test_channels_may_stay_in_the_text() -> None:
    parser = ReasoningAsText(new_parser("harmony"))
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So."
    )
    assert joined([*parser.feed(text), *parser.finish()]) == [TextDelta("Hm.So.")]
