"""A decode server in this process, a prefill server in another, and prompts between them."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from kvtide.bench.handoff.handoff_case import TIMEOUT_S, HandoffCase
from kvtide.bench.handoff.prefill_process import PrefillProcess
from kvtide.bench.handoff.served_engine import ServedEngine, TimedAnswer
from kvtide.bench.handoff.switched_transport import WriteWay
from kvtide.engine import RequestParams
from kvtide.engine.handoff.handoff_source import HandoffSource
from kvtide.engine.handoff.handoff_state import HandoffState
from kvtide.server.handoff.handoff_settings import HandoffSettings, Role


class HandoffBed:
    """Both servers. Each prompt is new unless a caller keeps it."""

    def __init__(self, case: HandoffCase, prefill: PrefillProcess, decode: ServedEngine) -> None:
        self.case, self.prefill, self.decode = case, prefill, decode
        self._random = np.random.default_rng(7)
        self._rooms = itertools.count()

    @property
    def page_tokens(self) -> int:
        return self.decode.engine.cache.memory.page_tokens

    def prompt(self, tokens: int) -> tuple[int, ...]:
        """Random tokens."""
        found = self._random.integers(0, self.decode.engine.vocabulary, tokens)
        return tuple(found.tolist())

    def alone(self, prompt: tuple[int, ...], count: int = 2) -> TimedAnswer:
        """The decode server prefills by itself."""
        return self.decode.answer(RequestParams(prompt, count))

    def handed_over(
        self, prompt: tuple[int, ...], count: int = 2, *, room: str | None = None
    ) -> TimedAnswer:
        """The prefill server prefills; `room`: it has done so, and keeps the pages there."""
        asks = room is None
        source = HandoffSource(
            self.prefill.address, room or f"asked-{next(self._rooms)}", asks=asks
        )
        answered = self.decode.answer(RequestParams(prompt, count, handoff_from=source))
        handoff = answered.request.handoff
        assert handoff is not None and handoff.state is HandoffState.DECODING, handoff
        assert handoff.first is not None, "the first token came with the tail"
        return answered

    def flush(self, *, prefill: bool = True) -> None:
        """Both servers forget all prompts, or the decode server alone."""
        self.decode.flush()
        if prefill:
            self.prefill.flush()

    def switch(self, way: WriteWay) -> None:
        self.prefill.switch(way)

    @contextmanager
    def without_tails(self) -> Iterator[None]:
        """The prefill server writes no tails, and the decode server computes them."""
        self._take_tails(False)
        self.switch(WriteWay.WITHOUT_TAIL)
        try:
            yield
        finally:
            self.switch(WriteWay.STRAIGHT)
            self._take_tails(True)

    def _take_tails(self, taken: bool) -> None:
        self.decode.call(lambda engine: setattr(engine.handoffs.decode, "takes_tails", taken))


@contextmanager
def handoff_bed(case: HandoffCase) -> Iterator[HandoffBed]:
    prefill = PrefillProcess(case)
    try:
        settings = HandoffSettings(
            role=Role.DECODE, transport=case.transport, timeout_s=TIMEOUT_S, min_tokens=1
        )
        decode = ServedEngine(case.open(decodes=True), settings)
        try:
            yield HandoffBed(case, prefill, decode)
        finally:
            decode.close()
    finally:
        prefill.close()
        gc.collect()
        if case.torch_device.type == "cuda":
            torch.cuda.empty_cache()
