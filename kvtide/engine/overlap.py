"""Overlap scheduling: while the device computes a step, the host plans, prepares and launches the
next one.

Between two steps the host reads sampled tokens, schedules, and writes page tables. Without overlap
the device idles meanwhile. `Overlap` holds the step after the current one, from plan to launch:

             plan              prepare               launch
    IDLE ──────────▶ PLANNED ──────────▶ PREPARED ──────────▶ LAUNCHED
     ▲                  │                    │                    │
     │                  │ take, discard      │ take, discard      │ take, discard
     └──────────────────┴────────────────────┴────────────────────┘

IDLE      there is no next step yet
PLANNED   its chunks are chosen and have slots (`Scheduler.plan_decode`, `plan_mixed`)
PREPARED  the inputs of its CUDA graph are written, except tokens that are not sampled yet
LAUNCHED  its graph runs on what only the device knows: sampled tokens, drafts, and behind a verify
          step also where acceptance ended

`take` makes it the current step, if it is still what the scheduler wants:

- PLANNED: the runner launches its chunks; scheduling is saved.
- PREPARED: the graph is launched with the tokens that the host has read by then.
- LAUNCHED: its output is read. A request that finished or was retracted meanwhile still occupies a
  row of the launched step; its output is discarded.

A step that is not wanted any more is discarded: its slots go back, and the scheduler schedules
afresh. A launched step cannot be recalled: the fence before the next launch orders every reuse of
its slots behind it.

Not every step can be launched ahead: see `Scheduler.may_launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from kvtide.cache import Lease, TieredCache
from kvtide.engine.chunks import PlannedStep, ScheduledChunk
from kvtide.engine.request import Request
from kvtide.engine.runner import LaunchedStep, PreparedStep, StepOutput, UnreadTokens


class OverlapState(Enum):
    IDLE = "idle"
    PLANNED = "planned"
    PREPARED = "prepared"
    LAUNCHED = "launched"


_NEXT = {
    OverlapState.IDLE: {OverlapState.PLANNED, OverlapState.IDLE},
    OverlapState.PLANNED: {OverlapState.PREPARED, OverlapState.IDLE},
    OverlapState.PREPARED: {OverlapState.LAUNCHED, OverlapState.IDLE},
    OverlapState.LAUNCHED: {OverlapState.IDLE},
}


class Confirming(Protocol):
    """What `take` asks the scheduler."""

    def confirms(self, chunks: list[ScheduledChunk]) -> bool: ...

    def give_back(self, chunks: list[ScheduledChunk]) -> None: ...


class Launching(Protocol):
    """What launches steps: the runner."""

    def run(self, chunks: Sequence[ScheduledChunk]) -> StepOutput: ...

    def prepare(self, chunks: Sequence[ScheduledChunk], moves: int) -> PreparedStep | None: ...

    def launch_prepared(self, step: PreparedStep) -> StepOutput: ...

    def launch_ahead(
        self, step: PreparedStep, requests: Sequence[Request], sampled: Tensor
    ) -> LaunchedStep: ...

    def launch_drafted(self, step: PreparedStep, drafts: Tensor) -> LaunchedStep: ...

    def launch_behind(
        self, step: PreparedStep, sampled: UnreadTokens, drafts: Tensor
    ) -> LaunchedStep: ...

    def read_launched(self, step: LaunchedStep, chunks: Sequence[ScheduledChunk]) -> StepOutput: ...


class CurrentStep(NamedTuple):
    """A step's chunks, and the call that launches it, or reads its output if it is `launched`."""

    chunks: list[ScheduledChunk]
    launch: Callable[[], StepOutput]
    launched: bool = False

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)


class Overlap:
    """See the module."""

    def __init__(self, cache: TieredCache, runner: Launching) -> None:
        self._cache = cache
        self._runner = runner
        self._state = OverlapState.IDLE
        self._rows: list[tuple[ScheduledChunk, Lease]] = []
        self._prepared: PreparedStep | None = None
        self._launched: LaunchedStep | None = None
        self._behind, self._moves = False, 0

    @property
    def state(self) -> OverlapState:
        return self._state

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """Those of the next step whose requests still hold the lease they were planned with."""
        return [chunk for chunk, lease in self._rows if chunk.request.lease is lease]

    # -- towards the launch -----------------------------------------------------------------

    def plan(self, planned: PlannedStep) -> None:
        """These chunks, which have slots, are the next step."""
        self._rows = [(chunk, chunk.request.held) for chunk in planned.chunks]
        self._moves = planned.moves
        self._become(OverlapState.PLANNED)

    def prepare(self) -> bool:
        """Write the next step's inputs into a CUDA graph; False, and nothing changed, if none
        fits."""
        self._prepared = self._runner.prepare([chunk for chunk, _ in self._rows], self._moves)
        if self._prepared is not None:
            self._become(OverlapState.PREPARED)
        return self._prepared is not None

    def launch(self, requests: Sequence[Request], sampled: Tensor) -> None:
        """Launch the next step; `sampled` has a token of each of `requests`, on the device."""
        assert self._prepared is not None, "only a prepared step is launched"
        self._cache.fence([lease for _, lease in self._rows])
        self._launched = self._runner.launch_ahead(self._prepared, requests, sampled)
        self._become(OverlapState.LAUNCHED)

    def launch_drafted(self, drafts: Tensor) -> None:
        """Launch the next step, a verify step of these drafts on the device."""
        assert self._prepared is not None, "only a prepared step is launched"
        self._cache.fence([lease for _, lease in self._rows])
        self._launched = self._runner.launch_drafted(self._prepared, drafts)
        self._become(OverlapState.LAUNCHED)

    def launch_behind(self, sampled: UnreadTokens, drafts: Tensor) -> None:
        """Launch the next step, a verify step of these drafts behind what is `sampled`."""
        assert self._prepared is not None, "only a prepared step is launched"
        self._cache.fence([lease for _, lease in self._rows])
        self._launched = self._runner.launch_behind(self._prepared, sampled, drafts)
        self._behind = True
        self._become(OverlapState.LAUNCHED)

    def forget(self) -> None:
        """The next step is scheduled afresh; slots stay taken."""
        self._become(OverlapState.IDLE)

    def drop(self, request: Request) -> None:
        """Discard a request's row of a launched step: it ran on another token than was sampled."""
        if self._state is not OverlapState.LAUNCHED:
            return
        self._rows = [row for row in self._rows if row[0].request is not request]

    # -- the current step -------------------------------------------------------------------

    def take(self, scheduler: Confirming) -> CurrentStep | None:
        """Make the next step the current one; None, and discard it, if it is not wanted."""
        prepared, launched, behind = self._prepared, self._launched, self._behind
        chunks, planned = self.chunks, len(self._rows)
        self._become(OverlapState.IDLE)
        if launched is not None:
            chunks = [chunk for chunk in chunks if chunk.is_sampled]
            if behind:  # Accepted tokens have moved them.
                chunks = [chunk._replace(end=chunk.request.length) for chunk in chunks]
            read = partial(self._runner.read_launched, launched, chunks)
            return CurrentStep(chunks, read, launched=True) if chunks else None
        if not chunks or not scheduler.confirms(chunks):
            scheduler.give_back(chunks)
            return None
        if prepared is not None and len(chunks) == planned:
            return CurrentStep(chunks, partial(self._launch_prepared, prepared))
        return self.afresh(chunks)

    def afresh(self, chunks: list[ScheduledChunk]) -> CurrentStep:
        """A step that was not prepared."""
        return CurrentStep(chunks, partial(self._run, chunks))

    def _run(self, chunks: list[ScheduledChunk]) -> StepOutput:
        self._fence(chunks)
        return self._runner.run(chunks)

    def _launch_prepared(self, step: PreparedStep) -> StepOutput:
        self._fence(step.chunks)
        return self._runner.launch_prepared(step)

    def _fence(self, chunks: Sequence[ScheduledChunk]) -> None:
        self._cache.fence([chunk.request.held for chunk in chunks])

    def _become(self, state: OverlapState) -> None:
        """The one place where the state changes."""
        assert state in _NEXT[self._state], f"{self._state.name} does not become {state.name}"
        if state is OverlapState.IDLE:
            self._rows, self._prepared, self._launched, self._behind = [], None, None, False
        self._state = state
