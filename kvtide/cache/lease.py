"""What callers of the cache hold: a match, and the lease it becomes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvtide.index import Arrival, Hit, Prompt, Stop
from kvtide.index import IndexLease as IndexLease
from kvtide.index.keys import Tokens
from kvtide.spec import Tier
from kvtide.transfer.lane import TransferError
from kvtide.transfer.transfers import Transfer, TransferState


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt is kept, and where. Nothing is held by it.

    tokens   where generation could resume
    by_tier  how many of them would come from which tier
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

    cached_tokens  where the model goes on: the prompt's tokens before are or will be on the device
    by_tier        how many of them came from which tier
    why            per pool, what kept the match from going deeper
    pending        commits that wait for the load, each with what it was made without

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
    def table_version(self) -> tuple[int, int, int]:
        """Equal for as long as the lease's page tables are: they change only with it."""
        in_flight = sum(not t.over for t in self.transfers) if self.transfers else 0
        return self.committed_pages, self.reserved_pages, in_flight

    @property
    def loading(self) -> bool:
        """Whether pages of the prefix are still on their way."""
        if not self.transfers or self.error is not None:
            return False
        return any(not transfer.over for transfer in self.transfers)

    @property
    def arriving(self) -> bool:
        """Whether the first layers of all that is on its way are there."""
        tickets = [transfer.ticket for transfer in self.transfers if not transfer.over]
        return all(ticket is not None and ticket.begun() for ticket in tickets)

    @property
    def failed(self) -> bool:
        return self.error is not None

    def append(self, tokens: Tokens) -> None:
        """The model generated these tokens."""
        self._index_lease.prompt.extend(tokens)

    def fail(self, error: TransferError) -> None:
        """The prefix will not come, and so nothing can be committed on top of it."""
        self.error, self.pending = error, []

    def join(self) -> None:
        """Wait until what is on its way is there, as far as the device has been told to bring it;
        it lands with the next `poll`."""
        for transfer in self.transfers:
            if transfer.state is TransferState.IN_FLIGHT and transfer.ticket is not None:
                transfer.ticket.join()

    def wait(self, leg: int) -> None:
        """Make the caller's coming work wait for a leg of the load; raises if it failed."""
        if self.error is not None:
            raise self.error
        for transfer in self.transfers:
            if transfer.state is TransferState.IN_FLIGHT:
                if transfer.ticket is None:
                    raise TransferError("the prefix could not be loaded") from transfer.error
                transfer.ticket.wait(leg)
            assert transfer.state is not TransferState.RESERVED, "wait comes after `load`"
