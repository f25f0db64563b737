"""Raw outputs of running models, as users and engineers posted them in public issues.

They are short excerpts, cut at their ends only, and not repaired: what broke was the model's doing.
`source` is where. What a call should be is what a reader of the issue would say; where the output
is beyond that, it is text. No raw output was found of `mistral`, `deepseek_v32` and `nemotron`.
"""

# ruff: noqa: E501

from __future__ import annotations

import json

from kvtide.server.tools.tool_spec import FunctionTool
from tests.server.tools.recorded import Recorded


def function(name: str, **types: str) -> FunctionTool:
    """A function whose arguments have these JSON types."""
    properties = {key: {"type": kind} for key, kind in types.items()}
    return FunctionTool(name, "", {"type": "object", "properties": properties})


TOOLS = (
    function("get_current_temperature", location="string"),
    function("Glob", pattern="string"),
    function("Bash", command="string"),
    function("exec_command", cmd="string"),
    function("web_search", query="string"),
    function("trace_impact", symbol="string"),
    function("create_file", filePath="string", content="string"),
    function("get_current_weather", location="string"),
    function("read", filePath="string", limit="integer", offset="integer"),
    function("question", questions="array"),
    function("get_ecs_instructions", data="object"),
    function("ffgrep", path="string", pattern="string"),
    function("get_file_info", path="string"),
    function("list_directory", path="string"),
    function("echo_text", text="string"),
    function("filter_dataframe_by_search_term", column_name="string", search_terms="array"),
)
_DATA = (
    '{"data":{"envs":{"sd":{"namespaces":{"main":{"resources":{"requests":{"cpu":"100m","memory":"128Mi"},'
    '"limits":{"cpu":"200m","memory":"256Mi"}}}}},"pr":{"namespaces":{"main":{"resources":{"requests":'
    '{"cpu":"500m","memory":"512Mi"},"limits":{"cpu":"1","memory":"1Gi"}}}}}}}'
)
_QUESTIONS = (
    '[{"question": "xxx：", "options": {"label": "xxx", "description": "xxx"}, {"label": "xxx", '
    '"description": "xxx"}, "header": "xxx"}]'
)


def posted(
    name: str,
    form: str,
    source: str,
    output: str,
    text: str,
    *calls: tuple[str, str],
    reasoning: str = "",
    whole: bool = True,
) -> Recorded:
    return Recorded(name, form, output, text, calls, reasoning, whole, TOOLS, source)


POSTED = [
    posted(
        "Qwen2.5-72B copies the doubled brackets of its template",
        "hermes",
        "https://github.com/sgl-project/sglang/pull/3960",
        "Let's start by getting the current temperature.\n<tool_call>\n"
        '{{"name": "get_current_temperature", "arguments": {"location": "San Francisco, California, USA"}}}\n'
        "</tool_call>",
        "Let's start by getting the current temperature.\n<tool_call>\n"
        '{{"name": "get_current_temperature", "arguments": {"location": "San Francisco, California, USA"}}}\n'
        "</tool_call>",
    ),
    posted(
        "Qwen3-Coder leaves the first marker out after text",
        "qwen3_coder",
        "https://github.com/ollama/ollama/issues/16686",
        "I'll use the Glob tool to list all markdown files in the current directory.\n\n"
        "<function=Glob>\n<parameter=pattern>\n*.md\n</parameter>\n</function>\n</tool_call>",
        "I'll use the Glob tool to list all markdown files in the current directory.",
        ("Glob", '{"pattern": "*.md"}'),
    ),
    posted(
        "Qwen3-Coder leaves the first marker out",
        "qwen3_coder",
        "https://github.com/ollama/ollama/pull/17742",
        "<function=exec_command>\n<parameter=cmd>\necho LEAK_TEST\n</parameter>\n</function>\n</tool_call>",
        "",
        ("exec_command", '{"cmd": "echo LEAK_TEST"}'),
    ),
    posted(
        "Qwen3-Coder calls a shell",
        "qwen3_coder",
        "https://github.com/jundot/omlx/pull/844",
        "I'll check the model information to confirm I'm running on the local oMLX server.\n\n"
        "<function=Bash>\n<parameter=command>\n"
        "echo $ANTHROPIC_BASE_URL && echo $ANTHROPIC_DEFAULT_SONNET_MODEL\n"
        "</parameter>\n</function>\n</tool_call>",
        "I'll check the model information to confirm I'm running on the local oMLX server.",
        ("Bash", '{"command": "echo $ANTHROPIC_BASE_URL && echo $ANTHROPIC_DEFAULT_SONNET_MODEL"}'),
    ),
    posted(
        "Llama 3.1 calls without a marker",
        "llama3",
        "https://github.com/raullenchai/Rapid-MLX/issues/700",
        '{"name": "web_search", "parameters": {"query": "你好"}}',
        "",
        ("web_search", '{"query": "你好"}'),
    ),
    posted(
        "Llama 3.2 calls a function that does not exist, then one that does",
        "llama3",
        "https://github.com/atwmarshall/dead-reckoning/issues/30",
        '{"name": "slugify", "parameters": {}}; {"name": "trace_impact", "parameters": {"symbol": "slugify"}}',
        '{"name": "slugify", "parameters": {}}; {"name": "trace_impact", "parameters": {"symbol": "slugify"}}',
    ),
    posted(
        "Devstral Small 2 searches",
        "mistral_args",
        "https://github.com/raullenchai/Rapid-MLX/issues/1071",
        '[TOOL_CALLS]web_search[ARGS]{"query": "latest AI model releases this month"}',
        "",
        ("web_search", '{"query": "latest AI model releases this month"}'),
    ),
    posted(
        "Devstral Small 2, whose second marker is no text",
        "mistral_args",
        "https://github.com/vllm-project/vllm/issues/30651",
        '[TOOL_CALLS]create_file{"filePath": "/workspaces/overleaf_dev/workspace/git-bridge/'
        'overleaf_with_admin_extension/blabla.txt", "content": "This is a test file created to verify '
        'file creation functionality."}',
        "",
        (
            "create_file",
            '{"filePath": "/workspaces/overleaf_dev/workspace/git-bridge/'
            'overleaf_with_admin_extension/blabla.txt", "content": "This is a test file created to '
            'verify file creation functionality."}',
        ),
    ),
    posted(
        "DeepSeek V3 calls twice",
        "deepseek_v3",
        "https://github.com/sgl-project/sglang/issues/4379",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_current_weather\n"
        '```json\n{"location": "Tokyo"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_current_weather\n"
        '```json\n{"location": "Par',
        "",
        ("get_current_weather", '{"location": "Tokyo"}'),
        ("get_current_weather", '{"location": "Par'),
        whole=False,
    ),
    posted(
        "DeepSeek V3.1 calls in the midst of its thought",
        "deepseek_v31",
        "https://github.com/sgl-project/sglang/pull/9446",
        "The response should be simple and direct - just provide the weather data without unnecessary "
        "commentary since the user didn't ask for anything beyond the basic weather information."
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_current_weather<｜tool▁sep｜>"
        '{"location": "Shanghai"}',
        "The response should be simple and direct - just provide the weather data without unnecessary "
        "commentary since the user didn't ask for anything beyond the basic weather information.",
        ("get_current_weather", '{"location": "Shanghai"}'),
    ),
    posted(
        "DeepSeek V4 calls a shell",
        "deepseek_v4",
        "https://github.com/sgl-project/sglang/issues/35736",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="Bash">\n'
        '<｜DSML｜parameter name="command" string="true">pwd</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "",
        ("Bash", '{"command": "pwd"}'),
    ),
    posted(
        "DeepSeek V4 writes backslashes as they are",
        "deepseek_v4",
        "https://github.com/anomalyco/opencode/issues/24566",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="read">\n'
        '<｜DSML｜parameter name="filePath" string="true">I:\\hrc\\usermode\\src\\hypercall\\hypercall.cpp'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="limit" string="false">15</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="offset" string="false">357</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "",
        (
            "read",
            r'{"filePath": "I:\\hrc\\usermode\\src\\hypercall\\hypercall.cpp", "limit": 15, "offset": 357}',
        ),
    ),
    posted(
        "DeepSeek V4 leaves a bracket out of the first marker and of a list",
        "deepseek_v4",
        "https://github.com/anomalyco/opencode/issues/24566",
        '<｜DSML｜tool_calls\n<｜DSML｜invoke name="question">\n'
        f'<｜DSML｜parameter name="questions" string="false">{_QUESTIONS}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "<｜DSML｜tool_calls",
        ("question", json.dumps({"questions": _QUESTIONS}, ensure_ascii=False)),
    ),
    posted(
        "DeepSeek V4 writes another marker and no arguments",
        "deepseek_v4",
        "https://github.com/vllm-project/vllm-ascend/issues/13794",
        '<｜DSML｜toolcall>Read\n\n```json\n{"file_path":"/tmp/gen_report.js","offset":100,"limit":20}\n``` \n',
        '<｜DSML｜toolcall>Read\n\n```json\n{"file_path":"/tmp/gen_report.js","offset":100,"limit":20}\n``` \n',
    ),
    posted(
        "gpt-oss-20b ends within its arguments",
        "harmony",
        "https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/942",
        "<|start|>assistant<|channel|>commentary to=functions.get_ecs_instructions<|constrain|>json"
        f"<|message|>{_DATA}",
        "",
        ("get_ecs_instructions", _DATA),
        whole=False,
    ),
    posted(
        "gpt-oss-20b calls in the channel of its thoughts",
        "harmony",
        "https://github.com/waybarrios/vllm-mlx/pull/562",
        "<|channel|>analysis<|message|>We need to run ffgrep. Let us search.\n<|end|><|start|>assistant"
        "<|channel|>analysis to=functions.ffgrep code<|message|>\n"
        '{"path":"","pattern":"TextualDisplayView"}<|call|>',
        "",
        ("ffgrep", '{"path":"","pattern":"TextualDisplayView"}'),
        reasoning="We need to run ffgrep. Let us search.\n",
    ),
    posted(
        "GLM-4.7-Flash calls twice",
        "glm",
        "https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/1528",
        "<tool_call>get_file_info<arg_key>path</arg_key><arg_value>file1.jpg</arg_value></tool_call>\n"
        "<tool_call>get_file_info<arg_key>path</arg_key><arg_value>file2.jpg</arg_value></tool_call>",
        "",
        ("get_file_info", '{"path": "file1.jpg"}'),
        ("get_file_info", '{"path": "file2.jpg"}'),
    ),
    posted(
        "Kimi K2 Thinking puts space around its markers",
        "kimi",
        "https://github.com/vybestack/llxprt-code/issues/749",
        "Let me start by exploring the structure and key files. <|tool_calls_section_begin|> "
        "<|tool_call_begin|> functions.list_directory:0 <|tool_call_argument_begin|> "
        '{"path": "/Users/..."} <|tool_call_end|> <|tool_calls_section_end|>',
        "Let me start by exploring the structure and key files.",
        ("list_directory", '{"path": "/Users/..."}'),
    ),
    posted(
        "LFM2 puts space before its last marker",
        "lfm2",
        "https://github.com/vllm-project/vllm/pull/39243",
        '<|tool_call_start|>[get_current_temperature(location="Tokyo")] <|tool_call_end|>',
        "",
        ("get_current_temperature", '{"location": "Tokyo"}'),
    ),
    posted(
        "LFM2.5-8B lists a folder",
        "lfm2",
        "https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/1979",
        '<|tool_call_start|>[list_directory(path="desktop")]<|tool_call_end|>',
        "",
        ("list_directory", '{"path": "desktop"}'),
    ),
    posted(
        "LFM2.5 begins with a line break",
        "lfm2",
        "https://github.com/jundot/omlx/pull/1620",
        "\n<|tool_call_start|>[echo_text(text='teste 123')]<|tool_call_end|>",
        "",
        ("echo_text", '{"text": "teste 123"}'),
    ),
    posted(
        "Gemma 3 27B calls in a fence, after text",
        "pythonic",
        "https://github.com/vllm-project/vllm/issues/14734",
        "The user query asks to filter by 'Division', which is in the 'relevant_columns'. The search term "
        'is "tech experts".\n```tool_code\n'
        "[filter_dataframe_by_search_term(column_name='Division', search_terms=['tech experts'])]\n```",
        "The user query asks to filter by 'Division', which is in the 'relevant_columns'. The search term "
        'is "tech experts".',
        (
            "filter_dataframe_by_search_term",
            '{"column_name": "Division", "search_terms": ["tech experts"]}',
        ),
    ),
]
