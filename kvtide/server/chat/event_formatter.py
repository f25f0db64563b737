"""A response as typed events: the shape of APIs whose streams name what begins and ends.

A writer turns output events into the API's own and keeps what it has written: the answer in one
piece is what its events add up to. `EventFormatter` is the `Formatter` of one choice around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtide.engine import Finish
from kvtide.server.request_parsing import ParsedRequest
from kvtide.server.response_formatting import Answer, Delta, Json, server_sent
from kvtide.server.service import ResponseStream
from kvtide.server.tools.output_events import OutputEvent
from kvtide.spec import ModelMemory

_COUNTS = frozenset(
    {
        *("prompt_tokens", "prompt_tokens_details"),
        *("completion_tokens", "completion_tokens_details"),
        "total_tokens",
    }
)
"""What OpenAI's usage counts; all else in it are details."""
GRAMMAR_ERROR = (
    "the answer exceeded a limit of its grammar; simplify its schema or regular expression"
)
"""Of an output that ended with `Finish.ERROR`."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a prompt and its output.

    cached     of the prompt: read from the cache
    written    of the prompt: computed, and kept in the cache as whole pages
    reasoning  of the output
    drafts     accepted and rejected ones, on a server that speculates
    details    of the cache, where the request asks for them
    """

    prompt: int
    cached: int
    written: int
    output: int
    reasoning: int
    drafts: Json
    details: Json

    @property
    def uncached(self) -> int:
        """Prompt tokens that were computed and are not kept: those after the last whole page."""
        return self.prompt - self.cached - self.written


class Ending(NamedTuple):
    """Why an output ended; `stopped` is the stop string that ended it, if one did."""

    finish: Finish
    stopped: str | None
    counts: TokenCounts


class EventWriter(Protocol):
    """Writes one output as events, objects that have a `type`, and keeps what it wrote."""

    def opening(self) -> list[Json]:
        """Before the request is admitted."""

    def started(self, counts: TokenCounts) -> list[Json]:
        """The prompt is computed."""

    def chunk(self, event: OutputEvent) -> list[Json]:
        """A piece of the output."""

    def closing(self, ending: Ending) -> list[Json]:
        """The output is over."""

    def failed(self, status: int, message: str) -> Json:
        """The service ended before the output did."""

    def whole(self) -> Json:
        """The answer in one piece, after `closing`; raises an HTTP error for one that failed,
        where the API has no object for it."""


class EventFormatter:
    """The `Formatter` of a response with one choice."""

    def __init__(
        self, parsed: ParsedRequest, answer: Answer, writer: EventWriter, memory: ModelMemory
    ) -> None:
        (self._stream,) = answer.streams
        self._usage: Callable[[], Json] = answer.usage
        self._writer = writer
        self._memory = memory
        self._finish: Finish | None = None
        self._started = False
        self._reasoning = 0

    def prompt_delta(self, stream: ResponseStream) -> Delta:
        return Delta()

    def opening(self, number: int) -> bytes:
        return _encoded(self._writer.opening())

    def chunk(self, number: int, delta: Delta) -> bytes:
        return _encoded(self._written(delta))

    def closing(self) -> bytes:
        return _encoded(self._closed())

    def whole(self, deltas: Sequence[Delta]) -> Json:
        self._writer.opening()
        for delta in deltas:
            self._written(delta)
        self._closed()
        return self._writer.whole()

    def error(self, status: int, message: str) -> bytes:
        return _encoded([self._writer.failed(status, message)])

    def _written(self, delta: Delta) -> list[Json]:
        """The events of a piece of the output."""
        self._reasoning += delta.reasoning
        self._finish = delta.finish
        events = [] if self._started else self._writer.started(self._counts())
        self._started = True
        return events + [made for event in delta.events for made in self._writer.chunk(event)]

    def _closed(self) -> list[Json]:
        assert self._finish is not None, "a stream closes after its last update"
        text = self._stream.request.text
        stopped = None if text is None else text.stopped
        return self._writer.closing(Ending(self._finish, stopped, self._counts()))

    def _counts(self) -> TokenCounts:
        usage, params = self._usage(), self._stream.request.params
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        page = self._memory.page_tokens
        kept = 0 if params.alone else (prompt - self._memory.holdback) // page * page
        return TokenCounts(
            prompt=prompt,
            cached=cached,
            written=max(0, kept - cached),
            output=usage["completion_tokens"],
            reasoning=self._reasoning,
            drafts=usage.get("completion_tokens_details", {}),
            details={name: given for name, given in usage.items() if name not in _COUNTS},
        )


def _encoded(events: Sequence[Json]) -> bytes:
    return b"".join(server_sent(event, event["type"]) for event in events)
