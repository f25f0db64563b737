"""Failed loads: a request whose prefix cannot be loaded is retracted, and recomputes it.

It is queued again and matches the device tier alone, so that it computes what is not there. The
client sees a later token, and the same text. So is a request whose prefix is quarantined.

A fetch from storage that fails retracts none: it ends before admission (`cache.fetching`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.cache import TieredCache
from kvtide.engine.request import Request
from kvtide.engine.restore_oracle import RestoreOracle
from kvtide.engine.scheduler import Scheduler
from kvtide.spec import Tier


class FailedLoads:
    def __init__(self, cache: TieredCache, scheduler: Scheduler) -> None:
        self._cache, self._scheduler = cache, scheduler
        self._polled = False

    def poll(self) -> None:
        """Poll the cache during a step."""
        self._cache.poll()
        self._polled = True

    def found(self, oracle: RestoreOracle | None) -> list[Request]:
        """Requests whose prefix failed to load or is in quarantine: they are to recompute it.

        If the cache was polled during the last step, transfers that landed since matter only to
        loading requests, and to waiting ones that could be admitted.
        """
        running = self._scheduler.running
        if not self._polled:
            self._cache.poll()
        elif self._scheduler.can_admit or any(request.held.loading for request in running):
            self._cache.land()
        self._polled = False
        failed = [request for request in running if request.held.failed]
        return [*failed, *(oracle.misled(running, failed) if oracle else ())]

    def recompute(self, requests: Sequence[Request]) -> None:
        """A prefix failed to load during a step of these, on any rank: none of its output is used.
        The requests wait again, and recompute what is not on the device."""
        self._cache.poll()
        self.retract(requests)

    def retract(self, requests: Sequence[Request]) -> None:
        """Queue them again. After a failed load a request matches the device tier alone, and
        recomputes the rest."""
        for request in requests:
            if request.held.failed:
                request.slowest_tier, request.reported = Tier.DEVICE, bool(request.output)
            self._scheduler.retract(request)
