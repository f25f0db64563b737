"""A model that computes nothing, on a device whose steps take a stated time.

What is left of a step is the host's: scheduling, sampling, the tree, and all that HTTP takes from
the same interpreter. A GPU's steps leave the interpreter alone; so does the wait here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtide.bench.conversations import Load
from kvtide.bench.step_cost import PAGE, Idle, idle_cache
from kvtide.engine import Engine
from kvtide.layers import Step
from kvtide.models.draft import CapturedStates
from kvtide.server.engine_rank import EngineRank
from kvtide.server.settings import Settings
from kvtide.server.setup.batch_setup import choose_batch
from kvtide.server.setup.engine_setup import Serving
from kvtide.server.tools.parser_registry import ChatFormats
from kvtide.spec import ModelMemory

CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long the device takes for a step of so many tokens."""

    step_s: float
    token_s: float

    def of(self, tokens: int) -> float:
        return self.step_s + tokens * self.token_s


class StandIn(Idle):
    """Steps queue on the device as they do on a GPU; the host waits where it needs logits.

    on_waiting  called before it waits
    """

    def __init__(self, memory: ModelMemory, times: StepTime) -> None:
        super().__init__(memory)
        self._times, self._free_at = times, 0.0
        self.on_waiting: Callable[[], None] | None = None

    def forward(
        self, step: Step, before: torch.Tensor | None = None, captured: CapturedStates | None = None
    ) -> torch.Tensor:
        begins = max(time.perf_counter(), self._free_at)
        self._free_at = begins + self._times.of(len(step.tokens))
        return super().forward(step, before, captured)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.on_waiting is not None:
            self.on_waiting()
        time.sleep(max(0.0, self._free_at - time.perf_counter()))
        return super().logits(hidden)


def stand_in_server(load: Load, times: StepTime, settings: Settings) -> Serving:
    """An engine for a load, whose device holds all its conversations."""
    each = -(-load.longest_tokens // PAGE) * PAGE
    cache, memory = idle_cache("full", (load.users + 2) * each)
    model = StandIn(memory, times)
    batch = choose_batch(settings, model, cache.config, cache.agreement)
    engine = Engine(model, cache, chunk_tokens=settings.step_tokens, max_running=batch.requests)
    engine.computes_in_launch = False
    model.on_waiting = lambda: engine.on_waiting()
    rank = EngineRank(engine)
    return Serving(
        rank, "a model that computes nothing", "", "", "", ChatFormats(None, ""), batch.sentence
    )
