"""Sessions and prefetches at random against a model of plain dictionaries, with a clock by hand.

After every step nothing that must hold is violated, and what is pinned is what the rules say.
"""

from __future__ import annotations

import math

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtide.cache import Namespace, Tier
from tests.cache.building import Rig, text
from tests.cache.memories import FULL, PAGE, WINDOW
from tests.grids import everything

OWNERS = [Namespace(cache_salt=salt) for salt in ("", "b", "c")]
DEVICE, FRACTION, SHARE = 24, 0.5, 0.5
TOTAL = int(FRACTION * DEVICE)
MAX_SHARED_PAGES = int(SHARE * TOTAL)

names = st.integers(0, 7)
owners = st.sampled_from(OWNERS)
documents = st.integers(1, 4)
lengths = st.integers(1, 9)
ttls = st.sampled_from((None, 0.0, 1.0, 5.0))


class SessionTraffic(RuleBasedStateMachine):
    """`pins` has the pinned pages of each session, least recently used first."""

    memory = FULL

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(
            self.memory, device=DEVICE, host=48, session_fraction=FRACTION, session_share=SHARE
        )
        self.sessions = self.rig.cache.sessions
        self.now = 0.0
        self.pins: dict[str, int] = {}
        self.owner: dict[str, Namespace] = {}
        self.expires: dict[str, float] = {}
        self.open: list[object] = []

    def _used(self, name: str, owner: Namespace, ttl: float | None) -> None:
        pages = self.pins.pop(name, 0)
        self.pins[name], self.owner[name] = pages, owner
        self.expires[name] = math.inf if ttl is None else self.now + ttl

    @rule(number=names, owner=owners, document=documents, pages=lengths, ttl=ttls)
    def turn(self, number, owner, document, pages, ttl) -> None:
        """A request begins, computes its prompt, and ends."""
        name = f"{owner.cache_salt}{number}"
        prompt = self.rig.cache.prompt(text(document, pages), owner)
        self.sessions.asked(name, prompt, ttl)
        self._used(name, owner, ttl)
        lease = self.rig.begin(text(document, pages), owner)
        if lease is not None:
            self.rig.settle()
            self.rig.compute(lease)
            self.rig.cache.release(lease)
        found = self.rig.cache.match(prompt).tokens // PAGE
        self.sessions.keep(name, prompt, 0, ttl)
        self._kept(name, min(found, MAX_SHARED_PAGES))

    def _kept(self, name: str, pages: int) -> None:
        """A namespace that pins most loses its oldest session, until all are within bounds."""
        self.pins[name] = pages
        while sum(self.pins.values()) > TOTAL:
            held = dict.fromkeys(OWNERS, 0)
            for each, count in self.pins.items():
                held[self.owner[each]] += count
            max_held = max(held.values())
            loser = next(
                n for n, count in self.pins.items() if count and held[self.owner[n]] == max_held
            )
            self.pins[loser] = 0

    @rule(number=names, owner=owners)
    def release(self, number, owner) -> None:
        name = f"{owner.cache_salt}{number}"
        assert self.sessions.forget(name) == (name in self.pins)
        self._gone(name)

    @rule(seconds=st.sampled_from((0.0, 0.5, 1.0, 4.0)))
    def pass_time(self, seconds) -> None:
        self.now += seconds
        self.sessions.tick(self.now)
        for name in [name for name, at in self.expires.items() if at <= self.now]:
            self._gone(name)

    def _gone(self, name: str) -> None:
        for known in (self.pins, self.owner, self.expires):
            known.pop(name, None)

    @rule(document=documents, pages=lengths, owner=owners)
    def prefetch(self, document, pages, owner) -> None:
        prompt = self.rig.cache.prompt(text(document, pages), owner)
        self.open.append(self.rig.cache.prefetches.begin(prompt, 60.0))

    @precondition(lambda self: self.open)
    @rule()
    def end_prefetch(self) -> None:
        self.rig.cache.prefetches.end(self.open.pop())

    @rule()
    def settle(self) -> None:
        self.rig.settle()

    @rule()
    def poll(self) -> None:
        self.rig.cache.poll()

    @rule(tier=st.sampled_from((Tier.DEVICE, Tier.HOST)))
    def flush(self, tier) -> None:
        self.rig.cache.flush(tier)

    @rule(document=documents, pages=st.integers(1, 20))
    def need_slots(self, document, pages) -> None:
        """A request that fits an empty device gets in, if sessions give way."""
        self.rig.settle()
        while (lease := self.rig.begin(text(9, pages))) is None:
            assert self.sessions.unpin_one()
            self.rig.settle()
        self.rig.cache.release(lease)
        for state in self.sessions.states():
            self.pins[state.name] = min(self.pins[state.name], state.pinned_tokens // PAGE)

    @invariant()
    def nothing_is_violated(self) -> None:
        assert self.rig.problems() == []

    @invariant()
    def what_is_pinned_is_what_the_rules_say(self) -> None:
        states = {state.name: state.pinned_tokens // PAGE for state in self.sessions.states()}
        assert states == self.pins
        assert sum(states.values()) <= TOTAL and all(n <= MAX_SHARED_PAGES for n in states.values())

    def teardown(self) -> None:
        self.rig.cache.prefetches.end_all()
        self.rig.end()


class WindowTraffic(SessionTraffic):
    """With a window, whose pages are bounded as well: which session loses is not foretold."""

    memory = WINDOW

    def _kept(self, name: str, pages: int) -> None:
        self.pins = {s.name: s.pinned_tokens // PAGE for s in self.sessions.states()}
        assert self.pins[name] in (0, *range(pages + 1))


COUNT = 200 if everything() else 12
_SETTINGS = settings(
    max_examples=COUNT, stateful_step_count=40, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

TestSessionTraffic = SessionTraffic.TestCase
TestSessionTraffic.settings = _SETTINGS
TestWindowTraffic = WindowTraffic.TestCase
TestWindowTraffic.settings = _SETTINGS
