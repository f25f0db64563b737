"""Sessions and prefetches at random against a model of plain dictionaries, with a clock by hand.

Every document is a line of prompts; its first token changes now and then. After every step nothing
that must hold is violated, and what is pinned is what the rules say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtide.cache import Namespace, Tier
from kvtide.cache.sessions.prompt_lines import MAX_LINES
from kvtide.cache.sessions.session_pins import STALE_PROMPTS
from tests.cache.building import Rig, text
from tests.cache.memories import FULL, PAGE, WINDOW
from tests.grids import everything

OWNERS = [Namespace(cache_salt=salt) for salt in ("", "b", "c")]
DEVICE, FRACTION, SHARE = 24, 0.5, 0.5
TOTAL = int(FRACTION * DEVICE)
MAX_SHARED_PAGES = int(SHARE * TOTAL)

names = st.integers(0, 2)
owners = st.sampled_from(OWNERS)
documents = st.integers(1, 12)
fronts = st.sampled_from((0, 0, 0, 1))
lengths = st.integers(1, 9)
ttls = st.sampled_from((None, None, None, 0.0, 1.0, 5.0))


def written(document: int, pages: int, front: int = 0) -> list[int]:
    return [100_000 * front + 1000 * document, *text(document, pages)[1:]]


@dataclass
class Line:
    """`pages` are pinned."""

    document: int
    asked: tuple[int, int] | None = None  # Front and pages of the last prompt.
    prompts: int = 0
    used: int = 0
    pages: int = 0


@dataclass
class Conversation:
    """Its lines, least recently used first."""

    owner: Namespace
    lines: list[Line] = field(default_factory=list)
    prompts: int = 0
    expires: float = math.inf

    @property
    def pages(self) -> int:
        return sum(line.pages for line in self.lines)

    def first_to_go(self, lines: list[Line]) -> Line:
        once = [line for line in lines if line.prompts == 1]
        return (once or lines)[0]


class SessionTraffic(RuleBasedStateMachine):
    """`known` has the sessions by name, least recently used first."""

    memory = FULL

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(
            self.memory, device=DEVICE, host=48, session_fraction=FRACTION, session_share=SHARE
        )
        self.sessions = self.rig.cache.sessions
        self.now = 0.0
        self.known: dict[str, Conversation] = {}
        self.changed = 0
        self.open: list[object] = []

    def _used(self, name: str, owner: Namespace, ttl: float | None) -> Conversation:
        session = self.known.pop(name, None) or Conversation(owner)
        self.known[name] = session
        session.expires = math.inf if ttl is None else self.now + ttl
        return session

    def _line(self, session: Conversation, document: int) -> Line:
        """A document's line, now the most recently used one."""
        line = next((each for each in session.lines if each.document == document), None)
        if line is not None:
            session.lines.remove(line)
        elif len(session.lines) == MAX_LINES:
            session.lines.remove(session.first_to_go(session.lines))
        line = line or Line(document)
        session.lines.append(line)
        return line

    @rule(number=names, owner=owners, document=documents, front=fronts, pages=lengths, ttl=ttls)
    def turn(self, number, owner, document, front, pages, ttl) -> None:
        """A request begins, computes its prompt, and ends."""
        name, tokens = f"{owner.cache_salt}{number}", written(document, pages, front)
        prompt = self.rig.cache.prompt(tokens, owner)
        session = self._used(name, owner, ttl)
        line = self._line(session, document)
        change = self.sessions.asked(name, prompt, ttl)
        assert (change is not None) == (line.asked is not None and line.asked[0] != front)
        self.changed += change is not None
        if line.asked != (front, pages):
            session.prompts, line.prompts = session.prompts + 1, line.prompts + 1
        line.asked, line.used = (front, pages), session.prompts
        lease = self.rig.begin(tokens, owner)
        if lease is not None:
            self.rig.settle()
            self.rig.compute(lease)
            self.rig.cache.release(lease)
        found = self.rig.cache.match(prompt).tokens // PAGE
        self.sessions.keep(name, prompt, 0, ttl)
        self._kept(session, line, pages, found)

    @rule(
        number=names,
        owner=owners,
        prompts=st.lists(st.tuples(st.integers(1, 9), fronts, lengths), max_size=20),
    )
    def turns(self, number, owner, prompts) -> None:
        """Many turns of one session."""
        for document, front, pages in prompts:
            self.turn(number, owner, document, front, pages, None)
            self.what_is_pinned_is_what_the_rules_say()

    def _kept(self, session: Conversation, line: Line, pages: int, found: int) -> None:
        """A line has what the others of its session leave."""
        line.pages = 0
        for other in session.lines:
            stale = session.prompts - other.used >= STALE_PROMPTS
            yields = line.prompts > 1 and (other.prompts == 1 or stale)
            if yields and session.pages + pages > MAX_SHARED_PAGES:
                other.pages = 0
        line.pages = min(found, MAX_SHARED_PAGES - session.pages)
        while sum(each.pages for each in self.known.values()) > TOTAL:
            self._evict()

    def _evict(self) -> None:
        """The namespace that pins most loses a line of its oldest session."""
        held = dict.fromkeys(OWNERS, 0)
        for session in self.known.values():
            held[session.owner] += session.pages
        loser = next(
            session
            for session in self.known.values()
            if session.pages and held[session.owner] == max(held.values())
        )
        loser.first_to_go([line for line in loser.lines if line.pages]).pages = 0

    @rule(number=names, owner=owners)
    def release(self, number, owner) -> None:
        name = f"{owner.cache_salt}{number}"
        assert self.sessions.forget(name) == (self.known.pop(name, None) is not None)

    @rule(seconds=st.sampled_from((0.0, 0.5, 1.0, 4.0)))
    def pass_time(self, seconds) -> None:
        self.now += seconds
        self.sessions.tick(self.now)
        for name in [name for name, each in self.known.items() if each.expires <= self.now]:
            del self.known[name]

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
            self._gave_way()
            self.rig.settle()
        self.rig.cache.release(lease)

    def _gave_way(self) -> None:
        if any(session.pages for session in self.known.values()):
            self._evict()

    @invariant()
    def nothing_is_violated(self) -> None:
        assert self.rig.problems() == []

    @invariant()
    def what_is_pinned_is_what_the_rules_say(self) -> None:
        for state, (name, session) in zip(self.sessions.states(), self.known.items(), strict=True):
            assert (state.name, state.lines) == (name, len(session.lines))
            assert state.pinned_tokens == session.pages * PAGE <= MAX_SHARED_PAGES * PAGE
        assert sum(session.pages for session in self.known.values()) <= TOTAL
        assert self.sessions.changed == self.changed

    def teardown(self) -> None:
        self.rig.cache.prefetches.end_all()
        self.rig.end()


class WindowTraffic(SessionTraffic):
    """With a window, whose pages are bounded as well: which line loses is not foretold."""

    memory = WINDOW

    def _kept(self, session: Conversation, line: Line, pages: int, found: int) -> None:
        self._gave_way()
        assert line.pages <= found

    def _gave_way(self) -> None:
        for name, session in self.known.items():
            leases = [line.lease for line in self.sessions._sessions[name].lines]
            for line, lease in zip(session.lines, leases, strict=True):
                line.pages = 0 if lease is None else lease.boundary


COUNT = 200 if everything() else 12
_SETTINGS = settings(
    max_examples=COUNT, stateful_step_count=40, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

TestSessionTraffic = SessionTraffic.TestCase
TestSessionTraffic.settings = _SETTINGS
TestWindowTraffic = WindowTraffic.TestCase
TestWindowTraffic.settings = _SETTINGS
