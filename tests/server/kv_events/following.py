"""Random traffic over an index that is published; the test's thread is the engine's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvtide.index import Index
from kvtide.server.kv_events.kv_event_settings import KVEventSettings
from kvtide.server.kv_events.publisher import Publisher
from tests.index.memories import ALL_MEMORIES
from tests.index.traffic import Traffic
from tests.server.kv_events.consuming import Consumer, held

LOCAL = "tcp://127.0.0.1:0"


class Followed:
    def __init__(
        self,
        name: str,
        settings: KVEventSettings | None = None,
        seed: int = 0,
        kind: type[Publisher] = Publisher,
        **options: int,
    ) -> None:
        self.traffic = Traffic(ALL_MEMORIES[name], seed)
        self.index: Index = self.traffic.index
        self._calls: list[Callable[[], None]] = []
        chosen = replace(settings or KVEventSettings(LOCAL, LOCAL), beacon_s=0.1)
        self.publisher = kind(chosen, self.index, self._ask, **options)
        self.publisher.read(self.index)

    def _ask(self) -> None:
        self._calls.append(lambda: self.publisher.read(self.index))

    def between_steps(self) -> None:
        while self._calls:
            self._calls.pop()()

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.traffic.step()
            self.between_steps()
        assert self.traffic.naive.complaints == []

    def known_to(self, consumer: Consumer) -> None:
        """Wait until the consumer knows all; it may not have met anything odd on the way."""
        consumer.until(lambda: held(self.index), self.between_steps)
        assert consumer.complaints == []
