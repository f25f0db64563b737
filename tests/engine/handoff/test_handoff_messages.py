"""What two servers tell each other: as JSON, as garbage, twice, too early and too late."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.handoff.handoff_state import HandoffState
from kvtide.engine.handoff.messages import (
    Ask,
    Complete,
    Done,
    Failed,
    First,
    HandoffMessage,
    MessageError,
    PagePlaces,
    Reserve,
    Silent,
    StopWriting,
    Written,
    from_json,
    to_json,
)
from kvtide.engine.handoff.prefill_handoffs import MAX_EARLY
from kvtide.engine.handoff.reports import RankReport, RankReports
from kvtide.engine.handoff.request_fields import asked_params, for_prefill, request_fields
from kvtide.engine.request import Finish, RequestError, RequestParams
from kvtide.engine.sampling.sampling_params import SamplingParams
from kvtide.index import Namespace
from tests.engine.handoff.handing_over import Pair, expected, family_pair, tokens_of
from tests.engine.restoring import PAGE

FAMILY = "llama"
PLACES = PagePlaces("kv", 3, np.array([0, 5], np.int32), np.array([7, 2], np.int32))
MESSAGES: tuple[HandoffMessage, ...] = (
    Ask("room", {"tokens": "AQAAAA==", "sampling": {}}),
    Reserve("room", 7, "digest", 5, (PLACES,), 1),
    StopWriting("room", 7),
    Done("room", 7),
    Written("room", 7, (0, 3), {"draft": (3,)}),
    First("room", 7, 12, -0.5, ((12, -0.5), (4, -2.0)), {"host": 16}),
    Complete("room", 7, tail=True, captured=b"\0\1\2"),
    Failed("room", 7, "why", silent=False),
    Silent("room", 7),
)


@pytest.fixture(scope="module")
def shared() -> Iterator[Pair]:
    pair = family_pair(FAMILY, chunks=(2 * PAGE, 48))
    yield pair
    pair.close()


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    yield from shared.lent()


def plain(message: HandoffMessage) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(to_json(message)))
    return found


# -- as JSON -----------------------------------------------------------------------------------


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_messages_survive_json(message: HandoffMessage) -> None:
    back = from_json(plain(message))
    assert type(back) is type(message) and to_json(back) == to_json(message)
    if isinstance(back, Reserve):
        assert back.count == 2 and list(back.places[0].numbers) == [3, 4]
        assert back.places[0].slots.tolist() == [7, 2]
    else:
        assert back == message


ALSO: dict[str, tuple[Any, ...]] = {"epoch": (), "places": ({},), "numbers": ({},), "top": ({},)}
"""What else a field may be in JSON: without elements all are alike."""
WRONG: tuple[Any, ...] = (None, True, "x", 1.5, [], {}, [1], {"a": "b"}, [["x", 1]])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_fields_of_another_type_are_refused(message: HandoffMessage) -> None:
    values = plain(message)
    for name in values:
        with pytest.raises(MessageError):
            from_json({key: value for key, value in values.items() if key not in (name, "room")})
        for wrong in WRONG:
            if not any(type(wrong) is type(fits) for fits in (values[name], *ALSO.get(name, ()))):
                with pytest.raises(MessageError):
                    from_json({**values, name: wrong})
    with pytest.raises(MessageError):
        from_json({**values, "more": 1})


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"kind": "nothing"},
        {"kind": ["done"]},
        [],
        None,
        "done",
        {**plain(MESSAGES[1]), "places": [{**plain(MESSAGES[1])["places"][0], "pages": "!!"}]},
        {**plain(MESSAGES[1]), "places": [{**plain(MESSAGES[1])["places"][0], "slots": "AAAA"}]},
        {**plain(MESSAGES[1]), "places": [{**plain(MESSAGES[1])["places"][0], "slots": ""}]},
        {**plain(MESSAGES[4]), "absent": {"draft": "x"}},
        {**plain(MESSAGES[5]), "top": [[1, "x"]]},
        {**plain(MESSAGES[5]), "cached": {"host": "many"}},
    ],
)
def test_what_is_no_message_is_refused(values: Any) -> None:
    with pytest.raises(MessageError, match="no message of a handoff"):
        from_json(values)


def test_a_request_survives_json() -> None:
    sampling = SamplingParams(0.7, 0.9, 5, 0.1, 42, 0.5, 0.25, 1.5, 3, ((4, -1.5),))
    params = RequestParams(
        *((1, 2, 2**31 - 1), 9, sampling, frozenset({7, 2})),
        namespace=Namespace("a", "b"),
        priority=2,
        speculate=False,
        grammar=Grammar("regex", "[é\n]"),
    )
    back = asked_params("room", json.loads(json.dumps(request_fields(params))))
    assert back.tokens == params.tokens and back.sampling == sampling
    assert back.grammar == params.grammar and back.stop_ids == params.stop_ids
    assert back.namespace == params.namespace and back.priority == 2 and not back.speculate
    assert back.max_tokens == 1 and back.handoff_to is not None and back.handoff_to.asked
    assert for_prefill(replace(params, max_tokens=0), "room").max_tokens == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": "?"},
        {"tokens": "AAAA"},
        {"tokens": 5},
        {"sampling": {"temperature": "hot"}},
        {"sampling": {"top_k": 1.5}},
        {"sampling": {"seed": None}},
        {"sampling": {"seed": 2**70}},
        {"sampling": {"luck": 1}},
        {"sampling": [1]},
        {"namespace": 5},
        {"namespace": ["a", "b", "c"]},
        {"priority": "high"},
        {"priority": [1]},
        {"sampling": {"logit_bias": {"4": 1}}},
        {"sampling": {"logit_bias": [[1, "x"]]}},
        {"grammar": {"kind": "poem", "text": "a"}},
        {"grammar": {"kind": "regex"}},
        {"grammar": "a*"},
        {"stop_ids": 4},
    ],
)
def test_a_request_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    fields = request_fields(RequestParams((1, 2), 1))
    with pytest.raises(ValueError, match="no request"):
        asked_params("room", {**fields, **wrong})
    with pytest.raises(ValueError, match="no request"):
        asked_params("room", {key: fields[key] for key in fields if key not in wrong})


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_one_rank_has_captured_what_the_first_draft_needs(ranks: tuple[int, int]) -> None:
    """The last one to write the tail need not be that one."""
    sent = list[HandoffMessage]()
    reports = RankReports(2, lambda room, message: sent.append(message))
    reports.computed(First("room", 7, 12, -0.5, (), {}), Complete("room", 7, tail=True))
    for rank in ranks:
        report = RankReport("tail", "room", 7, rank=rank, captured=b"\0\1" if rank else b"")
        assert not any(isinstance(message, Complete) for message in sent)
        reports.add(RankReport.from_json(json.loads(json.dumps(report.to_json()))))
    assert sent[-1] == Complete("room", 7, tail=True, captured=b"\0\1")


# -- at the wrong time -------------------------------------------------------------------------


def reserved(pair: Pair, prompt: tuple[int, ...]) -> tuple[Any, Reserve]:
    """A request whose reservation has reached the peer, and of which nothing has come yet."""
    request = pair.submit(prompt)
    pair.passes = lambda message: not isinstance(message, (Written, First, Complete))
    pair.run(lambda: bool(pair.sent(Reserve)))
    return request, pair.sent(Reserve)[-1]


def test_news_of_other_epochs_are_ignored(pair: Pair) -> None:
    prompt = pair.fresh(4 * PAGE + 1)
    request, reserve = reserved(pair, prompt)
    room = reserve.room
    for epoch in (reserve.epoch - 1, reserve.epoch + 1, -1, 2**60):
        for message in (
            Written(room, epoch, (0, 1), {}),
            First(room, epoch, 1, 0.0, (), {}),
            Complete(room, epoch, tail=True),
            Failed(room, epoch, "not this one", silent=False),
            Failed(room, epoch, "not this one", silent=True),
            Silent(room, epoch),
        ):
            pair.at_decode(message)
    pair.at_decode(Silent(room, reserve.epoch))
    assert request.handoff.state is HandoffState.RESERVED and not request.handoff.receipt.landed
    pair.passes = lambda message: True
    pair.finish(request)
    assert request.handoff.state is HandoffState.DECODING
    assert tokens_of(request) == expected(FAMILY, prompt)


def test_pages_that_are_reported_twice_count_once(pair: Pair) -> None:
    prompt = pair.fresh(4 * PAGE + 1)
    request, reserve = reserved(pair, prompt)
    pair.passes = lambda message: not isinstance(message, Complete)
    pair.run(lambda: request.handoff.receipt.complete)
    pair.at_decode(Written(reserve.room, reserve.epoch, (0, 1, 2, 3), {}))
    pair.at_decode(Written(reserve.room, reserve.epoch, (2, 2), {}))
    assert request.handoff.tokens == 4 * PAGE
    pair.passes = lambda message: True
    pair.finish(request)
    assert request.handoff.state is HandoffState.DECODING
    assert tokens_of(request) == expected(FAMILY, prompt)


def test_a_page_may_be_named_twice_in_a_message(pair: Pair) -> None:
    prompt = pair.fresh(4 * PAGE + 1)
    request, _ = reserved(pair, prompt)
    pair.run(lambda: bool(pair.to_decode))
    first = from_json(json.loads(pair.to_decode[0]))
    assert isinstance(first, Written)
    pair.at_decode(replace(first, numbers=(*first.numbers, *first.numbers)))
    assert request.handoff.receipt.landed == set(first.numbers)
    pair.passes = lambda message: True
    pair.finish(request)
    assert request.handoff.state is HandoffState.DECODING
    assert tokens_of(request) == expected(FAMILY, prompt)


@pytest.mark.parametrize("numbers", [(99,), (-1,), (0, 4)])
def test_pages_that_were_not_asked_for_end_the_handoff(
    pair: Pair, numbers: tuple[int, ...]
) -> None:
    prompt = pair.fresh(4 * PAGE + 1)
    request, reserve = reserved(pair, prompt)
    pair.at_decode(Written(reserve.room, reserve.epoch, numbers, {}))
    assert request.handoff.state is HandoffState.FAILED
    assert request.handoff.reason == "the peer wrote pages that were not asked for"
    assert pair.decode.handoffs.decode.quarantined
    pair.passes = lambda message: True
    pair.finish(request)
    assert tokens_of(request) == expected(FAMILY, prompt)


def test_an_end_before_all_pages_ends_the_handoff(pair: Pair) -> None:
    prompt = pair.fresh(4 * PAGE + 1)
    request, reserve = reserved(pair, prompt)
    first = expected(FAMILY, prompt)[0]
    pair.at_decode(First(*reserve.name, first.token, first.logprob, tuple(first.top), {}))
    pair.at_decode(Complete(*reserve.name, tail=True))
    assert request.handoff.state is HandoffState.FAILED
    assert request.handoff.reason == "the peer ended before all pages had come"
    pair.passes = lambda message: True
    pair.finish(request)
    assert tokens_of(request) == expected(FAMILY, prompt)


def test_an_end_before_the_first_token_ends_the_handoff(pair: Pair) -> None:
    prompt = pair.fresh(4 * PAGE + 1)
    request, reserve = reserved(pair, prompt)
    pair.passes = lambda message: not isinstance(message, (First, Complete))
    pair.run(lambda: request.handoff.receipt.complete)
    pair.at_decode(Complete(*reserve.name, tail=True))
    assert request.handoff.state is HandoffState.FAILED
    assert request.handoff.reason == "the peer ended before a first token had come"
    pair.passes = lambda message: True
    pair.finish(request)
    assert tokens_of(request) == expected(FAMILY, prompt)


def test_a_reservation_that_is_sent_twice_is_served_once(pair: Pair) -> None:
    prompt = pair.fresh(4 * PAGE + 1)
    request, reserve = reserved(pair, prompt)
    pair.at_prefill(reserve)
    pair.step()
    pair.at_prefill(reserve)
    pair.passes = lambda message: True
    pair.finish(request)
    assert request.handoff.state is HandoffState.DECODING
    assert tokens_of(request) == expected(FAMILY, prompt)
    assert sum(len(each.numbers) for each in pair.sent(Written)) == 4
    assert len(pair.sent(First)) == len(pair.sent(Complete)) == 1


def test_a_router_that_resends_gets_another_reservation_served(pair: Pair) -> None:
    """The first reservation is given up, and its peer hears of it; the second one has the room."""
    prompt = pair.fresh(4 * PAGE + 1)
    to_prefill, to_decode = pair.route(prompt)
    request = to_decode()
    pair.run(lambda: bool(pair.sent(Reserve)))
    (first,) = pair.sent(Reserve)
    pair.at_prefill(replace(first, epoch=first.epoch + 1))
    pair.deliver()
    assert request.handoff is not None and request.handoff.state is HandoffState.FAILED
    assert request.handoff.reason == "another reservation took its place"
    to_prefill()
    pair.run(lambda: len(pair.sent(Complete)) == 1)
    assert pair.sent(Complete)[0].epoch == first.epoch + 1
    assert pair.held()["rooms"] == 1, "what the first one says does not end the second one"
    pair.at_prefill(Done(first.room, first.epoch + 1))
    pair.finish(request)
    assert tokens_of(request) == expected(FAMILY, prompt)


def test_a_room_belongs_to_the_first_decode_server_that_reserved_it(pair: Pair) -> None:
    """Epochs of two servers may be equal: a message for one must not reach the other."""
    prompt = pair.fresh(4 * PAGE + 1)
    request, reserve = reserved(pair, prompt)
    pair.prefill.handoffs.receive("another", replace(reserve, epoch=reserve.epoch + 9))
    pair.prefill.handoffs.receive("another", Done(reserve.room, reserve.epoch + 9))
    pair.passes = lambda message: True
    pair.finish(request)
    assert tokens_of(request) == expected(FAMILY, prompt)
    assert request.handoff.state is HandoffState.DECODING
    (failed,) = pair.sent(Failed)
    assert failed.epoch == reserve.epoch + 9 and failed.silent
    assert failed.reason == "another decode server has this room"


@pytest.mark.parametrize("message", [Done("nowhere"), StopWriting("nowhere", 3)])
def test_the_end_of_an_unknown_room_is_answered_and_forgotten(
    pair: Pair, message: HandoffMessage
) -> None:
    pair.at_prefill(message)
    pair.settle()
    assert [type(each) for each in pair.log[1:]] == [Silent] * isinstance(message, StopWriting)


def test_rooms_that_ended_too_early_are_remembered_within_limits(pair: Pair) -> None:
    outgoing = pair.prefill.handoffs.prefill
    for number in range(2 * MAX_EARLY):
        pair.at_prefill(Done(f"nowhere-{number}"))
    assert len(outgoing._unwanted) == MAX_EARLY


def test_too_many_early_reservations_are_refused(pair: Pair) -> None:
    reserve = Reserve("room", 1, "digest", 5, (), 0)
    for number in range(MAX_EARLY):
        pair.at_prefill(replace(reserve, room=f"early-{number}"))
    pair.at_prefill(replace(reserve, room="early-0", epoch=2))
    pair.at_prefill(replace(reserve, room="one too many"))
    pair.deliver()
    refused = {(each.room, each.reason) for each in pair.sent(Failed)}
    assert refused == {
        ("early-0", "another reservation took its place"),
        ("one too many", "too many reservations wait for their requests"),
    }
    pair.prefill.handoffs.peer_lost("another")
    assert pair.held()["early reservations"] == MAX_EARLY
    for number in range(MAX_EARLY):
        pair.at_prefill(StopWriting(f"early-{number}", 1 + (number == 0)))
    pair.settle()
    assert len(pair.sent(Silent)) == MAX_EARLY


def test_a_stop_of_an_earlier_epoch_leaves_a_later_reservation(pair: Pair) -> None:
    pair.at_prefill(Reserve("room", 5, "digest", 5, (), 0))
    pair.at_prefill(StopWriting("room", 4))
    assert pair.held()["early reservations"] == 1
    pair.at_prefill(StopWriting("room", 5))


def test_a_room_that_another_request_has_is_refused(pair: Pair) -> None:
    to_prefill, _ = pair.route(pair.fresh(4 * PAGE + 1))
    to_prefill()
    with pytest.raises(RequestError, match="is in use by another request"):
        to_prefill()
    pair.at_prefill(Done(f"room-{pair.rooms}"))


@pytest.mark.parametrize("how", ["prompt", "aborted", "expired", "unpaired"])
def test_a_reservation_that_cannot_be_served_is_refused_in_a_sentence(pair: Pair, how: str) -> None:
    """The decode side learns so at once, and prefills by itself."""
    prompt = pair.fresh(4 * PAGE + 1)
    to_prefill, to_decode = pair.route(prompt)
    other, outgoing = to_prefill(), pair.prefill.handoffs.prefill
    if how == "aborted":
        pair.prefill.step()
        pair.prefill.abort(other)
        pair.settle()
    if how == "expired":
        pair.run()
        assert other.finish is Finish.LENGTH
        outgoing.expire(100.0, 10.0)
        outgoing.expire(109.0, 10.0)
        assert outgoing.rooms
        outgoing.expire(111.0, 10.0)
        pair.settle()
    request = to_decode()
    if how in ("prompt", "unpaired"):
        pair.passes = lambda message: False
        pair.run(lambda: bool(pair.to_prefill))
        reserve = from_json(json.loads(pair.to_prefill.popleft()))
        assert isinstance(reserve, Reserve)
        if how == "prompt":
            pair.at_prefill(replace(reserve, prompt="another"))
        else:
            pair.prefill.handoffs.receive("a stranger", reserve)
            pair.prefill.handoffs.receive("a stranger", Done(reserve.room, reserve.epoch))
        pair.passes = lambda message: True
    pair.finish(request)
    assert tokens_of(request) == expected(FAMILY, prompt)
    reasons = {
        "prompt": "the room has another prompt or namespace here; send both the same request",
        "aborted": "the prefill was aborted",
        "expired": "no decode server came for the prompt within 10 s",
        "unpaired": "this server and the peer have not paired",
    }
    assert request.handoff is not None and request.handoff.state is HandoffState.FAILED
    assert request.handoff.reason == reasons[how]


def test_an_abort_of_the_prefill_after_the_reservation_is_told(pair: Pair) -> None:
    prompt = pair.fresh(6 * PAGE + 1)
    to_prefill, to_decode = pair.route(prompt)
    other, request = to_prefill(), to_decode()
    pair.run(lambda: bool(pair.sent(Reserve)))
    pair.prefill.abort(other)
    pair.finish(request)
    assert request.handoff is not None and request.handoff.reason == "the prefill was aborted"
    assert tokens_of(request) == expected(FAMILY, prompt)


def test_a_prefill_without_an_answer_hands_nothing_over(pair: Pair) -> None:
    """A router may ask for no token at all."""
    prompt = pair.fresh(4 * PAGE + 1)
    to_prefill, to_decode = pair.route(prompt, 0)
    to_prefill()
    request = to_decode()
    pair.finish(request)
    assert request.finish is Finish.LENGTH and not request.output
