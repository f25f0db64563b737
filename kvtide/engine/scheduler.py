"""Who runs next, and how many of its tokens.

Admission reserves the worst case: a request runs only when the device has slots for its prefix and
a promise of slots for the rest of its prompt and all it may generate; of windows and states, for
what a few steps need. A request of higher priority that finds no room takes it from those of lower
ones, which wait again and go on later where they were. Then every step gives one token to each
request that generates, and what is left of the step's tokens to prompts, by priority and age; but
no more than some, so that a token is not long in coming. A step may be under way before anybody
asks for it: who comes meanwhile has its first part in the next.

Nobody computes what somebody else is about to: a request that shares pages with one that runs, and
has yet to compute them, starts when they can be found, or when they will not come from there.
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

from kvtide.cache import TieredCache
from kvtide.engine.request import Ahead, Request, RequestState

BESIDE_TOKENS = 2048
"""Tokens of a step in which somebody generates beside prompts. With more of them the next token is
long in coming, and those who generate are done when no prompts are left to be computed beside. It
is a number that matrix products divide well, and so includes those who generate."""
CROWDED_TOKENS = 1024
"""The same where somebody waits for room, if passes of so few tokens are recorded: the next one can
be begun while one is under way then."""
MAX_WAITS = 2
"""How often a request waits for another. What windows and states need may not be found after the
first: somebody then leaves it where their prompts part, and is the second. Where nothing is found
even then, a third would have requests served one by one."""


class ScheduledChunk(NamedTuple):
    """A request's part of a step: its tokens from `computed` up to `end`."""

    request: Request
    end: int

    @property
    def tokens(self) -> int:
        """How many it has, until they are computed."""
        return self.end - self.request.computed

    @property
    def ends(self) -> bool:
        """Whether all of the request's tokens are computed then."""
        return self.end == self.request.length


class Scheduler:
    """`chunk_tokens` is the most that one step computes (it may change between steps),
    `max_running` the largest batch. `recorded`: passes of few tokens are, and so can be shorter
    than loads, or begun beforehand.

    No more run than a step has tokens, so that all who generate get one.

    crowded    whether somebody has found no room for its pages, which only those who leave can give
    lets_land  whether those whose prefix is on its way keep nobody else waiting in a step
    """

    def __init__(
        self, cache: TieredCache, chunk_tokens: int, max_running: int, recorded: bool = False
    ) -> None:
        self.lets_land = recorded
        self.running: list[Request] = []
        self._waiting: list[tuple[int, int, Request]] = []
        self._cache = cache
        self.chunk_tokens = chunk_tokens
        self._max_running = min(max_running, chunk_tokens)
        self._states = _anchors_of_states(cache)
        # Of states, and of what is open between two entries, a token changes what is there.
        reuses = [(pool.reuse.stride, pool.tail_entries) for pool in cache.memory.pools]
        changing = any(kept is not None for reuse in reuses for kept in reuse)
        self._goes_ahead = recorded and not changing
        self._foreseen: list[ScheduledChunk] = []
        self._under_way: list[ScheduledChunk] = []
        self._at_work: list[Request] = []
        self._ending = False
        self.crowded = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def find(self, number: int) -> Request | None:
        """Whoever runs or waits under this number."""
        present = (*self.running, *(entry[2] for entry in self._waiting))
        return next((request for request in present if request.number == number), None)

    # -- in and out -------------------------------------------------------------------------

    def queue(self, request: Request) -> None:
        """Higher priorities first; among equals the older request, also when it was retracted."""
        request.state = RequestState.WAITING
        insort(self._waiting, (-request.params.priority, request.number, request))
        if self._waiting[0][2] is request:
            self.crowded = False

    def admit(self, makes_room: bool = True) -> None:
        """Take in waiting requests as long as the first of them finds room, or is made room.

        Those whose prefix is on its way, from storage or from somebody who computes it, keep
        nobody else waiting.
        """
        self.crowded = False
        while self.open and (first := self._first()) is not None:
            if len(self.running) < self._max_running and self._start(first):
                self._unqueue(first)
            elif not (makes_room and self._give_way(first)):
                self.crowded = all(r.params.priority >= first.params.priority for r in self.running)
                return

    @property
    def open(self) -> bool:
        """Whether somebody waits for whom there is a place, or one that could be taken."""
        if not self._waiting or len(self.running) < self._max_running:
            return bool(self._waiting)
        return min(request.params.priority for request in self.running) < -self._waiting[0][0]

    def _first(self) -> Request | None:
        """Whose turn it is, of those that wait for nothing but room. Some find that they do not."""
        for *_, request in self._waiting:
            if request.ready and not self._stands_back(request):
                return request
        return None

    def _stands_back(self, request: Request) -> bool:
        """Have a request wait for whoever is about to compute most of what it would, if any.

        It is noted who that is, and not looked into again before it is over. Whoever runs goes on
        or leaves, so nobody waits for ever; and nobody waits for a lower priority.
        """
        request.ahead = None
        if request.waits == MAX_WAITS:
            return False
        shared = (
            Ahead(other, self._cache.shared_pages(request.prompt, other.held))
            for other in self.running
            if other.params.priority >= request.params.priority
        )
        ahead = max(shared, key=lambda each: each.end, default=None)
        if ahead is None or ahead.end == 0 or self._finds(request, ahead.end):
            return False
        request.ahead = ahead
        request.waits += 1
        return True

    def _finds(self, request: Request, pages: int) -> bool:
        """Whether so many of a request's pages are kept already."""
        found = self._cache.match(request.prompt, request.slowest).tokens
        return found >= pages * self._cache.memory.page_tokens

    def hurry(self) -> None:
        """If storage keeps the next requests waiting and nobody else could start, they go on with
        what has come."""
        waiting = [entry[2] for entry in self._waiting]
        if any(request.ready for request in waiting):
            return
        fetches = [request.fetch for request in waiting if not request.settled]
        for fetch in fetches[: self._max_running - len(self.running)]:
            assert fetch is not None, "whoever has no fetch is settled"
            fetch.stop()

    def _give_way(self, first: Request) -> bool:
        """Make some room for a request: whoever is of lower priority waits again, latest first.

        Nobody has to if pages are leaving anyway, or if it would not help. When nothing runs and
        nothing moves, only pins of sessions can be in its way: they go.
        """
        lower = [r for r in self.running if r.params.priority < first.params.priority]
        if lower and (self._cache.making_room or not self._fits_beside(first, lower)):
            return False
        if lower:
            self.retract(min(lower, key=lambda r: (r.params.priority, -r.number)))
            return True
        return not self.running and not self._cache.busy and self._cache.forget_oldest()

    def _fits_beside(self, first: Request, lower: list[Request]) -> bool:
        """Whether there would be room for a request if those of lower priority had none."""
        page = self._cache.memory.page_tokens
        staying = [r for r in self.running if r not in lower]
        pages = sum(-(-r.max_length // page) for r in (first, *staying))
        return len(staying) < self._max_running and pages * page <= self._cache.max_sequence_tokens

    def retract(self, request: Request) -> None:
        """Take its slots and let it wait again; what it committed stays in the cache."""
        if request.held.live:
            self._cache.retain(request.held)
        self.remove(request)
        self.queue(request)

    def remove(self, request: Request) -> None:
        """However it ended, it holds nothing any more."""
        if request in self.running:
            self.running.remove(request)
            self.leave_out(request)
            in_use = request in self._at_work
            (self._cache.release if in_use else self._cache.release_idle)(request.held)
            request.lease = None
        else:
            self._unqueue(request)

    def leave_out(self, request: Request) -> None:
        """Nothing is to be made of its share of what was foreseen, or of what is under way."""
        if any(share.request is request for share in self._foreseen):
            self._foreseen = [share for share in self._foreseen if share.request is not request]
        self._under_way = [share for share in self._under_way if share.request is not request]

    def _unqueue(self, request: Request) -> None:
        self._waiting = [entry for entry in self._waiting if entry[2] is not request]

    def _start(self, request: Request) -> bool:
        """Slots for what is found and a promise for the rest; steps take from it as they go.

        Windows and states are kept where a step ends, and where that is only the step knows.
        """
        match = self._cache.match(request.prompt, request.slowest)
        page = self._cache.memory.page_tokens
        growth = -(-request.max_length // page) - match.tokens // page
        lease = self._cache.reserve(match, match.tokens, growth, request.params.priority)
        if lease is None:
            return False
        self._cache.load(lease)
        request.lease, request.computed = lease, lease.cached_tokens
        del request.scores[request.computed :]
        if not request.noted:
            request.by_tier, request.why = dict(lease.by_tier), lease.why
            request.noted = True
        request.admissions += 1
        request.state = RequestState.RUNNING
        self.running.append(request)
        return True

    # -- a step -----------------------------------------------------------------------------

    def plan(self) -> list[ScheduledChunk]:
        """Requests that generate come first; a request without slots for its share waits again."""
        under_way, self._under_way = [s for s in self._under_way if s.end <= s.request.length], []
        if under_way:
            return under_way
        self._at_work = []
        ready = self._ready()
        foreseen, self._foreseen = self._foreseen, []
        singles = all(share.ends and share.tokens == 1 for share in foreseen)
        if singles and len(foreseen) == len(ready) <= self.chunk_tokens:
            return foreseen
        self._give_back(foreseen)
        ready.sort(key=_turn)
        generating = sum(request.length - request.computed == 1 for request in ready)
        left, shares = self._most(generating), []
        for request in ready:
            count = min(request.length - request.computed, left)
            if count == 0:
                continue
            end = self._grown(request, request.computed + count)
            if end is None:
                self.retract(request)
                continue
            if self._states:
                end = self._cut(request, end)
            left -= end - request.computed
            shares.append(ScheduledChunk(request, end))
        return sorted(shares, key=_place)

    @property
    def pressed(self) -> bool:
        """Where somebody waits for room, steps with prompts are small, and begun beforehand."""
        return self.crowded and self._goes_ahead

    def _most(self, generating: int) -> int:
        """How many tokens a step has in which so many generate."""
        if not generating:
            return self.chunk_tokens
        beside = CROWDED_TOKENS if self.pressed else BESIDE_TOKENS
        return min(max(beside, 2 * generating), self.chunk_tokens)

    def foresee(self, late: bool = False) -> list[ScheduledChunk]:
        """What the next `plan` gives if nobody comes before, nor goes whose tokens are not all
        there yet: one more token for everybody whose tokens are all computed. Nothing if it will be
        something else, as when there are prompts; but if most of a pass is done (`late`), and
        somebody generates, with the next parts of these.

        Whose prefix is on its way has its pages elsewhere when it lands, if others have the same.
        Where pages depend on tokens behind them, a next one is not taken before its first is known.
        """
        self._foreseen, self._ending = [], False
        ready = self._ready()
        if any(r.held.loading or r.held.failed or r.length - r.computed == 1 for r in ready):
            return []
        page, depends = self._cache.memory.page_tokens, self._cache.memory.holdback > 0
        done = [request for request in ready if request.computed == request.length]
        going = [request for request in done if request.length + 1 < request.max_length]
        prompts = sorted((r for r in ready if r.computed < r.length), key=_turn)
        if not going or (prompts and not (late and self.pressed)):
            return []
        self._ending = len(going) < len(done)
        if depends and any(request.computed % page == 0 for request in going):
            return []
        left = self._most(len(going)) - len(going)
        if left < (2 if prompts else 0):  # A single token would not be told from those to be known.
            return []
        coming = [ScheduledChunk(request, request.length + 1) for request in going]
        for request in prompts:
            count = min(request.length - request.computed, left)
            if count > 1:
                coming.append(ScheduledChunk(request, request.computed + count))
                left -= count
        if not all(self._cache.grow(share.request.held, share.end) for share in coming):
            self._give_back(coming)
            return []
        self._foreseen = sorted(coming, key=_place)
        return self._foreseen

    def _give_back(self, shares: list[ScheduledChunk]) -> None:
        """What was taken for parts of prompts that are not computed: windows are kept before their
        ends, and the next part ends elsewhere."""
        for share in shares:
            if share.tokens > 1:
                self._cache.shrink(share.request.held, share.request.computed)

    @property
    def steady(self) -> bool:
        """Whether what is foreseen can be begun before it is known who goes on.

        A token too many would be in a running state. Whoever comes meanwhile takes part in the pass
        after it; whose prefix is about to land, and who gets the room of those that end now, need
        not wait so long for a pass of single tokens. Prompts are foreseen so late that they do.
        """
        prompts = any(share.tokens > 1 for share in self._foreseen)
        room = self._ending and self.waiting > 0
        loading = any(request.held.loading for request in self.running)
        return self._goes_ahead and (prompts or not (room or loading))

    def began(self) -> None:
        """What was foreseen is under way: `plan` gives what is left of it."""
        self._under_way, self._foreseen = self._foreseen, []
        self._at_work = [share.request for share in self._under_way]

    def _ready(self) -> list[Request]:
        """Who can take part in a step.

        If nobody's prefix is there yet, those begin before it is whose first layers are, since the
        others follow while these are computed with. Without such, all begin.
        """
        landed = [r for r in self.running if not (self.lets_land and r.held.loading)]
        return landed or [r for r in self.running if r.held.arriving] or [*self.running]

    def _grown(self, request: Request, end: int) -> int | None:
        """How far there are slots: up to `end`, or to the end of the page; None for nowhere.

        Whoever is alone takes what sessions have pinned, since waiting would bring nothing.
        """
        page = self._cache.memory.page_tokens
        least = min(end, (request.computed // page + 1) * page)
        while not self._cache.grow(request.held, end):
            if self._cache.grow(request.held, least):
                return least
            if len(self.running) > 1 or self._cache.busy or not self._cache.forget_oldest():
                return None
        return end

    def _cut(self, request: Request, end: int) -> int:
        """A running state is written where a step ends: end where a snapshot is wanted.

        What was taken beyond goes back: the next step may end elsewhere, and needs its state there.
        """
        page, wanted = self._cache.memory.page_tokens, end
        for anchor in self._states if request.computed // page < (end - 1) // page else ():
            table = self._cache.page_table(request.held, anchor)
            for number in range(request.computed // page, (end - 1) // page):
                if table[number] >= 0:
                    end = (number + 1) * page
                    break
        if end < wanted:
            self._cache.shrink(request.held, end)
        return end


def _turn(request: Request) -> tuple[bool, int, int]:
    """Who gets a step's tokens first: who generates, then the higher priority, then the older."""
    return (request.length - request.computed > 1, -request.params.priority, request.number)


def _place(share: ScheduledChunk) -> tuple[int, tuple[str, ...], bytes]:
    """Where a share stands in the step: prompts come last, those after most tokens behind others,
    since programs begin with the last. Of those who generate neighbours begin alike, since programs
    read for neighbours together what they have in common."""
    request = share.request
    if share.tokens > 1:
        return request.computed, (), b""
    return -1, request.params.namespace, request.prompt.beginning


def _anchors_of_states(cache: TieredCache) -> list[str]:
    """Anchors that keep running states in a layer of any stage, whatever this one has."""
    own = {p.follows or p.name for p in cache.memory.pools if p.reuse.stride is not None}
    names = sorted(anchor.name for anchor in cache.memory.anchors)
    nowhere = cache.agreement.all_true([name not in own for name in names])
    return [name for name, none in zip(names, nowhere, strict=True) if not none]
