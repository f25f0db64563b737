"""Handoffs that break: on the way, on either side, and with bytes that come too late.

Text never depends on a peer: every request that is not aborted gets the answer of one engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvtide.engine import Request, RequestParams
from kvtide.engine.handoff.handoff_state import HandoffState
from kvtide.engine.handoff.messages import (
    Complete,
    Done,
    Failed,
    Reserve,
    Silent,
    StopWriting,
    Written,
)
from kvtide.engine.handoff.prefill_handoffs import GAVE_WAY
from kvtide.engine.request import Finish
from kvtide.spec import Tier
from tests.engine.handoff.handing_over import DECODE, expected, family_pair, tokens_of
from tests.engine.handoff.unreliable import Unreliable
from tests.engine.restoring import PAGE, SAMPLING
from tests.grids import everything

FAMILY = "gpt_oss"  # A history and windows.
FAMILIES = ("gpt_oss", "falcon_h1", "deepseek_v4", "deepseek_v4 hot:7")
LENGTH = 5 * PAGE + 3


class Stand:
    """A pair over a transport that fails on demand, and what is poisoned on its decode side."""

    def __init__(self, family: str) -> None:
        self.family, self.transport = family, Unreliable()
        self.pair = family_pair(
            family,
            chunks=(PAGE, 48),
            transport=self.transport,
            prefill_cache={"tokens": 256, "host": 512},
            decode_cache={"tokens": 256, "host": 512},
        )

    def answered(self, request: Request) -> None:
        self.pair.finish(request)
        self.check(request)

    def check(self, request: Request) -> None:
        params = request.params
        assert tokens_of(request) == expected(self.family, params.tokens, params.max_tokens)

    def local(self, count: int, length: int = LENGTH) -> None:
        """Requests that use the decode side alone, and make it evict."""
        for _ in range(count):
            params = RequestParams(self.pair.fresh(length), 2, SAMPLING)
            self.answered(self.pair.decode.submit(params))

    def untouched(self) -> None:
        """Slots that a peer may still write to belong to no page, and are not free."""
        cache = self.pair.decode.cache
        tree = cache.index.tree
        for receipt in cache.receiving.quarantined.values():
            assert receipt.tail_row not in cache.receiving._free_rows
            for cell in {one.cell for one in receipt.arriving.taken}:
                mine = {one.slot for one in receipt.arriving.taken if one.cell == cell}
                used = {int(slot) for node in tree.walk() for slot in _slots(node.slots[cell])}
                assert not mine & used
                assert not mine & set(tree.cells[cell].slots.free_slots().tolist())


def _slots(found: np.ndarray | None) -> np.ndarray:
    return np.zeros(0, np.int32) if found is None else found


@pytest.fixture(scope="module", params=[FAMILY])
def shared(request: pytest.FixtureRequest) -> Iterator[Stand]:
    stand = Stand(request.param)
    yield stand
    stand.pair.close()


@pytest.fixture
def stand(shared: Stand) -> Iterator[Stand]:
    shared.transport.fails, shared.transport.silent = set(), True
    lent = shared.pair.lent()
    next(lent)
    yield shared
    shared.transport.held = False
    shared.transport.deliver_late()
    assert next(lent, None) is None


def handoff_state(request: Request) -> HandoffState:
    assert request.handoff is not None
    return request.handoff.state


# -- the sender --------------------------------------------------------------------------------


@pytest.mark.quick(family=["gpt_oss"], silent=[False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("silent", [True, False], ids=["silent", "late"])
def test_a_write_that_breaks_costs_time_and_no_text(family: str, silent: bool) -> None:
    """At the first page, in the middle, at the tail; what was not written may come later."""
    stand = Stand(family)
    pair, transport = stand.pair, stand.transport
    transport.silent = silent
    stand.answered(pair.submit(pair.fresh(LENGTH)))
    writes = transport.begun
    assert writes >= 4
    for number in range(writes) if everything() else (1, writes - 1):
        transport.fails = {transport.begun + number}
        request = pair.submit(pair.fresh(LENGTH))
        stand.answered(request)
        assert handoff_state(request) is HandoffState.FAILED
        assert request.handoff is not None
        assert request.handoff.reason == f"write {next(iter(transport.fails))} broke"
        quarantined = pair.decode.handoffs.decode.quarantined
        if silent:
            pair.settle()
            continue
        assert len(quarantined) == 1
        pair.run(lambda: bool(pair.sent(StopWriting)))
        stand.local(4)
        stand.untouched()
        assert transport.deliver_late()
        stand.local(2)
        stand.answered(pair.submit(pair.fresh(LENGTH)))
        assert not pair.sent(Silent), "the sender never knows"
        (epoch,) = quarantined
        pair.at_decode(Silent("", epoch))
        pair.settle()
        pair.log.clear()
    request = pair.submit(pair.fresh(LENGTH))
    stand.answered(request)
    assert handoff_state(request) is HandoffState.DECODING
    pair.settle()
    pair.close()


def test_pages_that_landed_before_a_failure_are_used(stand: Stand) -> None:
    pair, transport = stand.pair, stand.transport
    transport.fails = {transport.begun + 4}
    prompt = pair.fresh(LENGTH)
    request = pair.submit(prompt)
    stand.answered(request)
    assert request.handoff is not None and request.handoff.tokens == 4 * PAGE
    assert handoff_state(request) is HandoffState.FAILED


def test_a_write_in_flight_keeps_the_slots_until_it_has_ended(stand: Stand) -> None:
    pair, transport = stand.pair, stand.transport
    transport.held = True
    request = pair.submit(pair.fresh(LENGTH))
    begun = transport.begun
    pair.run(lambda: transport.begun > begun)
    pair.decode.abort(request)
    (epoch,) = pair.decode.handoffs.decode.quarantined
    pair.run(lambda: bool(pair.sent(StopWriting)))
    assert not pair.prefill.scheduler.running, "the peer gave up the request that it was asked for"
    stand.local(4)
    assert not pair.sent(Silent) and pair.decode.handoffs.decode.quarantined
    assert pair.prefill.cache.index.leases, "a page that is being written out is not reused"
    stand.untouched()
    transport.held = False
    pair.settle()
    assert [each.epoch for each in pair.sent(Silent)] == [epoch]


@pytest.mark.parametrize("asked", [True, False], ids=["asks", "routed"])
def test_a_prefill_that_is_aborted_keeps_pages_that_are_being_written(
    stand: Stand, asked: bool
) -> None:
    pair, transport = stand.pair, stand.transport
    transport.held = True
    prompt = pair.fresh(LENGTH)
    if asked:
        request = pair.submit(prompt)
    else:
        to_prefill, to_decode = pair.route(prompt)
        to_prefill()
        request = to_decode()
    begun = transport.begun
    pair.run(lambda: transport.begun > begun)
    (other,) = pair.prefill.scheduler.running
    pair.prefill.abort(other)
    for number in range(8):  # They need all of the device.
        pair.prefill.submit(RequestParams(pair.fresh(LENGTH), 1 + number % 2, SAMPLING))
    for _ in range(60):
        pair.step()
    assert pair.held()["prefill leases"] >= 1 and handoff_state(request) is HandoffState.RESERVED
    transport.held = False
    stand.answered(request)
    assert handoff_state(request) is HandoffState.FAILED


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_prefill_that_is_retracted_hands_on_what_it_computed(
    stand: Stand, in_flight: bool
) -> None:
    """Its first lease is released when no write reads it, and the second one goes on."""
    pair, transport = stand.pair, stand.transport
    transport.held = in_flight
    request = pair.submit(pair.fresh(LENGTH))
    pair.run(lambda: any(each.computed >= 3 * PAGE for each in pair.prefill.scheduler.running))
    (other,) = pair.prefill.scheduler.running
    pair.prefill.scheduler.retract(other)
    pair.run(lambda: other.admissions == 2)
    transport.held = False
    stand.answered(request)
    assert handoff_state(request) is HandoffState.DECODING
    assert sum(len(each.numbers) for each in pair.sent(Written)) == pair.sent(Reserve)[0].count


# -- the peer ----------------------------------------------------------------------------------


def test_a_peer_that_never_answers_is_given_up(stand: Stand) -> None:
    """The leader says so after its deadline; the slots stay taken for as long as it is silent."""
    pair = stand.pair
    pair.passes = lambda message: False
    request = pair.submit(pair.fresh(LENGTH))
    pair.run(lambda: len(pair.to_prefill) == 2)
    pair.to_prefill.clear()
    handoff = request.handoff
    assert handoff is not None and handoff.receipt is not None
    epoch = handoff.receipt.epoch
    pair.at_decode(Failed(handoff.source.room, epoch, "nothing came for 10 s", silent=False))
    stand.answered(request)
    stand.local(4)
    stand.untouched()
    assert set(pair.decode.handoffs.decode.quarantined) == {epoch}
    assert pair.decode.cache.receiving.quarantined_slots == len(handoff.receipt.places)
    pair.to_prefill.clear()
    pair.at_decode(Silent(handoff.source.room, epoch))
    pair.at_decode(Silent(handoff.source.room, epoch))
    pair.settle()


@pytest.mark.parametrize("state", ["early", "writing", "written", "unclaimed"])
def test_a_decode_server_that_is_lost_leaves_nothing_behind(stand: Stand, state: str) -> None:
    pair, transport = stand.pair, stand.transport
    to_prefill, to_decode = pair.route(pair.fresh(LENGTH))
    if state != "early":
        other = to_prefill()
    request = to_decode() if state != "unclaimed" else None
    if state == "early":
        pair.run(lambda: "early reservations" in pair.held())
    if state == "writing":
        transport.held = True
        begun = transport.begun
        pair.run(lambda: transport.begun > begun)
    if state == "written":
        pair.passes = lambda message: not isinstance(message, Complete)
        pair.run(lambda: other.finish is not None)
    pair.prefill.handoffs.peer_lost(DECODE)
    assert not pair.writer.knows(DECODE)
    if state == "unclaimed":
        pair.run()
        assert "rooms" in pair.held(), "any decode server may come for it"
        pair.at_prefill(Done(f"room-{pair.rooms}"))
        pair.step()
        pair.step()
    elif state != "early":
        for _ in range(20):
            pair.step()
        assert other.finish is Finish.LENGTH, "a router waits for its answer"
    assert ("prefill leases" in pair.held()) == (state == "writing"), pair.held()
    transport.held = False
    if request is not None:
        handoff = request.handoff
        assert handoff is not None and handoff.receipt is not None
        lost = Failed(handoff.source.room, handoff.receipt.epoch, "lost", silent=False)
        pair.at_decode(lost)
        pair.passes = lambda message: True
        stand.answered(request)
    pair.settle()
    stand.pair.close()
    stand.__init__(stand.family)  # type: ignore[misc]


def test_requests_that_a_lost_server_asked_for_are_ended(stand: Stand) -> None:
    pair = stand.pair
    request = pair.submit(pair.fresh(LENGTH))
    pair.run(lambda: bool(pair.prefill.scheduler.running))
    (other,) = pair.prefill.scheduler.running
    pair.prefill.handoffs.peer_lost(DECODE)
    assert other.finish is Finish.ABORT
    pair.decode.abort(request)
    pair.settle()
    stand.pair.close()
    stand.__init__(stand.family)  # type: ignore[misc]


# -- room --------------------------------------------------------------------------------------


def test_without_room_a_request_waits_and_then_goes_on(stand: Stand) -> None:
    """All tail rows are taken by handoffs of which nothing comes for a while."""
    pair, transport = stand.pair, stand.transport
    transport.held = True
    requests = [pair.submit(pair.fresh(2 * PAGE + 1)) for _ in range(6)]
    for _ in range(30):
        pair.step()
    states = [handoff_state(request) for request in requests]
    assert states == [HandoffState.RESERVED] * 4 + [HandoffState.OFFERED] * 2
    transport.held = False
    pair.run()
    for request in requests:
        stand.check(request)
        assert handoff_state(request) is HandoffState.DECODING


def test_a_long_prompt_is_not_overtaken_for_ever(stand: Stand) -> None:
    """Short prompts that come behind it wait until it has its slots."""
    pair, transport = stand.pair, stand.transport
    transport.held = True
    first = pair.submit(pair.fresh(12 * PAGE))
    pair.run(lambda: handoff_state(first) is HandoffState.RESERVED)
    long = pair.submit(pair.fresh(12 * PAGE))
    short = [pair.submit(pair.fresh(2 * PAGE)) for _ in range(2)]
    urgent = pair.submit(pair.fresh(2 * PAGE), priority=1)
    for _ in range(20):
        pair.step()
    assert [handoff_state(each) for each in (long, *short)] == [HandoffState.OFFERED] * 3
    assert handoff_state(urgent) is HandoffState.RESERVED
    transport.held = False
    pair.run()
    for request in (first, long, *short, urgent):
        stand.check(request)
        assert handoff_state(request) is HandoffState.DECODING


def test_slots_that_a_frozen_peer_keeps_hold_up_no_request(stand: Stand) -> None:
    """They may stay taken for ever: what does not fit beside them is prefilled here."""
    pair, transport = stand.pair, stand.transport
    transport.silent = False
    epochs = set[int]()
    for _ in range(4):
        transport.fails = {transport.begun}
        request = pair.submit(pair.fresh(2 * PAGE))
        stand.answered(request)
        epochs |= set(pair.decode.handoffs.decode.quarantined)
    assert len(epochs) == 4 and pair.decode.cache.receiving.free_tail_rows == 0
    request = pair.submit(pair.fresh(LENGTH))
    stand.answered(request)
    assert handoff_state(request) is HandoffState.DECLINED
    for epoch in epochs:
        pair.at_decode(Silent("", epoch))


def test_a_host_too_small_for_a_prompt_declines_it() -> None:
    pair = family_pair(FAMILY, decode_cache={"host": 12 * PAGE})
    for length in (5 * PAGE + 1, 8 * PAGE + 1):
        prompt = pair.fresh(length)
        request = pair.answer(prompt)
        assert tokens_of(request) == expected(FAMILY, prompt)
        fits = HandoffState.DECODING if length < 6 * PAGE else HandoffState.DECLINED
        assert handoff_state(request) is fits
    assert pair.decode.cache.match(pair.decode.cache.prompt(prompt), Tier.DEVICE).tokens
    pair.settle()
    pair.close()


def test_prompts_that_no_peer_came_for_give_way_to_one_that_a_peer_waits_for() -> None:
    """The decode side has its only tail row for a prompt that finds no slots on the prefill side,
    whose slots are held by prompts that wait for that row."""
    pair = family_pair(
        FAMILY,
        prefill_cache={"tokens": 14 * PAGE, "host": 64 * PAGE},
        decode_cache={"tokens": 32 * PAGE, "host": 64 * PAGE, "tails": 1},
    )
    computed = [pair.route(pair.fresh(LENGTH)) for _ in range(2)]
    for to_prefill, _ in computed:
        to_prefill()
    pair.run(lambda: pair.prefill.idle)
    asked = pair.submit(pair.fresh(LENGTH))
    pair.run(lambda: bool(pair.sent(Reserve)))
    requests = [asked, *(to_decode() for _, to_decode in computed)]
    pair.run(lambda: all(request.finish is not None for request in requests))
    for request in requests:
        assert tokens_of(request) == expected(FAMILY, request.params.tokens)
    first, second = (request.handoff for request in requests[1:])
    assert first is not None and first.state is HandoffState.DECODING, "the older one is kept"
    assert second is not None and second.state is HandoffState.FAILED
    assert second.reason == GAVE_WAY
    assert pair.prefill.handoffs.prefill.ended == {"handed_over": 2, "failed": 1}
    pair.settle()
    pair.close()
