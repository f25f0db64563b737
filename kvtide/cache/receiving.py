"""Pages that a peer writes into the host tier: a prompt prefilled by another server.

    begin ──▶ receipt: slots and a tail row ──land, in any order──▶ pages that matches find
                 ├──all there──▶ finish ──▶ the request is admitted, and its tail copied
                 └──abandon──▶ quarantined: nothing more lands ──silent──▶ slots go back

The slots are outside the tree (`index.Import`), so that a page which is half written is found by
no match. A peer's bytes may come after it failed: slots and tail rows of a receipt that was
abandoned are reused only when the peer is known to be silent.

Where a store is attached, it is given the pages that landed, as it is given backups.

All ranks are given the same calls, and so take the same slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtide.cache.agreed_events import AgreedEvents
from kvtide.cache.hardware import Hardware
from kvtide.cache.inflight import InFlightTransfers
from kvtide.index import Import, Index, Prompt, Taken, WantedPages
from kvtide.index.match.match import deepest_boundary, missing_pages
from kvtide.spec import ModelMemory, Tier

MAX_HOST_FRACTION = 0.5
"""The most of the host's slots that all receipts and fetches together take."""


@dataclass(slots=True, eq=False)
class Receipt:
    """Slots for pages of one prompt, and a row for its tail.

    boundary  the page at which the prompt can resume once all have landed; the tail follows
    places    a slot for every page that a peer is to write; landed pages keep their number
    tail_row  None once the tail is copied or dropped
    ready     the device is done with slots and row on all ranks: a peer may write there
    landed    numbers of the places whose page has landed
    """

    prompt: Prompt
    boundary: int
    held_tokens: int
    arriving: Import
    places: tuple[Taken, ...]
    tail_row: int | None
    ready: bool = False
    landed: set[int] = field(default_factory=set)

    @property
    def epoch(self) -> int:
        """Unique in this cache, and the same on all its ranks."""
        return self.arriving.number

    @property
    def complete(self) -> bool:
        return len(self.landed) == len(self.places)


class Receiving:
    """`TieredCache.receiving`: all receipts, and the tail rows. Without rows nothing comes."""

    def __init__(
        self,
        index: Index,
        hardware: Hardware,
        events: AgreedEvents,
        in_flight: InFlightTransfers,
    ) -> None:
        tails, self._events, self._in_flight = hardware.tails, events, in_flight
        self._index, self._tails, self._queued = index, tails, hardware.copier.queued
        self._memory: ModelMemory = index.memory
        self._free_rows = list(range(tails.rows))[::-1] if tails is not None else []
        self._open: dict[int, Receipt] = {}
        self._quarantined: dict[int, Receipt] = {}
        self._tails_held: dict[int, Receipt] = {}

    # -- what is missing --------------------------------------------------------------------

    def missing_tokens(self, prompt: Prompt) -> int:
        """Tokens in full pages that neither device nor host lets the prompt resume behind."""
        outline = self._index.outline(prompt)
        held = deepest_boundary(self._memory, outline.limit, outline.held)
        return (outline.limit - held) * self._memory.page_tokens

    def begin(self, prompt: Prompt) -> Receipt | None:
        """Take slots for all that a resume at the prompt's last boundary lacks, and a tail row.

        None when there is no room, and nothing changed.
        """
        if not self._free_rows:
            return None
        index, memory = self._index, self._memory
        outline = index.outline(prompt)
        held = deepest_boundary(memory, outline.limit, outline.held)
        wanted = [
            WantedPages(anchor, page)
            for anchor, pages in missing_pages(memory, outline.limit, outline.held)
            for page in pages.tolist()
        ]
        if not self._within(wanted):
            return None
        lease = index.pin(index.match(prompt, Tier.HOST))
        arriving = index.take(lease, wanted)
        if arriving is None:
            index.release(lease)
            return None
        receipt = Receipt(
            prompt,
            outline.limit,
            held * memory.page_tokens,
            arriving,
            tuple(arriving.taken),
            self._free_rows.pop(),
        )
        self._events.when(self._queued(), partial(setattr, receipt, "ready", True))
        self._open[receipt.epoch] = receipt
        self._tails_held[receipt.epoch] = receipt
        return receipt

    def can_ever_fit(self, prompt: Prompt) -> bool:
        """Whether the host can receive what a prompt lacks, beside what is quarantined now: nothing
        says when that ends. Waiting makes room of all else."""
        index, memory, outline = self._index, self._memory, self._index.outline(prompt)
        rows = 0 if self._tails is None else self._tails.rows
        if rows <= sum(each.tail_row is not None for each in self._quarantined.values()):
            return False
        for anchor, missing in missing_pages(memory, outline.limit, outline.held):
            reach = memory.pool(anchor).reuse.reach_pages(memory.page_tokens)
            pages = outline.limit if reach is None else min(reach, outline.limit)
            slots, lost = index.capacity(Tier.HOST, anchor), self._quarantined_slots(anchor)
            if pages > slots - lost or len(missing) > _max_slots(slots) - lost:
                return False
        return True

    def brings(self, receipt: Receipt, prompt: Prompt) -> bool:
        """Whether a receipt brings pages that this prompt has yet to get."""
        outline = self._index.outline(prompt)
        held = deepest_boundary(self._memory, outline.limit, outline.held)
        return self._index.shared_pages(prompt, receipt.prompt, held) > held

    def _within(self, wanted: Sequence[WantedPages]) -> bool:
        """Whether receipts and fetches leave enough of the host to the rest."""
        names = [want.anchor for want in wanted]
        return all(
            names.count(name) + self._index.importing_pages(name)
            <= _max_slots(self._index.capacity(Tier.HOST, name))
            for name in set(names)
        )

    # -- what comes -------------------------------------------------------------------------

    def land(
        self, receipt: Receipt, numbers: Sequence[int], absent: Sequence[Collection[str]]
    ) -> None:
        """All bytes of these places are there, on all ranks: matches find their pages.

        `absent` names, for each of them, the optional sidecars that the peer did not have.
        """
        assert receipt.epoch in self._open and not receipt.landed.intersection(numbers)
        places = [receipt.places[number] for number in numbers]
        self._index.adopt_from_peer(receipt.arriving, places, absent)
        receipt.landed.update(numbers)

    def finish(self, receipt: Receipt) -> None:
        """All has landed, and the peer writes no more; the tail stays until it is copied."""
        assert receipt.complete, "a receipt is finished when all its places have landed"
        del self._open[receipt.epoch]
        self._depart(receipt)
        self._index.forgo(receipt.arriving)

    def _depart(self, receipt: Receipt) -> None:
        """Give a store what has landed."""
        if self._in_flight.departs:
            landed = [receipt.places[number] for number in sorted(receipt.landed)]
            if (departure := self._index.depart(receipt.arriving, landed)) is not None:
                self._in_flight.departures.append(departure)

    def copy_tail(self, receipt: Receipt, slots: Mapping[str, int]) -> None:
        """Copy the tail to these slots of a lease, by anchor, and free its row.

        The next receipt with that row waits until the device has read it (`ready`).
        """
        assert self._tails is not None and receipt.tail_row is not None
        self._tails.copy(receipt.tail_row, slots)
        self.drop_tail(receipt)

    def drop_tail(self, receipt: Receipt) -> None:
        """Free the row of a receipt that is finished; a second time is harmless."""
        if receipt.tail_row is not None:
            assert receipt.epoch not in self._open, "a peer may still write there"
            self._free_rows.append(receipt.tail_row)
            del self._tails_held[receipt.epoch]
            receipt.tail_row = None

    def abandon(self, receipt: Receipt) -> None:
        """Land nothing more. Slots and row stay taken until `silent`."""
        del self._open[receipt.epoch]
        self._depart(receipt)
        self._index.abandon(receipt.arriving)
        self._quarantined[receipt.epoch] = receipt

    def silent(self, receipt: Receipt) -> None:
        """The peer of an abandoned receipt writes no more: all it held goes back."""
        del self._quarantined[receipt.epoch]
        self._index.forgo(receipt.arriving)
        self.drop_tail(receipt)

    # -- looking ----------------------------------------------------------------------------

    @property
    def quarantined(self) -> Mapping[int, Receipt]:
        """Receipts whose peer may still write, by epoch."""
        return self._quarantined

    def _quarantined_slots(self, anchor: str) -> int:
        names, receipts = self._index.anchor_names, self._quarantined.values()
        taken = (one for each in receipts for one in each.arriving.taken)
        return sum(names[one.cell % len(names)] == anchor for one in taken)

    @property
    def quarantined_slots(self) -> int:
        return sum(len(receipt.arriving.taken) for receipt in self._quarantined.values())

    @property
    def imports(self) -> Iterator[Import]:
        """The imports of receipts that hold slots."""
        for receipt in (*self._open.values(), *self._quarantined.values()):
            yield receipt.arriving

    @property
    def free_tail_rows(self) -> int:
        return len(self._free_rows)

    def violations(self) -> Iterator[str]:
        held = sorted(r.tail_row for r in self._tails_held.values() if r.tail_row is not None)
        rows = [] if self._tails is None else list(range(self._tails.rows))
        if sorted([*held, *self._free_rows]) != rows:
            yield f"tail rows {held} are held and {sorted(self._free_rows)} free, of {len(rows)}"
        for receipt in self._open.values():
            if not receipt.arriving.live:
                yield f"receipt {receipt.epoch} is open without slots"
            if len(receipt.arriving.taken) + len(receipt.landed) != len(receipt.places):
                yield f"receipt {receipt.epoch} counts {len(receipt.landed)} landed pages"
        for receipt in self._quarantined.values():
            if receipt.arriving.lease.live:
                yield f"abandoned receipt {receipt.epoch} still pins pages"


def _max_slots(slots: int) -> float:
    """How many of the host's slots receipts and fetches may have."""
    return max(1, MAX_HOST_FRACTION * slots)
