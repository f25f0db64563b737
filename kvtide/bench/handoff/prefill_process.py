"""The prefill server in a process of its own, and its remote control.

The parent sends (action, arguments) over a pipe; the child answers with a result, or with the
traceback of its error. The child ends with the pipe.
"""

from __future__ import annotations

import itertools
import multiprocessing
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from kvtide.bench.handoff.handoff_case import TIMEOUT_S, HandoffCase
from kvtide.bench.handoff.plain_copies import MooncakeCalls, PlainCopies
from kvtide.bench.handoff.served_engine import ServedEngine
from kvtide.bench.handoff.switched_transport import SwitchedTransport, WriteWay
from kvtide.engine import RequestParams
from kvtide.engine.handoff.handoff_source import HandoffTarget
from kvtide.engine.handoff.own_memory import source_memory
from kvtide.server.handoff.handoff_settings import HandoffSettings, Role
from kvtide.transfer.peer.transport import TransportSettings
from kvtide.transfer.peer.transport_registry import open_transport

START_S = 540.0
"""Kernels are compiled and CUDA graphs captured before the child answers."""
ANSWER_S = 300.0
END_S = 30.0


class SentBytes(NamedTuple):
    """What the page sender has written so far, and how long it was writing."""

    bytes: int
    seconds: float


class PrefillProcessError(RuntimeError):
    """An action failed in the child; the message is its traceback."""


class PrefillProcess:
    """`address` is where the child listens for handoffs."""

    def __init__(self, case: HandoffCase) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=run_prefill, args=(other, case), daemon=True)
        self._process.start()
        other.close()
        self.address = str(self._result(START_S))

    def switch(self, way: WriteWay) -> None:
        self._do("switch", way.value)

    def flush(self) -> None:
        """Empty the child's tiers, once it is at rest."""
        self._do("flush")

    def open_rooms(self, prompts: Sequence[tuple[int, ...]]) -> list[str]:
        """Prefill these prompts; each waits in a room until it is asked for."""
        return list(self._do("open_rooms", prompts))

    def sent(self) -> SentBytes:
        return SentBytes(*self._do("sent"))

    def plain_bytes_s(self) -> float:
        """The link's own speed, in this moment."""
        return float(self._do("plain"))

    def close(self) -> None:
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _do(self, action: str, *args: object) -> Any:
        self._pipe.send((action, args))
        return self._result(ANSWER_S)

    def _result(self, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise PrefillProcessError(f"the prefill process gave no answer in {timeout_s:g} s")
            done, result = self._pipe.recv()
        except EOFError:
            raise PrefillProcessError("the prefill process has ended; see above") from None
        if not done:
            raise PrefillProcessError(result)
        return result


def run_prefill(pipe: Connection, case: HandoffCase) -> None:
    """The child: it serves until the pipe is closed."""
    try:
        side = _PrefillActions(case)
    except Exception:
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, side.address))
    with suppress(EOFError, ConnectionError):
        while True:
            action, args = pipe.recv()
            try:
                pipe.send((True, getattr(side, action)(*args)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
    side.close()


class _PrefillActions:
    """What the parent may ask for."""

    def __init__(self, case: HandoffCase) -> None:
        engine, device = case.open(decodes=False), case.torch_device
        memory = engine.cache.memory
        pages = 2 + case.tokens // memory.page_tokens
        size = pages * sum(memory.slot_bytes(anchor.name) for anchor in memory.anchors)
        inner = open_transport(case.transport, TransportSettings(device=device))
        self._transport = SwitchedTransport(inner, device, size)
        settings = HandoffSettings(role=Role.PREFILL, transport=case.transport, timeout_s=TIMEOUT_S)
        self._served = ServedEngine(engine, settings, self._transport)
        self._plain = PlainCopies(device, size)
        self._mooncake: MooncakeCalls | None = None
        self._numbers = itertools.count()
        if case.transport == "mooncake":
            self._transport.recorded = []

    @property
    def address(self) -> str:
        side = self._served.handoff.prefill
        assert side is not None
        host, port = side.address
        return f"{host}:{port}"

    def switch(self, way: str) -> None:
        self._served.settle()
        self._transport.way = WriteWay(way)

    def flush(self) -> None:
        self._served.flush()

    def open_rooms(self, prompts: Sequence[tuple[int, ...]]) -> list[str]:
        rooms = [f"bench-{next(self._numbers)}" for _ in prompts]
        for room, prompt in zip(rooms, prompts, strict=True):
            self._served.answer(RequestParams(prompt, 1, handoff_to=HandoffTarget(room)))
        if self._transport.recorded is not None:
            self._transport.recorded.clear()
        return rooms

    def sent(self) -> tuple[int, float]:
        writer = self._served.engine.handoffs.prefill.writer
        assert writer is not None
        stats = writer.sender.stats()
        return stats.written_bytes, stats.busy_s

    def plain(self) -> float:
        recorded = self._transport.recorded
        if recorded is None:
            return self._plain.bytes_s()
        if self._mooncake is None:
            self._mooncake = MooncakeCalls(self._transport.descriptor)
            for region in source_memory(self._served.engine.cache).regions:
                self._mooncake.register(region.address, region.bytes)
        return self._mooncake.bytes_s(recorded)

    def close(self) -> None:
        self._served.close()
