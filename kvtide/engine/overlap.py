"""Overlap scheduling: while the device computes a step, the host plans, prepares and launches the
next one.

Between two steps the host reads sampled tokens, schedules, and writes page tables. Without overlap
the device idles meanwhile. `Overlap` holds the step after the current one, from plan to launch:

             plan              prepare               launch
    IDLE ──────────▶ PLANNED ──────────▶ PREPARED ──────────▶ LAUNCHED
     ▲                  │                    │                    │
     │                  │ take, forget       │ take, forget       │ take
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

`take` discards a step that is not wanted any more: its slots go back, and the scheduler schedules
afresh. `forget` discards a verify step that no graph fits. A launched step cannot be recalled: the
fence before the next launch orders every reuse of its slots behind it.

`drop` removes the row of a request that was launched on another token than was sampled. Where that
token is in the request's recurrent states, the engine retracts the request.

Which step is planned, and whether it is launched ahead: `launch_ahead`.

Drafts that the device is still computing are no part of this state. They belong to `Speculation`
and its drafter, because most of them begin while there is no next step, and give a step to plan
only later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


class StepConfirmer(Protocol):
    """What `take` asks the scheduler."""

    def confirms(self, chunks: list[ScheduledChunk]) -> bool: ...

    def give_back(self, chunks: list[ScheduledChunk]) -> None: ...


class StepLauncher(Protocol):
    """What launches steps: the runner."""

    def run(self, chunks: Sequence[ScheduledChunk]) -> StepOutput: ...

    def prepare(
        self, chunks: Sequence[ScheduledChunk], max_accepted: int
    ) -> PreparedStep | None: ...

    def launch_prepared(self, step: PreparedStep) -> StepOutput: ...

    def launch_ahead(
        self, step: PreparedStep, requests: Sequence[Request], sampled: Tensor
    ) -> LaunchedStep: ...

    def launch_drafted(self, step: PreparedStep, drafts: Tensor) -> LaunchedStep: ...

    def launch_verify_ahead(
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


@dataclass(slots=True)
class _NextStep:
    """What the states hold; a new one, without rows, is IDLE's.

    rows          chunks, each with the lease that its request was planned with
    max_accepted  `PlannedStep.max_accepted`
    dropped       requests whose row of the launched step was dropped
    """

    rows: list[tuple[ScheduledChunk, Lease]] = field(default_factory=list)
    max_accepted: int = 0
    prepared: PreparedStep | None = None
    launched: LaunchedStep | None = None
    dropped: list[Request] = field(default_factory=list)

    @property
    def chunks(self) -> list[ScheduledChunk]:
        return [chunk for chunk, lease in self.rows if chunk.request.lease is lease]


class Overlap:
    """See the module."""

    def __init__(self, cache: TieredCache, runner: StepLauncher) -> None:
        self._cache = cache
        self._runner = runner
        self._state = OverlapState.IDLE
        self._next = _NextStep()

    @property
    def state(self) -> OverlapState:
        return self._state

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """Those of the next step whose requests still hold the lease they were planned with."""
        return self._next.chunks

    @property
    def dropped(self) -> list[Request]:
        """Requests whose row of the launched step was dropped."""
        return self._next.dropped

    # -- towards the launch -----------------------------------------------------------------

    def plan(self, planned: PlannedStep) -> None:
        """These chunks, which have slots, are the next step."""
        rows = [(chunk, chunk.request.held) for chunk in planned.chunks]
        self._transition(OverlapState.PLANNED)
        self._next = _NextStep(rows, planned.max_accepted)

    def prepare(self) -> bool:
        """Write the next step's inputs into a CUDA graph; False, and nothing changed, if none
        fits."""
        step = self._next
        prepared = self._runner.prepare([chunk for chunk, _ in step.rows], step.max_accepted)
        if prepared is not None:
            self._transition(OverlapState.PREPARED)
            step.prepared = prepared
        return prepared is not None

    def launch(self, requests: Sequence[Request], sampled: Tensor) -> None:
        """Launch the next step; `sampled` has a token of each of `requests`, on the device."""
        self._launch(lambda step: self._runner.launch_ahead(step, requests, sampled))

    def launch_drafted(self, drafts: Tensor) -> None:
        """Launch the next step, a verify step of these drafts on the device."""
        self._launch(lambda step: self._runner.launch_drafted(step, drafts))

    def launch_verify_ahead(self, sampled: UnreadTokens, drafts: Tensor) -> None:
        """Launch the next step, a verify step of these drafts behind what is `sampled`."""
        self._launch(lambda step: self._runner.launch_verify_ahead(step, sampled, drafts))

    def _launch(self, launch: Callable[[PreparedStep], LaunchedStep]) -> None:
        step = self._next
        self._transition(OverlapState.LAUNCHED)
        assert step.prepared is not None, "PREPARED comes before"
        self._cache.fence([lease for _, lease in step.rows])
        step.launched = launch(step.prepared)

    def forget(self) -> None:
        """The next step is scheduled afresh; slots stay taken."""
        self._transition(OverlapState.IDLE)

    def drop(self, request: Request) -> bool:
        """Discard a request's row of a launched step: it ran on another token than was sampled.
        False, and nothing changed, if no step is launched."""
        if self._state is not OverlapState.LAUNCHED:
            return False
        step = self._next
        step.rows = [row for row in step.rows if row[0].request is not request]
        step.dropped.append(request)
        return True

    # -- the current step -------------------------------------------------------------------

    def take(self, scheduler: StepConfirmer) -> CurrentStep | None:
        """Make the next step the current one; None, and discard it, if it is not wanted."""
        step, chunks = self._next, self.chunks
        self._transition(OverlapState.IDLE)
        if step.launched is not None:
            chunks = [chunk for chunk in chunks if chunk.is_sampled]
            if step.max_accepted:  # By accepted tokens.
                chunks = [chunk._replace(end=chunk.request.length) for chunk in chunks]
            read = partial(self._runner.read_launched, step.launched, chunks)
            return CurrentStep(chunks, read, launched=True) if chunks else None
        if not chunks or not scheduler.confirms(chunks):
            scheduler.give_back(chunks)
            return None
        if step.prepared is not None and len(chunks) == len(step.rows):
            return CurrentStep(chunks, partial(self._launch_prepared, step.prepared))
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

    def _transition(self, state: OverlapState) -> None:
        """The one place where the state changes."""
        assert state in _NEXT[self._state], f"{self._state.name} does not become {state.name}"
        if state is OverlapState.IDLE:
            self._next = _NextStep()
        self._state = state
