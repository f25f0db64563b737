"""Raw outputs of the installed models, without a grammar: greedy, in the words of `test_generated`.

Their begin was given, a call's at the most up to its first argument: models of this size seldom
call unasked. They are cut at their ends only.
"""

# ruff: noqa: E501

from __future__ import annotations

from tests.server.tools.recorded import Recorded


def smollm2(name: str, output: str, text: str, *calls: tuple[str, str], whole: bool) -> Recorded:
    return Recorded(f"SmolLM2 {name}", "hermes", output, text, calls, whole=whole)


def gemma3(name: str, output: str, text: str, *calls: tuple[str, str]) -> Recorded:
    return Recorded(f"Gemma 3 {name}", "pythonic", output, text, calls)


GENERATED = [
    smollm2(
        "calls with an argument of its own, and explains itself",
        '<tool_call>\n{"name": "get_weather", "arguments": {\n    "city": "Cairo",\n'
        '    "weather": {\n        "temperature": 25,\n        "temperature_celsius": 25\n    }\n}}\n'
        "</tool_call>\n\nThis is a JSON that contains a list of weather parameters.",
        "This is a JSON that contains a list of weather parameters.",
        (
            "get_weather",
            '{\n    "city": "Cairo",\n    "weather": {\n        "temperature": 25,\n        "temperature_celsius": 25\n    }\n}',
        ),
        whole=True,
    ),
    smollm2(
        "copies the words that describe a call",
        '<tool_call>\n{"name": "the function\'s name", "arguments": {"the argument\'s name": "the function\'s value"}}\n'
        "</tool_call>\nThe temperature in fahrenheit is 100.",
        '<tool_call>\n{"name": "the function\'s name", "arguments": {"the argument\'s name": "the function\'s value"}}\n'
        "</tool_call>\nThe temperature in fahrenheit is 100.",
        whole=True,
    ),
    smollm2(
        "begins functions within functions",
        "<tool_call>\n<function=search-files>\n<parameter=city>Oslo</parameter>\n"
        "<function=search-files>\n<function=get-weather>\n<function=get-weather>\n",
        "",
        ("search-files", '{"city": "Oslo"}'),
        ("search-files", "{}"),
        ("get-weather", "{}"),
        ("get-weather", "{}"),
        whole=True,
    ),
    smollm2(
        "ends no value of its own tags",
        "<tool_call>\n<function=search-files>\n<parameter=city>São Paulo</parameter>\n"
        "<function=search-files>\n<parameter=filters>\n<param>\n<type>\n<value>\n"
        "<string>São Paulo</value>\n</type>\n</param>\n<function=search-files>\n<function=",
        "",
        ("search-files", '{"city": "São Paulo"}'),
        ("search-files", '{"filters": '),
        whole=False,
    ),
    smollm2(
        "gives the schema for arguments, and is cut short",
        '<tool_call>\n{"name": "get_weather", "arguments": {\n    "type": "object",\n    "properties": {\n'
        '        "city": {\n            "type": "string",\n            "description": "The weather in Oslo',
        "",
        (
            "get_weather",
            '{\n    "type": "object",\n    "properties": {\n        "city": {\n            "type": "string",\n            "description": "The weather in Oslo',
        ),
        whole=False,
    ),
    gemma3(
        "calls, and asks itself again",
        '[get_weather(city="Oslo", days=3)]\n\nWhat is the weather in Oslo for the next 3 days?\n'
        '[get_weather(city="Oslo", days=3)]',
        'What is the weather in Oslo for the next 3 days?\n[get_weather(city="Oslo", days=3)]',
        ("get_weather", '{"city": "Oslo", "days": 3}'),
    ),
    gemma3(
        "gives an argument twice",
        '[get_weather(city="Rome", days=1, units="celsius", units="fahrenheit")]\n'
        '[get_weather(city="Cairo", days=1, units="celsius", units="fahrenheit")]\n]',
        '[get_weather(city="Cairo", days=1, units="celsius", units="fahrenheit")]\n]',
        ("get_weather", '{"city": "Rome", "days": 1, "units": "fahrenheit"}'),
    ),
    gemma3(
        "calls methods in a fence",
        "```tool_code\nprint(search_files.get_weather())\n```\n",
        "```tool_code\nprint(search_files.get_weather())\n```\n",
    ),
]
