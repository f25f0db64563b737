"""What a step gives a request: tokens, their text, and whether one was its last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtide.engine.request import Finish, Request
from kvtide.engine.sampling.sampler import SampledToken


class Update(NamedTuple):
    """A request got a token and some text; `finish` says why that was its last, if it was."""

    request: Request
    sampled: SampledToken | None
    text: str
    finish: Finish | None


def append(request: Request, tokens: Sequence[SampledToken]) -> list[Update]:
    """Append the sampled tokens up to the request's last."""
    if not request.params.max_tokens:
        return [_closed(request, Finish.LENGTH)]
    updates: list[Update] = []
    for sampled in tokens:
        updates.append(_appended(request, sampled))
        if updates[-1].finish is not None:
            break
    return updates


def _appended(request: Request, sampled: SampledToken) -> Update:
    """One more token of output; `finish` says if it is the last."""
    stops, matcher = sampled.token in request.params.stop_ids, request.matcher
    if matcher is not None and (matcher.failed or not (stops or matcher.consume(sampled.token))):
        return _closed(request, Finish.ERROR)
    request.append(sampled)
    if stops:
        return _closed(request, Finish.STOP, sampled)
    text = request.text.feed(sampled.token) if request.text else ""
    if (request.text and request.text.stopped) or (matcher is not None and matcher.complete):
        return _closed(request, Finish.STOP, sampled, text)
    if len(request.output) == request.params.max_tokens:
        return _closed(request, Finish.LENGTH, sampled, text)
    return Update(request, sampled, text, None)


def _closed(
    request: Request, finish: Finish, sampled: SampledToken | None = None, text: str = ""
) -> Update:
    """The last update; text that might have been the start of a stop string follows."""
    rest = request.text.finish() if request.text else ""
    return Update(request, sampled, text + rest, finish)
