"""What callers of the cache hold: a match, and the lease it becomes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvtide.index import Arrival, Hit, Prompt, Stop
from kvtide.index import IndexLease as IndexLease
from kvtide.index.keys import TokenSequence
from kvtide.spec import Tier
from kvtide.transfer.lane import TransferError
from kvtide.transfer.transfers import Transfer, TransferState


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt is resident, and where. A match holds nothing.

    tokens   where generation could resume
    by_tier  how many of these tokens each tier would give
    """

    prompt: Prompt
    tokens: int
    by_tier: Mapping[Tier, int]
    slowest: Tier
    hit: Hit


@dataclass(slots=True, eq=False, weakref_slot=True)
class Lease:
    """The right to read a prefix and to write what comes after it, until released.

        ready ──commit──▶ ready
          ▲
        loading ──all transfers landed──▶ ready        commits made meanwhile happen now
          └─────one failed or is late───▶ failed       nothing of it is kept; release it

    cached_tokens  the model computes from here on; all tokens before are resident or loading
    by_tier        how many of these tokens each tier gave
    why            per pool, what kept the match from going deeper
    pending        commits that wait for the load, each with the sidecars that were not written

    Only the cache reads `_index_lease`.
    """

    _index_lease: IndexLease
    cached_tokens: int
    by_tier: Mapping[Tier, int]
    why: tuple[Stop, ...]
    transfers: list[Transfer[Arrival]] = field(default_factory=list)
    error: TransferError | None = None
    pending: list[tuple[int, Collection[str]]] = field(default_factory=list)

    @property
    def prompt(self) -> Prompt:
        return self._index_lease.prompt

    @property
    def live(self) -> bool:
        return self._index_lease.live

    @property
    def number(self) -> int:
        """Identifies the lease among all of this cache."""
        return self._index_lease.number

    @property
    def hidden(self) -> bool:
        """Whether no match finds what the lease stands on and commits."""
        return self._index_lease.hidden

    @property
    def committed_pages(self) -> int:
        """The page up to which the prompt is found or committed."""
        return self._index_lease.boundary

    @property
    def reserved_pages(self) -> int:
        """The page up to which the lease has slots."""
        return self._index_lease.reserved

    @property
    def table_version(self) -> tuple[int, int, int, int]:
        """Equal for as long as the lease's page tables are: they change only with it."""
        in_flight = sum(not t.over for t in self.transfers) if self.transfers else 0
        inner = self._index_lease
        return self.committed_pages, self.reserved_pages, in_flight, inner.shrunk

    @property
    def loading(self) -> bool:
        """Whether pages of the prefix are still arriving."""
        if not self.transfers or self.error is not None:
            return False
        return any(not transfer.over for transfer in self.transfers)

    @property
    def arriving(self) -> bool:
        """Whether the first leg of every open transfer has landed."""
        tickets = [transfer.ticket for transfer in self.transfers if not transfer.over]
        return all(ticket is not None and ticket.first_leg_done() for ticket in tickets)

    @property
    def failed(self) -> bool:
        return self.error is not None

    def append(self, tokens: TokenSequence) -> None:
        """The engine sampled these tokens."""
        self._index_lease.prompt.extend(tokens)

    def fail(self, error: TransferError) -> None:
        """The load failed: nothing can be committed on top of the prefix."""
        self.error, self.pending = error, []

    def join(self) -> None:
        """Block until all issued copies of the load are done; the next `poll` lands them."""
        for transfer in self.transfers:
            if transfer.state is TransferState.IN_FLIGHT and transfer.ticket is not None:
                transfer.ticket.join()

    def wait(self, leg: int) -> None:
        """Order the caller's next work after a leg of the load; raises if the load failed."""
        if self.error is not None:
            raise self.error
        for transfer in self.transfers:
            if transfer.state is TransferState.IN_FLIGHT:
                if transfer.ticket is None:
                    raise TransferError("the prefix could not be loaded") from transfer.error
                transfer.ticket.wait(leg)
            assert transfer.state is not TransferState.RESERVED, "wait comes after `load`"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a poll brought: leases whose prefix has landed, leases whose load failed."""

    landed: tuple[Lease, ...] = ()
    failed: tuple[Lease, ...] = ()
