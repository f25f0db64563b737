"""Calls of every format, as a model of that format writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Arguments = Mapping[str, Any]


def _json(arguments: Arguments) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen(name: str, arguments: Arguments) -> str:
    given = "".join(f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<function={name}>\n{given}</function>"


def _glm(name: str, arguments: Arguments) -> str:
    given = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n"
        for k, v in arguments.items()
    )
    return f"{name}\n{given}"


def _dsml(name: str, arguments: Arguments) -> str:
    given = "".join(
        f'<｜DSML｜parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">'
        f"{_plain(v)}</｜DSML｜parameter>\n"
        for k, v in arguments.items()
    )
    return f'\n<｜DSML｜invoke name="{name}">\n{given}</｜DSML｜invoke>\n'


def _python(name: str, arguments: Arguments) -> str:
    given = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items())
    return f"{name}({given})"


def _object(key: str) -> Callable[[str, Arguments], str]:
    return lambda name, arguments: f'{{"name": "{name}", "{key}": {_json(arguments)}}}'


_CALL: dict[str, tuple[str, Callable[[str, Arguments], str], str]] = {
    "hermes": ("<tool_call>\n", _object("arguments"), "\n</tool_call>"),
    "qwen3_coder": ("<tool_call>\n", _qwen, "\n</tool_call>"),
    "llama3": ("", _object("parameters"), ""),
    "mistral": ("[TOOL_CALLS][", _object("arguments"), "]"),
    "mistral_args": ("[TOOL_CALLS]", lambda name, given: f"{name}[ARGS]{_json(given)}", ""),
    "nemotron": ("<TOOLCALL>[", _object("arguments"), "]</TOOLCALL>"),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>",
        lambda name, given: f"functions.{name}:0<|tool_call_argument_begin|>{_json(given)}",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        lambda name, given: f"function<｜tool▁sep｜>{name}\n```json\n{_json(given)}\n```",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        lambda name, given: f"{name}<｜tool▁sep｜>{_json(given)}",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": ("<｜DSML｜function_calls>", _dsml, "</｜DSML｜function_calls>"),
    "deepseek_v4": ("<｜DSML｜tool_calls>", _dsml, "</｜DSML｜tool_calls>"),
    "harmony": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>",
        lambda name, given: (
            f"commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}"
        ),
        "",
    ),
    "glm": ("<tool_call>", _glm, "</tool_call>"),
    "lfm2": ("<|tool_call_start|>[", _python, "]<|tool_call_end|>"),
    "pythonic": ("[", _python, "]"),
}


def written(form: str, name: str, arguments: Arguments) -> str:
    """One call, and nothing else."""
    begin, call, end = _CALL[form]
    return f"{begin}{call(name, arguments)}{end}"


ONE = {form: written(form, "get_weather", {"city": "Paris", "days": 3}) for form in _CALL}
"""One call of each format."""
TWO: dict[str, str] = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": ONE["qwen3_coder"] + "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3": ONE["llama3"] + '; {"name": "now", "parameters": {}}',
    "mistral": ONE["mistral"][:-1] + ', {"name": "now", "arguments": {}}]',
    "mistral_args": ONE["mistral_args"] + "[TOOL_CALLS]now[ARGS]{}",
    "nemotron": ONE["nemotron"].replace("]", ', {"name": "now", "arguments": {}}]'),
    "kimi": ONE["kimi"].replace(
        "<|tool_call_end|>",
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}"
        "<|tool_call_end|>",
    ),
    "glm": ONE["glm"] + "<tool_call>now</tool_call>",
    "pythonic": ONE["pythonic"][:-1] + ", now()]",
}
