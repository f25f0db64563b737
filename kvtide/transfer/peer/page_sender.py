"""The page sender: one thread that writes for all rooms of a process.

A *room* is one handoff, an *epoch* one set of destinations within it. Jobs of a room are written in
the order in which they were submitted; rooms take turns. A job begins when its device work is done
(`when_ready`), so that a chunk's pages are submitted before they are computed.

    QUEUED ──> ACTIVE ──> DONE      on_done(None, True)
       │          └─────> FAILED    on_done(reason, silent)
       └────────────────> FAILED

What always holds:

- Every submitted job gets exactly one `on_done`, in the order of its room.
- After a failure nothing more of that room and epoch is begun.
- `silent` speaks for all jobs of this room and epoch: no byte of them lands after the call.
- A peer that is frozen costs its own rooms a time-out; writes to other peers go on beside it.
- Callbacks run on the sender's thread and return soon. One that raises is counted.
- An exception fails its job and is counted; the thread lives on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

from kvtide.transfer.peer.transport import PeerLink, PendingWrite, TransportError, WriteBatch

log = logging.getLogger("kvtide")

PART_BYTES = 16 << 20
"""Batches are written in parts of this size: a cancelled room waits for the parts in flight."""
PARTS_IN_FLIGHT = 4
"""Per link: the next parts are there when one ends, however late that is seen."""
QUOTA_PART_S = 0.05
"""With a quota, parts are as small as what it gives in this time, but not below MIN_PART_BYTES."""
MIN_PART_BYTES = 64 << 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 500e-6
BURST_S = 0.1
"""After a pause, so much of a second's bytes may go at once."""
CANCELLED = "the room was cancelled"
CLOSED = "the sender is closed"

Room = Hashable
OnDone = Callable[[str | None, bool], None]
"""The reason of a failure or None, and whether the room is silent."""
OnSilent = Callable[[bool], None]


def _at_once() -> bool:
    return True


class SendQuota:
    """A limit on bytes per second: a token bucket that may go into debt by one part."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        assert bytes_per_s > 0
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._left = bytes_per_s * BURST_S
        self._at = clock()

    def take(self, count: int) -> bool:
        """Whether so many bytes may go now; then they count."""
        now = self._clock()
        gained = (now - self._at) * self.bytes_per_s
        self._left = min(self._left + gained, self.bytes_per_s * BURST_S)
        self._at = now
        if self._left <= 0:
            return False
        self._left -= count
        return True


@dataclass(frozen=True, slots=True, eq=False)
class SendJob:
    """Rows to write for a room.

    batches     what goes over which link
    when_ready  whether the sources are computed; polled on the sender's thread
    timeout_s   the longest that one part of PART_BYTES may take
    """

    room: Room
    epoch: int
    batches: Sequence[tuple[PeerLink, WriteBatch]]
    on_done: OnDone
    when_ready: Callable[[], bool] = _at_once
    timeout_s: float = 10.0

    @property
    def total_bytes(self) -> int:
        return sum(batch.total_bytes for _, batch in self.batches)


@dataclass(frozen=True, slots=True)
class SenderStats:
    """Counts since the start, and what is in flight now.

    unsilent   jobs that failed while bytes may still land
    crashes    exceptions of callbacks and links that no caller saw
    busy_s     time in which a write was in flight
    """

    jobs_done: int = 0
    jobs_failed: int = 0
    jobs_cancelled: int = 0
    unsilent: int = 0
    crashes: int = 0
    written_bytes: int = 0
    written_rows: int = 0
    busy_s: float = 0.0
    queued_jobs: int = 0
    active_jobs: int = 0
    in_flight_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Part:
    link: PeerLink
    batch: WriteBatch
    pending: PendingWrite | None = None
    poll_s: float = _LONGEST_PAUSE_S


@dataclass(slots=True, eq=False)
class _Active:
    """A job whose parts are being written."""

    job: SendJob
    parts: Iterator[_Part]
    next_part: _Part | None = None
    in_flight: list[_Part] = field(default_factory=list)
    error: str | None = None
    silent: bool = True

    def advance(self) -> None:
        self.next_part = None if self.error else next(self.parts, None)

    def fail(self, reason: str, silent: bool) -> None:
        self.error = self.error or reason
        self.silent = self.silent and silent
        self.next_part = None


@dataclass(slots=True, eq=False)
class _RoomState:
    """A room that was submitted to or cancelled, until it is forgotten.

    ended     the last epoch that takes no more jobs, and the reason
    unsilent  epochs of which bytes may still land
    waiting   who cancelled, and which epoch
    on_forgotten  what follows once the room is forgotten
    """

    room: Room
    queue: deque[SendJob] = field(default_factory=deque)
    active: _Active | None = None
    ended: int | None = None
    reason: str = ""
    unsilent: set[int] = field(default_factory=set)
    waiting: list[tuple[int, OnSilent]] = field(default_factory=list)
    forgotten: bool = False
    on_forgotten: list[Callable[[], None]] = field(default_factory=list)

    def end(self, epoch: int, reason: str) -> None:
        if self.ended is None or epoch > self.ended:
            self.ended, self.reason = epoch, reason

    def takes(self, epoch: int) -> bool:
        return self.ended is None or epoch > self.ended


class PageSender:
    """See the module. All state but the inbox belongs to the thread."""

    def __init__(self, *, bytes_per_s: float | None = None, name: str = "page-sender") -> None:
        """`bytes_per_s` limits all rooms together."""
        self._quota = SendQuota(bytes_per_s) if bytes_per_s else None
        self._part_bytes = PART_BYTES
        if bytes_per_s:
            wanted = int(bytes_per_s * QUOTA_PART_S)
            self._part_bytes = min(PART_BYTES, max(MIN_PART_BYTES, wanted))
        self._rooms: dict[Room, _RoomState] = {}
        self._unsilent: dict[Room, set[int]] = {}
        self._busy: dict[Room, _RoomState] = {}
        self._in_flight: Counter[int] = Counter()
        # All keys are there from the start, as other threads copy the counts.
        names = (one.name for one in fields(SenderStats) if one.name != "busy_s")
        self._counts: Counter[str] = Counter(dict.fromkeys(names, 0))
        self._busy_s = 0.0
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._work, name=f"kvtide-{name}", daemon=True)
        self._thread.start()

    # -- from any thread ----------------------------------------------------------------------

    def submit(self, job: SendJob) -> None:
        """Queue a job. Its `on_done` comes in any case, also after `close`."""
        self._call(lambda: self._accept(job))

    def cancel(self, room: Room, epoch: int, on_silent: OnSilent = lambda silent: None) -> None:
        """Begin nothing more of this room up to this epoch, now or when it is submitted later.

        `on_silent(True)`: no byte of this epoch lands any more. `on_silent(False)`: a write failed
        whose bytes may still land, and the sender will never know.
        """
        self._call(lambda: self._cancel(room, epoch, on_silent))

    def forget(self, room: Room, on_forgotten: Callable[[], None] = lambda: None) -> None:
        """The room is over, and its number may be used anew.

        `on_forgotten` comes after all other calls of the room. Epochs of which bytes may still land
        are remembered: a later `cancel` does not call them silent.
        """
        self._call(lambda: self._forget(room, on_forgotten))

    def run(self, command: Callable[[], None]) -> None:
        """Run a command on the sender's thread, between two writes."""
        self._call(lambda: self._guarded(command))

    def stats(self) -> SenderStats:
        return SenderStats(busy_s=self._busy_s, **self._counts)

    def close(self, timeout_s: float) -> bool:
        """Fail what was not begun, wait for what is in flight; False if that takes longer."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _call(self, command: Callable[[], None]) -> None:
        with self._changed:
            if not self._ended:
                self._inbox.append(command)
                self._changed.notify()
                return
        command()  # Nothing is in flight any more, so every command ends at once.

    # -- commands -----------------------------------------------------------------------------

    def _state(self, room: Room) -> _RoomState:
        if room not in self._rooms:
            self._rooms[room] = _RoomState(room, unsilent=self._unsilent.pop(room, set()))
        return self._rooms[room]

    def _accept(self, job: SendJob) -> None:
        state = self._state(job.room)
        state.forgotten = False
        state.queue.append(job)
        self._busy[job.room] = state
        self._counts["queued_jobs"] += 1
        if self._closing:
            state.end(job.epoch, CLOSED)
        self._settle(state)

    def _cancel(self, room: Room, epoch: int, on_silent: OnSilent) -> None:
        state = self._state(room)
        state.end(epoch, CANCELLED)
        state.waiting.append((epoch, on_silent))
        if state.active is not None and state.active.job.epoch <= epoch:
            state.active.fail(CANCELLED, silent=True)
        self._settle(state)

    def _forget(self, room: Room, on_forgotten: Callable[[], None]) -> None:
        state = self._state(room)
        state.forgotten = True
        state.on_forgotten.append(on_forgotten)
        self._settle(state)

    def _close_all(self) -> None:
        for state in list(self._busy.values()):
            epochs = [job.epoch for job in state.queue]
            if state.active is not None:
                state.active.fail(CLOSED, silent=True)
                epochs.append(state.active.job.epoch)
            state.end(max(epochs), CLOSED)
            self._settle(state)

    def _settle(self, state: _RoomState) -> None:
        """With no job active: fail queued jobs of ended epochs, answer those who cancelled."""
        if state.active is not None:
            return
        dropped = [job for job in state.queue if not state.takes(job.epoch)]
        state.queue = deque(job for job in state.queue if state.takes(job.epoch))
        self._counts["queued_jobs"] -= len(dropped)
        for job in dropped:
            self._report(job, state.reason, job.epoch not in state.unsilent)
        waiting, state.waiting = state.waiting, []
        for epoch, on_silent in waiting:
            self._guarded(partial(on_silent, epoch not in state.unsilent))
        if not state.queue:
            self._busy.pop(state.room, None)
            if state.forgotten:
                self._drop(state)

    def _drop(self, state: _RoomState) -> None:
        self._rooms.pop(state.room, None)
        if state.unsilent:
            self._unsilent[state.room] = state.unsilent
        for call in state.on_forgotten:
            self._guarded(call)

    def _report(self, job: SendJob, error: str | None, silent: bool) -> None:
        kind = "jobs_failed"
        if error is None or error in (CANCELLED, CLOSED):
            kind = "jobs_done" if error is None else "jobs_cancelled"
        self._counts[kind] += 1
        self._counts["unsilent"] += not silent
        self._guarded(partial(job.on_done, error, silent))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # A caller's mistake must not end the thread.
            self._counts["crashes"] += 1
            log.exception("a callback of the page sender failed")

    # -- the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        pause_s, writing, since = _FIRST_PAUSE_S, False, 0.0
        while self._run_inbox(pause_s):
            since = since if writing else time.monotonic()
            moved = self._step()
            pause_s = 0.0 if moved else min(2 * pause_s + _FIRST_PAUSE_S, self._longest_pause())
            if writing or moved:
                self._busy_s += time.monotonic() - since
            writing, since = self._in_flight.total() > 0, time.monotonic()

    def _longest_pause(self) -> float:
        rooms = self._busy.values()
        parts = [part for state in rooms if state.active for part in state.active.in_flight]
        return min([_LONGEST_PAUSE_S, *(part.poll_s for part in parts)])

    def _run_inbox(self, pause_s: float) -> bool:
        """Wait for commands, for ever or for a pause, and run them; False: the thread ends."""
        with self._changed:
            if not self._inbox and not self._closing and (pause_s or not self._busy):
                self._changed.wait(pause_s if self._busy else None)
            commands = list(self._inbox)
            self._inbox.clear()
            if self._closing and not commands and not self._busy:
                self._ended = True
                return False
        for command in commands:
            command()
        if self._closing:
            self._close_all()
        return True

    def _step(self) -> bool:
        """Whether anything moved. A room that began a part goes to the end of the row."""
        moved = False
        for state in list(self._busy.values()):
            moved |= self._poll(state)
        for state in list(self._busy.values()):
            if self._begin(state):
                moved = True
                self._busy[state.room] = self._busy.pop(state.room)
            moved |= self._finish(state)
        return moved

    def _poll(self, state: _RoomState) -> bool:
        active = state.active
        if active is None:
            return False
        ended = [one for one in active.in_flight if self._over(active, one)]
        for one in ended:
            active.in_flight.remove(one)
            self._in_flight -= Counter({id(one.link): 1})  # A count of none is dropped.
            self._counts["in_flight_bytes"] -= one.batch.total_bytes
        return bool(ended)

    def _over(self, active: _Active, part: _Part) -> bool:
        try:
            assert part.pending is not None
            if not part.pending.poll():
                return False
        except Exception as error:  # A transport's: the job fails with it.
            self._fail(active, error)
            return True
        self._counts["written_bytes"] += part.batch.total_bytes
        self._counts["written_rows"] += len(part.batch)
        return True

    def _fail(self, active: _Active, error: Exception) -> None:
        if isinstance(error, TransportError):
            active.fail(str(error), error.silent)
            return
        self._counts["crashes"] += 1
        log.error("a transport failed", exc_info=error)
        active.fail(f"{type(error).__name__}: {error}", silent=False)

    def _begin(self, state: _RoomState) -> bool:
        """Begin the next part, if the link and the quota take it."""
        active = state.active or self._activate(state)
        if active is None or (part := active.next_part) is None:
            return False
        if self._in_flight[id(part.link)] >= PARTS_IN_FLIGHT:
            return False
        if self._quota is not None and not self._quota.take(part.batch.total_bytes):
            return False
        try:
            if not part.link.alive():
                raise TransportError("the link is dead", silent=True)
            part.poll_s = part.link.poll_s
            part.pending = part.link.begin(part.batch, active.job.timeout_s)
        except Exception as error:  # As above.
            self._fail(active, error)
            return True
        active.in_flight.append(part)
        self._in_flight[id(part.link)] += 1
        self._counts["in_flight_bytes"] += part.batch.total_bytes
        active.advance()
        return True

    def _activate(self, state: _RoomState) -> _Active | None:
        """The first job of a room, if its sources are computed."""
        job = state.queue[0]
        active = _Active(job, self._parts(job))
        try:
            if not job.when_ready():
                return None
            active.advance()
        except Exception as error:  # The caller's: nothing was begun.
            self._counts["crashes"] += 1
            log.exception("a job of the page sender cannot begin")
            active.fail(f"{type(error).__name__}: {error}", silent=True)
        state.queue.popleft()
        state.active = active
        self._counts["queued_jobs"] -= 1
        self._counts["active_jobs"] += 1
        return active

    def _parts(self, job: SendJob) -> Iterator[_Part]:
        for link, batch in job.batches:
            for part in batch.parts(self._part_bytes):
                yield _Part(link, part)

    def _finish(self, state: _RoomState) -> bool:
        active = state.active
        if active is None or active.next_part is not None or active.in_flight:
            return False
        state.active, epoch = None, active.job.epoch
        self._counts["active_jobs"] -= 1
        if not active.silent:
            state.unsilent.add(epoch)
        if active.error is not None:
            state.end(epoch, f"an earlier write of the room failed: {active.error}")
        self._report(active.job, active.error, epoch not in state.unsilent)
        self._settle(state)
        return True
