"""`TieredCache`: a model's memory over device, host and storage, as one cache for an engine.

    match ─▶ reserve ─▶ load ─▶ [wait(layer) … forward] ─▶ commit … commit ─▶ release
                                    poll, once per step

The cache owns the device's pages and the host's. It takes tokens and returns leases; it never sees
a request. All calls come from one thread and none waits for a copy, except `wait` for the layer
that is needed next. Copies run beside the model and become visible in `poll`.

What always holds: `match` finds only pages that are readable; a lease keeps what it was promised
until `release`; a transfer that fails gives back all it held.

`storage` reaches beyond the process: attach a store, and fetch from it when a prompt arrives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from kvtide.cache.agreed_events import AgreedEvents
from kvtide.cache.cache_config import CacheConfig
from kvtide.cache.cache_invariants import CacheParts, violations
from kvtide.cache.cache_stats import CacheCounts, Stats, counts_of_pages, counts_of_transfers
from kvtide.cache.hardware import Hardware, space
from kvtide.cache.inflight import ArrivalTransfer, InFlightTransfers, explained
from kvtide.cache.lease import Lease, Match, Progress
from kvtide.cache.rank_agreement import Agreement, Alone
from kvtide.cache.receiving import Receiving
from kvtide.cache.sessions.prefetching import Prefetches
from kvtide.cache.sessions.session_pins import Sessions
from kvtide.cache.storage_tier import Storage
from kvtide.cache.supplements.supplements import Supplements
from kvtide.cache.write_policies import POLICIES
from kvtide.index import DEFAULT_NAMESPACE, Arrival, Index, Namespace, Placement, Prompt, Stop
from kvtide.index import IndexLease as IndexLease
from kvtide.index.keys import MAX_TOKEN, TokenSequence
from kvtide.spec import ALL, ModelMemory, PageMove, Slots, Tier
from kvtide.transfer.strided import Way
from kvtide.transfer.transfers import Transfers, TransferState

MAX_INFLIGHT = 64
"""Transfers per exchange between ranks; older ones come first."""
HANDOVER_S = 1e-3
"""How long `load` waits at most for the first copy: its lane's thread needs the interpreter."""


class TieredCache:
    """See the module. `hardware` is opened from the config if not given.

    `agreement` makes this rank's cache end transfers as the caches of all other ranks do.
    """

    def __init__(
        self,
        memory: ModelMemory,
        config: CacheConfig,
        *,
        agreement: Agreement | None = None,
        placement: Placement | None = None,
        hardware: Hardware | None = None,
    ) -> None:
        self.memory = memory
        self.config = config
        self.agreement = agreement or Alone()
        self.hardware = hardware or Hardware.open(memory, config, self.agreement)
        writing = POLICIES[config.write_policy if config.host_size else "none"]
        self.index = Index(
            memory,
            self.hardware.capacity_pages,
            eviction=config.eviction,
            placement=placement,
            fingerprint=space(memory, config),
            keeps=(Tier.DEVICE,) if writing.keeps_only_copies else (),
            copy_on_device=self._copy_on_device,
            hot_rows=config.hot_rows if memory.hot_pools else 0,
        )
        transfers: Transfers[Arrival] = Transfers(self.hardware.copier, config.transfer_timeout_s)
        self._in_flight = InFlightTransfers(self.index, transfers)
        self._writing = writing(self.index, self._in_flight, config.headroom)
        self.sessions = Sessions(self.index, config.session_fraction, config.session_share)
        self._leases: dict[int, Lease] = {}
        self._step_leases: frozenset[int] | None = None
        self._counts = CacheCounts()
        self.storage = Storage(self.index, self._in_flight, self.hardware, config, self.agreement)
        self.prefetches = Prefetches(
            self.index, self._in_flight, self.storage, self.sessions, self._make_room
        )
        self.supplements = Supplements(self.index, self._in_flight, self.storage)
        self._events = AgreedEvents()
        self.receiving = Receiving(self.index, self.hardware, self._events, self._in_flight)

    # -- finding ----------------------------------------------------------------------------

    def prompt(self, tokens: TokenSequence, namespace: Namespace = DEFAULT_NAMESPACE) -> Prompt:
        """A request's tokens in the form the cache works with; made once per request."""
        return self.index.prompt(tokens, namespace)

    def scratch(self, tokens: TokenSequence) -> Prompt:
        """A prompt that finds nothing and that no match finds: for computing without the cache.

        Reserve, commit and release it like any other. Each lease has pages of its own, no write
        policy copies them, and `release` drops them all.
        """
        return self.index.scratch(tokens)

    def match(self, prompt: Prompt, slowest: Tier = Tier.HOST) -> Match:
        """How much of the prompt is resident in the tiers down to `slowest`. Changes nothing."""
        hit = self.index.match(prompt, slowest)
        page = self.memory.page_tokens
        by_tier = {tier: n * page for tier, n in self.index.pages_by_tier(hit).items()}
        return Match(prompt, hit.boundary * page, by_tier, slowest, hit)

    def matched_slots(self, match: Match, pool: str) -> Slots:
        """The device slot of every matched page, or -1; valid until the cache changes."""
        return self.index.matched_slots(match.hit, self.memory.pool(pool).follows or pool)

    def why(self, prompt: Prompt, slowest: Tier = Tier.HOST) -> list[Stop]:
        """Per pool, what keeps a match of this prompt from going deeper."""
        return self.index.why(self.index.match(prompt, slowest))

    # -- a request --------------------------------------------------------------------------

    def reserve(
        self, match: Match, tokens: int | None = None, growth_pages: int = 0, priority: int = 0
    ) -> Lease | None:
        """Lease the match, with slots for its prefix and for the tokens up to `tokens`: on the
        device, and for hot pools on the host, with a row of their buffers.

        `tokens` is all of the prompt if not given; `growth_pages` promises as many further pages.
        In every pool or in none: `None` means no room now, and nothing changed; try again after
        a `poll`. More than `max_sequence_tokens` never fits. An outdated match is made again.
        """
        upto = match.prompt.tokens if tokens is None else tokens
        if not self.index.has_row:  # Nothing is evicted for a request that has to wait.
            self._counts.refused += 1
            return None
        lease = self._reserve(match, upto, growth_pages, priority)
        if lease is None and self._make_room():
            lease = self._reserve(match, upto, growth_pages, priority)
        if lease is None:
            self._counts.refused += 1
            return None
        if not lease._index_lease.hidden:
            self._counts.leased(match.prompt.tokens, lease.by_tier, lease.why)
        self._writing.found(lease._index_lease)
        return lease

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence whose history fits, also in the pages that a prefill gathers."""
        gathered = [hot.shape.gather_pages for hot in self.hardware.hot.values()]
        return min([self.history_tokens, *(pages * self.memory.page_tokens for pages in gathered)])

    @property
    def history_tokens(self) -> int:
        """Tokens of all sequences together whose history fits: on the device, or at home. Windows
        and states alone bound none: what sequences have passed is given back."""
        histories = [anchor for anchor in self.memory.anchors if anchor.reuse.reach is ALL]
        pages = (self.index.capacity(anchor.home, anchor.name) for anchor in histories)
        return min(pages, default=MAX_TOKEN) * self.memory.page_tokens

    def grow(self, lease: Lease, tokens: int, growth_pages: int = 0) -> bool:
        """Take slots for the lease's tokens up to `tokens`; False, and nothing changed, if full.

        Checkpoints are optional: where they do not fit, the lease continues without them.
        """
        inner, advance = lease._index_lease, self.index.advance
        if tokens <= inner.reserved * self.memory.page_tokens and not growth_pages:
            return True
        if advance(inner, tokens, growth_pages):
            return True
        if self._make_room() and advance(inner, tokens, growth_pages):
            return True
        return self.index.advance_without_checkpoints(inner, tokens, growth_pages)

    def shrink(self, lease: Lease, tokens: int) -> None:
        """Give back slots beyond `tokens`, which stay promised: less was computed than planned.

        The next `grow` chooses anew where windows and states are kept.
        """
        self.index.shrink(lease._index_lease, tokens)

    def load(self, lease: Lease) -> None:
        """Start the copies that bring the lease's prefix to the device.

        Loads of other leases reserved since the last call leave in the same submission.
        """
        others = self._in_flight.any_in_flight(Way.LOAD)
        if lease.loading and self._in_flight.submit(Way.LOAD) and not others:
            for transfer in lease.transfers:
                if transfer.ticket is not None:
                    transfer.ticket.wait_issued(HANDOVER_S)

    def wait(self, lease: Lease, layer: int) -> None:
        """Make the model's coming work wait until the prefix is there for this (global) layer.

        On a GPU this orders streams and returns at once; on a CPU it blocks. Raises
        `TransferError` when the load failed or missed its deadline: release the lease then. With
        several ranks, release it when `poll` reports it as failed, which happens on all of them.
        """
        if lease.transfers:
            lease.wait(self.hardware.copier.leg_of(layer))

    def commit(self, lease: Lease, tokens: int, without: Collection[str] = ()) -> None:
        """The tokens up to `tokens` are computed: `match` finds their full pages from now on.

        For a lease that is still loading, the commit happens when the load lands, and never if the
        load fails. `without` names optional sidecars (a draft's KV) that were not written.
        """
        assert lease.live, "committing with a lease that was released"
        self._in_flight.drop_fence()
        if lease.loading:
            lease.pending.append((tokens, without))
        elif not lease.failed:
            self._commit(lease, tokens, without)

    def retain(self, lease: Lease) -> None:
        """Keep a checkpoint at the lease's last committed page: a next prompt resumes there."""
        if not lease._index_lease.running or not self.index.has_checkpoints:
            return
        self.index.retain(lease._index_lease)
        if not (lease.loading or lease.failed):
            self._writing.committed(lease._index_lease)

    def shared_pages(self, prompt: Prompt, lease: Lease) -> int:
        """Up to which page a prompt shares what a lease has yet to commit; 0 if it shares none.

        Once the lease has committed that page, `match` finds it, if the windows and states that a
        resume there needs were kept.
        """
        inner = lease._index_lease
        if inner.hidden or inner.prompt.tokens < (inner.boundary + 1) * self.memory.page_tokens:
            return 0  # As of all requests that decode: cheap to find out.
        return self.index.shared_pages(prompt, inner.prompt, inner.boundary)

    def release(self, lease: Lease) -> None:
        """Give back exactly what the lease holds. A second time is harmless.

        A lease that has generated beyond its prompt keeps a checkpoint at its end: the next turn
        resumes there. If a step launched after the last fence uses its slots, later loads are
        ordered behind that step.
        """
        if self._step_leases is None or lease.number in self._step_leases:
            self._in_flight.drop_fence(Way.LOAD)
        if lease.live and lease._index_lease.boundary > lease._index_lease.placed:
            self.retain(lease)
        self._leases.pop(lease._index_lease.number, None)
        self.index.release(lease._index_lease)

    def release_when(self, lease: Lease, is_quiet: Callable[[], bool]) -> None:
        """Release the lease once `is_quiet` on all ranks: until then its pages are read."""
        self._events.when(is_quiet, lambda: self.release(lease))

    def page_table(self, lease: Lease, pool: str) -> Slots:
        """The slot of every page the lease has, -1 where the pool keeps none.

        On the device; of a hot pool on the host. Includes the slots of pages that are still
        arriving: call `wait` before reading them.
        """
        anchor = self.memory.pool(pool).follows or pool
        if lease.loading:
            return self.index.arriving_table(lease._index_lease, anchor)
        return self.index.page_table(lease._index_lease, anchor)

    def carries(self, lease: Lease, sidecar: str) -> npt.NDArray[np.bool_]:
        """For every page of the prefix: whether the device has this optional sidecar of it."""
        return self.index.carries(lease._index_lease, sidecar)

    def view(self, pool: str, layer: int) -> Mapping[str, torch.Tensor]:
        """A layer's device buffers, by field: (slots or hot pages, entries of a page, *shape)."""
        hot = self.hardware.hot.get(pool)
        return self.hardware.device.view(pool, layer) if hot is None else hot.view

    def home_view(self, pool: str, layer: int) -> Mapping[str, torch.Tensor]:
        """A layer's buffers where `page_table` has its slots: of a hot pool, on the host."""
        tier, hardware = self.memory.pool(pool).home, self.hardware
        return (hardware.device if tier is Tier.DEVICE else hardware.host).view(pool, layer)

    def wait_for_steps(self) -> None:
        """Block until the device has done all that is queued now: host pages may be read."""
        if self.config.torch_device.type == "cuda":
            torch.cuda.current_stream(self.config.torch_device).synchronize()

    def hot_row(self, lease: Lease) -> int:
        """The lease's row in the hot pools; -1 where the memory has none."""
        return lease._index_lease.hot_row

    # -- beside requests --------------------------------------------------------------------

    def fence(self, step: Iterable[Lease] | None = None) -> None:
        """A fence: all work queued so far is ordered before any reuse of freed slots.

        For a caller that launches a step and then admits requests and polls while it runs. Copies
        wait for the fence alone, not for that step, until the next `commit` or `poll`, or until one
        of its leases is released. `step` names these leases; without it they may be any.
        """
        self._step_leases = None if step is None else frozenset(lease.number for lease in step)
        self._in_flight.fence()

    def poll(self) -> Progress:
        """Once per step: land the transfers that all ranks have done, start those that are due."""
        progress = self.land()
        self.prefetches.advance()
        self._writing.tick()
        for way in Way:
            self._in_flight.submit(way)
        self.supplements.advance()
        self._in_flight.drop_fence()
        return progress

    def land(self) -> Progress:
        """Land the transfers that are done on all ranks, earlier in a step than `poll`."""
        settled: dict[int, Lease] = {}
        for transfer, inners in self._settle():
            waiting = (self._leases.get(inner.number) for inner in inners)
            for lease in (lease for lease in waiting if lease is not None and not lease.failed):
                if transfer in lease.transfers:
                    settled[lease.number] = lease
                    if transfer.state is not TransferState.LANDED:
                        lease.fail(explained(transfer))
        landed = [lease for lease in settled.values() if not lease.failed and not lease.loading]
        for lease in landed:
            self._settled(lease)
        failed = [lease for lease in settled.values() if lease.failed]
        return Progress(tuple(landed), tuple(failed))

    def _settle(self) -> list[tuple[ArrivalTransfer, list[IndexLease]]]:
        """End the transfers that are done on every rank: one exchange for all in flight."""
        transfers, events = self._in_flight.verdicts()[:MAX_INFLIGHT], self._events.verdicts()
        mine = [*events, *transfers, *self.storage.verdicts()]
        agreed = self.agreement.all_min(mine, self.index.tick) if mine else []
        end = len(events) + len(transfers)
        news = self._in_flight.settle(agreed[len(events) : end])
        self.storage.settle(agreed[end:])
        self._events.settle(agreed[: len(events)])
        return news

    def prefetch(self, prompt: Prompt) -> bool:
        """Begin to load a waiting prompt's prefix, if device slots are free for it.

        It evicts nothing, and the caller releases nothing: a later `reserve` finds more on the
        device. The copies leave with the next `load` or `poll`.
        """
        found = self.match(prompt)
        if found.tokens == self.match(prompt, Tier.DEVICE).tokens:
            return False
        inner = self.index.pin(found.hit)
        transfers = self._in_flight.load(inner) if self._fits_free(inner) else None
        self.index.release(inner)
        return bool(transfers)

    def quarantine(self, prompt: Prompt) -> int:
        """Hide all pages behind the prompt's first page from every match: they may be corrupt.

        Returns how many pages those are, over tiers and pools. They are dropped when no lease or
        transfer needs them. Leases on them continue, and no match finds what they commit; sessions
        unpin them. The same tokens can be computed anew at once.
        """
        self.storage.remove(prompt)
        pages = self.index.quarantine(prompt)
        self.sessions.forget_hidden()
        self._in_flight.cancel_pointless()
        return pages

    @property
    def making_room(self) -> bool:
        """Whether pages are leaving the device: `reserve` may find room when they have landed."""
        return any(self._in_flight.leaving(anchor.name) for anchor in self.memory.anchors)

    @property
    def busy(self) -> bool:
        """Whether anything is in flight between device and host."""
        return len(self._in_flight) > 0

    @property
    def unsettled(self) -> bool:
        """Whether a `poll` has, or will have, something to do, with storage too."""
        waiting = len(self._events) + len(self.prefetches) + len(self.supplements)
        return self.busy or self.storage.unsettled or waiting > 0

    def flush(self, tier: Tier) -> int:
        """Drop every page of a tier that is not pinned; returns how many."""
        return self.index.clear(tier)

    def drain(self, timeout_s: float) -> bool:
        """Poll until nothing is in flight or waits for storage; False on a timeout of any rank."""
        deadline = time.monotonic() + timeout_s
        self.poll()
        while self.busy or self.storage.at_work:
            (in_time,) = self.agreement.all_min([time.monotonic() <= deadline])
            if not in_time:
                return False
            time.sleep(0.0002)
            self.poll()
        return True

    def close(self, timeout_s: float = 10.0) -> bool:
        """Finish what is in flight, write what waits to be stored, and give the memory back.

        False if a call of the store did not return in time: the memory then stays allocated.
        """
        self.prefetches.end_all()
        self.sessions.forget_all()
        deadline = time.monotonic() + timeout_s
        self.drain(timeout_s)
        self.storage.detach(max(0.0, deadline - time.monotonic()))
        self.drain(max(1.0, deadline - time.monotonic()))
        ended = self.storage.join(max(1.0, deadline - time.monotonic()))
        if ended:
            self.hardware.close(max(1.0, deadline - time.monotonic()))
        return ended

    # -- looking ----------------------------------------------------------------------------

    def stats(self, *, session_pages: bool = True) -> Stats:
        """Without the pages that sessions pin it takes no longer with many sessions."""
        return Stats(
            **counts_of_transfers(self._in_flight, self.hardware.copier.lanes),
            **counts_of_pages(self.index),
            prompt_tokens=self._counts.prompt_tokens,
            cached_tokens=dict(self._counts.cached_tokens),
            misses=dict(self._counts.misses),
            refused=self._counts.refused,
            skipped_backups=self._writing.skipped,
            sessions=self.sessions.stats(pages_too=session_pages),
            prefetches=dict(self.prefetches.ended),
            storage=self.storage.stats(),
        )

    def validate(self) -> list[str]:
        """Every violation of what must hold, in sentences; empty when all is well."""
        parts = CacheParts(self.index, self._in_flight, self._leases, self.storage, self.receiving)
        kept = (*self.sessions.violations(), *self.prefetches.violations())
        return [*self.index.validate(), *violations(parts), *kept]

    # -- the steps --------------------------------------------------------------------------

    def _reserve(self, match: Match, tokens: int, growth: int, priority: int) -> Lease | None:
        """Pin, load slots, compute slots: all of it, or nothing."""
        if not self.index.current(match.hit):
            match = self.match(match.prompt, match.slowest)
        why = tuple(self.index.why(match.hit))
        inner = self.index.pin(match.hit, priority)
        # A match of the device alone waits for no transfer, not even of optional sidecars.
        transfers = self._in_flight.load(inner) if match.slowest > Tier.DEVICE else []
        if transfers is None or not self.index.advance(inner, tokens, growth):
            self._undo(inner, transfers or [])
            return None
        if any(transfer in self._in_flight.overdue() for transfer in transfers):
            # An overdue load still holds its slots, and waiting for it fails: recompute instead.
            self._undo(inner, transfers)
            return self._reserve(self.match(match.prompt, Tier.DEVICE), tokens, growth, priority)
        lease = Lease(inner, match.tokens, match.by_tier, why, transfers)
        self._leases[inner.number] = lease
        return lease

    def _undo(self, inner: IndexLease, transfers: list[ArrivalTransfer]) -> None:
        """Take back a reservation; transfers begun for other leases continue."""
        for transfer in transfers:
            own = transfer.holds is not None and transfer.holds.leases[0] is inner
            if own and transfer.state is TransferState.RESERVED:
                self._in_flight.cancel(transfer)
        self.index.release(inner)

    def _settled(self, lease: Lease) -> None:
        """The lease's load has landed: make the commits that waited for it."""
        pending, lease.pending = lease.pending, []
        if pending:  # A commit frees duplicate pages, which a running step may still use.
            self._in_flight.drop_fence(Way.LOAD)
        for tokens, without in pending:
            self._commit(lease, tokens, without)

    def _commit(self, lease: Lease, tokens: int, without: Collection[str]) -> None:
        if self._full_pages(tokens) > lease._index_lease.boundary:
            self.index.commit(lease._index_lease, tokens, without)
            self._writing.committed(lease._index_lease)

    def _copy_on_device(self, move: PageMove) -> None:
        self.hardware.copy_on_device(move)  # Backups wait for that, too.
        self._in_flight.drop_fence()

    def _full_pages(self, tokens: int) -> int:
        return (tokens - self.memory.holdback) // self.memory.page_tokens

    def _make_room(self) -> bool:
        """Free what the last refusal lacked on the device; True if trying again may succeed."""
        missing = self.index.missing.items()
        lacking = {anchor: pages for (tier, anchor), pages in missing if tier is Tier.DEVICE}
        return self._writing.make_room(lacking)

    def _fits_free(self, inner: IndexLease) -> bool:
        """Whether the lease's pages on the host fit on the device without eviction."""
        needs, free = self.index.needs(inner, Tier.HOST, Tier.DEVICE), self.index.free_pages
        return all(pages <= free(Tier.DEVICE, name) for name, pages in needs.items())
