"""A chat template: from a conversation to the text that the model was trained on.

Templates are Jinja programs that come with a checkpoint, with the conventions of `transformers`:
they see `messages`, `tools`, `add_generation_prompt` and the special tokens, may call
`raise_exception` and `strftime_now`, and may mark what the assistant says with `generation`, which
means nothing here. They run in a sandbox: a checkpoint is data and may not become code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from kvtide.models.model_errors import CheckpointError, TemplateError

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is asked to write.

    add_generation_prompt  end where the assistant begins to speak.
    variables              further names that this template knows.
    """

    messages: Sequence[Message]
    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, object]] | None = None
    variables: Mapping[str, object] = field(default_factory=dict)


class ChatTemplate:
    """A template, ready to render. `tokens` are the special tokens that it may write."""

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._tokens = dict(tokens)
        try:
            self._template = _environment(now).from_string(source)
        except JinjaError as flaw:
            raise CheckpointError(
                f"the chat template does not parse ({flaw}); use the one that the model came with"
            ) from None

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation."""
        seen = {
            **self._tokens,
            **conversation.variables,
            "messages": conversation.messages,
            "tools": conversation.tools,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            # A copy made of JSON's types: methods of anything else would be open to the template.
            return self._template.render(json.loads(json.dumps(seen)))
        except TemplateError:
            raise
        # A template may do anything with what a request holds: index it, add to it, call it.
        except (JinjaError, TypeError, ValueError, LookupError, AttributeError) as flaw:
            raise TemplateError(
                f"the chat template does not take this conversation ({flaw}); send messages with "
                "a role and a content, as the model's card shows them"
            ) from None


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: now().strftime(form),
        "namespace": _Namespace,
        "dict": _new_dict,
    }
    return environment


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}`: its body, and nothing else."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(f"the chat template refuses this conversation: {reason}")


def _json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape for HTML; models were trained on JSON as it is."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _new_dict(*items: Any, **named: object) -> dict[str, object]:
    return dict(*items, **named)


class _Namespace(Namespace):
    """A template's own variables; names that Python gives a meaning to are not among them."""

    def __init__(self, *items: Any, **named: object) -> None:
        super().__init__()
        for name, value in _new_dict(*items, **named).items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace takes no name like {name}")
        super().__setitem__(name, value)
