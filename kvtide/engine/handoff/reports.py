"""What the ranks of the prefill side have written, joined into messages for the decode side.

A place has landed when every rank has written its part of it. The leader keeps one `RankReports`;
its own sender thread and the other ranks' connections call `add`.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from kvtide.engine.handoff.messages import Complete, Failed, First, HandoffMessage, Silent, Written

ReportKind = Literal["written", "tail", "failed", "silent", "over"]


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank has to say about a room and epoch.

    written  these places are there; `absent` as in `Written`
    tail     the tail is there; `captured` as in `Complete`, of the rank that has the draft's logits
    failed   nothing more will be written; `silent`: no byte of this rank comes any more
    silent   after a cancellation; alike
    over     the rank has forgotten the room, and reports nothing more of this epoch
    """

    kind: ReportKind
    room: str
    epoch: int
    numbers: tuple[int, ...] = ()
    absent: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reason: str = ""
    silent: bool = True
    rank: int = 0
    captured: bytes = b""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "captured": base64.b64encode(self.captured).decode()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankReport:
        absent = {name: tuple(numbers) for name, numbers in values["absent"].items()}
        given = {"numbers": tuple(values["numbers"]), "absent": absent}
        return cls(**{**values, **given, "captured": base64.b64decode(values["captured"])})


@dataclass(slots=True)
class _Epoch:
    """Which places and tails each rank has written, and which ranks are silent, failed or over.

    A peer may ask twice whether all is silent: ranks are distinguished, not counted.
    """

    written: dict[int, set[int]] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    tails: set[int] = field(default_factory=set)
    silent: dict[int, bool] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    failed: bool = False
    complete: Complete | None = None
    captured: bytes = b""


class RankReports:
    """`send` takes the room and a message for the peer that has it; any thread may call it.

    An epoch is forgotten when its room is over on all ranks, or when all have reported whether they
    are silent.
    """

    def __init__(self, ranks: int, send: Callable[[str, HandoffMessage], None]) -> None:
        self._ranks, self._send = ranks, send
        self._epochs: dict[tuple[str, int], _Epoch] = {}
        self._lock = threading.Lock()

    def add(self, report: RankReport) -> None:
        with self._lock:
            key = report.room, report.epoch
            state = self._epochs.setdefault(key, _Epoch())
            for message in self._messages(state, report):
                self._send(report.room, message)
            if self._ranks in (len(state.silent), len(state.over)):
                del self._epochs[key]

    def computed(self, first: First, complete: Complete) -> None:
        """The prompt is computed: its first token is sent at once, the other message when the tail
        has been written."""
        with self._lock:
            state = self._epochs.setdefault((first.room, first.epoch), _Epoch())
            state.complete = complete
            for message in (first, *self._ended(state)):
                self._send(first.room, message)

    def _messages(self, state: _Epoch, report: RankReport) -> list[HandoffMessage]:
        room, epoch, rank = report.room, report.epoch, report.rank
        match report.kind:
            case "written":
                state.written.setdefault(rank, set()).update(report.numbers)
                there = tuple(n for n in report.numbers if self._is_written(state, n))
                state.sent.update(there)
                return [Written(room, epoch, there, report.absent)] if there else []
            case "tail":
                state.tails.add(rank)
                state.captured = state.captured or report.captured
                return self._ended(state)
            case "failed":
                first, state.failed = not state.failed, True
                silent = report.silent and self._ranks == 1
                return [Failed(room, epoch, report.reason, silent)] if first else []
            case "silent":
                state.silent[rank] = report.silent
                done = len(state.silent) == self._ranks and all(state.silent.values())
                return [Silent(room, epoch)] if done else []
            case "over":
                state.over.add(rank)
                return []

    def _is_written(self, state: _Epoch, number: int) -> bool:
        """All ranks have written the place, and the peer has not heard of it."""
        by_all = len(state.written) == self._ranks
        return (
            number not in state.sent
            and by_all
            and all(number in numbers for numbers in state.written.values())
        )

    def _ended(self, state: _Epoch) -> list[HandoffMessage]:
        complete = state.complete
        if complete is None or state.failed or len(state.tails) < self._ranks:
            return []
        state.complete = None
        return [replace(complete, captured=state.captured)]
