"""How the served model writes calls and reasoning: formats by name, chosen for a model.

`--tool-parser` names a format. Else the chat template does, by the markers that it writes, and else
the model's family. A model whose template knows no tools gets them described: Gemma, and any model
with `--tool-parser pythonic`, in Python's form, others in Hermes'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.grammar.grammar_rules import literal
from kvtide.models.chat import Conversation
from kvtide.models.spoken_tools import HERMES, PYTHONIC, SpokenForm
from kvtide.models.tokenizer import Tokenizer
from kvtide.models.tool_templates import ToolTemplate
from kvtide.server.tools import (
    deepseek_calls,
    glm,
    harmony,
    hermes,
    kimi,
    llama3,
    mistral,
    pythonic,
    reasoning,
)
from kvtide.server.tools.grammars.lark_rules import LarkRules, always, any_of
from kvtide.server.tools.marker_parser import (
    MarkerParser,
    OfferedTools,
    new_call_id,
    short_call_id,
)
from kvtide.server.tools.output_events import (
    CallsOrAnswer,
    FirstCallOnly,
    OutputParser,
    PlainText,
)
from kvtide.server.tools.tool_spec import FunctionTool, ToolRequest

NO_REASONING, THINK, HARMONY = "none", "think", "harmony"
REASONING_PARSERS = (NO_REASONING, THINK, HARMONY)


class CallGrammar(Protocol):
    def __call__(
        self, tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    parser    reads an output
    special   markers that may be special tokens, which the output's text must then have
    trigger   the marker before the first call; empty where a call begins the answer
    grammar   the expression of all calls, after the trigger
    evidence  texts that a chat template of this format has
    opening   how an answer begins that is calls without a marker, as a regular expression
    other     another marker that begins calls, and the expression that follows it
    marked    the format beside answers that may look like calls without a marker
    """

    parser: type[MarkerParser]
    special: tuple[str, ...]
    trigger: str
    grammar: CallGrammar
    evidence: tuple[str, ...]
    opening: str = ""
    other: tuple[str, CallGrammar] | None = None
    marked: ToolFormat | None = None
    new_id: Callable[[], str] = new_call_id


_HARMONY = {False: harmony.HarmonyParser, True: harmony.WholeAnswerParser}
_HERMES = (hermes.HermesParser, (hermes.BEGIN, hermes.END), hermes.BEGIN)
_MISTRAL = (
    mistral.MistralParser,
    (mistral.BEGIN, mistral.ARGUMENTS, mistral.CALL_ID),
    mistral.BEGIN,
)
_DEEPSEEK = (deepseek_calls.DeepSeekParser, deepseek_calls.SPECIAL)
_V3 = (*_DEEPSEEK, deepseek_calls.CALLS)

FORMATS: dict[str, ToolFormat] = {
    "harmony": ToolFormat(
        harmony.HarmonyParser,
        harmony.SPECIAL,
        harmony.CHANNEL,
        harmony.harmony_grammar,
        (harmony.CHANNEL,),
    ),
    "deepseek_v4": ToolFormat(
        *(*_DEEPSEEK, f"<{deepseek_calls.DSML}tool_calls>"),
        deepseek_calls.deepseek_v4_grammar,
        (deepseek_calls.DSML, "tool_calls>"),
    ),
    "deepseek_v32": ToolFormat(
        *(*_DEEPSEEK, f"<{deepseek_calls.DSML}function_calls>"),
        deepseek_calls.deepseek_v32_grammar,
        (deepseek_calls.DSML,),
    ),
    "deepseek_v3": ToolFormat(
        *_V3, deepseek_calls.deepseek_v3_grammar, (deepseek_calls.CALLS, "```json")
    ),
    "deepseek_v31": ToolFormat(*_V3, deepseek_calls.deepseek_v31_grammar, (deepseek_calls.CALLS,)),
    "glm": ToolFormat(
        glm.GlmParser,
        (glm.BEGIN, glm.END, glm.KEY, glm.KEY_END, glm.VALUE, glm.VALUE_END),
        glm.BEGIN,
        glm.glm_grammar,
        ("<arg_key>",),
    ),
    "qwen3_coder": ToolFormat(
        *_HERMES,
        hermes.qwen_coder_grammar,
        (hermes.BEGIN, hermes.FUNCTION),
        other=(hermes.FUNCTION, hermes.bare_qwen_coder_grammar),
    ),
    "hermes": ToolFormat(*_HERMES, hermes.hermes_grammar, (hermes.BEGIN,)),
    "mistral_args": ToolFormat(
        *_MISTRAL,
        mistral.mistral_args_grammar,
        (mistral.BEGIN, mistral.ARGUMENTS),
        new_id=short_call_id,
    ),
    "mistral": ToolFormat(
        *_MISTRAL, mistral.mistral_grammar, (mistral.BEGIN,), new_id=short_call_id
    ),
    "nemotron": ToolFormat(
        mistral.NemotronParser,
        (mistral.NEMOTRON, mistral.NEMOTRON_END),
        mistral.NEMOTRON,
        mistral.nemotron_grammar,
        (mistral.NEMOTRON,),
    ),
    "kimi": ToolFormat(kimi.KimiParser, kimi.SPECIAL, kimi.CALLS, kimi.kimi_grammar, (kimi.CALLS,)),
    "llama3": ToolFormat(
        llama3.Llama3Parser,
        (llama3.BEGIN,),
        "",
        llama3.llama3_grammar,
        ('{"name": function name',),
        opening=r"\{",
        marked=ToolFormat(
            llama3.MarkedLlama3Parser,
            (llama3.BEGIN,),
            llama3.BEGIN,
            llama3.llama3_grammar,
            (),
        ),
    ),
    "lfm2": ToolFormat(
        pythonic.PythonicParser,
        (pythonic.BEGIN, pythonic.END),
        pythonic.BEGIN,
        pythonic.pythonic_grammar,
        (pythonic.BEGIN,),
        opening=pythonic.BARE_CALL,
    ),
    "pythonic": ToolFormat(
        pythonic.PythonicParser,
        (pythonic.BEGIN, pythonic.END),
        "",
        pythonic.bare_grammar,
        ("tool_code",),
        opening=r"\[",
    ),
}
"""In the order in which a template is searched for their evidence."""

FAMILIES: dict[str, str] = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "gemma2": "pythonic",
    "gemma3_text": "pythonic",
    "glm4_moe_lite": "glm",
    "glm_moe_dsa": "glm",
    "gpt_oss": "harmony",
    "kimi_linear": "kimi",
    "lfm2": "lfm2",
    "llama": "llama3",
    "mistral": "mistral",
    "mixtral": "mistral",
    "nemotron_h": "qwen3_coder",
    "qwen3_5_moe_text": "qwen3_coder",
    "qwen3_5_text": "qwen3_coder",
}
"""By `model_type`; the others speak Hermes' form."""
THINKING = frozenset(
    {
        *("deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe_lite", "glm_moe_dsa"),
        *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "smollm3"),
    }
)
"""Families that think aloud, whatever their template says."""
PARSERS = tuple(sorted(FORMATS))
_SPOKEN: dict[str, SpokenForm] = {"hermes": HERMES, "pythonic": PYTHONIC}
"""Formats in which tools are described where the template knows none."""


class ChatFormats:
    """The formats of one model.

    tool_parser, reasoning_parser  names of the settings; None to choose them
    remark                         what an operator should know of the choice, else empty
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        model_type: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        chat = None if tokenizer is None else tokenizer.chat
        tool_chat = chat if tokenizer is None else tokenizer.tool_chat or chat
        self._tokenizer = tokenizer
        self._plain_template = None if chat is None else ToolTemplate(chat)
        self._template = None if tool_chat is None else ToolTemplate(tool_chat)
        source = "" if tool_chat is None else tool_chat.source
        knows_tools = self._template is not None and self._template.renders_tools
        self._describes = self._template is not None and not knows_tools
        self.tool_parser = tool_parser or _tool_parser(source, model_type, knows_tools=knows_tools)
        plain = "" if chat is None else chat.source
        self.reasoning = reasoning_parser or _reasoning_parser(plain + source, model_type)
        if reasoning_parser is None and tool_parser not in (None, HARMONY):
            self.reasoning = self.reasoning if self.reasoning != HARMONY else NO_REASONING
        self._format = FORMATS[self.tool_parser]
        form = _SPOKEN.get(self.tool_parser)
        self._describes &= form is not None
        self._form = form or HERMES
        self._pair = reasoning.PAIRS["[THINK]" in plain + source]

    @property
    def remark(self) -> str:
        if self._template is None or self._template.renders_tools:
            return ""
        if self._describes:
            return f"the chat template knows no tools: they are described in {self._form.name}"
        return (
            f"the chat template knows no tools: --tool-parser {self.tool_parser} reads calls, and "
            "requests must describe the tools themselves"
        )

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation, by the template for tools where it has any."""
        template = self._template if conversation.tools else self._plain_template
        if template is None:
            assert self._tokenizer is not None, "a conversation is rendered by a tokenizer"
            return self._tokenizer.render(conversation)
        return template.render(conversation, self._form, describe=self._describes)

    def _speaks_harmony(self) -> bool:
        return self.reasoning == HARMONY or self.tool_parser == "harmony"

    def special_ids(self, request: ToolRequest) -> dict[str, int]:
        """The ids of markers that are special tokens; an output's text must have them."""
        texts: Iterable[str] = self._format.special if request.callable else ()
        if self._speaks_harmony():
            texts = harmony.SPECIAL
        elif self.reasoning == THINK:
            texts = (*texts, *reasoning.MARKERS)
        if self._tokenizer is None:
            return {}
        ids = {text: self._tokenizer.special_id(text) for text in texts}
        return {text: token for text, token in ids.items() if token is not None}

    def parser_factory(
        self, request: ToolRequest, prompt: str, *, formed: bool = False
    ) -> Callable[[], OutputParser]:
        """Makes the parser of one output that follows a prompt.

        formed  a grammar holds the answer's text, so that markers in it are a part of it
        """
        offered = OfferedTools.of(request.callable, self._format.new_id)
        closing = reasoning.opened_by(prompt)

        def answer() -> OutputParser:
            if self._speaks_harmony():
                channels: OutputParser = _HARMONY[formed](offered)
                none = self.reasoning == NO_REASONING
                return reasoning.ReasoningAsText(channels) if none else channels
            calls: OutputParser = PlainText()
            if request.callable:
                calls = self._call_format(formed=formed).parser(offered)
                calls = CallsOrAnswer(calls) if formed else calls
            return reasoning.ThinkParser(calls, closing) if self.reasoning == THINK else calls

        def new_parser() -> OutputParser:
            return answer() if request.several else FirstCallOnly(answer())

        return new_parser

    def _call_format(self, *, formed: bool) -> ToolFormat:
        return (self._format.marked if formed else None) or self._format

    # -- grammar ----------------------------------------------------------------------------

    def grammar(
        self,
        request: ToolRequest,
        prompt: str,
        content: Grammar | None = None,
        satisfiable: Callable[[str], bool] = always,
    ) -> Grammar | None:
        """The grammar of an output: of its calls, of its text, or None where it is free.

        content      what the text must be, where the request says so
        satisfiable  whether some text matches a rule (`LarkRules`)
        """
        if not (request.required or request.guarded or content is not None):
            return None
        frames = self._speaks_harmony() or self.reasoning == THINK
        if not request.callable and not frames:
            return content
        rules = LarkRules(self.special_ids(request), satisfiable)
        if self._speaks_harmony():
            tools = request.callable
            text = None if content is None else rules.content(content)
            answer = None if request.required else harmony.answer_grammar(rules, text)
            return Grammar("lark", rules.text(harmony.channels_grammar(tools, rules, answer)))
        form = self._call_format(formed=content is not None)
        ways = [] if request.required else self._answers(form, request, rules, content)
        if request.callable and (request.required or content is not None):
            ways.append(f"{rules.marker(form.trigger)} {_calls(form, request, rules)}")
        return Grammar("lark", rules.text(f"{self._thought(rules, prompt)} ({any_of(ways)})"))

    def _answers(
        self, form: ToolFormat, request: ToolRequest, rules: LarkRules, content: Grammar | None
    ) -> list[str]:
        """An answer that is no call, and without a form of its own one that ends in calls. Its text
        has nothing in it that the parser takes for the begin of a call."""
        if not request.callable:
            return [rules.content(content)] if content is not None else []
        markers, opening = form.parser.MARKERS, self._opening(form)
        if content is not None:
            return [rules.content(content, markers, opening)]
        free = rules.free_text(markers, opening)
        if not form.trigger:
            return [free, _calls(form, request, rules)]
        other = [] if form.other is None else [form.other]
        begun = {form.trigger, *(marker for marker, _ in other)}
        besides = [marker for marker in markers if marker not in begun]
        return [
            free,
            *(
                f"{rules.text_until(marker, besides, opening)} "
                f"{grammar(request.callable, rules, parallel=request.several)}"
                for marker, grammar in [(form.trigger, form.grammar), *other]
            ),
        ]

    def _opening(self, form: ToolFormat) -> str:
        """How no text may begin: as calls do, or as reasoning does."""
        thoughts = reasoning.PAIRS if self.reasoning == THINK else ()
        openings = [literal(opening) for opening, _ in thoughts]
        return "|".join([*openings, *([form.opening] if form.opening else [])])

    def _thought(self, rules: LarkRules, prompt: str) -> str:
        """The reasoning before the answer, which the prompt may have opened."""
        if self.reasoning != THINK:
            return ""
        space = r"/[ \n]{0,3}/"
        if (closing := reasoning.opened_by(prompt)) is not None:
            return f"{rules.text_until(closing)} {space}"
        opening, closing = self._pair
        return f"({rules.marker(opening)} {rules.text_until(closing)} {space})?"


def _calls(form: ToolFormat, request: ToolRequest, rules: LarkRules) -> str:
    return form.grammar(request.callable, rules, parallel=request.several)


def _tool_parser(source: str, model_type: str, *, knows_tools: bool) -> str:
    if source and not knows_tools:
        return "pythonic" if FAMILIES.get(model_type) == "pythonic" else "hermes"
    for name, form in FORMATS.items():
        if source and all(text in source for text in form.evidence):
            return name
    return FAMILIES.get(model_type, "hermes")


def _reasoning_parser(source: str, model_type: str) -> str:
    if model_type == "gpt_oss" or harmony.CHANNEL in source:
        return HARMONY
    thinks = model_type in THINKING or any(opening in source for opening, _ in reasoning.PAIRS)
    return THINK if thinks else NO_REASONING
