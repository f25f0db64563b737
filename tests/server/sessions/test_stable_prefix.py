"""Rules for the front of conversations: before and after, patterns that are refused, time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvtide.server.sessions.stable_prefix import (
    MAX_LINE,
    MAX_SEARCHED,
    MAX_TEXT,
    NO_RULES,
    parse_rules,
    stabilized,
)
from kvtide.server.setting_values import SettingsError

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"
SYSTEM = "You are an agent.\nUse tools.\n"
Json = dict[str, Any]


def turn(role: str, content: object) -> Json:
    return {"role": role, "content": content}


def parts(*texts: str) -> list[Json]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("rules", "before", "after"),
    [
        (
            "billing-header",
            [turn("system", f"{HEADER}\n{SYSTEM}"), turn("user", HEADER)],
            [turn("system", SYSTEM), turn("user", HEADER)],
        ),
        (
            "billing-header",
            [turn("system", parts(HEADER, SYSTEM)), turn("user", "hi")],
            [turn("system", parts(SYSTEM)), turn("user", "hi")],
        ),
        (  # Blocks that were joined without a line break.
            "billing-header",
            [turn("system", HEADER + SYSTEM)],
            [turn("system", SYSTEM)],
        ),
        (
            "dates",
            [turn("system", f"Today's date is 2026-11-17.\n{SYSTEM}"), turn("user", "hi")],
            [turn("system", f"{SYSTEM}Today's date is 2026-11-17."), turn("user", "hi")],
        ),
        (
            "dates",
            [turn("system", parts("Date: 2026-11-17", SYSTEM)), turn("user", "hi")],
            [turn("system", parts(SYSTEM, "\nDate: 2026-11-17")), turn("user", "hi")],
        ),
        (  # A time changes with every request: behind the history with it.
            "dates",
            [turn("system", f"- Current time: 12:31\n{SYSTEM}"), turn("user", "hi")],
            [turn("system", SYSTEM), turn("user", "hi\n- Current time: 12:31")],
        ),
        (  # There is no message of the caller's behind which it could stand.
            "dates",
            [turn("system", f"Current date: 2026-11-17 12:31\n{SYSTEM}"), turn("assistant", "ho")],
            [turn("system", f"{SYSTEM}Current date: 2026-11-17 12:31"), turn("assistant", "ho")],
        ),
        (
            "dates",
            [turn("developer", f"Today is 17 May\n{SYSTEM}"), turn("system", "More."),
             turn("user", "hi")],
            [turn("developer", SYSTEM), turn("system", "More.\nToday is 17 May"),
             turn("user", "hi")],
        ),
        (  # What a user says of dates stays where it is, and so does a line that has none.
            "dates",
            [turn("system", "Dates are ISO.\nToday is fine"), turn("user", "Date: 2026-11-17")],
            [turn("system", "Dates are ISO.\nToday is fine"), turn("user", "Date: 2026-11-17")],
        ),
        (
            r"regex:(?i)request[- ]id: \w+",
            [turn("system", f"Request-ID: a81\n{SYSTEM}"), turn("user", "request id: 7\nhi"),
             turn("user", "request id: 9")],
            [turn("system", SYSTEM), turn("user", "hi"), turn("user", "request id: 9")],
        ),
        (
            "billing-header, dates, regex:#",
            [turn("system", f"# noise\n{HEADER}\nDate: 2026-11-17\n{SYSTEM}"), turn("user", "hi")],
            [turn("system", f"{SYSTEM}Date: 2026-11-17"), turn("user", "hi")],
        ),
        ("dates", [turn("user", "hi")], [turn("user", "hi")]),
        ("dates,regex:x", [turn("system", None), turn("user", [])],
         [turn("system", None), turn("user", [])]),
    ],
)  # fmt: skip
def test_the_front_of_a_conversation(rules: str, before: list[Json], after: list[Json]) -> None:
    given = [dict(turn) for turn in before]
    assert stabilized(before, parse_rules(rules)) == after
    assert before == given, "the caller's messages are its own"
    assert stabilized(after, parse_rules("billing-header")) == after


def test_without_rules_nothing_changes() -> None:
    messages = [turn("system", f"{HEADER}\nDate: 2026-11-17"), turn("user", "hi")]
    assert stabilized(messages, NO_RULES) == messages


def test_two_requests_of_two_days_begin_alike() -> None:
    def asked(day: int) -> list[Json]:
        system = f"{HEADER[:-6]}{day}a;\nToday's date: 2026-11-{day}\n{SYSTEM}"
        return list(
            stabilized([turn("system", system), turn("user", "hi")],
                       parse_rules("billing-header,dates"))
        )  # fmt: skip

    first, second = asked(17), asked(18)
    assert first[0]["content"].startswith(SYSTEM) and second[0]["content"].startswith(SYSTEM)


def test_long_texts_and_lines_are_left_alone() -> None:
    rules = parse_rules("dates,regex:z+")
    long_line = "z" * (MAX_LINE + 1) + "\n"
    behind = "y\n" * (MAX_TEXT // 2) + "z\nDate: 2026-11-17"
    searched = "y\n" * (MAX_SEARCHED // 2) + "z\n"
    for text in (long_line, behind, searched):
        assert stabilized([turn("system", text)], rules) == [turn("system", text)]


@pytest.mark.parametrize("pattern", [r".*x.*y", r"[a-z]*a[a-z]*!", r"(?i)A*A*b"])
def test_texts_that_are_made_to_take_long_do_not(pattern: str) -> None:
    line = "a" * (MAX_LINE - 1) + "\n"
    text = line * (MAX_SEARCHED // len(line))
    began = time.monotonic()
    stabilized([turn("system", text), turn("user", text)], parse_rules(f"dates,regex:{pattern}"))
    assert time.monotonic() - began < 20.0, "exponential time would not end at all"


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ("", "names no rule"),
        ("date", "has 'date'; use billing-header, dates, regex:PATTERN"),
        ("regex:", "an empty pattern"),
        ("regex:(a+)+b", "repeats a group"),
        ("regex:(?:a|a)*b", "repeats a group"),
        ("regex:(a|b){9}", "repeats a group"),
        ("regex:.*.*.*x", "3 repeats; use at most 2"),
        ("regex:a{1,900}b{1,900}c{1,}", "3 repeats"),
        (r"regex:(a)\1", "back-reference"),
        ("regex:(?=a)b", "look-around"),
        ("regex:(", "is no pattern"),
    ],
)
def test_rules_that_cannot_be_used_are_refused(rules: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=r".*".join(map(_escaped, problem.split("…")))):
        parse_rules(rules)


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "()[]{}*+.?" else c for c in text)


@pytest.mark.parametrize("pattern", [r"id: \w+", r"(?:cc|dd)=[^;]*;?", r"\(x\)+", r"[*+)]x*"])
def test_patterns_that_take_linear_or_square_time_are_accepted(pattern: str) -> None:
    assert parse_rules(f"regex:{pattern}").pattern is not None
