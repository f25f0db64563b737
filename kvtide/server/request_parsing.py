"""Request parsing: a JSON body → checked requests for the engine, one per choice.

A prompt is tokenized, packed and checked once, off the engine's thread; its `n` choices share the
packed tokens. The bodies are those of OpenAI's API, with some fields of our own: `top_k`, `min_p`,
`repetition_penalty`, `stop_token_ids`, `ignore_eos`, `cache_salt`, `session_id`,
`session_ttl_seconds`, `priority`, `recompute`, `speculate`, `return_token_ids`,
`return_cached_tokens_details`, `regex`, `choice` (`output_format`); and those of routers
(`handoff.conventions`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from kvtide.cache import Namespace
from kvtide.engine import CheckedRequest, Engine, RequestError, RequestParams, SamplingParams
from kvtide.engine.grammar.grammar import Grammar
from kvtide.models.chat import Conversation
from kvtide.models.tokenizer import Tokenizer
from kvtide.server.chat.chat_messages import read_messages
from kvtide.server.handoff.handoff_fields import HandoffFields, HandoffSide
from kvtide.server.output_format import compiled_format, logit_bias
from kvtide.server.refused_fields import CHAT, COMPLETION, refuse
from kvtide.server.sessions.session_settings import SessionSettings, checked_id
from kvtide.server.sessions.stable_prefix import StableRules, stabilized
from kvtide.server.tools.grammars.enforcement import AnswerGrammars
from kvtide.server.tools.output_events import OutputParser, PlainText
from kvtide.server.tools.parser_registry import ChatFormats
from kvtide.server.tools.tool_spec import NO_TOOLS, ToolRequest, read_tools

DEFAULT_SESSIONS = SessionSettings()
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_PRIORITY = 1_000_000
MAX_CHAT_NAME = 64
"""Characters of a tool's name in a chat completion, as OpenAI documents them."""
DEFAULT_CHAT_TOKENS = 1024
"""`max_tokens` of a chat that names none. Slots for all of it are reserved at admission."""
DEFAULT_COMPLETION_TOKENS = 16
TEMPLATE_FIELDS = ("reasoning_effort", "verbosity")
"""Of a chat: variables of its template."""


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "model_not_found")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A body, parsed: the engine's requests, and the form of the response.

    choices     one request per choice, the `n` choices of one prompt next to each other
    logprobs    how many alternatives a token's logprobs list; None for no logprobs
    handoffs    of each choice, where a router has named them
    tools       what the request says of tools
    new_parser  makes the parser of one choice's output
    """

    choices: tuple[CheckedRequest, ...]
    n: int
    chat: bool
    echo: bool = False
    logprobs: int | None = None
    stream: bool = False
    stream_usage: bool = False
    token_ids: bool = False
    cache_details: bool = False
    handoffs: tuple[HandoffFields | None, ...] = ()
    tools: ToolRequest = NO_TOOLS
    new_parser: Callable[[], OutputParser] = PlainText


class RequestParser:
    """Parses bodies for one engine.

    seeded    requests without a seed share one
    handoffs  reads what routers say of handoffs, for so many prompts with so many choices each
    formats   how the model writes calls and reasoning; by its chat template if not given
    sessions  the defaults of sessions, and the rules for the front of conversations
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        seeded: bool,
        handoffs: ReadHandoffs | None = None,
        formats: ChatFormats | None = None,
        sessions: SessionSettings = DEFAULT_SESSIONS,
    ) -> None:
        self._sessions = sessions
        self._engine = engine
        self._handoffs = handoffs
        self._tokenizer = engine.tokenizer
        self._formats = formats or ChatFormats(engine.tokenizer, "")
        self._name = name
        self._seeded = seeded

    def completion(self, body: RequestFields) -> ParsedRequest:
        """The body of `/v1/completions`."""
        self.check_model(body)
        refuse(body.values, COMPLETION)
        prompts = _prompts(body, self._tokenizer)
        logprobs = body.integer("logprobs", None, 0, MAX_LOGPROBS)
        echo = body.flag("echo")
        max_tokens = body.integer("max_tokens", DEFAULT_COMPLETION_TOKENS, 0)
        common = self._common(body, max_tokens, logprobs)
        scored = replace(common, score=logprobs) if echo else common
        requests = [replace(scored, tokens=tuple(prompt)) for prompt in prompts]
        return self._parsed(body, requests, chat=False, echo=echo, logprobs=logprobs)

    def chat_completion(self, body: RequestFields) -> ParsedRequest:
        """The body of `/v1/chat/completions`: a chat with OpenAI's limit of names."""
        parsed = self.chat(body)
        for tool in parsed.tools.tools:
            if len(tool.name) > MAX_CHAT_NAME:
                raise RequestError(
                    f"the tool name {tool.name!r:.80} has {len(tool.name)} characters, and a chat "
                    f"takes {MAX_CHAT_NAME}; rename it, or use /v1/responses or /v1/messages",
                    param="tools",
                )
        return parsed

    def chat(self, body: RequestFields, default_tokens: int = DEFAULT_CHAT_TOKENS) -> ParsedRequest:
        """A chat of any API; without a limit it gets so many tokens."""
        tools, text = self._rendered(body)
        prompt = self._encoded(text)
        alternatives = body.integer("top_logprobs", 0, 0, MAX_LOGPROBS)
        logprobs = alternatives if body.flag("logprobs") else None
        max_tokens = body.integer("max_completion_tokens", None, 0)
        if max_tokens is None:
            max_tokens = body.integer("max_tokens", None, 0)
        if max_tokens is None:
            available = self._engine.max_sequence_tokens - len(prompt)
            max_tokens = max(1, min(default_tokens, available))
        common = self._common(body, max_tokens, logprobs)
        params = replace(
            common,
            tokens=tuple(prompt),
            grammar=self._grammar(tools, text, common.grammar),
            keep_special=frozenset(self._formats.special_ids(tools).values()),
        )
        form = {"chat": True, "logprobs": logprobs, "tools": tools}
        formed = common.grammar is not None
        new_parser = self._formats.parser_factory(tools, text, formed=formed)
        return self._parsed(body, [params], **form, new_parser=new_parser)

    def chat_tokens(self, body: RequestFields) -> list[int]:
        """The prompt of a chat's body, however long it is."""
        _, text = self._rendered(body)
        return self._encoded(text)

    def _rendered(self, body: RequestFields) -> tuple[ToolRequest, str]:
        """The tools of a chat's body, and its prompt as text."""
        self.check_model(body)
        refuse(body.values, CHAT)
        if self._tokenizer is None:
            raise RequestError(
                "this model came without a tokenizer; send token ids to /v1/completions"
            )
        tools = read_tools(
            body.get("tools"),
            body.get("tool_choice"),
            parallel=body.flag("parallel_tool_calls", default=True),
        )
        conversation = _conversation(body, tools, self._sessions.stable)
        return tools, self._formats.render(conversation)

    def _grammar(self, tools: ToolRequest, prompt: str, content: Grammar | None) -> Grammar | None:
        """The grammar of a chat's answer, whose text must be `content`."""
        grammars = AnswerGrammars(self._formats, self._engine.grammars)
        return grammars.compiled(tools, prompt, content)

    def _encoded(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, add_special=False)

    def check_model(self, body: RequestFields) -> None:
        """A body may name the served model only."""
        model = body.text("model", self._name)
        if model != self._name:
            raise ModelNotFoundError(f"there is no model '{model}' here; use '{self._name}'")

    def _common(
        self, body: RequestFields, max_tokens: int | None, logprobs: int | None
    ) -> RequestParams:
        """All but the tokens."""
        assert max_tokens is not None
        stop_ids = frozenset[int]()
        if self._tokenizer is not None and not body.flag("ignore_eos"):
            stop_ids = self._tokenizer.special.stop_ids
        return RequestParams(
            tokens=(),
            max_tokens=max_tokens,
            sampling=self._sampling(body, logprobs or 0),
            stop_ids=stop_ids | frozenset(body.integers("stop_token_ids")),
            stop=body.texts("stop", MAX_STOPS),
            recompute=body.flag("recompute"),
            namespace=Namespace(cache_salt=body.text("cache_salt", "")),
            priority=body.integer("priority", 0, -MAX_PRIORITY, MAX_PRIORITY) or 0,
            session=checked_id(body.text("session_id", "")),
            session_ttl_s=self._sessions.ttl(
                body.number("session_ttl_seconds", self._sessions.ttl_s)
            ),
            speculate=body.flag("speculate", default=True),
            grammar=compiled_format(body.values, self._engine.grammars),
        )

    def _sampling(self, body: RequestFields, logprobs: int) -> SamplingParams:
        default_seed = 0 if self._seeded else secrets.randbits(62)
        seed = body.integer("seed", default_seed, -(2**63), 2**63)
        return SamplingParams(
            temperature=body.number("temperature", 1.0),
            top_p=body.number("top_p", 1.0),
            top_k=max(0, body.integer("top_k", 0, -1) or 0),
            min_p=body.number("min_p", 0.0),
            seed=(seed or 0) % 2**62,
            presence_penalty=body.number("presence_penalty", 0.0),
            frequency_penalty=body.number("frequency_penalty", 0.0),
            repetition_penalty=body.number("repetition_penalty", 1.0),
            logprobs=logprobs,
            logit_bias=logit_bias(body.values),
        )

    def _parsed(
        self, body: RequestFields, prompts: Sequence[RequestParams], **form: Any
    ) -> ParsedRequest:
        """Check every prompt once, and give each of its choices a seed of its own."""
        checked = [self._engine.check(params) for params in prompts]
        n = body.integer("n", 1, 1, MAX_CHOICES) or 1
        if len(prompts) * n > MAX_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts with {n} choices each; ask for at most {MAX_CHOICES} "
                "answers at once",
                param="n",
            )
        options = body.object("stream_options")
        choices = [_choice(request, number) for request in checked for number in range(n)]
        handoffs = () if self._handoffs is None else self._handoffs(body, len(prompts), n)
        return ParsedRequest(
            choices=_handed(choices, handoffs) if any(handoffs) else tuple(choices),
            n=n,
            stream=body.flag("stream"),
            stream_usage=options.flag("include_usage"),
            token_ids=body.flag("return_token_ids"),
            cache_details=body.flag("return_cached_tokens_details"),
            handoffs=handoffs,
            **form,
        )


def _choice(request: CheckedRequest, number: int) -> CheckedRequest:
    sampling = request.params.sampling
    seeded = replace(sampling, seed=sampling.seed + number)
    return replace(request, params=replace(request.params, sampling=seeded))


def _handed(
    choices: Sequence[CheckedRequest], handoffs: Sequence[HandoffFields | None]
) -> tuple[CheckedRequest, ...]:
    """The choices with their handoffs; a prefill server computes one token of each."""
    prefills = any(each is not None and each.side is HandoffSide.PREFILL for each in handoffs)
    handed = []
    for request, handoff in zip(choices, handoffs, strict=True):
        params = request.params if handoff is None else handoff.apply(request.params)
        if prefills:
            params = replace(params, max_tokens=min(1, params.max_tokens))
        handed.append(replace(request, params=params))
    return tuple(handed)


# -- prompts ----------------------------------------------------------------------------------


def _prompts(body: RequestFields, tokenizer: Tokenizer | None) -> list[list[int]]:
    """A text, token ids, or a list of either."""
    given, add_special = body.get("prompt"), body.flag("add_special_tokens", default=True)
    if isinstance(given, str) or (isinstance(given, list) and type(next(iter(given), None)) is int):
        given = [given]
    if not isinstance(given, list) or not given:
        raise RequestError(
            "prompt is missing; send a text, a list of token ids, or several",
            "missing_required_parameter" if given is None else "invalid_type",
            "prompt",
        )
    return [_tokens(prompt, tokenizer, add_special=add_special) for prompt in given]


def _are_ids(given: Sequence[object]) -> bool:
    """Whether all items are numbers of JSON; `True` is none of them."""
    return {*map(type, given)} == {int}


def _tokens(prompt: object, tokenizer: Tokenizer | None, *, add_special: bool) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                "this model came without a tokenizer; send token ids as the prompt", param="prompt"
            )
        return tokenizer.encode(prompt, add_special=add_special)
    if isinstance(prompt, list) and _are_ids(prompt):
        return prompt
    raise RequestError(
        "a prompt is neither a text nor a list of token ids; send one of them",
        "invalid_type",
        "prompt",
    )


def _conversation(body: RequestFields, tools: ToolRequest, rules: StableRules) -> Conversation:
    named = {name: body.text(name, "") for name in TEMPLATE_FIELDS}
    variables: dict[str, object] = {name: value for name, value in named.items() if value}
    variables |= body.object("chat_template_kwargs").values
    messages = body.get("messages")
    if rules and isinstance(messages, list) and all(isinstance(one, dict) for one in messages):
        messages = stabilized(messages, rules)
    return Conversation(
        read_messages(messages),
        tools=[tool.template_form() for tool in tools.tools if not tool.deferred] or None,
        variables=variables,
    )


# -- fields -----------------------------------------------------------------------------------


def read_json(raw: bytes) -> RequestFields:
    """A body. NaN, Infinity and lone surrogates, which Python's parser takes, are refused."""
    try:
        values = json.loads(raw.decode(), parse_constant=_no_number)
        if b"\\u" in raw:
            json.dumps(values, ensure_ascii=False).encode()
    except RecursionError:
        raise RequestError("the body is nested too deeply; send less of it", None) from None
    except UnicodeError:
        raise RequestError("the body has halves of characters; send UTF-8", None) from None
    except ValueError as flaw:
        raise RequestError(f"the body is not JSON ({flaw}); send a JSON object", None) from None
    return RequestFields(values)


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number in JSON")


class RequestFields:
    """A JSON object whose fields are read with their types. `null` is the same as missing."""

    def __init__(self, values: object, name: str = "the body") -> None:
        if not isinstance(values, dict):
            raise RequestError(f"{name} is not a JSON object; send one", "invalid_type")
        self.values: Mapping[str, object] = values

    def get(self, name: str) -> object:
        return self.values.get(name)

    def object(self, name: str) -> RequestFields:
        value = self.get(name)
        return RequestFields({} if value is None else value, name)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise _wrong_type(name, value, "true or false")
        return value

    def integer(
        self, name: str, default: int | None, minimum: int, maximum: int | None = None
    ) -> int | None:
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not int:
            code = "invalid_type"
        elif value < minimum:
            code = "integer_below_min_value"
        elif maximum is not None and value > maximum:
            code = "integer_above_max_value"
        else:
            return value
        span = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise RequestError(f"{name} is {_shown(value)}; send a whole number {span}", code, name)

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise _wrong_type(name, value, "a number")
        assert isinstance(value, int | float)
        try:
            return float(value)
        except OverflowError:
            problem = f"{name} is {_shown(value)}; send a smaller number"
            raise RequestError(problem, "decimal_above_max_value", name) from None

    def text(self, name: str, default: str) -> str:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise _wrong_type(name, value, "a text")
        return value

    def texts(self, name: str, maximum: int) -> tuple[str, ...]:
        """A text or several."""
        value = self.get(name)
        given = [] if value is None else value if isinstance(value, list) else [value]
        if len(given) > maximum or not all(isinstance(item, str) and item for item in given):
            raise RequestError(
                f"{name} is not a text or a list of up to {maximum} that are not empty", param=name
            )
        return tuple(given)

    def integers(self, name: str) -> list[int]:
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise _wrong_type(name, value, "a list of whole numbers")
        return value


ReadHandoffs = Callable[[RequestFields, int, int], tuple[HandoffFields | None, ...]]


def _wrong_type(name: str, value: object, expected: str) -> RequestError:
    return RequestError(f"{name} is {_shown(value)}; send {expected}", "invalid_type", name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
