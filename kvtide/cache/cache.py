"""`TieredCache`: a model's memory over device, host and storage, for people who write engines.

    match ─▶ reserve ─▶ load ─▶ [wait(layer) … forward] ─▶ commit … commit ─▶ release
                                    poll, once per step

The cache owns the device's pages and the host's. It takes tokens and returns leases; it never sees
a request. All calls come from one thread and none waits for a copy, except `wait` for the layer
that is needed next. Copies run beside the model and become visible in `poll`.

What always holds: what `match` finds is there; what a lease was promised stays until `release`;
pages on their way are not readable; whatever fails gives back all it held.

`storage` reaches beyond the process: attach a store, and fetch from it when a prompt arrives.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtide.cache.cache_config import CacheConfig
from kvtide.cache.cache_invariants import CacheParts, violations
from kvtide.cache.cache_stats import CacheCounts, PageCount, Stats
from kvtide.cache.hardware import Hardware, space
from kvtide.cache.inflight import Flight, InFlightTransfers
from kvtide.cache.lease import Lease, Match
from kvtide.cache.rank_agreement import Agreement, Alone
from kvtide.cache.sessions import Sessions
from kvtide.cache.storage_tier import Storage
from kvtide.cache.write_policies import POLICIES
from kvtide.index import DEFAULT_NAMESPACE, Arrival, Index, Namespace, Placement, Prompt, Stop
from kvtide.index import IndexLease as IndexLease
from kvtide.index.keys import Tokens
from kvtide.spec import ALL, ModelMemory, Slots, Tier
from kvtide.transfer.lane import TransferError
from kvtide.transfer.strided import Way
from kvtide.transfer.traffic import Traffic
from kvtide.transfer.transfer import TransferState

MAX_FLIGHTS = 64
"""How many transfers ranks talk about at a time; older ones come first."""
HANDOVER_S = 1e-3
"""So long at the most, whoever starts a load leaves the interpreter to the thread that issues it:
the first bytes are on their way while the caller goes on, and not after it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a poll brought: leases whose prefix is all there, leases whose prefix will not come."""

    landed: tuple[Lease, ...] = ()
    failed: tuple[Lease, ...] = ()


class TieredCache:
    """See the module. Tests bring their own `hardware`; otherwise the config says what to open.

    `agreement` is how this rank's cache comes to the same ends as those of all others.
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
        )
        traffic: Traffic[Arrival] = Traffic(self.hardware.copier, config.transfer_timeout_s)
        self._flights = InFlightTransfers(self.index, traffic)
        self._writing = writing(self.index, self._flights, config.headroom)
        self._sessions = Sessions(self.index, config.session_share)
        self._leases: dict[int, Lease] = {}
        self._counts = CacheCounts()
        self.storage = Storage(self.index, self._flights, self.hardware, config, self.agreement)

    # -- finding ----------------------------------------------------------------------------

    def prompt(self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> Prompt:
        """A request's tokens in the form the cache works with; made once per request."""
        return self.index.prompt(tokens, namespace)

    def scratch(self, tokens: Tokens) -> Prompt:
        """A prompt that finds nothing and is found by nobody: for computing it without the cache.

        Reserve, commit and release it like any other: each lease has its pages to itself, no
        write policy copies them, and `release` drops them all.
        """
        return self.index.scratch(tokens)

    def match(self, prompt: Prompt, slowest: Tier = Tier.HOST) -> Match:
        """How much of the prompt is kept on the device, or down to `slowest`. Changes nothing."""
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
        """Lease the match, with device slots for its prefix and for the tokens up to `tokens`.

        `tokens` is all of the prompt if not given; `growth_pages` promises as many further ones.
        In every pool or in none: `None` means no room now, and nothing changed; try again after
        a `poll`. It may never fit if it is more than `max_sequence_tokens`. A match that is out of
        date is
        made again.
        """
        upto = match.prompt.tokens if tokens is None else tokens
        lease = self._reserve(match, upto, growth_pages, priority)
        if lease is None and self._writing.make_room(self._missing()):
            lease = self._reserve(match, upto, growth_pages, priority)
        if lease is None:
            self._counts.refused += 1
            return None
        if not lease.inner.hidden:
            self._counts.leased(match.prompt.tokens, lease.by_tier, lease.why)
        self._writing.found(lease.inner)
        return lease

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence whose history fits the device when nothing else is there."""
        histories = [anchor for anchor in self.memory.anchors if anchor.reuse.reach is ALL]
        pages = [self.index.capacity(Tier.DEVICE, a.name) for a in histories or self.memory.anchors]
        return min(pages) * self.memory.page_tokens

    def grow(self, lease: Lease, tokens: int, growth_pages: int = 0) -> bool:
        """Take slots for the lease's tokens up to `tokens`; False, and nothing changed, if full.

        Checkpoints on the way are wishes of the placement: where they do not fit, the lease goes on
        without them.
        """
        within = tokens <= lease.inner.reserved * self.memory.page_tokens
        if within and not growth_pages:
            return True
        if self.index.reserve(lease.inner, tokens, growth=growth_pages, running=True):
            return True
        again = self._writing.make_room(self._missing())
        if again and self.index.reserve(lease.inner, tokens, growth=growth_pages, running=True):
            return True
        return self.index.reserve(lease.inner, tokens, (), growth_pages, running=True)

    def shrink(self, lease: Lease, tokens: int) -> None:
        """Give back slots beyond `tokens`, which stay promised: less was computed than planned.

        Where windows and states are kept is then decided anew by the next `grow`.
        """
        self.index.shrink(lease.inner, tokens)

    def load(self, lease: Lease) -> None:
        """Start the copies that bring the lease's prefix to the device.

        Loads of other leases reserved since the last call leave in the same submission.
        """
        others = self._flights.flying(Way.LOAD)
        if lease.loading and self._flights.submit(Way.LOAD) and not others:
            for flight in lease.transfers:
                if flight.ticket is not None:
                    flight.ticket.handed_over(HANDOVER_S)

    def wait(self, lease: Lease, layer: int) -> None:
        """Make the model's coming work wait until the prefix is there for this (global) layer.

        On a GPU this orders streams and returns at once; on a CPU it blocks. Raises
        `TransferError` when the load failed or missed its deadline: release the lease then. Other
        ranks may not know of it yet: with several, all release it when `poll` says that it failed.
        """
        if lease.transfers:
            lease.wait(self.hardware.copier.leg_of(layer))

    def commit(self, lease: Lease, tokens: int, without: Collection[str] = ()) -> None:
        """The tokens up to `tokens` are computed: their full pages can be found from now on.

        For a lease that is still loading it happens when the load has landed, and not at all if
        that fails. `without` names optional sidecars (a draft's KV) that were not computed.
        """
        assert lease.live, "committing with a lease that was released"
        self._flights.unmark()
        if lease.loading:
            lease.pending.append((tokens, without))
        elif not lease.failed:
            self._commit(lease, tokens, without)

    def retain(self, lease: Lease) -> None:
        """Make a checkpoint of where the lease stands: somebody will go on from there."""
        if not lease.inner.running or not self.index.has_checkpoints:
            return
        self.index.retain(lease.inner)
        if not (lease.loading or lease.failed):
            self._writing.committed(lease.inner)

    def common(self, prompt: Prompt, lease: Lease) -> int:
        """Up to which page a prompt shares what a lease has yet to commit; 0 if it shares none.

        When `commit` has come there, `match` finds these pages, if what a resume there needs was
        kept.
        """
        inner = lease.inner
        return 0 if inner.hidden else self.index.common(prompt, inner.prompt, inner.boundary)

    def release(self, lease: Lease, in_use: bool = True) -> None:
        """Give back exactly what the lease holds. A second time is harmless.

        Where it has gone on beyond its prompt, a next prompt will go on from its end. `in_use`:
        maybe by a pass that was begun after the last `mark`; a load comes after it then.
        """
        if in_use:
            self._flights.unmark(Way.LOAD)
        if lease.live and lease.inner.boundary > lease.inner.placed:
            self.retain(lease)
        self._leases.pop(lease.inner.number, None)
        self.index.release(lease.inner)

    def page_table(self, lease: Lease, pool: str) -> Slots:
        """The device slot of every page the lease has, -1 where the pool keeps none.

        Includes slots into which pages are on their way: `wait` comes before reading them.
        """
        anchor = self.memory.pool(pool).follows or pool
        if lease.loading:
            return self.index.coming_table(lease.inner, anchor)
        return self.index.page_table(lease.inner, anchor)

    def carries(self, lease: Lease, sidecar: str) -> npt.NDArray[np.bool_]:
        """For every page of the prefix on the device: has it this optional sidecar?"""
        return self.index.carries(lease.inner, sidecar)

    def view(self, pool: str, layer: int) -> Mapping[str, torch.Tensor]:
        """What a layer keeps on the device, by field: (slots, entries of a page, *shape)."""
        return self.hardware.device.view(pool, layer)

    # -- beside requests --------------------------------------------------------------------

    def mark(self) -> None:
        """All that was committed is computed by what the device has been given to do so far, and
        all that is free is free when that is done.

        Before a pass that others are admitted beside and whose `poll` comes while it is under way:
        copies then wait for nothing of it, unless something is committed in between.
        """
        self._flights.mark()

    def poll(self) -> Progress:
        """Once per step: let land what is done everywhere, start copies that are due."""
        progress = self.land()
        self._writing.tick()
        for way in Way:
            self._flights.submit(way)
        self._flights.unmark()
        return progress

    def land(self) -> Progress:
        """Let land what is done everywhere; for whom `poll` comes too late in a step."""
        told: dict[int, Lease] = {}
        for flight, inners in self._settle():
            waiting = (self._leases.get(inner.number) for inner in inners)
            for lease in (lease for lease in waiting if lease is not None and not lease.failed):
                if flight in lease.transfers:
                    told[lease.inner.number] = lease
                    if flight.state is not TransferState.LANDED:
                        lease.fail(_explained(flight))
        landed = [lease for lease in told.values() if not lease.failed and not lease.loading]
        for lease in landed:
            self._settled(lease)
        failed = [lease for lease in told.values() if lease.failed]
        return Progress(tuple(landed), tuple(failed))

    def _settle(self) -> list[tuple[Flight, list[IndexLease]]]:
        """End what is done on every rank: one exchange for all that is in flight."""
        flights = self._flights.verdicts()[:MAX_FLIGHTS]
        mine = [*flights, *self.storage.verdicts()]
        agreed = self.agreement.all_min(mine, self.index.tree.tick) if mine else []
        news = self._flights.settle(agreed[: len(flights)])
        self.storage.settle(agreed[len(flights) :])
        return news

    def prefetch(self, prompt: Prompt) -> bool:
        """Begin to bring a waiting prompt's prefix to the device, if slots are free for it.

        Nothing is evicted for it and nothing has to be released: it only makes a later `reserve`
        find more on the device. The copies leave with the next `load` or `poll`.
        """
        found = self.match(prompt)
        if found.tokens == self.match(prompt, Tier.DEVICE).tokens:
            return False
        inner = self.index.pin(found.hit)
        flights = self._flights.load(inner) if self._fits_free(inner) else None
        self.index.release(inner)
        return bool(flights)

    def keep(self, session: str, prompt: Prompt, priority: int = 0) -> bool:
        """Pin what the session's next turn can resume from, until `forget` or the next `keep`."""
        return self._sessions.keep(session, prompt, priority)

    def forget(self, session: str) -> bool:
        """Unpin a session; False if it was not kept (any more)."""
        return self._sessions.forget(session)

    def forget_oldest(self) -> bool:
        """Unpin the session that was kept longest ago; False if there is none."""
        return self._sessions.forget_oldest()

    def quarantine(self, prompt: Prompt) -> int:
        """Let nobody find again what shares the prompt's first page, as it may be corrupt.

        Returns how many pages that are, over tiers and pools. They are dropped as soon as no lease
        or copy needs them. Leases that hold some go on with them, and nothing that they commit
        is found; sessions let go of theirs. The same tokens can be computed anew at once.
        """
        self.storage.remove(prompt)
        pages = self.index.banish(prompt)
        self._sessions.forget_hidden()
        self._flights.cancel_pointless()
        return pages

    @property
    def making_room(self) -> bool:
        """Whether pages are leaving the device: `reserve` may find room when they have landed."""
        return any(self._flights.leaving(anchor.name) for anchor in self.memory.anchors)

    @property
    def busy(self) -> bool:
        """Whether anything is in flight between device and host."""
        return len(self._flights) > 0

    @property
    def unsettled(self) -> bool:
        """Whether a `poll` has, or will have, something to do, with storage too."""
        return self.busy or self.storage.unsettled

    def flush(self, tier: Tier) -> int:
        """Drop every page of a tier that nobody needs; returns how many it were."""
        return self.index.clear(tier)

    def drain(self, timeout_s: float) -> bool:
        """Poll until nothing is in flight, nor waits for storage; False if that took longer than
        allowed, on any rank.
        """
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
        """Finish what is in flight, write what is in line, and give the memory back.

        False if a store kept a call for longer than that: the memory is then left to it.
        """
        self._sessions.forget_all()
        deadline = time.monotonic() + timeout_s
        self.drain(timeout_s)
        self.storage.detach(max(0.0, deadline - time.monotonic()))
        self.drain(max(1.0, deadline - time.monotonic()))
        ended = self.storage.join(max(1.0, deadline - time.monotonic()))
        if ended:
            self.hardware.close(max(1.0, deadline - time.monotonic()))
        return ended

    # -- looking ----------------------------------------------------------------------------

    def stats(self) -> Stats:
        flights, index, counts = self._flights, self.index, self._counts
        anchors = [anchor.name for anchor in self.memory.anchors]
        return Stats(
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=dict(counts.cached_tokens),
            misses=dict(counts.misses),
            refused=counts.refused,
            transfers={(w.name.lower(), s.value): n for (w, s), n in flights.ended.items()},
            moved_bytes={way.name.lower(): flights.moved_bytes[way] for way in Way},
            moved_pages={way.name.lower(): flights.moved_pages[way] for way in Way},
            in_flight=len(flights),
            overdue=len(flights.overdue()),
            lane_failures={
                way.name.lower(): lane.failures for way, lane in self.hardware.copier.lanes.items()
            },
            skipped_backups=self._writing.skipped,
            pages={
                (tier, anchor): PageCount(
                    index.capacity(tier, anchor),
                    index.resident_pages(tier, anchor),
                    index.free_pages(tier, anchor),
                )
                for tier in (Tier.DEVICE, Tier.HOST)
                for anchor in anchors
            },
            sessions=len(self._sessions),
            storage=self.storage.stats(),
        )

    def validate(self) -> list[str]:
        """Every violation of what must hold, in sentences; empty when all is well."""
        parts = CacheParts(self.index, self._flights, self._leases, self.storage)
        return [*self.index.validate(), *violations(parts)]

    # -- the steps --------------------------------------------------------------------------

    def _reserve(self, match: Match, tokens: int, growth: int, priority: int) -> Lease | None:
        """Pin, load slots, compute slots: all of it, or nothing."""
        if not self.index.current(match.hit):
            match = self.match(match.prompt, match.slowest)
        why = tuple(self.index.why(match.hit))
        inner = self.index.pin(match.hit, priority)
        # A match of the device alone waits for nothing, not even for what is optional.
        flights = self._flights.load(inner) if match.slowest > Tier.DEVICE else []
        if flights is None or not self.index.reserve(inner, tokens, growth=growth, running=True):
            self._undo(inner, flights or [])
            return None
        if any(flight in self._flights.overdue() for flight in flights):
            # Waiting for it would fail, and it holds its slots: compute these pages instead.
            self._undo(inner, flights)
            return self._reserve(self.match(match.prompt, Tier.DEVICE), tokens, growth, priority)
        lease = Lease(inner, match.tokens, match.by_tier, why, flights)
        self._leases[inner.number] = lease
        return lease

    def _undo(self, inner: IndexLease, flights: list[Flight]) -> None:
        """Take back a reservation; flights that were begun for others go on."""
        for flight in flights:
            own = flight.holding is not None and flight.holding.leases[0] is inner
            if own and flight.state is TransferState.RESERVED:
                self._flights.cancel(flight)
        self.index.release(inner)

    def _settled(self, lease: Lease) -> None:
        """The lease's load has landed: do what it was waiting for."""
        pending, lease.pending = lease.pending, []
        if pending:  # Of pages that others have too, one is free then. A pass may be at it.
            self._flights.unmark(Way.LOAD)
        for tokens, without in pending:
            self._commit(lease, tokens, without)

    def _commit(self, lease: Lease, tokens: int, without: Collection[str]) -> None:
        if self._full_pages(tokens) > lease.inner.boundary:
            self.index.commit(lease.inner, tokens, without)
            self._writing.committed(lease.inner)

    def _full_pages(self, tokens: int) -> int:
        return (tokens - self.memory.holdback) // self.memory.page_tokens

    def _missing(self) -> dict[str, int]:
        """What the last refusal lacked on the device."""
        missing = self.index.missing.items()
        return {anchor: pages for (tier, anchor), pages in missing if tier is Tier.DEVICE}

    def _fits_free(self, inner: IndexLease) -> bool:
        """Whether what the host has of the lease's prefix fits on the device without evicting."""
        needs = self.index.needs(inner, Tier.HOST, Tier.DEVICE)
        return all(
            pages <= self.index.free_pages(Tier.DEVICE, name) for name, pages in needs.items()
        )


def _explained(flight: Flight) -> TransferError:
    """Why a load that has not landed never will, or not in time."""
    elsewhere = "it missed its deadline" if flight.late else "it failed on another rank"
    return TransferError(f"the prefix could not be loaded: {flight.error or elsewhere}")
