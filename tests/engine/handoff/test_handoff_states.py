"""Every state of a handoff, and every way out of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kvtide.engine import Request
from kvtide.engine.handoff.handoff_source import HandoffSource
from kvtide.engine.handoff.handoff_state import NEXT, OVER, WAITING, DecodeHandoff, HandoffState
from kvtide.engine.handoff.messages import (
    Complete,
    Done,
    Failed,
    First,
    HandoffMessage,
    Reserve,
    Silent,
    StopWriting,
    Written,
)
from kvtide.engine.request import Finish
from tests.engine.handoff.handing_over import PEER, Pair, expected, family_pair, tokens_of
from tests.engine.restoring import PAGE

S = HandoffState
OPEN = (S.OFFERED, S.RESERVED, S.STREAMING, S.LANDED)
FAMILY = "llama"
WAITS_FOR: dict[HandoffState, tuple[type, ...]] = {
    S.RESERVED: (Written, First, Complete),
    S.STREAMING: (Complete,),
    S.LANDED: (),
}
"""The messages that a handoff must not get in order to stay in a state."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Pair]:
    pair = family_pair(FAMILY, chunks=(2 * PAGE, 48))
    yield pair
    pair.close()


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    yield from shared.lent()


def handoff_of(request: Request) -> DecodeHandoff:
    assert request.handoff is not None
    return request.handoff


def bring(pair: Pair, request: Request, state: HandoffState) -> None:
    """Step until the handoff is in the state, and withhold what would end that."""
    if state is S.OFFERED:
        return
    withheld = WAITS_FOR[state]
    pair.passes = lambda message: not isinstance(message, withheld)

    def reached() -> bool:
        pair.deliver()
        return handoff_of(request).state is state and bool(pair.sent(Reserve))

    pair.run(reached)
    pair.log.clear()


def epoch_of(request: Request) -> int:
    receipt = handoff_of(request).receipt
    assert receipt is not None
    return receipt.epoch


# -- the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("before", list(S))
def test_no_transition_happens_that_is_not_in_the_table(before: HandoffState) -> None:
    for after in S:
        handoff = DecodeHandoff(HandoffSource(PEER, "room"), before)
        if after in NEXT[before]:
            handoff.move(after, "why")
            assert handoff.state is after and handoff.reason == "why"
        else:
            with pytest.raises(AssertionError, match=f"is not followed by {after.value}"):
                handoff.move(after)
            assert handoff.state is before


def test_a_handoff_can_be_aborted_before_its_end_and_fail_while_its_peer_has_slots() -> None:
    assert {state for state in S if NEXT[state]} == set(OPEN)
    assert all(S.ABORTED in NEXT[state] for state in OPEN)
    assert {state for state in S if S.FAILED in NEXT[state]} == {S.RESERVED, S.STREAMING}
    assert {*OPEN, *OVER} == set(S) and set(OPEN) > WAITING


# -- through the engine ------------------------------------------------------------------------


def test_a_handoff_passes_through_its_states_in_order(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[tuple[HandoffState, HandoffState]] = []
    move = DecodeHandoff.move

    def noted(handoff: DecodeHandoff, state: HandoffState, reason: str = "") -> None:
        moves.append((handoff.state, state))
        move(handoff, state, reason)

    monkeypatch.setattr(DecodeHandoff, "move", noted)
    prompt = pair.fresh(5 * PAGE + 3)
    request = pair.answer(prompt)
    assert moves == list(itertools.pairwise((*OPEN, S.DECODING)))
    assert tokens_of(request) == expected(FAMILY, prompt)


@pytest.mark.parametrize("state", OPEN)
@pytest.mark.parametrize("routed", [False, True], ids=["asks", "routed"])
def test_an_abort_in_any_state_leaves_nothing_on_either_side(
    pair: Pair, state: HandoffState, routed: bool
) -> None:
    prompt = pair.fresh(5 * PAGE + 3)
    if routed:
        to_prefill, to_decode = pair.route(prompt)
        request, other = to_decode(), to_prefill()
    else:
        request = pair.submit(prompt)
    bring(pair, request, state)
    pair.decode.abort(request)
    assert request.finish is Finish.ABORT and handoff_of(request).state is S.ABORTED
    pair.passes = lambda message: True
    pair.settle()
    if routed:
        assert other.finish is Finish.LENGTH, "the router's request is answered"
    sent = [type(each) for each in pair.log if isinstance(each, (Done, StopWriting, Silent))]
    expected: dict[HandoffState, list[type[HandoffMessage]]] = {
        S.OFFERED: [Done] if routed else [],
        S.RESERVED: [StopWriting, Silent],
        S.STREAMING: [StopWriting, Silent],
        S.LANDED: [Done],
    }
    assert sent == expected[state]


@pytest.mark.parametrize("routed", [False, True], ids=["asks", "routed"])
def test_an_abort_before_the_peer_was_told_frees_the_slots_at_once(
    pair: Pair, routed: bool
) -> None:
    prompt = pair.fresh(5 * PAGE + 3)
    to_prefill, to_decode = pair.route(prompt)
    if routed:
        to_prefill()
    request = to_decode() if routed else pair.submit(prompt)
    pair.decode.handoffs.decode.poll()
    assert handoff_of(request).state is S.RESERVED and pair.held()["unsent reservations"] == 1
    pair.decode.abort(request)
    assert not pair.decode.handoffs.decode.quarantined
    pair.settle()
    assert not pair.sent(Reserve) and len(pair.sent(Done)) == routed


@pytest.mark.parametrize("state", [S.RESERVED, S.STREAMING])
@pytest.mark.parametrize("silent", [True, False], ids=["silent", "late"])
def test_a_failure_in_any_state_is_answered_from_here(
    pair: Pair, state: HandoffState, silent: bool
) -> None:
    prompt = pair.fresh(5 * PAGE + 3)
    request = pair.submit(prompt)
    bring(pair, request, state)
    epoch, room = epoch_of(request), handoff_of(request).source.room
    pair.at_decode(Failed(room, epoch, "the peer is gone", silent))
    assert handoff_of(request).state is S.FAILED
    assert handoff_of(request).reason == "the peer is gone"
    quarantined = pair.decode.handoffs.decode.quarantined
    assert set(quarantined) == (set() if silent else {epoch})
    pair.passes = lambda message: True
    pair.finish(request)
    assert tokens_of(request) == expected(FAMILY, prompt)
    pair.settle()
    assert len(pair.sent(Done if silent else StopWriting)) == 1


def test_a_failure_that_comes_after_landing_changes_nothing(pair: Pair) -> None:
    prompt = pair.fresh(5 * PAGE + 3)
    request = pair.submit(prompt)
    bring(pair, request, S.LANDED)
    pair.at_decode(Failed(handoff_of(request).source.room, epoch_of(request), "late", False))
    assert handoff_of(request).state is S.LANDED
    pair.finish(request)
    assert handoff_of(request).state is S.DECODING
    assert tokens_of(request) == expected(FAMILY, prompt)


def test_a_prompt_of_which_little_is_missing_is_declined(pair: Pair) -> None:
    prompt = pair.fresh(5 * PAGE + 3)
    pair.answer(prompt)
    pair.settle()
    pair.log.clear()
    request = pair.answer(prompt)
    assert handoff_of(request).state is S.DECLINED
    assert tokens_of(request) == expected(FAMILY, prompt)
    assert not pair.log, "a peer that is not needed is not asked"


@pytest.mark.parametrize("prefill_first", [True, False])
def test_a_declined_prompt_is_let_go_by_a_peer_that_a_router_asked(
    pair: Pair, prefill_first: bool
) -> None:
    """Also if the peer hears that before it gets the request."""
    prompt = pair.fresh(5 * PAGE + 3)
    pair.answer(prompt)
    to_prefill, to_decode = pair.route(prompt)
    if prefill_first:
        to_prefill()
        pair.run()
        assert pair.held()["rooms"] == 1, "it waits for the decode side"
    request = to_decode()
    pair.finish(request)
    assert handoff_of(request).state is S.DECLINED
    if not prefill_first:
        to_prefill()
    pair.settle()


@pytest.mark.parametrize("at", ["before", "during", "after"])
def test_a_reservation_may_come_before_during_and_after_the_prefill(pair: Pair, at: str) -> None:
    prompt = pair.fresh(6 * PAGE + 3)
    to_prefill, to_decode = pair.route(prompt)
    if at == "before":
        request = to_decode()
        pair.run(lambda: "early reservations" in pair.held())
        to_prefill()
    else:
        other = to_prefill()
        while other.finish is None and (at == "after" or other.computed < 3 * PAGE):
            pair.prefill.step()
        request = to_decode()
    pair.finish(request)
    assert handoff_of(request).state is S.DECODING
    assert tokens_of(request) == expected(FAMILY, prompt)
    (reserve,) = pair.sent(Reserve)
    assert reserve.count == 6
