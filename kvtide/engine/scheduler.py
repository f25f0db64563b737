"""Continuous batching: which requests run, and which chunk of each the next step computes.

Admission reserves the worst case. A request runs once the device has slots for its prefix and a
promise of slots for the rest of its prompt and its whole output; of windows and states, for what a
few steps need. A request of higher priority that finds no slots preempts those of lower priority:
they are retracted, wait again, and later resume where they were.

Every step gives one token to each decoding request. Chunked prefill: chunks of prompts share the
rest of the step's token budget by priority and age. Beside decode the budget is smaller, so that
decode latency stays bounded.

No prefix is computed twice at once: a request that shares pages which a running request is about to
compute waits until it finds them, or until they will not come from there.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

from kvtide.cache import TieredCache
from kvtide.engine.chunks import PlannedStep, ScheduledChunk, unread_draft, with_drafts
from kvtide.engine.request import PrefixOwner, Request, RequestState
from kvtide.engine.residency.hot_residency import GatherBudget

MIXED_STEP_TOKENS = 2048
"""Token budget of a step with both decode and prefill, decode tokens included. A larger one delays
the next token of decoding requests, and leaves no prefill to batch them with later. GEMMs run well
at this number of rows."""
BLOCKED_STEP_TOKENS = 1024
"""The same while a request waits for slots, where steps of so few tokens are CUDA graphs: these
can be launched ahead."""
MAX_PREFIX_WAITS = 2
"""How often a request waits for another's prefix. Windows and states may be missing after the first
wait: the first request then keeps them where the prompts part, and the second wait finds them. A
third would serve requests one by one."""


class Scheduler:
    """`chunk_tokens` is the token budget of a step (it may change between steps), `max_running` the
    largest batch. No more requests run than a step has tokens, so that all can decode.

    on_admitted    is called with every request that has its lease, before it is in a step
    retractions    how often a running request was queued again: preempted, or to recompute
    blocked        the first waiting request found no slots; only requests that leave free some
    skips_loading  requests whose prefix is loading take no part in a step if others can run
    launches_ahead a step may be launched before the host knows its tokens: it is a CUDA graph
    keeps_states   the model has recurrent states or open entries, which a step overwrites: a step
                   launched on a token that the host then rejects could not be undone
    """

    def __init__(
        self, cache: TieredCache, chunk_tokens: int, max_running: int, cuda_graphs: bool = False
    ) -> None:
        self.running: list[Request] = []
        self.retractions = 0
        self._waiting: list[tuple[int, int, Request]] = []
        self._cache = cache
        self.chunk_tokens = chunk_tokens
        self.max_running = min(max_running, chunk_tokens)
        self._states = _anchors_of_states(cache)
        self.keeps_states = any(
            pool.reuse.stride is not None or pool.tail_entries is not None
            for pool in cache.memory.pools
        )
        self.skips_loading = self.launches_ahead = cuda_graphs
        self.blocked = False
        self.on_admitted: Callable[[Request], None] = lambda request: None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def queued(self) -> list[Request]:
        """The waiting requests, in the order of admission."""
        return [request for *_, request in self._waiting]

    def find(self, number: int) -> Request | None:
        """The running or waiting request of this number."""
        present = (*self.running, *self.queued)
        return next((request for request in present if request.number == number), None)

    # -- admission --------------------------------------------------------------------------

    def queue(self, request: Request) -> None:
        """Higher priorities first; among equals the older request, also when it was retracted."""
        request.state = RequestState.WAITING
        insort(self._waiting, (-request.params.priority, request.number, request))
        if self._waiting[0][2] is request:
            self.blocked = False

    def admit(self) -> None:
        """Admit waiting requests while the first of them finds slots, preempting lower priorities.

        A request that waits for a fetch or for another's prefix blocks none behind it.
        """
        while (first := self._admit_fitting()) is not None:
            if not self._preempt_for(first):
                self.blocked = all(r.params.priority >= first.params.priority for r in self.running)
                return

    def admit_without_preemption(self) -> None:
        """Admit waiting requests into free slots; for while a step runs."""
        if (first := self._admit_fitting()) is not None:
            self.blocked = all(r.params.priority >= first.params.priority for r in self.running)

    def _admit_fitting(self) -> Request | None:
        """Admit requests in order; the first that finds no slots, None if none is left."""
        self.blocked = False
        while self.can_admit and (first := self._first_ready()) is not None:
            if len(self.running) == self.max_running or not self._start(first):
                return first
            self._unqueue(first)
        return None

    @property
    def can_admit(self) -> bool:
        """A request waits, and the batch has a place for it or one to preempt."""
        if not self._waiting or len(self.running) < self.max_running:
            return bool(self._waiting)
        return min(request.params.priority for request in self.running) < -self._waiting[0][0]

    def _first_ready(self) -> Request | None:
        """The first request that waits for slots alone."""
        for *_, request in self._waiting:
            if request.ready and not self._waits_for_prefix(request):
                return request
        return None

    def _waits_for_prefix(self, request: Request) -> bool:
        """Have a request wait for the running one that is about to compute most of its prefix.

        The owner is noted and not looked up again before it is done. Running requests go on or
        leave, so no wait is endless; and no request waits for one of lower priority.
        """
        request.prefix_owner = None
        if request.prefix_waits == MAX_PREFIX_WAITS:
            return False
        shared = (
            PrefixOwner(other, self._cache.shared_pages(request.prompt, other.held))
            for other in self.running
            if other.params.priority >= request.params.priority
        )
        owner = max(shared, key=lambda each: each.end, default=None)
        if owner is None or owner.end == 0 or self._finds(request, owner.end):
            return False
        request.prefix_owner = owner
        request.prefix_waits += 1
        return True

    def _finds(self, request: Request, pages: int) -> bool:
        """So many of the request's pages are cached already."""
        found = self._cache.match(request.prompt, request.slowest_tier).tokens
        return found >= pages * self._cache.memory.page_tokens

    def stop_fetches(self) -> None:
        """End the fetches of the next requests if no other request could start: they resume from
        what has arrived."""
        waiting = self.queued
        if any(request.ready for request in waiting):
            return
        fetches = [request.fetch for request in waiting if not request.settled]
        for fetch in fetches[: self.max_running - len(self.running)]:
            assert fetch is not None, "a request without a fetch is settled"
            fetch.stop()

    def _preempt_for(self, first: Request) -> bool:
        """Retract the latest request of the lowest priority to free slots for this one.

        None is retracted while demoted pages are about to leave, or if that would not be enough.
        When nothing runs and nothing moves, only session pins hold slots: one of them goes.
        """
        lower = [r for r in self.running if r.params.priority < first.params.priority]
        if lower and (self._cache.making_room or not self._fits_beside(first, lower)):
            return False
        if lower:
            self.retract(_victim(lower))
            return True
        return not self.running and not self._cache.busy and self._cache.sessions.unpin_one()

    def _fits_beside(self, first: Request, lower: list[Request]) -> bool:
        """The request would fit if those of lower priority held no slots."""
        page = self._cache.memory.page_tokens
        staying = [r for r in self.running if r not in lower]
        pages = sum(-(-r.max_length // page) for r in (first, *staying))
        return len(staying) < self.max_running and pages * page <= self._cache.history_tokens

    def retract(self, request: Request) -> None:
        """Free its slots and queue it again: preempted, or to recompute what failed to load."""
        if request.held.live:
            self._cache.retain(request.held)
        self.remove(request)
        self.queue(request)
        self.retractions += 1

    def remove(self, request: Request) -> None:
        """Free all that the request holds, running or waiting."""
        if request in self.running:
            self.running.remove(request)
            if request.is_quiet is None:
                self._cache.release(request.held)
            else:
                self._cache.release_when(request.held, request.is_quiet)
            request.lease, request.drafts = None, ()
        else:
            self._unqueue(request)

    def _unqueue(self, request: Request) -> None:
        self._waiting = [entry for entry in self._waiting if entry[2] is not request]

    def _start(self, request: Request) -> bool:
        """Take slots for the cached prefix and a promise for the rest, which steps draw on.

        Windows and states are kept where a step ends, which only the step knows.
        """
        match = self._cache.match(request.prompt, request.slowest_tier)
        page = self._cache.memory.page_tokens
        growth = -(-request.max_length // page) - match.tokens // page
        lease = self._cache.reserve(match, match.tokens, growth, request.params.priority)
        if lease is None:
            return False
        self._cache.load(lease)
        request.lease, request.computed = lease, lease.cached_tokens
        del request.scores[request.computed :]
        if not request.reported:
            request.by_tier, request.why = request.found_here(lease), lease.why
            request.reported = True
        request.admissions += 1
        request.state = RequestState.RUNNING
        self.running.append(request)
        self.on_admitted(request)
        return True

    # -- the next step ----------------------------------------------------------------------

    def schedule(self) -> list[ScheduledChunk]:
        """The chunks of the next step, decode first.

        Where a request finds no slots the latest one of the lowest priority is retracted, and so on
        until it does or is that one itself: the oldest always goes on.
        """
        ready = sorted(self._ready(), key=_schedule_order)
        decoding = sum(request.length - request.computed == 1 for request in ready)
        left, chunks = self._token_budget(decoding), list[ScheduledChunk]()
        gathered = GatherBudget(self._cache)
        for request in ready:
            count = min(request.length - request.computed, left)
            if count == 0 or request.lease is None:
                continue
            if not gathered.take(request.computed, count + len(request.drafts)):
                request.drafts = ()
                if not gathered.take(request.computed, count):
                    continue
            end = self._grown(request, request.computed + count)
            while end is None and request.lease is not None:
                victim = _victim(self.running)
                self.retract(victim)
                left += sum(chunk.tokens for chunk in chunks if chunk.request is victim)
                chunks = [chunk for chunk in chunks if chunk.request is not victim]
                end = None if victim is request else self._grown(request, request.computed + count)
            if end is None:
                continue
            if self._states:
                end = self._cut_at_checkpoint(request, end)
            left -= end - request.computed
            chunks.append(ScheduledChunk(request, end))
        return sorted(with_drafts(chunks, left), key=_batch_order)

    def _token_budget(self, decoding: int) -> int:
        """Tokens of a step in which so many requests decode."""
        if not decoding:
            return self.chunk_tokens
        mixed = BLOCKED_STEP_TOKENS if self.plans_prefill_ahead else MIXED_STEP_TOKENS
        return min(max(mixed, 2 * decoding), self.chunk_tokens)

    def _ready(self) -> list[Request]:
        """The requests that take part in a step.

        If every prefix is still loading, those run whose first layers have arrived: the others
        follow while these compute. Without such, all run, and wait layer by layer.
        """
        landed = [r for r in self.running if not (self.skips_loading and r.held.loading)]
        return landed or [r for r in self.running if r.held.arriving] or [*self.running]

    def _grown(self, request: Request, end: int) -> int | None:
        """How far there are slots: up to `end`, or to the end of the page; None for nowhere.

        Session pins give way before a running request is retracted. One that runs alone takes them
        all if it must: waiting would free nothing.
        """
        cache, page = self._cache, self._cache.memory.page_tokens
        page_end = min(end, (request.computed // page + 1) * page)
        while not cache.grow(request.held, end):
            if cache.grow(request.held, page_end):
                return page_end
            alone = len(self.running) == 1 and not cache.busy
            takes = alone or (cache.sessions.hold_enough and not cache.making_room)
            if not (takes and cache.sessions.unpin_one()):
                return None
        return end

    def _cut_at_checkpoint(self, request: Request, end: int) -> int:
        """End the chunk where a state checkpoint is wanted: states are written where a step ends.

        Slots beyond go back: the next step may end elsewhere, and needs its state there.
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

    def slots_for_drafts(self, request: Request, count: int) -> int:
        """Take slots for up to `count` drafts behind a request's tokens; for how many there are.

        None is drafted beyond the request's last token, so that admission has counted all. Pages
        are taken one by one: windows are then kept before every one of them, wherever acceptance
        ends. A recurrent state is written where a step ends, so that drafts end with the page.
        """
        last = min(request.length + count, request.max_length - 1)
        if self._states:
            last = min(last, self._page_end(request))
        return self._slots_up_to(request, last) - request.length

    def _page_end(self, request: Request) -> int:
        """Where the page of a request's last token ends."""
        page = self._cache.memory.page_tokens
        return -(-request.length // page) * page

    def _slots_up_to(self, request: Request, last: int) -> int:
        """Take slots behind a request's tokens, page by page; returns how far there are some."""
        page, end = self._cache.memory.page_tokens, request.length
        while end < last:
            page_end = min(last, (end // page + 1) * page)
            if not self._cache.grow(request.held, page_end):
                break
            end = page_end
        return end

    # -- the step after it ------------------------------------------------------------------

    @property
    def plans_prefill_ahead(self) -> bool:
        """While a request waits for slots, mixed steps are small and are launched ahead: but for
        states, which are kept where a prefill chunk ends."""
        return self.blocked and self.launches_ahead and not self.keeps_states

    def plan_decode(self) -> PlannedStep | None:
        """The step after the current one, assuming that no request arrives or finishes: one decode
        token per running request. None if it will be another, as with prefill to do."""
        ready = self._ready()
        return self._planned(ready, []) if all(_is_computed(r) for r in ready) else None

    def plan_mixed(self) -> PlannedStep | None:
        """The same with the next prefill chunks beside; for late in the current step."""
        ready = self._ready()
        prefills = sorted((r for r in ready if not _is_computed(r)), key=_schedule_order)
        return self._planned(ready, prefills) if self.plans_prefill_ahead or not prefills else None

    def _planned(self, ready: list[Request], prefills: list[Request]) -> PlannedStep | None:
        """Chunks with slots, if decoding requests go on.

        A loading prefix may land on other slots, if another request computed the same pages. Where
        pages depend on tokens behind them, a page is not begun before its first token is known.
        """
        if any(r.held.loading or r.held.failed or r.length - r.computed == 1 for r in ready):
            return None
        page, depends = self._cache.memory.page_tokens, self._cache.memory.holdback > 0
        computed = [request for request in ready if _is_computed(request)]
        decoding = [r for r in computed if r.length + 1 < r.max_length]
        if not decoding or (depends and any(r.computed % page == 0 for r in decoding)):
            return None
        left = self._token_budget(len(decoding)) - len(decoding)
        if left < (2 if prefills else 0):  # A prefill chunk of one token would pass for decode.
            return None
        chunks = [ScheduledChunk(request, request.length + 1) for request in decoding]
        gathered = GatherBudget(self._cache)
        for request in prefills:
            count = min(request.length - request.computed, left)
            if count > 1 and gathered.take(request.computed, count):
                chunks.append(ScheduledChunk(request, request.computed + count))
                left -= count
        if not all(self._cache.grow(chunk.request.held, chunk.end) for chunk in chunks):
            self.give_back(chunks)
            return None
        return PlannedStep(sorted(chunks, key=_batch_order), len(decoding) < len(computed))

    def plan_verify(self) -> PlannedStep | None:
        """The next step, all of whose tokens but the drafts are known; None if requests wait, load
        or prefill, and others may be in it."""
        running = [*self.running]
        if (self.can_admit and not self.blocked) or any(
            r.held.loading or r.held.failed or (not r.drafts and r.length - r.computed > 1)
            for r in running
        ):
            return None
        chunks = self.schedule()
        return PlannedStep(chunks, frees_slots=False) if self.running == running else None

    def plan_verify_ahead(
        self, chunks: Sequence[ScheduledChunk], wanted: Callable[[Request], int]
    ) -> PlannedStep | None:
        """The step behind a verify step of these chunks, before the host knows what is accepted: of
        each request the token that is sampled last, and up to `wanted` drafts.

        There are slots wherever acceptance ends. None if other requests may be in the step. With
        recurrent states the step cannot be launched, only drafted for: it has no drafts that could
        lie behind the page's end.
        """
        ending = [chunk for chunk in chunks if chunk.request.length + 1 >= chunk.request.max_length]
        if (
            len(chunks) < len(self.running)
            or (self.can_admit and not self.blocked)
            or (ending and self.waiting)
            or any(request.held.loading or request.held.failed for request in self.running)
        ):
            return None
        planned = []
        left = self._token_budget(len(chunks)) - len(chunks)
        for chunk in chunks:
            request = chunk.request
            if chunk in ending:
                continue
            first = request.length + 1 + len(chunk.drafts)
            last = max(first, min(first + wanted(request), request.max_length - 1))
            if self._states:
                last = min(last, self._page_end(request))
            end = self._slots_up_to(request, last)
            if end < min(first, last):
                return None
            drafts = max(0, min(end - first, left))
            left -= drafts
            planned.append(ScheduledChunk(request, request.length + 1, (unread_draft(0),) * drafts))
        max_accepted = max(len(chunk.drafts) for chunk in chunks)
        return PlannedStep(planned, bool(ending), max_accepted) if planned else None

    def may_launch(self, planned: PlannedStep) -> bool:
        """The planned step may be launched before the sampled tokens are known. A request that ends
        leaves nothing of it: the pages that it keeps end before that.

        Requests that arrive meanwhile join the step after it. A decode step is not worth that delay
        to a prefix about to land, or to a request that gets the slots of one that ends now. A mixed
        step is planned so late that these are in it.
        """
        frees_slots = planned.frees_slots and self.waiting > 0
        delays = frees_slots or any(request.held.loading for request in self.running)
        return self.launches_ahead and (planned.has_prefill or not delays)

    def may_launch_uncertain(self, planned: PlannedStep) -> bool:
        """The same where the host may read another token than the device has."""
        return not self.keeps_states and self.may_launch(planned)

    def confirms(self, chunks: list[ScheduledChunk]) -> bool:
        """A planned decode step is what `schedule` would return now."""
        decode = all(chunk.completes and chunk.tokens == 1 for chunk in chunks)
        return decode and len(chunks) == len(self._ready()) <= self.chunk_tokens

    def give_back(self, chunks: list[ScheduledChunk]) -> None:
        """Return slots of prefill chunks that are not computed: windows are kept before their ends,
        and the next chunk ends elsewhere."""
        for chunk in chunks:
            if chunk.tokens > 1:
                self._cache.shrink(chunk.request.held, chunk.request.computed)


def _victim(requests: Sequence[Request]) -> Request:
    """Which request is preempted: of the lowest priority, the latest."""
    return min(requests, key=lambda request: (request.params.priority, -request.number))


def _is_computed(request: Request) -> bool:
    return request.computed == request.length


def _schedule_order(request: Request) -> tuple[bool, int, int]:
    """Decode first, then higher priority, then age."""
    return (request.length - request.computed > 1, -request.params.priority, request.number)


def _batch_order(chunk: ScheduledChunk) -> tuple[int, tuple[str, ...], bytes]:
    """Decode rows with a common prefix are neighbours: cascade attention reads it once for them.
    Prefill chunks follow, longest context last, where the attention kernel starts."""
    request = chunk.request
    if chunk.tokens > 1:
        return request.computed, (), b""
    return -1, request.params.namespace, request.prompt.beginning


def _anchors_of_states(cache: TieredCache) -> list[str]:
    """Anchors that keep recurrent states in a layer of any stage, whatever this one has."""
    own = {p.follows or p.name for p in cache.memory.pools if p.reuse.stride is not None}
    names = sorted(anchor.name for anchor in cache.memory.anchors)
    nowhere = cache.agreement.all_true([name not in own for name in names])
    return [name for name, none in zip(names, nowhere, strict=True) if not none]
