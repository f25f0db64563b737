"""Thousands of handoffs beside everything else, and nothing is left of them.

Requests that a decode server asks for, requests that a router sends to both sides or to one, local
ones, aborts, retractions, writes that break, bytes that come late, messages that take their time,
deadlines, lost connections. Every answer is that of one engine; in the end all is let go.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvtide.engine import Engine, Request, RequestParams, SamplingParams
from kvtide.engine.handoff.handoff_state import NEXT, DecodeHandoff, HandoffState
from kvtide.engine.handoff.messages import Failed, Silent, StopWriting, from_json, to_json
from kvtide.engine.handoff.own_memory import target_memory
from kvtide.engine.handoff.prefill_handoffs import ABORTED, GAVE_WAY
from kvtide.engine.request import Finish
from kvtide.spec import Tier
from tests.engine.handoff.handing_over import DEADLINE_S, DECODE, expected, family_pair, tokens_of
from tests.engine.handoff.unreliable import Unreliable
from tests.engine.restoring import PAGE, SAMPLING, text
from tests.grids import everything

DEADLINE_STEPS = 40
"""Steps after which the leader gives up a peer that writes nothing."""
SILENT_STEPS = 60
"""Steps after which it knows that a peer writes no more that cannot say so itself."""
STUCK_STEPS = 4 * SILENT_STEPS
"""Steps without progress after which, if they took long enough, traffic is stuck."""
SAMPLINGS = (
    SAMPLING,
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, logprobs=1),
    SamplingParams(frequency_penalty=0.7, repetition_penalty=1.2),
)


@dataclass
class Asked:
    request: Request
    since: int


class Traffic:
    """`ended` counts handoffs by their last state, `reasons` why some failed."""

    def __init__(self, family: str, seed: int, *, faults: bool) -> None:
        self.family, self.chance, self.faults = family, random.Random(seed), faults
        self.transport = Unreliable()
        sizes = {"tokens": 24 * PAGE, "host": 40 * PAGE}
        self.pair = family_pair(
            family,
            chunks=(2 * PAGE, 3 * PAGE),
            transport=self.transport,
            prefill_cache=sizes,
            decode_cache={**sizes, "tails": 3},
        )
        roots = [text(self.chance, 3 * PAGE) for _ in range(12 if everything() else 5)]
        lengths = (5, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 3, 3 * PAGE - 1)
        self.prompts = [root + text(self.chance, more) for root in roots for more in lengths]
        self.open: list[Asked] = []
        self.later: list[tuple[int, Callable[[], Request]]] = []
        self.unsilent: dict[int, int] = {}
        self.room_of: dict[int, str] = {}
        self.ended: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.met: Counter[str] = Counter()
        self.steps = self.handoffs = 0
        self.state: tuple[int, ...] = ()
        self.since = (0.0, 0)

    # -- what is asked ----------------------------------------------------------------------

    def params(self) -> RequestParams:
        chance = self.chance
        sampling = chance.choice(SAMPLINGS) if chance.random() < 0.3 else SAMPLING
        count = chance.choice((1, 2, 3, 5))
        priority = int(chance.random() < 0.15)
        return RequestParams(chance.choice(self.prompts), count, sampling, priority=priority)

    def ask(self) -> None:
        params = self.params()
        self.handoffs += 1
        request = self.pair.submit(
            params.tokens, params.max_tokens, sampling=params.sampling, priority=params.priority
        )
        self.open.append(Asked(request, self.steps))

    def route(self) -> None:
        """To both sides, at different times; a router may lose one of them."""
        params = self.params()
        self.handoffs += 1
        sides = list(
            self.pair.route(
                params.tokens, params.max_tokens, sampling=params.sampling, priority=params.priority
            )
        )
        lost = self.chance.random() < 0.1 if self.faults else False
        if lost:
            sides.pop(self.chance.randrange(2))
        for side in sides:
            self.later.append((self.steps + self.chance.choice((0, 0, 1, 4, 9)), side))

    def local(self) -> None:
        engine = self.chance.choice((self.pair.prefill, self.pair.decode))
        self.open.append(Asked(engine.submit(self.params()), self.steps))

    # -- what goes wrong --------------------------------------------------------------------

    def abort(self) -> None:
        asked = self.chance.choice(self.open)
        engine = self._engine(asked.request)
        engine.abort(asked.request)
        self.met["abort"] += 1

    def abort_prefill(self) -> None:
        rooms = list(self.pair.prefill.handoffs.prefill.rooms.values())
        if rooms:
            self.pair.prefill.abort(self.chance.choice(rooms).request)
            self.met["abort of a prefill"] += 1

    def retract(self) -> None:
        engine = self.chance.choice((self.pair.prefill, self.pair.decode))
        if engine.scheduler.running:
            engine.scheduler.retract(self.chance.choice(engine.scheduler.running))
            self.met["retraction"] += 1

    def break_write(self) -> None:
        self.transport.silent = self.chance.random() < 0.5
        self.transport.fails = {self.transport.begun + self.chance.randrange(3)}

    def deliver_late(self) -> None:
        self.met["late bytes"] += bool(self.transport.deliver_late())

    def hold_writes(self) -> None:
        self.transport.held = not self.transport.held

    def flush(self) -> None:
        for tier in self.chance.choice(((Tier.DEVICE,), (Tier.HOST,), (Tier.DEVICE, Tier.HOST))):
            self.pair.decode.cache.flush(tier)

    def lose_connection(self) -> None:
        """Messages on their way are gone; both sides notice, and then connect again."""
        pair, incoming = self.pair, self.pair.decode.handoffs.decode
        pair.to_prefill.clear()
        pair.to_decode.clear()
        pair.prefill.handoffs.peer_lost(DECODE)
        pair.wait_for_sender()
        pair.to_decode.clear()
        for epoch, request in list(incoming._by_epoch.items()):
            handoff = request.handoff
            assert handoff is not None
            self.room_of[epoch] = handoff.source.room
            pair.at_decode(Failed(handoff.source.room, epoch, "the connection ended", False))
        pair.to_prefill.clear()
        target = target_memory(pair.decode.cache)
        descriptor = pair.receiver.expose(target.regions)
        pair.writer.add_peer(DECODE, [target.manifest], [descriptor])
        for epoch in incoming.quarantined:
            stop = StopWriting(self.room_of[epoch], epoch)
            pair.to_prefill.append(json.dumps(to_json(stop)))
        self.met["lost connection"] += 1

    # -- the leaders' part ------------------------------------------------------------------

    def watch(self) -> None:
        """Deadlines: of peers that write nothing, and of prompts that no server comes for.

        They are counted in steps, of which a slow machine takes many while nothing is written: so
        there are none where nothing goes wrong.
        """
        pair, incoming = self.pair, self.pair.decode.handoffs.decode
        for asked in self.open:
            handoff = asked.request.handoff
            if handoff is None or handoff.receipt is None:
                continue
            self.room_of[handoff.receipt.epoch] = handoff.source.room
            if not handoff.waits:
                continue
            if self.faults and self.steps - asked.since > DEADLINE_STEPS:
                epoch = handoff.receipt.epoch
                pair.at_decode(Failed(handoff.source.room, epoch, "nothing came", silent=False))
                self.met["deadline"] += 1
        for epoch in incoming.quarantined:
            self.unsilent.setdefault(epoch, self.steps)
        known = {e: since for e, since in self.unsilent.items() if e in incoming.quarantined}
        self.unsilent = known
        for epoch, since in list(known.items()):
            if self.steps - since > SILENT_STEPS and not self.transport.held:
                self.transport.deliver_late()
                pair.at_decode(Silent(self.room_of.pop(epoch), epoch))
                self.met["silent by its leader"] += 1
        if self.faults:
            pair.prefill.handoffs.prefill.expire(float(self.steps), 2.0 * DEADLINE_STEPS)

    # -- running ----------------------------------------------------------------------------

    def step(self, *, more: bool = True) -> None:
        verbs: dict[Callable[[], None], float] = {
            self.ask: 12, self.route: 10, self.local: 4, self.flush: 12,
            self.abort: 1.2 * bool(self.open), self.abort_prefill: 0.6, self.retract: 1.5,
        }  # fmt: skip
        if self.faults:
            verbs |= {
                self.break_write: 1.5, self.deliver_late: 1.0, self.hold_writes: 0.7,
                self.lose_connection: 0.25,
            }  # fmt: skip
        if more and len(self.open) < 12:
            for _ in range(self.chance.choice((0, 1, 1, 2))):
                (verb,) = self.chance.choices(list(verbs), list(verbs.values()))
                verb()
        self.submit_due()
        self.steps += 1
        self.deliver_some(all_of_it=not more)
        pair = self.pair
        for engine in (pair.prefill, pair.decode):
            engine.step()
            if self.steps % 4 == 0 or not everything():
                assert engine.cache.validate() == []
        self.watch()
        self.take_answers()

    def submit_due(self) -> None:
        due = [side for at, side in self.later if at <= self.steps]
        self.later = [(at, side) for at, side in self.later if at > self.steps]
        for side in due:
            self.open.append(Asked(side(), self.steps))

    def deliver_some(self, *, all_of_it: bool) -> None:
        """Messages of one room stay in order; others may overtake them."""
        pair = self.pair
        for queue, arrive in ((pair.to_prefill, pair.at_prefill), (pair.to_decode, pair.at_decode)):
            arrived, left, held = list[str](), deque[str](), set[str]()
            while queue:
                raw = queue.popleft()
                room = str(json.loads(raw)["room"])
                if not all_of_it and (room in held or self.chance.random() < 0.25):
                    held.add(room)
                    left.append(raw)
                else:
                    arrived.append(raw)
            queue.extendleft(reversed(left))
            for raw in arrived:
                arrive(from_json(json.loads(raw)))
        pair.log.clear()

    def take_answers(self) -> None:
        still = []
        for asked in self.open:
            request = asked.request
            if request.finish is None:
                still.append(asked)
                continue
            params = request.params
            whole = expected(self.family, params.tokens, 5, params.sampling)
            found = tokens_of(request)
            assert found == whole[: len(found)]
            if request.finish is not Finish.ABORT:
                assert len(found) == params.max_tokens
            if (handoff := request.handoff) is not None:
                self.ended[handoff.state.value] += 1
                self.reasons[handoff.reason] += handoff.state is HandoffState.FAILED
        self.open = still

    def run(self, handoffs: int, enough: Callable[[], bool] = lambda: False) -> None:
        """At most so many handoffs, or until there were `enough`."""
        self.note_progress()
        while self.handoffs < handoffs and not enough():
            self.step()
            self.note_progress()
        self.transport.held = False
        self.transport.fails = set()
        while self.open or self.later or self.pair.decode.handoffs.decode.quarantined:
            self.step(more=False)
            self.note_progress()
        for _ in range(2 * DEADLINE_STEPS + 2):
            self.watch()
            self.steps += 1
        self.transport.deliver_late()
        self.pair.settle()
        self.pair.close()

    def note_progress(self) -> None:
        """Fails if nothing has begun or ended for many steps and for long; steps may be slow."""
        unsilent = self.pair.decode.handoffs.decode.quarantined
        state = (self.handoffs, len(self.open), len(self.later), len(unsilent))
        if state != self.state:
            self.state, self.since = state, (time.monotonic(), self.steps)
        when, steps = self.since
        waited = time.monotonic() - when > DEADLINE_S and self.steps - steps > STUCK_STEPS
        assert not waited, self.pair.state()

    def _engine(self, request: Request) -> Engine:
        found = self.pair.decode.find(request.number)
        return self.pair.decode if found is request else self.pair.prefill


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> set[tuple[HandoffState, HandoffState]]:
    """The transitions that handoffs make."""
    seen: set[tuple[HandoffState, HandoffState]] = set()
    move = DecodeHandoff.move

    def noted(handoff: DecodeHandoff, state: HandoffState, reason: str = "") -> None:
        seen.add((handoff.state, state))
        move(handoff, state, reason)

    monkeypatch.setattr(DecodeHandoff, "move", noted)
    return seen


def test_handoffs_without_faults_are_all_decoded(
    moves: set[tuple[HandoffState, HandoffState]],
) -> None:
    traffic = Traffic("llama", 1, faults=False)
    traffic.run(600 if everything() else 40)
    assert traffic.ended["decoding"] > 0.2 * traffic.handoffs, traffic.ended
    assert set(+traffic.reasons) <= {ABORTED, GAVE_WAY}
    assert traffic.reasons[ABORTED] <= traffic.met["abort of a prefill"], traffic.reasons


def test_every_transition_happens_in_random_traffic(
    moves: set[tuple[HandoffState, HandoffState]],
) -> None:
    """And none that is not in the table, which `move` asserts."""
    traffic = Traffic("llama", 2, faults=True)
    table = {(before, after) for before, following in NEXT.items() for after in following}

    def all_was_met() -> bool:
        return moves == table and len(traffic.met) == 7 and traffic.handoffs >= 1000

    traffic.run(10_000 if everything() else 60, all_was_met)
    if everything():
        assert moves == table, table - moves
        assert min(traffic.met.values()) > 0 and len(traffic.met) == 7, traffic.met
    assert moves <= table
    # Few handoffs, most of them beside another one of their prefix: chance decides how many.
    usual = 0.1 if everything() else 0.05
    assert traffic.ended["decoding"] > usual * traffic.handoffs, traffic.ended


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["gpt_oss", "falcon_h1", "deepseek_v32 hot:24"])
def test_random_traffic_of_every_form_of_memory(family: str, seed: int) -> None:
    Traffic(family, seed, faults=True).run(200)
