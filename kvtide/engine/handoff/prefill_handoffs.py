"""The prefill side of handoffs: what is computed is written to the peer at once.

    open ──▶ the prompt is prefilled, chunk by chunk ──▶ first token ──▶ tail written
               └──reserve: after every step, its new pages are written──┘        │
                                          lease kept until the peer is done ◀────┘

A request with a `HandoffTarget` computes its prompt and one token. Its peer may name slots before,
during or after that: pages are written as soon as both are there. The lease is kept until the peer
says that it is done, since a page is read by the sender's thread.

All ranks are given the same messages in the same order. Each writes its own rows, and reports what
it has written to the leader (`reports`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import numpy as np

from kvtide.cache import Lease, TieredCache
from kvtide.engine.handoff.messages import (
    Complete,
    Done,
    First,
    HandoffMessage,
    Numbers,
    Reserve,
    StopWriting,
)
from kvtide.engine.handoff.page_writer import PageWrite, PageWriter, PlacedPages
from kvtide.engine.handoff.reports import RankReport, ReportKind
from kvtide.engine.handoff.request_fields import prompt_digest
from kvtide.engine.request import Finish, Request, RequestState
from kvtide.engine.speculation.speculation import Speculation
from kvtide.spec import ALL
from kvtide.tiers.manifest import PAGES, TAIL
from kvtide.tiers.row_copies import DestinationError
from kvtide.transfer.peer.page_sender import CANCELLED

ABORTED = "the prefill was aborted"
GAVE_WAY = "its pages gave way to prompts that decode servers wait for"
REPLACED = "another reservation took its place"
ReportRank = Callable[[RankReport], None]
MAX_EARLY = 1024
"""Reservations kept for requests that a router has yet to send; and names of rooms that ended on
one side before the other came."""


@dataclass(slots=True, eq=False)
class PrefillHandoff:
    """One prompt that is prefilled for a peer.

    boundary  the page at which the tail begins
    peer      the connection that reserved; None before
    sent      numbers of places that were given to the sender
    lease     once the request has ended, the one that keeps its pages
    released  the peer needs nothing more
    unclaimed since when the prompt is computed and no peer has come for it
    in_flight jobs of the sender; its thread counts them down
    """

    request: Request
    boundary: int
    peer: str | None = None
    reserve: Reserve | None = None
    sent: set[int] = field(default_factory=set)
    tail_sent: bool = False
    lease: Lease | None = None
    failed: bool = False
    released: bool = False
    unclaimed: float | None = None
    in_flight: int = 0

    @property
    def room(self) -> str:
        target = self.request.params.handoff_to
        assert target is not None
        return target.room

    @property
    def is_over(self) -> bool:
        return self.released and self.request.finish is not None

    @property
    def is_awaited(self) -> bool:
        """The peer has slots for a prompt that waits for slots here."""
        queued = self.request.state is RequestState.WAITING and self.request.ready
        return queued and self.reserve is not None and not (self.failed or self.released)

    def is_quiet(self) -> bool:
        """No thread reads pages of a lease that the request no longer has."""
        return not self.in_flight and (self.released or self.request.finish is None)


class PrefillHandoffs:
    """`writer`: None where nothing can be handed over. `report` and `on_computed` go to the
    leader's `RankReports`. `speculation`: its draft's state goes over with the tail."""

    def __init__(self, cache: TieredCache, speculation: Speculation | None) -> None:
        self.writer: PageWriter | None = None
        self.report: ReportRank = _unheard
        self.on_computed: Callable[[First, Complete], None] = _unheard
        self.ended: Counter[str] = Counter()
        self._cache, self._speculation = cache, speculation
        self._rooms: dict[str, PrefillHandoff] = {}
        self._early: dict[str, tuple[str, Reserve]] = {}
        self._gone: dict[str, str] = {}
        self._unwanted: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def rooms(self) -> Mapping[str, PrefillHandoff]:
        """Handoffs that are not over."""
        return self._rooms

    def takes(self, room: str) -> bool:
        """Whether a request may open this room: a router that resends uses the same one."""
        return room not in self._rooms

    # -- from the engine --------------------------------------------------------------------

    def open(self, request: Request) -> None:
        """A request was queued whose prompt goes to a peer."""
        target = request.params.handoff_to
        assert target is not None and self.takes(target.room)
        boundary = (request.prompt.tokens - 1) // self._cache.memory.page_tokens
        if boundary:
            request.prompt.checkpoints = (boundary,)
        handoff = PrefillHandoff(request, boundary)
        handoff.released = self._unwanted.pop(target.room, None) is not None
        self._gone.pop(target.room, None)
        request.is_quiet = handoff.is_quiet
        self._rooms[target.room] = handoff
        if target.room in self._early:
            self._reserve(handoff, *self._early.pop(target.room))

    def advance(self) -> None:
        """After a step's commits: give the sender all pages that are there now."""
        for handoff in list(self._rooms.values()):
            if handoff.reserve is not None and not handoff.failed:
                self._send(handoff)

    def finished(self, request: Request, finish: Finish) -> None:
        """The request has its first token, or has ended without one; its lease is still there."""
        target = request.params.handoff_to
        handoff = None if target is None else self._rooms.get(target.room)
        if handoff is None or handoff.request is not request:
            return
        if finish is Finish.ABORT or not request.output or request.lease is None:
            self._fail(handoff, ABORTED)
            if handoff.reserve is None:
                handoff.released = True
                _remember(self._gone, handoff.room, ABORTED)
            return
        handoff.lease = request.held
        if handoff.reserve is not None and not handoff.failed:
            self._send(handoff)

    def ended_request(self, request: Request) -> None:
        """The request has left the scheduler: forget a room that the peer is done with."""
        target = request.params.handoff_to
        if target is not None and (handoff := self._rooms.get(target.room)) is not None:
            self._forget_if_over(target.room, handoff)

    # -- from the peer ----------------------------------------------------------------------

    def receive(self, peer: str, message: HandoffMessage) -> Request | None:
        """A message of a connection. Returns a request that the peer asked for and gives up."""
        if isinstance(message, Reserve):
            self._take(peer, message)
            return None
        if isinstance(message, StopWriting):
            return self._stop(message)
        return self._done(peer, message) if isinstance(message, Done) else None

    def _take(self, peer: str, reserve: Reserve) -> None:
        """Reserve for a room, or keep that until its request comes."""
        room, handoff = reserve.room, self._rooms.get(reserve.room)
        self._unwanted.pop(room, None)
        reason = self._gone.pop(room, "")
        if handoff is not None:
            self._reserve(handoff, peer, reserve)
            return
        if room not in self._early and len(self._early) >= MAX_EARLY:
            reason = reason or "too many reservations wait for their requests"
        if reason:
            self._refuse(reserve, reason)
            return
        if (before := self._early.get(room)) is not None and before[1].epoch != reserve.epoch:
            self._refuse(before[1], REPLACED)
        self._early[room] = (peer, reserve)

    def _refuse(self, reserve: Reserve, reason: str) -> None:
        """Nothing was written for it, and nothing will be."""
        self._report("failed", reserve, reason=reason)
        self._report("over", reserve)

    def _done(self, peer: str, message: Done) -> Request | None:
        """A peer needs nothing more; a room that another reservation has goes on."""
        handoff = self._rooms.get(message.room)
        reserve = None if handoff is None else handoff.reserve
        if handoff is not None and reserve is not None:
            other = (handoff.peer, reserve.epoch) != (peer, message.epoch)
            return None if other else self._release(message.room)
        return self._release(message.room)

    def peer_lost(self, peer: str) -> list[Request]:
        """A connection has ended: what it reserved is over. Returns requests that it asked for."""
        self._early = {room: each for room, each in self._early.items() if each[0] != peer}
        rooms = [room for room, handoff in self._rooms.items() if handoff.peer == peer]
        given_up = []
        for room in rooms:
            handoff = self._rooms[room]
            if self.writer is not None and handoff.reserve is not None:
                self.writer.cancel(room, handoff.reserve.epoch, _unheard)
            handoff.failed = True
            if (request := self._release(room)) is not None:
                given_up.append(request)
        if self.writer is not None:
            self.writer.drop_peer(peer)
        return given_up

    def expire(self, now: float, timeout_s: float) -> None:
        """Release computed prompts that no peer came for within `timeout_s`."""
        for room, handoff in list(self._rooms.items()):
            if handoff.request.finish is None or handoff.reserve is not None:
                continue
            if handoff.unclaimed is None:
                handoff.unclaimed = now
            elif now - handoff.unclaimed > timeout_s:
                self._drop(room, f"no decode server came for the prompt within {timeout_s:g} s")

    def drop_unclaimed(self) -> None:
        """Nothing runs: drop the last computed prompt that no peer has come for, if a prompt that a
        peer has slots for waits for room here.

        The peer may be without slots until that prompt is computed, and so may never come for the
        others: each side would wait for the other.
        """
        rooms = self._rooms
        awaited = any(one.is_awaited for one in rooms.values())
        unclaimed = [r for r, one in rooms.items() if one.lease is not None and one.reserve is None]
        if awaited and unclaimed and not self._cache.busy:
            self._drop(unclaimed[-1], GAVE_WAY)

    def _drop(self, room: str, reason: str) -> None:
        """Give up a computed prompt; a peer that comes for it learns why, and computes it."""
        self._rooms[room].failed = True
        self._release(room)
        _remember(self._gone, room, reason)

    def _stop(self, message: StopWriting) -> Request | None:
        room, handoff = message.room, self._rooms.get(message.room)
        if room in self._early and self._early[room][1].epoch == message.epoch:
            del self._early[room]

        def silent(quiet: bool) -> None:
            self._report("silent", message, silent=quiet)

        if self.writer is None:
            silent(True)
        else:
            self.writer.cancel(room, message.epoch, silent)
        if handoff is None:
            _remember(self._unwanted, room, "")
            if self.writer is not None:
                self.writer.forget(room)
            return None
        if handoff.reserve is not None and handoff.reserve.epoch != message.epoch:
            return None
        handoff.failed = True
        return self._release(room)

    def _release(self, room: str) -> Request | None:
        """The peer needs nothing more of the room."""
        self._early.pop(room, None)
        handoff = self._rooms.get(room)
        if handoff is None:
            _remember(self._unwanted, room, "")
            return None
        handoff.released = True
        self._forget_if_over(room, handoff)
        target = handoff.request.params.handoff_to
        unfinished = handoff.request.finish is None
        return handoff.request if unfinished and target is not None and target.asked else None

    def _forget_if_over(self, room: str, handoff: PrefillHandoff) -> None:
        if handoff.is_over and self._rooms.get(room) is handoff:
            del self._rooms[room]
            self.ended["failed" if handoff.failed else "handed_over"] += 1
            if self.writer is not None and handoff.reserve is not None:
                self.writer.forget(room, partial(self._report, "over", handoff.reserve))
            elif self.writer is not None:  # It may have been cancelled all the same.
                self.writer.forget(room)

    # -- writing ----------------------------------------------------------------------------

    def _reserve(self, handoff: PrefillHandoff, peer: str, message: Reserve) -> None:
        before, over = handoff.reserve, handoff.failed or handoff.released
        if before is not None and (handoff.peer, before.epoch) == (peer, message.epoch):
            return  # It was sent twice.
        if before is not None and handoff.peer != peer and not over:
            self._refuse(message, "another decode server has this room")
            return
        if before is not None:
            self._end_epoch(before, REPLACED, ("over",) if over else ("failed", "over"))
        handoff.peer, handoff.reserve = peer, message
        handoff.sent, handoff.tail_sent = set(), False
        handoff.failed = handoff.released = False
        problem = self._problem(handoff, peer, message)
        if problem:
            self._fail(handoff, problem)
        else:
            self._send(handoff)

    def _problem(self, handoff: PrefillHandoff, peer: str, reserve: Reserve) -> str:
        """Why nothing can be written for a reservation; empty if it can."""
        prompt = prompt_digest(handoff.request.params)
        if self.writer is None or not self.writer.knows(peer):
            return "this server and the peer have not paired"
        if handoff.request.finish is not None and handoff.lease is None:
            return ABORTED
        if (reserve.prompt, reserve.boundary) != (prompt, handoff.boundary):
            return "the room has another prompt or namespace here; send both the same request"
        return ""

    def _fail(self, handoff: PrefillHandoff, reason: str) -> None:
        """End a handoff that cannot go on; the peer learns of it once it has reserved."""
        was_over, handoff.failed = handoff.failed or handoff.released, True
        if handoff.reserve is not None and not was_over:
            self._end_epoch(handoff.reserve, reason, ("failed",))

    def _end_epoch(self, reserve: Reserve, reason: str, reports: Sequence[ReportKind]) -> None:
        """Write no more for a reservation, then make these reports of it: it failed, and the room
        goes on without it."""

        def silent(quiet: bool) -> None:
            if "failed" in reports:
                self._report("failed", reserve, reason=reason, silent=quiet)
            if "over" in reports:
                self._report("over", reserve)

        if self.writer is None:
            silent(True)
        else:
            self.writer.cancel(reserve.room, reserve.epoch, silent)

    def _report(
        self,
        kind: ReportKind,
        of: Reserve | StopWriting,
        numbers: tuple[int, ...] = (),
        absent: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        reason: str = "",
        silent: bool = True,
        captured: bytes = b"",
    ) -> None:
        rank = self.writer.own if self.writer is not None else 0
        of_rank = reason, silent, rank, captured
        self.report(RankReport(kind, of.room, of.epoch, numbers, dict(absent), *of_rank))

    def _send(self, handoff: PrefillHandoff) -> None:
        """Give the sender the pages that are computed and not sent, then the tail."""
        reserve, lease = handoff.reserve, handoff.lease or handoff.request.lease
        if reserve is None or lease is None or lease.loading or lease.failed:
            return
        assert self.writer is not None and handoff.peer is not None
        anchors = [anchor.name for anchor in self._cache.memory.anchors]
        tables = {anchor: self._cache.page_table(lease, anchor) for anchor in anchors}
        try:
            self._send_pages(handoff, reserve, lease, tables)
            if handoff.lease is not None and not handoff.tail_sent:
                self._send_tail(handoff, reserve, tables)
        except DestinationError as error:
            self._fail(handoff, str(error))

    def _send_pages(
        self,
        handoff: PrefillHandoff,
        reserve: Reserve,
        lease: Lease,
        tables: Mapping[str, Numbers],
    ) -> None:
        places, numbers = [], list[int]()
        for some in reserve.places:
            ready = self._ready(handoff, some.anchor, some.pages, lease)
            unsent = np.array([n not in handoff.sent for n in some.numbers], bool)
            if (chosen := np.flatnonzero(ready & unsent)).size:
                places.append(PlacedPages(some.anchor, some.pages[chosen], some.slots[chosen]))
                numbers += (some.first + chosen).tolist()
        if not numbers:
            return
        absent = self._absent(handoff, reserve, lease, set(numbers))
        report = partial(self._report, "written", reserve, tuple(numbers), absent)
        self._submit(handoff, reserve, PageWrite(*reserve.name, PAGES, tables, places), report)
        handoff.sent.update(numbers)

    def _ready(
        self, handoff: PrefillHandoff, anchor: str, pages: Numbers, lease: Lease
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which pages are computed; windows and states are those of the boundary alone."""
        assert self.writer is not None and handoff.peer is not None
        sources = self.writer.source_anchors(handoff.peer, anchor)
        histories = all(self._cache.memory.pool(one).reuse.reach is ALL for one in sources)
        if histories:
            return np.asarray(pages < lease.committed_pages, bool)
        return np.full(len(pages), lease.committed_pages >= handoff.boundary)

    def _absent(
        self, handoff: PrefillHandoff, reserve: Reserve, lease: Lease, numbers: set[int]
    ) -> dict[str, tuple[int, ...]]:
        """The places whose page here lacks an optional sidecar that the peer keeps."""
        assert self.writer is not None and handoff.peer is not None
        missing = self.writer.absent(handoff.peer)
        found: dict[str, tuple[int, ...]] = {name: tuple(numbers) for name in missing}
        for anchor in self._cache.memory.anchors:
            for name in self._cache.memory.optional_sidecars(anchor.name):
                if name in missing:
                    continue
                carried = self._cache.carries(lease, name)
                without = tuple(
                    number
                    for some in reserve.places
                    for number, page in zip(some.numbers, some.pages.tolist(), strict=True)
                    if number in numbers and page < len(carried) and not carried[page]
                )
                if without:
                    found[name] = without
        return found

    def _send_tail(
        self, handoff: PrefillHandoff, reserve: Reserve, tables: Mapping[str, Numbers]
    ) -> None:
        """The page behind the boundary: of every anchor, all that its slot has."""
        assert self.writer is not None and handoff.peer is not None
        page, row = np.array([handoff.boundary]), np.array([reserve.tail_row])
        anchors = self.writer.tail_anchors(handoff.peer)
        places = [PlacedPages(anchor, page, row) for anchor in anchors]
        work = PageWrite(*reserve.name, TAIL, tables, places)
        request, speculation = handoff.request, self._speculation
        drafts = speculation is not None and speculation.writes(request)
        whole = not self.writer.absent(handoff.peer)
        whole = whole and (drafts or not self._cache.memory.draft_sidecars)
        read = speculation.captured(request) if speculation is not None and drafts else None

        def report() -> None:
            """On the sender's thread: the device has done all that was queued before the tail."""
            self._report("tail", reserve, captured=read() if read is not None else b"")

        self._submit(handoff, reserve, work, report)
        handoff.tail_sent = True
        sampled = request.output[0]
        cached = {tier.name.lower(): count for tier, count in request.by_tier.items()}
        first = First(*reserve.name, sampled.token, sampled.logprob, tuple(sampled.top), cached)
        self.on_computed(first, Complete(*reserve.name, tail=whole))

    def _submit(
        self,
        handoff: PrefillHandoff,
        reserve: Reserve,
        work: PageWrite,
        report: Callable[[], None],
    ) -> None:
        assert self.writer is not None and handoff.peer is not None
        ready = self._cache.hardware.copier.queued()

        def ended(error: str | None, silent: bool) -> None:
            """On the sender's thread."""
            with self._lock:
                handoff.in_flight -= 1
            if error is None:
                report()
            elif error != CANCELLED:  # That is reported by what has cancelled.
                self._report("failed", reserve, reason=error, silent=silent)

        with self._lock:
            handoff.in_flight += 1
        try:
            self.writer.write(handoff.peer, work, ready, ended)
        except DestinationError:
            with self._lock:
                handoff.in_flight -= 1
            raise


def _remember(names: dict[str, str], room: str, reason: str) -> None:
    """Note a room, and lose the oldest ones of too many."""
    names[room] = reason
    while len(names) > MAX_EARLY:
        del names[next(iter(names))]


def _unheard(*_: object) -> None:
    """Nothing listens: a rank without peers."""
