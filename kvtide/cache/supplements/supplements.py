"""Supplements: optional sidecars brought to a prompt's pages, which are kept without them.

    storage ──fetch──▶ host ──load──▶ device          in the background; no request waits

Pages may have been computed without a draft's KV that a store or the host has. When a request that
uses it arrives, it is fetched from storage to the host pages that lack it, and copied to the device
pages that lack what the host has.

Such a copy leaves by itself, when no other load is in flight, and brings little: a request's load
that follows hardly waits for it. The model reads a sidecar from the poll on that lands it.

All ranks are given the same prompts, so that copies and fetches begin and end alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.cache.inflight import InFlightTransfers
from kvtide.cache.storage_tier import Storage
from kvtide.cache.supplements.supplement_fetching import SupplementFetch
from kvtide.index import Index, Prompt
from kvtide.spec import ModelMemory
from kvtide.transfer.strided import Way

MAX_COPY_BYTES = 16 << 20
"""Of a copy to the device: a request's load waits behind one at the most."""
MAX_LOOKS = 8
"""Prompts that a poll looks at."""


@dataclass(slots=True, eq=False)
class Supplement:
    """`fetch`: of what the host lacks, too; None without. `stopped`: its request has ended."""

    prompt: Prompt
    fetch: SupplementFetch | None
    stopped: bool = False

    def stop(self) -> None:
        """Begin no further copy to the device. What is being fetched comes to the host."""
        self.stopped = True


class Supplements:
    """`TieredCache.supplements`: all that may still bring something, oldest first."""

    def __init__(self, index: Index, in_flight: InFlightTransfers, storage: Storage) -> None:
        self._index, self._in_flight, self._storage = index, in_flight, storage
        self._max_pages = max(1, MAX_COPY_BYTES // max(1, _sidecar_bytes(index.memory)))
        self._open: list[Supplement] = []

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, prompt: Prompt) -> Supplement:
        """Bring what the prompt's pages lack. A first copy leaves at once, so that it lands while
        the prompt's last tokens are prefilled; the next polls go on with it."""
        supplement = Supplement(prompt, self._storage.supplement(prompt))
        self._open.append(supplement)
        self.advance()
        return supplement

    def advance(self) -> None:
        """Also once per poll: begin a copy to the device, of the first prompt for which there is
        one, where no load is open. The other prompts' turn comes with the next polls."""
        self._open = [one for one in self._open if not one.stopped]
        if self._in_flight.any_open(Way.LOAD):
            return
        for one in self._open[:MAX_LOOKS]:
            if self._in_flight.supplement(one.prompt, self._max_pages):
                self._in_flight.submit(Way.LOAD)
                return
            self._open.remove(one)
            waits = one.fetch is not None and not one.fetch.over
            if waits or self._index.sidecars.awaited(one.prompt):
                self._open.append(one)


def _sidecar_bytes(memory: ModelMemory) -> int:
    """Of all optional sidecars of a page, of the whole model: the same on every rank."""
    pools = [pool for pool in memory.whole.pools if pool.follows and not pool.reuse.required]
    return sum(pool.page_bytes(memory.page_tokens) for pool in pools)
