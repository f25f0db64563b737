"""Which step comes next, and how far the host takes it while the device computes the current one.

`Overlap` holds the next step. It is launched before the host has read what is sampled, or drafted:

launch_next          a decode token of each request; prefill chunks if a request waits for slots
launch_verify_ahead  a verify step after a verify step, wherever acceptance ends
launch_verify        a verify step of drafts that the device is still computing
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.cache import TieredCache
from kvtide.engine.chunks import PlannedStep, ScheduledChunk
from kvtide.engine.overlap import Overlap
from kvtide.engine.request import Request, RequestState
from kvtide.engine.runner import StepOutput
from kvtide.engine.sampling.sampler import SamplingBatch
from kvtide.engine.scheduler import Scheduler
from kvtide.engine.speculation.speculation import Speculation


class LaunchAhead:
    """Steers `overlap`."""

    def __init__(
        self,
        overlap: Overlap,
        cache: TieredCache,
        scheduler: Scheduler,
        speculation: Speculation | None,
    ) -> None:
        self._overlap, self._cache, self._scheduler = overlap, cache, scheduler
        self._speculation = speculation

    @property
    def admits_beside(self) -> bool:
        """Admission runs beside the step, which starts at once: a request waits for slots, and most
        often none are free."""
        waits = self._scheduler.blocked and bool(self._scheduler.running)
        return waits and self._scheduler.launches_ahead

    def prepare_next(self) -> None:
        """Plan one decode token of each running request, and prepare that step."""
        self._prepare(self._scheduler.plan_decode())

    def launch_next(
        self, requests: Sequence[Request], sampling: SamplingBatch, output: StepOutput
    ) -> None:
        """Plan the next step, prepare it, and launch it where that is possible.

        Prefill joins it only late in the current step, so that prefixes which land meanwhile are in
        it.
        """
        if self._scheduler.plans_prefill_ahead and output.wait_until_late():
            self._cache.land()
            planned = self._scheduler.plan_mixed()
        else:
            planned = self._scheduler.plan_decode()
        if not self._prepare(planned) or planned is None:
            return
        scheduler = self._scheduler
        may_launch = scheduler.may_launch if sampling.certain else scheduler.may_launch_uncertain
        if may_launch(planned):
            sampling.keep_logits()
            output.keep_captured()
            self._overlap.launch(requests, sampling.tokens)

    def launch_verify_ahead(
        self, chunks: Sequence[ScheduledChunk], sampling: SamplingBatch, output: StepOutput
    ) -> None:
        """Draft behind a verify step, and launch the next one of these drafts, before the host has
        read what was sampled: the device accepts by itself. Only a step of all running requests.

        Recurrent states go back to where acceptance ended before the next step: with such a model
        the drafts alone are launched, and the host reads what was accepted while they run.
        """
        speculation, scheduler = self._speculation, self._scheduler
        if speculation is None or not speculation.can_draft_ahead:
            return
        planned = scheduler.plan_verify_ahead(chunks, speculation.wanted_ahead)
        if planned is None or not any(chunk.drafts for chunk in planned.chunks):
            return
        step = speculation.unread(chunks, output, sampling.tokens)
        drafted = speculation.draft_ahead(step, planned)
        if drafted is None or not scheduler.launches_ahead or scheduler.keeps_states:
            return
        planned, drafts = drafted
        output.keep_captured()
        if self._prepare(planned):
            self._overlap.launch_verify_ahead(step.sampled, drafts)
        else:
            self._overlap.forget()

    def launch_verify(self) -> bool:
        """Launch the next step on drafts that the device has yet to compute; False if the host has
        to read them first."""
        drafts = self._speculation.take_unread() if self._speculation is not None else None
        if drafts is None or (planned := self._scheduler.plan_verify()) is None:
            return False
        if not self._prepare(planned):
            self._overlap.forget()
            return False
        assert self._speculation is not None, "no drafts without speculation"
        self._speculation.before(planned.chunks)
        self._overlap.launch_drafted(drafts)
        return True

    def _prepare(self, planned: PlannedStep | None) -> bool:
        """The step is prepared: there is one, and a CUDA graph fits it."""
        if planned is None:
            return False
        self._overlap.plan(planned)
        return self._overlap.prepare()

    def drop(self, request: Request) -> bool:
        """The host samples another token than the device has: what runs on that one is void.
        Returns whether a step does."""
        if self._speculation is not None:
            self._speculation.undo_ahead(request)
        return self._overlap.drop(request)

    @property
    def wrong_states(self) -> list[Request]:
        """Running requests whose states have a token that was not sampled: they are computed again
        from the cache."""
        dropped = self._overlap.dropped if self._scheduler.keeps_states else ()
        return [request for request in dropped if request.state is RequestState.RUNNING]
