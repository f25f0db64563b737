"""Outputs as models write them, format by format, and what they mean.

These here are written by hand from the published formats, not taken from running models. `SHAPES`
has what parsers of other engines are tested with, in words of our own. `posted` has outputs of
running models that were posted in public, and `generated` those of the installed models. `calls`
are names and arguments as text; arguments of complete calls are compared as JSON too.
"""

# ruff: noqa: E501

from __future__ import annotations

from dataclasses import dataclass

from kvtide.server.tools.tool_spec import FunctionTool

WEATHER = FunctionTool(
    "get_weather",
    "The weather of a city",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city"],
    },
)
SEARCH = FunctionTool(
    "search-files",
    "",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "filters": {"type": "object"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "deep": {"type": "boolean"},
            "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
    },
)
NOW = FunctionTool("now", "The time", {"type": "object", "properties": {}})
TOOLS = (WEATHER, SEARCH, NOW)


@dataclass(frozen=True)
class Recorded:
    """`whole`: every call is complete, so its arguments are JSON. `source`: where a running model's
    output was posted; empty for one that is written by hand."""

    name: str
    format: str
    output: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""
    whole: bool = True
    tools: tuple[FunctionTool, ...] = TOOLS
    source: str = ""


MARKED = '["a</parameter>b", "</function></tool_call>", "</arg_value></｜DSML｜parameter>"]'
"""JSON with markers in its texts."""
PARIS = ("get_weather", '{"city": "Paris", "days": 3}')
HARD = r'{"query": "a \"{b}\" </tool_call> [c] \\ \u00e9 世界 \n", "filters": {"x": {"y": []}}}'

HERMES = [
    Recorded(
        "one call",
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        "</tool_call>",
        "",
        (PARIS,),
    ),
    Recorded(
        "text before, two calls, text after",
        "hermes",
        'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", '
        '"days": 3}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        "Done.",
        "Let me look.\nDone.",
        (PARIS, ("now", "{}")),
    ),
    Recorded(
        "brackets, quotes and markers in strings",
        "hermes",
        '<tool_call>{"name": "search-files", "arguments": ' + HARD + "}</tool_call>",
        "",
        (("search-files", HARD),),
    ),
    Recorded(
        "arguments before the name",
        "hermes",
        '<tool_call>\n{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}\n'
        "</tool_call>",
        "",
        (PARIS,),
    ),
    Recorded(
        "arguments as a text",
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}'
        "</tool_call>",
        "",
        (PARIS,),
    ),
    Recorded(
        "no arguments",
        "hermes",
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": null}'
        "</tool_call>",
        "",
        (("now", "{}"), ("now", "{}")),
    ),
    Recorded(
        "line breaks in a string",
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa\nris\t"}}</tool_call>',
        "",
        (("get_weather", '{"city": "Pa\\nris\\t"}'),),
    ),
    Recorded(
        "no end marker",
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
        "",
        (PARIS,),
    ),
    Recorded(
        "a bracket is missing",
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}</tool_call> '
        "so",
        "so",
        (PARIS,),
    ),
    Recorded(
        "a bracket too many",
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}}\n'
        "</tool_call>",
        "",
        (PARIS,),
    ),
    Recorded(
        "cut short in the arguments",
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        "",
        (("get_weather", '{"city": "Par'),),
        whole=False,
    ),
    Recorded(
        "cut short before the arguments",
        "hermes",
        'Well: <tool_call>\n{"name": "get_wea',
        'Well: <tool_call>\n{"name": "get_wea',
    ),
    Recorded("cut short in the marker", "hermes", "a <tool_ca", "a <tool_ca"),
    Recorded(
        "an unknown function",
        "hermes",
        '<tool_call>{"name": "fly", "arguments": {"to": 1}}',
        "",
        (("fly", '{"to": 1}'),),
    ),
    Recorded(
        "a name that is none",
        "hermes",
        '<tool_call>{"name": "two words", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "two words", "arguments": {}}</tool_call>',
    ),
    Recorded(
        "no JSON, then a call",
        "hermes",
        '<tool_call> weather(Paris) <tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "<tool_call> weather(Paris)",
        (("now", "{}"),),
    ),
    Recorded(
        "wrong brackets",
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": [1}}</tool_call> hm',
        "hm",
        (("now", '{"a": [1'),),
        whole=False,
    ),
    Recorded("text alone", "hermes", "  2 < 3 and {4}\n", "  2 < 3 and {4}\n"),
    Recorded("an empty answer", "hermes", "", ""),
]

QWEN_CODER = [
    Recorded(
        "markers in a text of JSON",
        "qwen3_coder",
        f"<tool_call>\n<function=search-files>\n<parameter=tags>\n{MARKED}\n</parameter>\n"
        "<parameter=deep>\ntrue\n</parameter>\n</function>\n</tool_call>",
        "",
        (("search-files", f'{{"tags": {MARKED}, "deep": true}}'),),
    ),
    Recorded(
        "a text of JSON without an end",
        "qwen3_coder",
        '<tool_call>\n<function=search-files>\n<parameter=tags>\n["a\n</parameter>\n'
        "<parameter=deep>\ntrue\n</parameter>\n</function>\n</tool_call>",
        "",
        (("search-files", '{"tags": "[\\"a", "deep": true}'),),
    ),
    Recorded(
        "types from the schema",
        "qwen3_coder",
        'I will.\n<tool_call>\n<function=search-files>\n<parameter=query>\nline one\n\nline "two"\n'
        '</parameter>\n<parameter=filters>\n{"a": [1, 2]}\n</parameter>\n<parameter=deep>\nTrue\n'
        "</parameter>\n<parameter=limit>\nnull\n</parameter>\n</function>\n</tool_call>",
        "I will.",
        (
            (
                "search-files",
                '{"query": "line one\\n\\nline \\"two\\"", "filters": {"a": [1, 2]}, "deep": true, '
                '"limit": null}',
            ),
        ),
    ),
    Recorded(
        "two calls, no parameters, no outer marker",
        "qwen3_coder",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<function=get_weather>"
        "<parameter=city>Paris</parameter><parameter=days>3</parameter></function>",
        "",
        (("now", "{}"), PARIS),
    ),
    Recorded(
        "cut short in a text",
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        "",
        (("get_weather", '{"city": "Par'),),
        whole=False,
    ),
    Recorded(
        "ends are missing",
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n",
        "",
        (PARIS,),
    ),
    Recorded("no name", "qwen3_coder", "<function=>\n<x", "<function=>\n<x"),
]

LLAMA3 = [
    Recorded(
        "a bare object",
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        "",
        (PARIS,),
    ),
    Recorded(
        "two calls after the marker",
        "llama3",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; '
        '{"type": "function", "name": "now", "parameters": {}}',
        "",
        (PARIS, ("now", "{}")),
    ),
    Recorded(
        "text before the marker",
        "llama3",
        'Sure.<|python_tag|>{"name": "search-files", "parameters": ' + HARD + "}",
        "Sure.",
        (("search-files", HARD),),
    ),
    Recorded(
        "an answer of JSON", "llama3", '{"name": "Ann", "age": 3} ', '{"name": "Ann", "age": 3} '
    ),
    Recorded("other JSON", "llama3", ' {"a": {"name": "now"}}', ' {"a": {"name": "now"}}'),
    Recorded("code", "llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    Recorded(
        "cut short",
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "世',
        "",
        (("get_weather", '{"city": "世'),),
        whole=False,
    ),
    Recorded("cut short before the arguments", "llama3", '{"name": "get_wea', '{"name": "get_wea'),
    Recorded(
        "text after",
        "llama3",
        '{"name": "now", "parameters": {}}\n\nAs you asked.',
        "As you asked.",
        (("now", "{}"),),
    ),
]

MISTRAL = [
    Recorded(
        "a list",
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
        "",
        (PARIS, ("now", "{}")),
    ),
    Recorded(
        "text before, hard strings",
        "mistral",
        'Hm.[TOOL_CALLS] [{"name": "search-files", "arguments": ' + HARD + "}]",
        "Hm.",
        (("search-files", HARD),),
    ),
    Recorded(
        "names and arguments",
        "mistral_args",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[CALL_ID]'
        "123456789[ARGS]{}",
        "",
        (PARIS, ("now", "{}")),
    ),
    Recorded(
        "without [ARGS]",
        "mistral_args",
        '[TOOL_CALLS]get_weather{"city": "Paris", "days": 3}',
        "",
        (PARIS,),
    ),
    Recorded(
        "cut short",
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "d',
        "",
        (("get_weather", '{"city": "Paris", "d'),),
        whole=False,
    ),
    Recorded("no list", "mistral", "[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]"),
    Recorded("a list cut short", "mistral", "a [TOOL_CALLS] [", "a [TOOL_CALLS] ["),
    Recorded("a name cut short", "mistral_args", "[TOOL_CALLS]get_wea", "[TOOL_CALLS]get_wea"),
    Recorded("no name", "mistral_args", "[TOOL_CALLS]a b{}", "[TOOL_CALLS]a b{}"),
]

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_P = "<｜DSML｜parameter"
DEEPSEEK = [
    Recorded(
        "V3",
        "deepseek_v3",
        f'I look.{_CALLS}{_CALL}function{_SEP}get_weather\n```json\n{{"city": "Paris", "days": 3}}'
        f"\n```{_END}\n{_CALL}function{_SEP}now\n```json\n{{}}\n```{_END}{_CALLS_END}",
        "I look.",
        (PARIS, ("now", "{}")),
    ),
    Recorded(
        "V3.1",
        "deepseek_v31",
        f'{_CALLS}{_CALL}get_weather{_SEP}{{"city": "Paris", "days": 3}}{_END}{_CALL}now{_SEP}{{}}'
        f"{_END}{_CALLS_END}",
        "",
        (PARIS, ("now", "{}")),
    ),
    Recorded(
        "V3.1 without arguments, ends missing",
        "deepseek_v31",
        f"{_CALLS}{_CALL}now{_SEP}{_END}{_CALL}search-files{_SEP}{HARD}",
        "",
        (("now", "{}"), ("search-files", HARD)),
    ),
    Recorded(
        "V3 cut short",
        "deepseek_v3",
        f'{_CALLS}{_CALL}function{_SEP}get_weather\n```json\n{{"city": "Pa',
        "",
        (("get_weather", '{"city": "Pa'),),
        whole=False,
    ),
    Recorded(
        "V3 cut short before the name",
        "deepseek_v3",
        f"a {_CALLS}{_CALL}func",
        f"a {_CALLS}{_CALL}func",
    ),
    Recorded("a list of nothing", "deepseek_v31", f"{_CALLS} so", f"{_CALLS} so"),
    Recorded(
        "V3.2",
        "deepseek_v32",
        'Ok.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        f'{_P} name="city" string="true">Paris</｜DSML｜parameter>\n'
        f'{_P} name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Ok.",
        (PARIS, ("now", "{}")),
    ),
    Recorded(
        "V4, values of all kinds",
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="search-files">\n'
        f'{_P} name="query" string="true">5 < 6 "世界"\n</｜DSML｜parameter>\n'
        f'{_P} name="filters" string="false">{{"a": [true, "x"]}}</｜DSML｜parameter>\n'
        f'{_P} name="limit" string="false">2.5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "",
        (
            (
                "search-files",
                '{"query": "5 < 6 \\"世界\\"\\n", "filters": {"a": [true, "x"]}, "limit": 2.5}',
            ),
        ),
    ),
    Recorded(
        "V3.2 cut short",
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        f'{_P} name="city" string="true">Par</｜DSML｜para',
        "",
        (("get_weather", '{"city": "Par</｜DSML｜para'),),
        whole=False,
    ),
    Recorded(
        "V4 in the block of V3.2, without its end",
        "deepseek_v4",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>',
        "",
        (("now", "{}"),),
    ),
    Recorded(
        "V4 without a block, text on both sides",
        "deepseek_v4",
        'Ok.\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\nThat was it.',
        "Ok.\nThat was it.",
        (("now", "{}"),),
    ),
    Recorded(
        "V4, a call that closes itself and one without its end",
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now"/>\n<｜DSML｜invoke name="get_weather">\n'
        f'{_P} name="city" string="true">Paris</｜DSML｜parameter>\n'
        f'{_P} name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "",
        (("now", "{}"), PARIS, ("now", "{}")),
    ),
    Recorded(
        "V3.2 without a name",
        "deepseek_v32",
        "<｜DSML｜function_calls>\n<｜DSML｜invoke>x",
        "<｜DSML｜function_calls>\n<｜DSML｜invoke>x",
    ),
]

HARMONY = [
    Recorded(
        "markers in a text of the arguments",
        "harmony",
        '<|channel|>commentary to=functions.search-files<|message|>{"query": "a<|end|><|start|>b"}'
        "<|call|>",
        "",
        (("search-files", '{"query": "a<|end|><|start|>b"}'),),
    ),
    Recorded(
        "analysis and answer",
        "harmony",
        "<|channel|>analysis<|message|>They greet.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello <b>!",
        "Hello <b>!",
        reasoning="They greet.",
    ),
    Recorded(
        "a call",
        "harmony",
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}',
        "",
        (PARIS,),
        reasoning="Need weather.",
    ),
    Recorded(
        "a preamble, the recipient first, the last marker",
        "harmony",
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant to=functions."
        "search-files<|channel|>commentary json<|message|>" + HARD + "<|call|>",
        "I look it up.",
        (("search-files", HARD),),
    ),
    Recorded(
        "the recipient at once",
        "harmony",
        " to=functions.now<|channel|>commentary<|message|>{}<|call|>",
        "",
        (("now", "{}"),),
    ),
    Recorded(
        "cut short in a header",
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|chan",
        "",
        reasoning="Hm.",
    ),
    Recorded(
        "cut short in the arguments",
        "harmony",
        '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Pa',
        "",
        (("get_weather", '{"city": "Pa'),),
        whole=False,
    ),
    Recorded("no channels", "harmony", " to be or <|not|>", " to be or <|not|>"),
]

GLM = [
    Recorded(
        "markers in a text of JSON",
        "glm",
        f"<tool_call>search-files\n<arg_key>tags</arg_key>\n<arg_value>{MARKED}</arg_value>\n"
        "<arg_key>deep</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
        "",
        (("search-files", f'{{"tags": {MARKED}, "deep": true}}'),),
    ),
    Recorded(
        "numbers of any size",
        "glm",
        "<tool_call>search-files<arg_key>limit</arg_key><arg_value>1e999</arg_value></tool_call>"
        "<tool_call>get_weather<arg_key>days</arg_key>"
        f"<arg_value>{'9' * 5000}</arg_value></tool_call>",
        "",
        (
            ("search-files", '{"limit": 1e999}'),
            ("get_weather", f'{{"days": {"9" * 5000}}}'),
        ),
        whole=False,
    ),
    Recorded(
        "types from the schema",
        "glm",
        "Sure.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "Sure.",
        (PARIS,),
    ),
    Recorded(
        "no line breaks, two calls",
        "glm",
        "<tool_call>search-files<arg_key>query</arg_key><arg_value>12</arg_value><arg_key>tags</arg_key>"
        '<arg_value>["a", "<b>"]</arg_value><arg_key>deep</arg_key><arg_value>false</arg_value>'
        "</tool_call><tool_call>now</tool_call>",
        "",
        (("search-files", '{"query": "12", "tags": ["a", "<b>"], "deep": false}'), ("now", "{}")),
    ),
    Recorded(
        "an unknown argument, a value of the wrong type",
        "glm",
        "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>many</arg_value>\n"
        "<arg_key>x</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",
        "",
        (("get_weather", '{"days": "many", "x": [1]}'),),
    ),
    Recorded(
        "cut short",
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa",
        "",
        (("get_weather", '{"city": "Pa'),),
        whole=False,
    ),
    Recorded("the end is missing", "glm", "<tool_call>now\n", "", (("now", "{}"),)),
    Recorded("no name", "glm", "<tool_call>two words\n", "<tool_call>two words\n"),
]

PYTHONIC = [
    Recorded(
        "a bare list",
        "pythonic",
        '[get_weather(city="Paris", days=3), now()]',
        "",
        (PARIS, ("now", "{}")),
    ),
    Recorded(
        "markers, literals, strings with brackets",
        "lfm2",
        "Ok <|tool_call_start|>[search-files(query='a \\'(b)\\' \"[', filters={'x': [None, -1.5]}, "
        'deep=True, tags=("é", """t"""))]<|tool_call_end|> done',
        "Ok done",
        (
            (
                "search-files",
                '{"query": "a \'(b)\' \\"[", "filters": {"x": [null, -1.5]}, "deep": true, '
                '"tags": ["é", "t"]}',
            ),
        ),
    ),
    Recorded(
        "a fence",
        "pythonic",
        'I look.\n```tool_code\nprint(get_weather("Paris", days=3))\nnow()\n```\n',
        "I look.",
        (PARIS, ("now", "{}")),
    ),
    Recorded("a list that is none", "pythonic", "[1, 2, 3]", "[1, 2, 3]"),
    Recorded("an unknown function", "pythonic", "[fly(to=1)]", "[fly(to=1)]"),
    Recorded(
        "code that is no literal",
        "pythonic",
        "[get_weather(city=open('/etc/passwd').read())]",
        "[get_weather(city=open('/etc/passwd').read())]",
    ),
    Recorded(
        "a fence with more than calls",
        "pythonic",
        "```tool_code\nimport os\nnow()\n```",
        "```tool_code\nimport os\nnow()\n```",
    ),
    Recorded("cut short", "pythonic", '[get_weather(city="Par', '[get_weather(city="Par'),
    Recorded("the end is missing", "lfm2", "<|tool_call_start|>[now()", "", (("now", "{}"),)),
]

_BEGIN, _STOP = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_ONE, _ARGS, _DONE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI = [
    Recorded(
        "two calls in a section",
        "kimi",
        f'I look. {_BEGIN}{_ONE}functions.get_weather:0{_ARGS}{{"city": "Paris", "days": 3}}{_DONE}'
        f"{_ONE}functions.now:1{_ARGS}{{}}{_DONE}{_STOP}",
        "I look.",
        (PARIS, ("now", "{}")),
    ),
    Recorded(
        "spaces, hard strings, no prefix",
        "kimi",
        f"{_BEGIN}{_ONE} search-files:12 {_ARGS} {HARD} {_DONE}{_STOP}",
        "",
        (("search-files", HARD),),
    ),
    Recorded(
        "no section, ends missing",
        "kimi",
        f'{_ONE}functions.get_weather:0{_ARGS}{{"city": "Paris", "days": 3}}',
        "",
        (PARIS,),
    ),
    Recorded(
        "cut short",
        "kimi",
        f'{_BEGIN}{_ONE}functions.get_weather:0{_ARGS}{{"city": "Pa',
        "",
        (("get_weather", '{"city": "Pa'),),
        whole=False,
    ),
    Recorded(
        "cut short before the arguments",
        "kimi",
        f"a {_BEGIN}{_ONE}functions.get_wea",
        f"a {_BEGIN}{_ONE}functions.get_wea",
    ),
    Recorded("a section of nothing", "kimi", f"{_BEGIN} so", f"{_BEGIN} so"),
    Recorded(
        "an id without a number, then a call",
        "kimi",
        f"{_BEGIN}{_ONE}functions.now.0{_ARGS}{{}}{_DONE}{_ONE}functions.now:1{_ARGS}{{}}{_DONE}{_STOP}",
        f"{_BEGIN}{_ONE}functions.now.0{_ARGS}{{}}{_DONE}",
        (("now", "{}"),),
    ),
]

NEMOTRON = [
    Recorded(
        "a list",
        "nemotron",
        'I look.<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "now", "arguments": {}}]</TOOLCALL>',
        "I look.",
        (PARIS, ("now", "{}")),
    ),
    Recorded(
        "no list, arguments as a text, text after",
        "nemotron",
        '<TOOLCALL>{"name": "now", "arguments": "{\\"a\\": \\"1\\"}"}</TOOLCALL>\nDone.',
        "Done.",
        (("now", '{"a": "1"}'),),
    ),
    Recorded(
        "cut short",
        "nemotron",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Pa',
        "",
        (("get_weather", '{"city": "Pa'),),
        whole=False,
    ),
    Recorded("no calls", "nemotron", "<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>"),
    Recorded("a list cut short", "nemotron", "a <TOOLCALL>[", "a <TOOLCALL>["),
    Recorded("no call", "nemotron", "</TOOLCALL> so <TOOLCALL>f", "</TOOLCALL> so <TOOLCALL>f"),
]

_LFM = "<|tool_call_start|>"
SHAPES = [
    Recorded(
        "no spaces in the object",
        "hermes",
        '<tool_call>{"name":"get_weather","arguments":{"city":"Paris","days":3}}</tool_call>',
        "",
        (("get_weather", '{"city":"Paris","days":3}'),),
    ),
    Recorded(
        "arguments as a text that is no JSON",
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": "hello"}\n</tool_call>',
        "",
        (("now", '"hello"'),),
        whole=False,
    ),
    Recorded(
        "reasoning in front, which another parser splits off",
        "hermes",
        '<think>So.</think>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "<think>So.</think>",
        (("now", "{}"),),
    ),
    Recorded(
        "three calls with spaces around semicolons",
        "llama3",
        '{"name": "now", "parameters": {}} ; {"name": "search-files", "parameters": {"query": '
        '"a {b} [c]", "filters": {"x": {"y": {"z": "deep"}}}}};\n{"name": "now", "arguments": {}}',
        "",
        (
            ("now", "{}"),
            ("search-files", '{"query": "a {b} [c]", "filters": {"x": {"y": {"z": "deep"}}}}'),
            ("now", "{}"),
        ),
    ),
    Recorded(
        "no JSON after the brackets",
        "llama3",
        '{"name": "invalidTool", "parameters": {invalid json}',
        '{"name": "invalidTool", "parameters": {invalid json}',
    ),
    Recorded(
        "braces in the text after",
        "llama3",
        '{"name": "now", "parameters": {}} I used {now} for this.',
        "I used {now} for this.",
        (("now", "{}"),),
    ),
    Recorded(
        "a name and an object, twice",
        "mistral",
        '[TOOL_CALLS]get_weather{"city": "Paris", "days": 3}[TOOL_CALLS]now{}',
        "",
        (PARIS, ("now", "{}")),
    ),
    Recorded("words after the marker", "mistral", "[TOOL_CALLS] no list", "[TOOL_CALLS] no list"),
    Recorded(
        "compact objects, text at both ends",
        "deepseek_v31",
        f'some text{_CALLS}{_CALL}get_weather{_SEP}{{"city":"Paris"}}{_END}{_CALL}now{_SEP}{{"y":2}}'
        f"{_END}{_CALLS_END} and more",
        "some text and more",
        (("get_weather", '{"city":"Paris"}'), ("now", '{"y":2}')),
    ),
    Recorded(
        "calls without their markers",
        "deepseek_v31",
        f'{_CALLS}now{_SEP}{{"x":1}}{_CALLS_END}',
        f'{_CALLS}now{_SEP}{{"x":1}}{_CALLS_END}',
    ),
    Recorded(
        "parameters without line breaks, compact JSON",
        "deepseek_v32",
        'Sure! <｜DSML｜function_calls>\n<｜DSML｜invoke name="search-files">\n'
        f'{_P} name="query" string="true">SF</｜DSML｜parameter>'
        f'{_P} name="filters" string="false">{{"type":"for","minutes":2880}}</｜DSML｜parameter>'
        "\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "Sure!",
        (("search-files", '{"query": "SF", "filters": {"type": "for", "minutes": 2880}}'),),
    ),
    Recorded(
        "an empty line where parameters would be",
        "deepseek_v4",
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>",
        "",
        (("now", "{}"),),
    ),
    Recorded(
        "no content type, no arguments",
        "harmony",
        '<|channel|>commentary to=functions.get_weather<|message|>{\n"city": "Paris"\n}<|call|>'
        "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
        "<|call|>",
        "",
        (("get_weather", '{\n"city": "Paris"\n}'), ("now", "{}")),
    ),
    Recorded(
        "indented lines, text between calls",
        "glm",
        "I will help.<tool_call>get_weather\n    <arg_key>city</arg_key>\n"
        "    <arg_value>New York</arg_value>\n    </tool_call>\n\nMeanwhile, the time.\n\n"
        "<tool_call>now\n</tool_call>",
        "I will help.\n\nMeanwhile, the time.",
        (("get_weather", '{"city": "New York"}'), ("now", "{}")),
    ),
    Recorded(
        "all kinds of values",
        "lfm2",
        f"{_LFM}[search-files(query='Martha\\'s', filters={{'a': 'b', 'c': None}}, deep=True, "
        "tags=[], limit=7), now()]<|tool_call_end|>\nChecking.",
        "Checking.",
        (
            (
                "search-files",
                '{"query": "Martha\'s", "filters": {"a": "b", "c": null}, "deep": true, '
                '"tags": [], "limit": 7}',
            ),
            ("now", "{}"),
        ),
    ),
    Recorded(
        "space before the list, brackets in a shell command",
        "lfm2",
        f"{_LFM} [search-files(query='grep -F \"]\" log.txt')]<|tool_call_end|>",
        "",
        (("search-files", '{"query": "grep -F \\"]\\" log.txt"}'),),
    ),
]

ALL = [
    *(*HERMES, *QWEN_CODER, *LLAMA3, *MISTRAL, *NEMOTRON, *DEEPSEEK, *KIMI, *HARMONY, *GLM),
    *(*PYTHONIC, *SHAPES),
]
