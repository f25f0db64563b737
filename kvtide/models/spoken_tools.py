"""Tools in words, for chat templates that know none: how they are described, called and answered.

    HERMES      <tool_call>                                  <tool_response>
                {"name": "f", "arguments": {"a": 1}}         the result
                </tool_call>                                 </tool_response>
    PYTHONIC    [f(a=1), g()]                                ```tool_output
                                                             the result
                                                             ```

Calls of earlier turns stand in the prompt as the model wrote them, so that their pages match.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Tool = Mapping[str, Any]
"""As chat templates know it."""
Function = Mapping[str, Any]
"""A call's name, and its arguments as text."""


class SpokenForm(NamedTuple):
    """One way to speak of tools. `name` is what an operator reads of it."""

    name: str
    describe: Callable[[Sequence[Tool]], str]
    call: Callable[[Sequence[Function]], str]
    result: Callable[[str], str]


# -- Hermes -----------------------------------------------------------------------------------

_HERMES = """\
You can call functions. These are their signatures:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between tags, for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
</tool_call>"""


def _describe_as_hermes(tools: Sequence[Tool]) -> str:
    return _HERMES.format(tools="\n".join(_json(tool) for tool in tools))


def _call_as_hermes(functions: Sequence[Function]) -> str:
    calls = (
        f'{{"name": {json.dumps(each["name"])}, "arguments": {each["arguments"] or "{}"}}}'
        for each in functions
    )
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def _result_as_hermes(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


# -- Python -----------------------------------------------------------------------------------

_PYTHONIC = """\
You can call functions. These are their signatures, as a list of JSON schemas:
[
{tools}
]
To call functions, answer with a list of calls and nothing else. Name every argument:
[first_function(text="some text", count=2), second_function()]"""


def _describe_as_python(tools: Sequence[Tool]) -> str:
    return _PYTHONIC.format(tools=",\n".join(_json(tool["function"]) for tool in tools))


def _call_as_python(functions: Sequence[Function]) -> str:
    calls = (f"{each['name']}({_python_arguments(each['arguments'])})" for each in functions)
    return f"[{', '.join(calls)}]"


def _python_arguments(arguments: str | None) -> str:
    try:
        values = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return str(arguments)
    if not isinstance(values, dict):
        return str(arguments)
    return ", ".join(f"{name}={_json(value)}" for name, value in values.items())


def _result_as_python(text: str) -> str:
    return f"```tool_output\n{text}\n```"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


HERMES = SpokenForm("Hermes' form", _describe_as_hermes, _call_as_hermes, _result_as_hermes)
PYTHONIC = SpokenForm("Python's form", _describe_as_python, _call_as_python, _result_as_python)
