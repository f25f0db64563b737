"""What the ranks of the prefill side have written, joined into messages for the decode side.

A place has landed when every rank has written its part of it. The leader keeps one `RankReports`;
its own sender thread and the other ranks' connections call `add`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvtide.engine.handoff.messages import Failed, First, Message, Silent, Written


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank has to say about a room and epoch.

    written  these places are there; `absent` as in `Written`
    tail     the tail is there
    failed   nothing more will be written; `silent`: no byte of this rank comes any more
    silent   after a cancellation; alike
    """

    kind: Literal["written", "tail", "failed", "silent"]
    room: str
    epoch: int
    numbers: tuple[int, ...] = ()
    absent: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reason: str = ""
    silent: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankReport:
        absent = {name: tuple(numbers) for name, numbers in values["absent"].items()}
        return cls(**{**values, "numbers": tuple(values["numbers"]), "absent": absent})


@dataclass(slots=True)
class _Epoch:
    """How many ranks have written each place, the tail, and how many are silent."""

    written: Counter[int] = field(default_factory=Counter)
    tails: int = 0
    silent: list[bool] = field(default_factory=list)
    failed: bool = False
    first: First | None = None


class RankReports:
    """`send` takes the room and a message for the peer that has it; any thread may call it."""

    def __init__(self, ranks: int, send: Callable[[str, Message], None]) -> None:
        self._ranks, self._send = ranks, send
        self._epochs: dict[tuple[str, int], _Epoch] = {}
        self._lock = threading.Lock()

    def add(self, report: RankReport) -> None:
        with self._lock:
            state = self._epochs.setdefault((report.room, report.epoch), _Epoch())
            for message in self._messages(state, report):
                self._send(report.room, message)

    def first(self, message: First) -> None:
        """The prompt is computed: this is sent when its tail has been written."""
        with self._lock:
            state = self._epochs.setdefault((message.room, message.epoch), _Epoch())
            state.first = message
            for each in self._ended(state):
                self._send(message.room, each)

    def forget(self, room: str) -> None:
        with self._lock:
            self._epochs = {key: each for key, each in self._epochs.items() if key[0] != room}

    def _messages(self, state: _Epoch, report: RankReport) -> list[Message]:
        room, epoch = report.room, report.epoch
        if report.kind == "written":
            state.written.update(report.numbers)
            there = tuple(n for n in report.numbers if state.written[n] == self._ranks)
            return [Written(room, epoch, there, report.absent)] if there else []
        if report.kind == "tail":
            state.tails += 1
            return self._ended(state)
        if report.kind == "failed":
            first, state.failed = not state.failed, True
            silent = report.silent and self._ranks == 1
            return [Failed(room, epoch, report.reason, silent)] if first else []
        state.silent.append(report.silent)
        done = len(state.silent) == self._ranks and all(state.silent)
        return [Silent(room, epoch)] if done else []

    def _ended(self, state: _Epoch) -> list[Message]:
        whole = state.first is not None and state.tails == self._ranks and not state.failed
        return [state.first] if whole and state.first is not None else []
