"""The first token goes to the client when the peer has sampled it, before all pages have landed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvtide.engine import Request, Update
from kvtide.engine.handoff.handoff_state import HandoffState
from kvtide.engine.handoff.messages import Complete, Failed, First, Written, from_json
from kvtide.engine.request import Finish, RequestState
from tests.engine.handoff.handing_over import Pair, expected, family_pair, tokens_of
from tests.engine.restoring import PAGE

FAMILIES = ["llama", "deepseek_v4", "falcon_h1"]
LENGTHS = [4 * PAGE + 1, 4 * PAGE]
"""The tail is one token, or a whole page."""


@pytest.fixture(scope="module", params=FAMILIES)
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[str, Pair]]:
    pair = family_pair(request.param)
    yield request.param, pair
    pair.close()


@pytest.fixture
def family(shared: tuple[str, Pair]) -> str:
    return shared[0]


@pytest.fixture
def pair(shared: tuple[str, Pair]) -> Iterator[Pair]:
    yield from shared[1].lent()


def updates_of(pair: Pair, request: Request) -> list[Update]:
    """The updates that the decode side gives from here on are noted there."""
    noted: list[Update] = []
    step = type(pair.decode).step

    def stepped() -> list[Update]:
        updates = step(pair.decode)
        noted.extend(each for each in updates if each.request is request)
        return updates

    pair.decode.step = stepped  # type: ignore[method-assign]
    return noted


@pytest.fixture(autouse=True)
def _plain_steps(pair: Pair) -> Iterator[None]:
    yield
    pair.decode.__dict__.pop("step", None)


def is_first(message: str) -> bool:
    return isinstance(from_json(json.loads(message)), First)


def sampled(pair: Pair, length: int) -> tuple[Request, list[Update]]:
    """A request whose first token has come, of which nothing else is known here."""
    request = pair.submit(pair.fresh(length))
    noted = updates_of(pair, request)
    pair.passes = lambda message: not isinstance(message, (Written, First, Complete))
    pair.run(lambda: any(is_first(each) for each in pair.to_decode))
    first = next(each for each in pair.to_decode if is_first(each))
    pair.to_decode.remove(first)
    pair.at_decode(from_json(json.loads(first)))
    return request, noted


def begun(pair: Pair, length: int) -> tuple[Request, list[Update]]:
    """The client has the token too."""
    request, noted = sampled(pair, length)
    pair.run(lambda: bool(noted))
    return request, noted


@pytest.mark.parametrize("length", LENGTHS)
def test_it_comes_before_the_pages(pair: Pair, family: str, length: int) -> None:
    request, noted = begun(pair, length)
    handoff = request.handoff
    assert handoff is not None and handoff.waits and request.state is RequestState.WAITING
    assert [each.sampled for each in noted] == [request.output[0]] and noted[0].finish is None
    pair.passes = lambda message: True
    pair.finish(request)
    assert handoff.state is HandoffState.DECODING and handoff.whole
    assert tokens_of(request) == expected(family, request.params.tokens)
    assert [each.sampled for each in noted] == request.output, "every token came once"


@pytest.mark.parametrize("length", LENGTHS)
def test_a_peer_that_fails_behind_it_costs_no_token(pair: Pair, family: str, length: int) -> None:
    request, noted = begun(pair, length)
    handoff = request.handoff
    assert handoff is not None and handoff.receipt is not None
    pair.at_decode(Failed(handoff.source.room, handoff.receipt.epoch, "lost", silent=False))
    pair.passes = lambda message: True
    pair.finish(request)
    assert handoff.state is HandoffState.FAILED
    assert tokens_of(request) == expected(family, request.params.tokens)
    assert [each.sampled for each in noted] == request.output, "every token came once"


def test_a_client_that_leaves_behind_it_leaves_nothing(pair: Pair) -> None:
    request, noted = begun(pair, LENGTHS[0])
    pair.decode.abort(request)
    pair.passes = lambda message: True
    pair.settle()
    assert request.finish is Finish.ABORT and len(noted) == 1


def test_one_that_a_client_does_not_wait_for_is_not_given(pair: Pair) -> None:
    request, noted = sampled(pair, LENGTHS[0])
    pair.decode.abort(request)
    pair.passes = lambda message: True
    pair.settle()
    assert not noted


@pytest.mark.parametrize("way", ["complete", "failed"])
@pytest.mark.parametrize("count", [0, 1])
def test_a_request_without_a_second_token_ends_with_its_handoff(
    pair: Pair, family: str, count: int, way: str
) -> None:
    prompt = pair.fresh(LENGTHS[0])
    request = pair.submit(prompt, count)
    noted = updates_of(pair, request)
    pair.passes = lambda message: not isinstance(message, Complete)
    pair.run(lambda: bool(pair.sent(First)))
    handoff = request.handoff
    assert handoff is not None and handoff.receipt is not None
    receipt = handoff.receipt
    pair.run(lambda: receipt.complete)
    assert request.finish is None and [each.finish for each in noted] == [None] * count
    if way == "failed":
        pair.at_decode(Failed(handoff.source.room, receipt.epoch, "lost", silent=True))
    pair.passes = lambda message: True
    pair.finish(request)
    ended = HandoffState.DECODING if way == "complete" else HandoffState.FAILED
    assert (request.finish, handoff.state) == (Finish.LENGTH, ended)
    assert [each.finish for each in noted] == [None] * count + [Finish.LENGTH]
    assert tokens_of(request) == expected(family, prompt)[:count]
    assert request.admissions == 0, "nothing was loaded for it"
    pair.settle()
    found = pair.decode.cache.match(pair.decode.cache.prompt((*prompt, 1)))
    assert found.tokens == 4 * PAGE, "its pages serve later prompts"


def test_a_token_that_stops_the_answer_ends_it_with_the_handoff(pair: Pair, family: str) -> None:
    prompt = pair.fresh(LENGTHS[0])
    first = expected(family, prompt)[0].token
    request = pair.answer(prompt, 8, stop_ids=frozenset({first}))
    assert request.finish is Finish.STOP and [each.token for each in request.output] == [first]
