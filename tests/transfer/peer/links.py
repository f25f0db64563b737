"""A link that tests run by hand: writes end when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtide.transfer.peer.transport import TransportError, WriteBatch

DEADLINE_S = 60.0


class HandPending:
    def __init__(self, batch: WriteBatch) -> None:
        self.batch = batch
        self.over = False
        self.error: Exception | None = None

    def poll(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.over


class HandLink:
    """`at_once`: writes end when they begin. `refuse`: the next `begin` raises this."""

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        self.refuse: Exception | None = None
        self.dead = False
        self.began: list[HandPending] = []
        self.changed = threading.Condition()

    def begin(self, batch: WriteBatch, timeout_s: float) -> HandPending:
        with self.changed:
            if self.refuse is not None:
                raise self.refuse
            pending = HandPending(batch)
            pending.over = self.at_once
            self.began.append(pending)
            self.changed.notify_all()
            return pending

    def alive(self) -> bool:
        return not self.dead

    def close(self) -> None:
        self.dead = True

    def wait(self, count: int) -> None:
        """Until so many writes have begun."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.began) >= count, DEADLINE_S)

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.began[number].over = True

    def fail(self, number: int, silent: bool) -> None:
        self.began[number].error = TransportError("the peer is gone", silent=silent)


class Heard:
    """Collects what callbacks are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._changed = threading.Condition()

    def as_(self, name: str) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            with self._changed:
                self.calls.append((name, *arguments))
                self._changed.notify_all()

        return call

    def wait(self, count: int) -> list[tuple[object, ...]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, DEADLINE_S), self.calls
            return list(self.calls)
