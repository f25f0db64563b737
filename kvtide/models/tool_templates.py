"""How a chat template takes tools, found out by rendering, and conversations made to fit it.

Templates differ: some want a call's arguments as an object and some as text, some take one call a
message, and some know no tools at all. Those get the tools described in the system message, and
calls and results as text (`spoken_tools`). Most do not know the role developer either.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtide.models.chat import ChatTemplate, Conversation, Message
from kvtide.models.developer_role import without_developer
from kvtide.models.model_errors import TemplateError
from kvtide.models.spoken_tools import HERMES, SpokenForm

_NAME, _KEY = "probe_function", "probe_key"
_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}
_ASKED: Message = {"role": "user", "content": "probe"}


class ToolTemplate:
    """renders_tools  the template writes tools into the prompt."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat
        self.renders_tools = self._renders_tools()
        self._wants_text = self._wants_arguments_as_text()
        self._one_call = self.renders_tools and self._refuses_two_calls()
        self._joins = self._render([_ASKED, _ASKED], tools=None) is None
        self._has_system = self._shows([{"role": "system", "content": _NAME}, _ASKED])
        # A template that writes any role would write one that the model has never seen.
        developed = self._shows([{"role": "developer", "content": _NAME}, _ASKED])
        self._has_developer = "developer" in chat.source and developed

    def render(
        self, conversation: Conversation, form: SpokenForm = HERMES, *, describe: bool = True
    ) -> str:
        """The text of a conversation, made to fit."""
        return self._chat.render(self.prepare(conversation, form, describe=describe))

    def prepare(
        self, conversation: Conversation, form: SpokenForm = HERMES, *, describe: bool = True
    ) -> Conversation:
        """The conversation as this template takes it.

        form      how tools are spoken of where the template knows none
        describe  then describe them to the model
        """
        messages = conversation.messages
        if not self._has_developer and any(m.get("role") == "developer" for m in messages):
            messages = without_developer(messages, has_system=self._has_system)
        if not any(m.get("tool_calls") or m.get("role") == "tool" for m in messages):
            fitting: Iterable[Message] = messages
        elif not self.renders_tools:
            fitting = _spoken(messages, form, joined=self._joins)
        else:
            alone = _one_by_one(messages) if self._one_call else messages
            fitting = alone if self._wants_text else map(_with_objects, alone)
        listed = list(fitting)
        if conversation.tools and not self.renders_tools:
            if describe:
                listed = self._described(listed, form.describe(conversation.tools))
            return replace(conversation, messages=listed, tools=None)
        return replace(conversation, messages=listed)

    def _described(self, messages: Sequence[Message], text: str) -> list[Message]:
        roles = ("system", "developer") if self._has_system else ("user",)
        for at, message in enumerate(messages):
            if message.get("role") in roles:
                whole = f"{message['content']}\n\n{text}"
                return [*messages[:at], {**message, "content": whole}, *messages[at + 1 :]]
        return [{"role": roles[0], "content": text}, *messages]

    # -- probes -----------------------------------------------------------------------------

    def _renders_tools(self) -> bool:
        plain = self._render([_ASKED], tools=None)
        tooled = self._render([_ASKED])
        return _NAME in tooled if tooled is not None else plain is None

    def _wants_arguments_as_text(self) -> bool:
        """Objects unless the template fails with them, or writes them as Python does."""
        shown = self._render(_called({_KEY: "probe"}))
        if shown is not None and _KEY in shown and f"'{_KEY}'" not in shown:
            return False
        text = self._render(_called(json.dumps({_KEY: "probe"})))
        return text is not None and _KEY in text

    def _refuses_two_calls(self) -> bool:
        arguments: object = {_KEY: "probe"}
        given = json.dumps(arguments) if self._wants_text else arguments
        once, twice = (self._render(_called(*[given] * count)) for count in (1, 2))
        return once is not None and twice is None

    def _shows(self, messages: Sequence[Message]) -> bool:
        return _NAME in (self._render(messages, tools=None) or "")

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = (_TOOL,)
    ) -> str | None:
        try:
            return self._chat.render(Conversation(messages, tools=tools))
        except TemplateError:
            return None


def _called(*arguments: object) -> list[Message]:
    """Calls, one for each of the arguments, and their results."""
    ids = [f"probe000{number}" for number in range(len(arguments))]
    calls = [
        {"id": id_, "type": "function", "function": {"name": _NAME, "arguments": given}}
        for id_, given in zip(ids, arguments, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": id_, "name": _NAME, "content": "probe"} for id_ in ids
    ]
    return [_ASKED, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


# -- messages ---------------------------------------------------------------------------------


def _calls(message: Message) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _with_objects(message: Message) -> Message:
    """Arguments as objects; those that are no JSON object stay text."""
    if not _calls(message):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _object(call["function"])}}
        for call in _calls(message)
    ]
    return {**message, "tool_calls": calls}


def _object(function: Mapping[str, Any]) -> object:
    try:
        value = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return function["arguments"]
    return value if isinstance(value, dict) else function["arguments"]


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """Each call in a message of its own, followed by its result."""
    moved = set[int]()
    for at, message in enumerate(messages):
        calls = _calls(message)
        if len(calls) < 2:
            if at not in moved:
                yield message
            continue
        for number, call in enumerate(calls):
            content = message.get("content") if number == 0 else None
            yield {**message, "content": content, "tool_calls": [call]}
            result = _result(messages, at, call)
            if result is not None and result not in moved:
                moved.add(result)
                yield messages[result]


def _result(messages: Sequence[Message], after: int, call: Mapping[str, Any]) -> int | None:
    """Where the result of a call is: among the tool messages that follow at once."""
    for at in range(after + 1, len(messages)):
        if messages[at].get("role") != "tool":
            return None
        if messages[at].get("tool_call_id") == call.get("id"):
            return at
    return None


def _spoken(messages: Sequence[Message], form: SpokenForm, *, joined: bool) -> Iterator[Message]:
    """Calls and results as text; neighbouring results are one message of the user, with what the
    user says next if messages of one role are `joined`."""
    results: list[str] = []
    for message in messages:
        if message.get("role") == "tool":
            results.append(form.result(str(message["content"])))
            continue
        if results and joined and message.get("role") == "user":
            message = {**message, "content": "\n".join([*results, str(message["content"])])}
        elif results:
            yield {"role": "user", "content": "\n".join(results)}
        results = []
        yield _spoken_calls(message, form) if _calls(message) else message
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _spoken_calls(message: Message, form: SpokenForm) -> Message:
    texts = [str(message["content"])] if message.get("content") else []
    texts.append(form.call([call["function"] for call in _calls(message)]))
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(texts)}
