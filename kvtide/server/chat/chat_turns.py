"""Messages of a chat body, built from conversations in another API's shape.

Templates of many models want one system message at the front, and user and assistant in turn. So
neighbours of one role become one message, and what the system says later becomes part of the user's
turn. Both look at neighbours only: a conversation that grows keeps the messages it had, and its
prefix in the cache.
"""

from __future__ import annotations

import re
from typing import Any

from kvtide.engine import RequestError
from kvtide.server.handoff.conventions import BOOTSTRAP, KV_TRANSFER

Json = dict[str, Any]

PARAGRAPH = "\n\n"
"""Between texts that a client sends as separate blocks or messages."""


class ChatTurns:
    """`messages` is what a chat body takes."""

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def system(self, text: str) -> None:
        if all(message["role"] == "system" for message in self.messages):
            self._speak("system", text)
        else:
            self.user(f"<system-reminder>\n{text}\n</system-reminder>")

    def user(self, text: str) -> None:
        self._speak("user", text)

    def assistant(self, text: str) -> None:
        """Generated text, byte for byte: another separator would change the tokens."""
        message = self._answer()
        message["content"] = (message["content"] or "") + text

    def reasoning(self, text: str) -> None:
        message = self._answer()
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._answer().setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _speak(self, role: str, text: str) -> None:
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += PARAGRAPH + text
        else:
            self.messages.append({"role": role, "content": text})

    def _answer(self) -> Json:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]


def with_template_variables(chat: Json, given: object, **variables: object) -> None:
    """Add variables of the chat template to a chat body; those that the client names win."""
    known = {name: value for name, value in variables.items() if value is not None}
    if given is not None and not isinstance(given, dict):
        raise RequestError(
            "chat_template_kwargs is not an object; send one",
            "invalid_type",
            "chat_template_kwargs",
        )
    if merged := {**known, **(given or {})}:
        chat["chat_template_kwargs"] = merged


OWN_FIELDS = (
    *BOOTSTRAP,
    KV_TRANSFER,
    "cache_salt",
    "choice",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "presence_penalty",
    "priority",
    "recompute",
    "regex",
    "repetition_penalty",
    "return_cached_tokens_details",
    "seed",
    "session_id",
    "session_ttl_seconds",
    "speculate",
    "stop_token_ids",
    "stream",
    "temperature",
    "top_k",
    "top_p",
)
"""Fields that mean the same in every API here, and go into the chat body as they are."""


_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def common_fields(body: Json, conversation: object = None) -> Json:
    """`conversation`: what a client names it by, elsewhere in the body. It becomes `session_id` if
    the body has none and it cannot be guessed: a session tells what changed in its prompts."""
    chat = {name: body[name] for name in OWN_FIELDS if body.get(name) is not None}
    if isinstance(conversation, str) and _UUID.fullmatch(conversation):
        chat.setdefault("session_id", conversation)
    return chat
