"""Sessions: conversations whose prefix must stay until their next turn.

A session pins what the next turn of each of its lines (`prompt_lines`) needs to resume, in the tier
where it is now, until its TTL has passed since its last request. Pins are bounded twice:

- One session pins no more than its part: of a longer prefix the first part, as far as that can be
  resumed. A line has what the session's other lines leave. To a line that was continued, those that
  had one prompt only leave all, and so do those that were not used for `STALE_PROMPTS` prompts.
- All sessions pin no more than their fraction of the device (of hot pools, of the host). Past it,
  the namespace that pins most gives up a line of its least recently used session, and so on. So a
  namespace that pins no more than total / namespaces loses nothing to the others.

A session that lost its pins is still known: its last prompts can be compared with the next one, and
be prefetched. What is known is bounded as well, by the same rule.

Time comes with `tick`, from the one clock that all ranks follow; nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtide.cache.sessions.prompt_lines import (
    MAX_LINES,
    PromptChange,
    PromptLine,
    find_line,
    first_to_go,
)
from kvtide.index import Index, Prompt
from kvtide.index import IndexLease as IndexLease
from kvtide.index.keys import TOKEN_BYTES, Hidden, Namespace
from kvtide.spec import Tier

MAX_SESSIONS = 8192
MAX_REMEMBERED_TOKENS = 1 << 24
"""Of the last prompts of all sessions together, with their answers: 64 MiB."""
STALE_PROMPTS = 8

Owner = Namespace | Hidden


class SessionState(NamedTuple):
    """A session as a report shows it.

    tokens         of its last prompt, with the answer where there is one
    lines          of prompts
    pinned_tokens  of the prefixes of its lines, as if they shared nothing
    idle_s         since its last request; `left_s` until it ends, None for never
    """

    name: str
    tokens: int
    lines: int
    pinned_tokens: int
    idle_s: float
    left_s: float | None


class SessionStats(NamedTuple):
    """`pinned` now, of `known` ones; `pages` that they pin by tier and anchor, each counted once.

    ended    sessions since the cache was made: expired, released; evicted, or a line lost its pin
    changed  prompts that broke a line's prefix
    """

    pinned: int
    known: int
    pages: Mapping[tuple[Tier, str], int]
    ended: Mapping[str, int]
    changed: int


@dataclass(slots=True, eq=False)
class Session:
    """`lines`, least recently used first, are one at least.

    turns    requests so far
    prompts  those whose prompt differs from its line's last one
    """

    name: str
    owner: Owner
    lines: list[PromptLine] = field(default_factory=list)
    turns: int = 0
    prompts: int = 0
    used: float = 0.0
    expires: float = math.inf
    remembered: int = 0

    @property
    def pinned(self) -> list[PromptLine]:
        """Lines that pin a prefix, least recently used first."""
        return [line for line in self.lines if line.lease is not None]


class Sessions:
    """`TieredCache.sessions`, least recently used first.

    fraction       the most of the home slots of every anchor that all sessions pin
    fraction_each  the most of that which one of them pins
    """

    def __init__(self, index: Index, fraction: float, fraction_each: float) -> None:
        memory = index.memory
        self._index = index
        self._page = memory.page_tokens
        self._reaches = {
            anchor.name: anchor.reuse.reach_pages(memory.page_tokens) for anchor in memory.anchors
        }
        self._max_pages = {
            anchor.name: fraction * index.capacity(anchor.home, anchor.name)
            for anchor in memory.anchors
        }
        self._max_pages_each = {
            name: int(fraction_each * pages) for name, pages in self._max_pages.items()
        }
        self._sessions: dict[str, Session] = {}
        self._pinned: dict[str, Counter[Owner]] = {name: Counter() for name in self._reaches}
        self._remembered: Counter[Owner] = Counter()
        self._next = math.inf
        self.now = 0.0
        self.ended: Counter[str] = Counter()
        self.changed = 0

    def __len__(self) -> int:
        """Sessions that pin a prefix."""
        return sum(bool(session.pinned) for session in self._sessions.values())

    # -- time -------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """It is `now`, in seconds of the clock that all ranks follow: end what has expired."""
        self.now = max(self.now, now)
        if self.now < self._next:
            return
        for session in [*self._sessions.values()]:
            if session.expires <= self.now:
                self._end(session, "expired")
        self._next = min((s.expires for s in self._sessions.values()), default=math.inf)

    @property
    def next_expiry(self) -> float | None:
        """When `tick` may have something to end; None for never."""
        return None if self._next == math.inf else self._next

    # -- turns ------------------------------------------------------------------------------

    def asked(self, name: str, prompt: Prompt, ttl_s: float | None = None) -> PromptChange | None:
        """A turn begins with this prompt: what it changed of its line's last one, if anything.

        The session lives on for `ttl_s`, for ever without one.
        """
        session = self._used(name, prompt.namespace, ttl_s)
        session.turns += 1
        line, change = self._line(session, prompt)
        self.changed += change is not None
        if line.asked != prompt.packed:
            session.prompts += 1
            line.prompts += 1
        line.asked, line.prompt, line.used = prompt.packed, None, session.prompts
        self._remember(session)
        return change

    def keep(
        self, name: str, prompt: Prompt, priority: int = 0, ttl_s: float | None = None
    ) -> bool:
        """A turn has ended: pin what the next one can resume from, in place of its line's last pin.

        False if its line may pin nothing.
        """
        session = self._used(name, prompt.namespace, ttl_s)
        line, _ = self._line(session, prompt)
        self._unpin(session, line)
        line.prompt = prompt
        if (room := self._make_room(session, line, prompt)) > 0:
            hit = self._index.match(self._within(room, prompt))
            line.lease = self._index.pin(hit, priority)
            self._count(session, line, 1)
            while (anchor := self._exceeded()) is not None:
                self._evict(anchor)
        self._remember(session)
        return line.lease is not None

    def prompt_of(self, name: str) -> Prompt | None:
        """The last prompt of a session with its answer; None if there is no such session."""
        session = self._sessions.get(name)
        if session is None:
            return None
        return self._index.prompt(session.lines[-1].whole, _named(session.owner))

    def turns_of(self, name: str) -> int:
        """How many turns of a session have begun."""
        return self._sessions[name].turns if name in self._sessions else 0

    def forget(self, name: str) -> bool:
        """End a session; False if there is none."""
        session = self._sessions.get(name)
        if session is None:
            return False
        self._end(session, "released")
        return True

    # -- when slots are needed --------------------------------------------------------------

    @property
    def hold_enough(self) -> bool:
        """Whether pins hold at least the slots that the last refusal lacked."""
        missing = self._index.missing
        homes = {anchor.name: anchor.home for anchor in self._index.memory.anchors}
        return bool(missing) and all(
            homes[anchor] is tier and self._pinned[anchor].total() >= pages
            for (tier, anchor), pages in missing.items()
        )

    def unpin_one(self) -> bool:
        """Unpin one line, where pins are in the way of requests; False if none is pinned."""
        held = [anchor for anchor, pinned in self._pinned.items() if pinned.total()]
        missing = [anchor for _, anchor in self._index.missing if anchor in held]
        if held:
            self._evict((missing or held)[0])
            return True
        empty = next((s for s in self._sessions.values() if s.pinned), None)
        if empty is not None:
            self._unpin(empty, empty.pinned[0])
        return empty is not None

    def forget_hidden(self) -> None:
        """Unpin prefixes that no turn will find again."""
        for session in self._sessions.values():
            for line in session.pinned:
                if line.lease is not None and line.lease.hidden:
                    self._unpin(session, line)

    def forget_all(self) -> None:
        for session in [*self._sessions.values()]:
            self._end(session, "released")

    # -- looking ----------------------------------------------------------------------------

    def states(self) -> list[SessionState]:
        """All sessions, least recently used first."""
        return [
            SessionState(
                session.name,
                len(session.lines[-1].whole) // TOKEN_BYTES,
                len(session.lines),
                sum(lease.boundary for lease in _leases(session)) * self._page,
                self.now - session.used,
                None if session.expires == math.inf else max(0.0, session.expires - self.now),
            )
            for session in self._sessions.values()
        ]

    def pinned(self) -> Iterator[tuple[str, IndexLease]]:
        """The names of the sessions that pin prefixes, with each that they pin."""
        return ((s.name, lease) for s in self._sessions.values() for lease in _leases(s))

    def stats(self, *, pages_too: bool = True) -> SessionStats:
        """Counting the pages takes a walk over all that is pinned; `pages_too` may leave it out."""
        leases = [lease for _, lease in self.pinned()]
        pages = self._index.pinned_pages(leases) if pages_too else {}
        known = len(self._sessions)
        return SessionStats(len(self), known, pages, dict(self.ended), self.changed)

    def violations(self) -> Iterator[str]:
        """What does not hold, in sentences."""
        for name, session in self._sessions.items():
            if not all(lease.live for lease in _leases(session)):
                yield f"session {name!r} pins with a lease that was released"
            if not 1 <= len(session.lines) <= MAX_LINES:
                yield f"session {name!r} has {len(session.lines)} lines"
            for anchor, pages in self._max_pages_each.items():
                if sum(self._pages(lease, anchor) for lease in _leases(session)) > pages:
                    yield f"session {name!r} pins more than its part of {anchor}"
            if session.expires <= self.now and session.expires < self._next:
                yield f"session {name!r} has expired, and nothing will end it"
        for anchor, pinned in self._pinned.items():
            counted = sum(self._pages(lease, anchor) for _, lease in self.pinned())
            if counted != pinned.total():
                yield f"sessions pin {counted} pages of {anchor}, and count {pinned.total()}"
            if counted > self._max_pages[anchor]:
                yield f"sessions pin {counted} pages of {anchor}, more than they may"
        if len(self._sessions) > MAX_SESSIONS:
            yield f"{len(self._sessions)} sessions are known, more than {MAX_SESSIONS}"
        if self._remembered.total() != sum(s.remembered for s in self._sessions.values()):
            yield "sessions remember other tokens than they count"

    # -- the steps --------------------------------------------------------------------------

    def _line(self, session: Session, prompt: Prompt) -> tuple[PromptLine, PromptChange | None]:
        """The line that a prompt continues, or a new one, now the most recently used one."""
        found, change = find_line(session.lines, prompt.packed, self._page)
        line = found or PromptLine()
        if found is not None:
            session.lines.remove(found)
        elif len(session.lines) == MAX_LINES:
            gone = first_to_go(session.lines)
            self._unpin(session, gone)
            session.lines.remove(gone)
        session.lines.append(line)
        line.used = session.prompts
        return line, change

    def _make_room(self, session: Session, line: PromptLine, prompt: Prompt) -> int:
        """The page up to which a line may pin this prompt, after others have given way."""
        pages = max(0, prompt.tokens - prompt.holdback) // self._page
        for other in session.pinned if line.prompts > 1 else []:
            yields = other.prompts < 2 or session.prompts - other.used >= STALE_PROMPTS
            if yields and self._room(session) < pages:
                self._unpin(session, other)
        return self._room(session)

    def _room(self, session: Session) -> int:
        """The page up to which one more line of a session may pin; pools that reach less far back
        fit anyway."""
        room = 1 << 60
        for anchor, pages in self._max_pages_each.items():
            left = pages - sum(self._pages(lease, anchor) for lease in _leases(session))
            reach = self._reaches[anchor]
            if reach is None or reach > left:
                room = min(room, left)
        return room

    def _within(self, pages: int, prompt: Prompt) -> Prompt:
        """The prompt as far as so many pages of it."""
        tokens = pages * self._page + prompt.holdback
        if prompt.tokens <= tokens:
            return prompt
        cut = prompt.packed[: (tokens + 1) * TOKEN_BYTES]
        return self._index.prompt(cut, _named(prompt.namespace))

    def _used(self, name: str, owner: Owner, ttl_s: float | None) -> Session:
        """The session, now the most recently used one."""
        session = self._sessions.get(name)
        if session is not None and session.owner != owner:
            self._end(session, "released")
        session = self._sessions.pop(name, None) or Session(name, owner)
        self._sessions[name] = session
        session.used = self.now
        session.expires = math.inf if ttl_s is None else self.now + ttl_s
        self._next = min(self._next, session.expires)
        return session

    def _remember(self, session: Session) -> None:
        """Count what is remembered of a session; forget others while that is too much."""
        tokens = sum(line.remembered for line in session.lines)
        self._remembered[session.owner] += tokens - session.remembered
        session.remembered = tokens
        while (
            self._remembered.total() > MAX_REMEMBERED_TOKENS or len(self._sessions) > MAX_SESSIONS
        ):
            owner = max(self._remembered, key=self._remembered.__getitem__)
            self._end(next(s for s in self._sessions.values() if s.owner == owner), "evicted")

    def _exceeded(self) -> str | None:
        """An anchor of which sessions pin more than they may."""
        return next(
            (a for a, held in self._pinned.items() if held.total() > self._max_pages[a]), None
        )

    def _evict(self, anchor: str) -> None:
        """The namespace that pins most of an anchor unpins a line of its least recently used
        session; of several such namespaces, the one whose session was used least recently."""
        pinned = self._pinned[anchor]
        max_pinned = max(pinned.values())
        for session in self._sessions.values():
            lines = [
                line
                for line in session.pinned
                if line.lease is not None and self._pages(line.lease, anchor)
            ]
            if lines and pinned[session.owner] == max_pinned:
                self._unpin(session, first_to_go(lines))
                self.ended["evicted"] += 1
                return
        raise AssertionError(f"sessions count pages of {anchor} that none of them pins")

    def _end(self, session: Session, reason: str) -> None:
        for line in session.pinned:
            self._unpin(session, line)
        del self._sessions[session.name]
        self._remembered[session.owner] -= session.remembered
        if not self._remembered[session.owner]:
            del self._remembered[session.owner]
        self.ended[reason] += 1

    def _unpin(self, session: Session, line: PromptLine) -> None:
        if line.lease is not None:
            self._count(session, line, -1)
            self._index.release(line.lease)
            line.lease = None

    def _count(self, session: Session, line: PromptLine, sign: int) -> None:
        assert line.lease is not None
        for anchor, pinned in self._pinned.items():
            pinned[session.owner] += sign * self._pages(line.lease, anchor)
            if not pinned[session.owner]:
                del pinned[session.owner]

    def _pages(self, lease: IndexLease, anchor: str) -> int:
        """Counted as if no two lines shared a page: an upper bound."""
        reach = self._reaches[anchor]
        return lease.boundary if reach is None else min(lease.boundary, reach)


def _leases(session: Session) -> list[IndexLease]:
    return [line.lease for line in session.lines if line.lease is not None]


def _named(owner: Owner) -> Namespace:
    assert isinstance(owner, Namespace), "a scratch prompt has no session"
    return owner
