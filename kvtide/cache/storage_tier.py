"""The storage tier: the attached store, and what is fetched from it and stored to it.

    ATTACHED ──leave──▶ LEAVING ──nothing in flight──▶ CLOSING ──workers ended──▶ gone

Detaching never blocks. Queued pages, and backups in flight that will be queued, are written until
the deadline; the rest is dropped. Slots that a call still uses stay taken until it returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from kvtide.cache.cache_config import CacheConfig
from kvtide.cache.fetching import Fetch, Fetches
from kvtide.cache.hardware import Hardware, formats, object_suffixes, other_shapes, space
from kvtide.cache.inflight import InFlightTransfers
from kvtide.cache.rank_agreement import Agreement
from kvtide.cache.store_removals import Removal, Removals
from kvtide.cache.supplements.supplement_fetching import SupplementFetch, SupplementFetches
from kvtide.cache.write_behind import WriteBehind
from kvtide.durations import Durations
from kvtide.index import Departure, Index, Prompt
from kvtide.index.keys import Hidden, PageKey
from kvtide.spec import RankShape
from kvtide.storage import Store, StoreError
from kvtide.storage.codec import CodedStore
from kvtide.tiers import TierError
from kvtide.transfer.store_link import StoreLink

T = TypeVar("T")

CLOSE_S = 30.0


class AttachmentState(Enum):
    ATTACHED = "attached"
    LEAVING = "leaving"
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class StorageStats:
    """Counters of a store since it was attached, except those marked "now".

    name, state     its name, and whether it is attached or leaving, now
    answers         whether calls go through, now; `last_error` is the last failure's message
    trips           how often a breaker opened, since calls failed
    fetches         by outcome; `fetching` now
    fetched_pages   read to the host
    supplements     sidecars of pages, read for pages that the host had without them
    stored_pages    written or there already; `dropped_pages` left the queue unwritten, and
                    `failed_pages` were not taken; `waiting_pages` in the queue now
    objects         by what happened to them (`transfer.store_link`)
    moved_bytes     read ("fetch") and written ("store")
    coded_bytes     the same as the store has them; empty without a codec
    reading_s       how long any fetch was reading
    read_bytes_s    as last measured; None before anything was read
    seconds         of reads ("fetch") and of written batches ("store")
    """

    name: str
    state: str
    answers: bool
    last_error: str
    trips: int
    fetches: Mapping[str, int]
    fetching: int
    fetched_pages: int
    supplements: int
    stored_pages: int
    dropped_pages: int
    failed_pages: int
    waiting_pages: int
    objects: Mapping[str, int] = field(default_factory=dict)
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    coded_bytes: Mapping[str, int] = field(default_factory=dict)
    reading_s: float = 0.0
    read_bytes_s: float | None = None
    seconds: Mapping[str, Durations] = field(default_factory=dict)


class StorageListener(Protocol):
    """Follows which store is attached, and what it is asked for. Called on the cache's thread."""

    def store_changed(self, store: Store | None) -> None:
        """Prompts are fetched from this store from now on; None: from none."""
        ...

    def pages_asked(self, prompt: Prompt) -> None:
        """The store is asked which pages of this prompt it has."""
        ...


class Storage:
    """`TieredCache.storage`. At most one store is attached; others may be leaving."""

    def __init__(
        self,
        index: Index,
        in_flight: InFlightTransfers,
        hardware: Hardware,
        config: CacheConfig,
        agreement: Agreement,
    ) -> None:
        self.space = space(index.memory, config)
        self._index = index
        self._in_flight = in_flight
        self._hardware = hardware
        self._config = config
        self._agreement = agreement
        self._stores: list[Attachment] = []
        self._unremoved: list[Removal] = []
        self._was_attached = False
        self._listeners: list[StorageListener] = []

    # -- for callers of the cache -----------------------------------------------------------

    def link(self, store: Store) -> StoreLink:
        """Prepare a store for `attach`: registering the host's memory with it may take long.

        The one call that may come from any thread. Close a link that is not attached.
        """
        host = self._hardware.host
        if not any(host.arrangement.slots.values()):
            raise TierError("storage is reached through a host tier, and there is none; size one")
        if isinstance(store, CodedStore) and store.codec.lossy and not self._config.lossy_pages:
            raise TierError(
                f"storage {store.name} rounds pages, and those of this cache are exact; use "
                "codec=lossless, or start anew with this store (`--storage`, or lossy_pages in the "
                "cache's config)"
            )
        shapes = other_shapes(host.arrangement, self._config)
        return StoreLink(store, formats(self._index.memory, self._config), host, shapes)

    def attach(self, store: Store | StoreLink) -> None:
        """Store pages in this store from now on, and fetch them from it.

        It must have been opened for this cache's `space`, which covers weights, precision, page
        size and pools. The store attached before is detached. All ranks attach a store, or
        none does.
        """
        self._attach(lambda: store if isinstance(store, StoreLink) else self.link(store))

    def attach_opened(self, opening: Future[StoreLink], leave_s: float = 10.0) -> None:
        """Like `attach`; raises if any rank's store failed to open.

        The store attached before has `leave_s` to write its queue.
        """
        self._attach(opening.result, leave_s)

    def _attach(self, opened: Callable[[], StoreLink], leave_s: float = 10.0) -> None:
        link = self._linked(opened)
        self.detach(leave_s)
        queued = self._hardware.copier.queued
        self._stores.append(Attachment(link, self._index, self._config, self._agreement, queued))
        self._in_flight.departs = self._was_attached = True
        self._index.sidecars.ask_anew()
        self._hand_over()
        for listener in self._listeners:
            listener.store_changed(link.store)

    def _linked(self, opened: Callable[[], StoreLink]) -> StoreLink:
        """The opened link; raises if any rank has none, since their trees would diverge."""
        link, error = None, None
        try:
            link = opened()
        except Exception as raised:
            error = raised
        if all(self._agreement.all_true([link is not None])) and link is not None:
            return link
        if link is not None:
            link.close(CLOSE_S)
        raise error or StoreError("another rank could not attach its store; see its log")

    def detach(self, timeout_s: float = 10.0) -> bool:
        """Detach the store; its queue, and backups in flight, are written until the time is up.

        It happens during `poll`, and is over when `stats` returns None; False without a store.
        """
        attached = self._attached
        if attached is None:
            return False
        self._in_flight.departs = False
        attached.leave(timeout_s)
        for listener in self._listeners:
            listener.store_changed(None)
        return True

    def fetch(
        self, prompt: Prompt, token_s: float = 0.0, limit_s: float | None = None
    ) -> Fetch | None:
        """Begin to fetch a prompt's pages to the host; None if there is no need.

        A request that can wait does so until the fetch is `over`; others `stop` it, and continue
        after the next `poll`. Nothing has to be released. `token_s` is the time to compute a token:
        a fetch that would take longer than computing is declined. `limit_s` bounds the fetch in
        place of the config's patience.
        """
        attached = self._source_for(prompt)
        fetch = None if attached is None else attached.fetches.begin(prompt, token_s, limit_s)
        if fetch is not None:
            for listener in self._listeners:
                listener.pages_asked(prompt)
        return fetch

    def supplement(self, prompt: Prompt) -> SupplementFetch | None:
        """Begin to fetch optional sidecars that neither the device nor the host has of the prompt's
        pages; None if there are none."""
        attached = self._source_for(prompt)
        return None if attached is None else attached.supplements.begin(prompt)

    def _source_for(self, prompt: Prompt) -> Attachment | None:
        """The store that may be asked for this prompt."""
        attached = self._attached
        if attached is None or isinstance(prompt.namespace, Hidden):
            return None
        # A leaving store may be the same one, and may write what the attached one has removed.
        return None if any(one.removals.forbid(prompt) for one in self._stores) else attached

    def listen(self, listener: StorageListener) -> None:
        """Call the listener from now on, and at once with the store that is attached."""
        self._listeners.append(listener)
        attached = self._attached
        listener.store_changed(attached.link.store if attached is not None else None)

    def object_suffixes(self, anchor: str, shape: RankShape) -> tuple[bytes, ...]:
        """How stored objects of this anchor are named, if ranks of this shape serve the model: see
        `hardware.object_suffixes`."""
        return object_suffixes(self._index.memory, self._config, anchor, shape)

    def ask(self, function: Callable[[Store], T]) -> Future[T] | None:
        """Run a function of the attached store on a worker; None without a store."""
        return self._attached.link.ask(function) if self._attached is not None else None

    def stats(self) -> StorageStats | None:
        """Counters of the store that is attached, or leaving; None without one."""
        return self._stores[-1].stats() if self._stores else None

    # -- for the cache ----------------------------------------------------------------------

    @property
    def stores(self) -> Sequence[Attachment]:
        """The stores that are not gone, oldest first; see `_staying`."""
        return self._stores

    @property
    def unsettled(self) -> bool:
        """Whether a poll has, or will have, something to do."""
        return bool(self._in_flight.departures) or any(one.unsettled for one in self._stores)

    @property
    def at_work(self) -> bool:
        """Whether a fetch, a write or a removal is open: the same on every rank."""
        return bool(self._in_flight.departures) or any(one.at_work for one in self._stores)

    def remove(self, prompt: Prompt) -> None:
        """Remove the known pages behind the prompt's first page from every store; from one that was
        detached, once it is attached again."""
        if isinstance(prompt.namespace, Hidden) or not self._was_attached:
            return
        known = self._index.keys_below(prompt)
        for one in self._stores:
            one.remove(prompt, known)
        if self._attached is None:
            self._remember(Removal.of(self._index, prompt, known))

    def verdicts(self) -> list[int]:
        """This rank's verdicts on all that is open."""
        return [value for one in self._stores for value in one.verdicts()]

    def settle(self, agreed: Sequence[int]) -> None:
        """Act on the agreed verdicts, and queue the departures that have landed."""
        at = 0
        for one in self._stores:
            count = len(one.verdicts())
            one.settle(agreed[at : at + count])
            at += count
        landed, self._in_flight.departures = self._in_flight.departures, []
        for departure in landed:
            self._depart(departure)
        for one in self._stores:
            one.advance(more=self._in_flight.departing and one is self._stores[-1])
        self._hand_over()
        self._stores = self._staying()

    def _staying(self) -> list[Attachment]:
        """All stores but those that are gone. The last one stays as long as any other does: it
        takes the departures, and ranks notice at different times that it is gone."""
        left = [one for one in self._stores if not one.gone]
        return [*left, *(one for one in self._stores[-1:] if left and one.gone)]

    def _depart(self, departure: Departure) -> None:
        """Queue a departure for the last store, if that still takes any."""
        last = self._stores[-1] if self._stores else None
        if last is None or last.state is AttachmentState.CLOSING:
            self._index.departed(departure)
        else:
            last.storing.enqueue(departure)

    def _hand_over(self) -> None:
        """Removals that a store did not finish, or that came while there was none, pass to the next
        one: it may be the same store."""
        for one in self._stores:
            if one.state is AttachmentState.CLOSING:
                for removal in one.removals.give_up():
                    self._remember(removal)
        if self._attached is not None:
            unremoved, self._unremoved = self._unremoved, []
            for removal in unremoved:
                self._attached.removals.begin(removal.prompt, removal.keys)

    def _remember(self, removal: Removal) -> None:
        """For the store that is attached next. There is one removal for every first page."""
        size = self._index.page_bytes
        if removal.keys and not any(one.joined_with(removal, size) for one in self._unremoved):
            self._unremoved.append(removal)

    def join(self, timeout_s: float) -> bool:
        """Wait until the leaving stores are closed; False if a call did not return."""
        deadline = time.monotonic() + timeout_s
        left = (one.join(max(0.0, deadline - time.monotonic())) for one in self._stores)
        return all([*left])

    @property
    def _attached(self) -> Attachment | None:
        last = self._stores[-1] if self._stores else None
        return last if last is not None and last.state is AttachmentState.ATTACHED else None


class Attachment:
    """One store, from `attach` until it is closed."""

    def __init__(
        self,
        link: StoreLink,
        index: Index,
        config: CacheConfig,
        agreement: Agreement,
        queued: Callable[[], Callable[[], bool]],
    ) -> None:
        self.state = AttachmentState.ATTACHED
        self.link = link
        self.fetches = Fetches(index, link, agreement, config.patience, queued)
        self.storing = WriteBehind(index, link, config.transfer_timeout_s)
        self.supplements = SupplementFetches(index, link, agreement, config.transfer_timeout_s)
        self.removals = Removals(index, link)
        self._index = index
        self._deadline = 0.0
        self._in_time = True
        self._closer: threading.Thread | None = None
        self._ended = False

    @property
    def unsettled(self) -> bool:
        return self.at_work or self.state is not AttachmentState.ATTACHED

    @property
    def at_work(self) -> bool:
        return self._open > 0 or self.state is AttachmentState.LEAVING

    @property
    def _open(self) -> int:
        """Fetches, writes and removals that have not ended."""
        return sum(len(part) for part in self._parts)

    @property
    def _parts(self) -> tuple[WriteBehind, Removals, Fetches, SupplementFetches]:
        return self.storing, self.removals, self.fetches, self.supplements

    @property
    def gone(self) -> bool:
        """Whether the store is closed; ranks notice this at different times."""
        return self._closer is not None and not self._closer.is_alive()

    def leave(self, timeout_s: float) -> None:
        """Take nothing new; write the queue until the time is up."""
        assert self.state is AttachmentState.ATTACHED
        self.state = AttachmentState.LEAVING
        self._deadline = time.monotonic() + timeout_s
        self.fetches.stop_all()
        self.supplements.stop_all()

    def verdicts(self) -> list[int]:
        """This rank's verdicts on all that is open."""
        if not self.at_work:
            return []
        in_time = self.state is AttachmentState.ATTACHED or time.monotonic() <= self._deadline
        return [in_time, *(verdict for part in self._parts for verdict in part.verdicts())]

    def settle(self, agreed: Sequence[int]) -> None:
        """Act on the agreed verdicts."""
        if not agreed:
            return
        self._in_time = bool(agreed[0])
        at = 1
        for part in self._parts:
            count = len(part.verdicts())
            part.settle(agreed[at : at + count])
            at += count

    def advance(self, *, more: bool) -> None:
        """Write the queue, or close a leaving store that has nothing open. `more`: backups that
        will be queued are in flight."""
        leaving = self.state is AttachmentState.LEAVING
        if leaving and not self._in_time:
            self.storing.give_up()
        self.storing.tick()
        awaited = (more and self._in_time) or self._open > 0
        if leaving and not awaited:
            self.state = AttachmentState.CLOSING
            self._closer = threading.Thread(target=self._close, daemon=True)
            self._closer.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until a leaving store is closed; False if a call did not return."""
        if self._closer is None:
            return False
        self._closer.join(timeout_s)
        return self.gone and self._ended

    def remove(self, prompt: Prompt, known: list[PageKey]) -> None:
        """Remove the prompt's pages, and those known by key; end their fetches and writes."""
        if self.state is AttachmentState.CLOSING:
            return
        self.fetches.discard(prompt)
        self.supplements.discard(prompt)
        self.storing.withhold(self.removals.begin(prompt, known))

    def stats(self) -> StorageStats:
        link, storing = self.link, self.storing
        return StorageStats(
            name=link.store.name,
            state=self.state.value,
            answers=link.available,
            last_error=link.last_error,
            trips=sum(breaker.trips for breaker in link.breakers.values()),
            fetches=dict(self.fetches.ended),
            fetching=len(list(self.fetches.open)),
            fetched_pages=self.fetches.fetched_pages,
            supplements=self.supplements.pages,
            stored_pages=storing.stored,
            dropped_pages=storing.dropped,
            failed_pages=storing.failed,
            waiting_pages=len(storing),
            objects=dict(link.counts),
            moved_bytes={way: link.moved_bytes[way] for way in ("fetch", "store")},
            coded_bytes=link.store.coded_bytes if isinstance(link.store, CodedStore) else {},
            reading_s=self.fetches.reading.seconds,
            read_bytes_s=link.read_speed.bytes_s,
            seconds={"fetch": self.fetches.seconds.seen(), "store": storing.seconds.seen()},
        )

    def _close(self) -> None:
        self._ended = self.link.close(CLOSE_S)
