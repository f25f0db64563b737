"""`--stable-prefix`: rules against noise at the front of conversations.

Clients put lines there that change from request to request. A prefix is reused up to the first
token that differs, so such a line costs all that follows it. Rules drop these lines, or move them
behind what stays the same, before a conversation is tokenized:

| rule             | lines                                            | what becomes of them       |
|------------------|--------------------------------------------------|----------------------------|
| `billing-header` | "x-anthropic-billing-header: …"                  | dropped                    |
| `dates`          | "Today's date is …", "Current date: …" and alike | to the end of system texts |
| `dates`          | the same with a time of day                      | to the last message's end  |
| `regex:PATTERN`  | those that begin with a match                    | dropped                    |

The front is the system messages before any other, for `regex:` also the first user message. A rule
reads the first `MAX_TEXT` characters of a text (`regex:` the first `MAX_SEARCHED`), and no line of
more than `MAX_LINE`. PATTERN is Python's, without what can take exponential time: only single
characters and classes are repeated without bound, at most `MAX_REPEATS` times in it. So a rule
takes bounded time on any text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvtide.server.setting_values import SettingsError

Message = Mapping[str, object]

MAX_TEXT, MAX_SEARCHED, MAX_LINE, MAX_REPEATS = 1 << 18, 16_384, 500, 2
BILLING, DATES, REGEX = "billing-header", "dates", "regex:"

_BILLING = re.compile(r"x-anthropic-billing-header:[ \t]*(?:[\w.-]+=[^;\s]*;?[ \t]*)*")
_DATE = re.compile(
    r"[ \t]*(?:[-*#][ \t]*)?(?:today's date|today is|the date is|the current (?:date|time)"
    r"|current (?:date|time|datetime)|date|datetime)\b[^\n]*\d",
    re.IGNORECASE,
)
_TIME = re.compile(r"\d{1,2}:\d{2}")
_FRONT = ("system", "developer")


class StableRules(NamedTuple):
    """Which rules apply; `pattern` is that of `regex:`."""

    billing: bool = False
    dates: bool = False
    pattern: re.Pattern[str] | None = None

    def __bool__(self) -> bool:
        return self.billing or self.dates or self.pattern is not None


NO_RULES = StableRules()


def parse_rules(text: str) -> StableRules:
    """RULES of the setting: names with commas between them, `regex:PATTERN` last."""
    names, _, pattern = text.partition(REGEX)
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in (BILLING, DATES):
            raise SettingsError(f"has '{name}'; use {BILLING}, {DATES}, {REGEX}PATTERN")
    if not found and REGEX not in text:
        raise SettingsError(f"names no rule; use {BILLING}, {DATES}, {REGEX}PATTERN")
    compiled = _compiled(pattern) if REGEX in text else None
    return StableRules(BILLING in found, DATES in found, compiled)


def parse_stable_prefix(text: str) -> str:
    """The setting's value, if it can be used."""
    parse_rules(text)
    return text


def stabilized(messages: Sequence[Message], rules: StableRules) -> list[Message]:
    """The conversation with its front as the rules leave it. The given messages do not change."""
    result = list(messages)
    if not rules:
        return result
    front = 0
    while front < len(result) and result[front].get("role") in _FRONT:
        front += 1
    moved: list[str] = []
    for number in range(front):
        result[number] = _applied(result[number], lambda text: _cleaned(text, rules, moved))
    pattern = rules.pattern
    first = next((n for n, m in enumerate(result) if m.get("role") == "user"), None)
    if pattern is not None and first is not None:
        result[first] = _applied(result[first], lambda text: _without(text, pattern))
    times = [line for line in moved if _TIME.search(line)]
    last = len(result) - 1
    if times and (last < front or result[last].get("role") not in ("user", "tool")):
        times = []
    _append(result, front - 1, [line for line in moved if line not in times])
    _append(result, last, times)
    return result


# -- texts ------------------------------------------------------------------------------------


def _applied(message: Message, change: Callable[[str], str]) -> Message:
    """The message with its text changed; parts that are left without text are dropped."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    if not isinstance(content, list):
        return message
    parts: list[object] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(text, str):
            parts.append(part)
        elif (changed := change(text)).strip() or not text.strip():
            parts.append({**part, "text": changed})
    return {**message, "content": parts}


def _cleaned(text: str, rules: StableRules, moved: list[str]) -> str:
    """A system text without its noise; `moved` gets the lines that go elsewhere."""
    if rules.billing:
        text = _without_header(text)
    if rules.dates:
        text = _lines(text, lambda line: _take(line, moved))
    return text if rules.pattern is None else _without(text, rules.pattern)


def _take(line: str, moved: list[str]) -> bool:
    if _DATE.match(line) is None:
        return True
    moved.append(line.strip())
    return False


def _without(text: str, pattern: re.Pattern[str]) -> str:
    kept = _lines(text[:MAX_SEARCHED], lambda line: pattern.match(line) is None)
    return kept + text[MAX_SEARCHED:]


def _without_header(text: str) -> str:
    """The header ends with its last `key=value;`: another block may follow on the same line."""
    kept = []
    for line in text[:MAX_TEXT].splitlines(keepends=True):
        found = _BILLING.match(line)
        rest = line[found.end() :] if found else line
        if not found or rest.strip():
            kept.append(rest)
    return "".join(kept) + text[MAX_TEXT:]


def _lines(text: str, keeps: Callable[[str], bool]) -> str:
    """The text without the lines that `keeps` refuses."""
    lines = text[:MAX_TEXT].splitlines(keepends=True)
    kept = [line for line in lines if len(line) > MAX_LINE or keeps(line)]
    return text if len(kept) == len(lines) else "".join(kept) + text[MAX_TEXT:]


def _append(messages: list[Message], number: int, lines: Sequence[str]) -> None:
    """Put lines behind the text of a message."""
    if not lines:
        return
    message, added = messages[number], "\n".join(lines)
    content = message.get("content")
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": f"\n{added}"}]
    elif isinstance(content, str):
        content = f"{content.rstrip()}\n{added}" if content.strip() else added
    messages[number] = {**message, "content": content}


# -- patterns ---------------------------------------------------------------------------------


def _compiled(pattern: str) -> re.Pattern[str]:
    if problem := _problem(pattern):
        raise SettingsError(f"has {REGEX}{pattern}, {problem}")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SettingsError(f"has {REGEX}{pattern}, which is no pattern: {error}") from None


def _problem(pattern: str) -> str | None:
    """Why matching the pattern may take too long, in words."""
    if not pattern:
        return "an empty pattern; write one behind the colon"
    plain = pattern.removeprefix("(?i)")
    if re.search(r"\\[1-9]|\(\?(?!:)", plain):
        return "with a back-reference or a look-around; write it without"
    plain = re.sub(r"\\.", "x", plain)
    plain = re.sub(r"\[\]?[^\]]*\]", "x", plain)
    if re.search(r"\)[*+{]", plain):
        return "which repeats a group; repeat single characters or classes"
    repeats = len(re.findall(r"[*+]|\{\d*,\d*\}|\{\d{3,}\}", plain))
    if repeats > MAX_REPEATS:
        return f"with {repeats} repeats; use at most {MAX_REPEATS}"
    return None
