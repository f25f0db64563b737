"""Messages of role developer, for chat templates that do not know the role.

Before the conversation begins they are the system's, or the user's where a template has no system.
Later they become part of the user's turn, since many templates want one system message at the
front, and user and assistant in turn. Both look at neighbours only: a conversation that grows keeps
the messages it had, and its prefix in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.models.chat import Message

_FRONT = ("system", "developer")


def without_developer(messages: Sequence[Message], *, has_system: bool) -> list[Message]:
    """The messages in other roles; what a developer says joins neighbours of the role it gets."""
    listed: list[Message] = []
    front, joins = True, False
    for message in messages:
        front &= message.get("role") in _FRONT
        ours = message.get("role") == "developer"
        if ours:
            message = _turned(message, front=front, has_system=has_system)
        last = listed[-1] if listed else {}
        joins = (ours or joins) and last.get("role") == message.get("role")
        if joins:
            listed[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            listed.append(message)
            joins = ours
    return listed


def _turned(message: Message, *, front: bool, has_system: bool) -> Message:
    role = "system" if front and has_system else "user"
    text = message["content"]
    content = text if front else f"<system-reminder>\n{text}\n</system-reminder>"
    return {**message, "role": role, "content": content}
