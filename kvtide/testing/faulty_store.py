"""A store whose calls go wrong: those that a test names, or those that a seeded draw picks.

    store.next("read", Fault.FLIP)            the next read
    store.always["write"] = Fault.RAISE       every write, until it is taken out again
    FaultyStore(inner, draw=Draw(seed, 0.1))  one call in ten, any fault that the call can have

`release` opens the gate behind which blocked calls wait. They then go through: what they read is
written to memory that was given to them long ago, as a remote write that comes late would be.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeVar

from kvtide.storage.store import MISSING, LingeringError, Removed, Store, StoreError, StoreStatus
from kvtide.testing.faults import FaultError

T = TypeVar("T")


class Fault(Enum):
    """What a call does instead of, or besides, what it should."""

    RAISE = "raises StoreError"
    CRASH = "raises what no store should raise"
    EXIT = "asks the thread to end"
    LINGER = "raises LingeringError, and keeps the memory"
    BLOCK = "returns only when released"
    SLOW = "takes a while"
    MISSING = "finds nothing"
    SHORT = "reads a byte less than was written"
    FLIP = "reads one wrong byte per object"
    REFUSE = "stores nothing"
    MISCOUNT = "answers for one object too few"


ANYWHERE = (Fault.RAISE, Fault.CRASH, Fault.EXIT, Fault.BLOCK, Fault.SLOW)
FAULTS: dict[str, tuple[Fault, ...]] = {
    "lend": ANYWHERE,
    "exists": (*ANYWHERE, Fault.MISSING, Fault.MISCOUNT),
    "read": (*ANYWHERE, Fault.LINGER, Fault.MISSING, Fault.SHORT, Fault.FLIP, Fault.MISCOUNT),
    "write": (*ANYWHERE, Fault.LINGER, Fault.REFUSE, Fault.MISCOUNT),
    "remove": ANYWHERE,
    "clear": ANYWHERE,
    "status": ANYWHERE,
    "close": ANYWHERE,
}
"""Which faults a call can have."""


class Draw:
    """A fraction of all calls goes wrong, each in one of the ways given that it can."""

    def __init__(
        self, seed: object, fraction: float, faults: Sequence[Fault] = tuple(Fault)
    ) -> None:
        self._chance = random.Random(repr(seed))
        self._faults = faults
        self._lock = threading.Lock()
        self.fraction = fraction

    def __call__(self, call: str) -> Fault | None:
        possible = [fault for fault in FAULTS[call] if fault in self._faults]
        with self._lock:
            if not possible or self._chance.random() >= self.fraction:
                return None
            return self._chance.choice(possible)


class FaultyStore:
    """See the module. All else is done by the store it is put over.

    calls      how many there were, by name
    met        faults that happened, by call and fault
    waiting    how many calls are blocked now
    lingering  memory that reads which lingered may still write to, and until when
    """

    def __init__(
        self,
        store: Store,
        draw: Callable[[str], Fault | None] = lambda call: None,
        *,
        slow_s: float = 0.002,
        lingers_s: float = 0.05,
    ) -> None:
        self.name = f"faulty {store.name}"
        self.always: dict[str, Fault] = {}
        self.calls: Counter[str] = Counter()
        self.met: Counter[tuple[str, Fault]] = Counter()
        self.lingering: list[tuple[float, memoryview]] = []
        self.waiting = 0
        self.slow_s, self.lingers_s = slow_s, lingers_s
        self._store = store
        self._draw = draw
        self._next: dict[str, deque[Fault | None]] = {call: deque() for call in FAULTS}
        self._gate = threading.Event()
        self._lock = threading.Lock()

    # -- what goes wrong --------------------------------------------------------------------

    def next(self, call: str, *faults: Fault | None) -> None:
        """The next calls of this name go wrong, one after the other; None is one that works."""
        assert set(faults) <= {None, *FAULTS[call]}
        self._next[call].extend(faults)

    def heal(self) -> None:
        """End all faults, and release blocked calls."""
        self.always.clear()
        for faults in self._next.values():
            faults.clear()
        self._draw = lambda call: None
        self.release()

    def release(self) -> None:
        """Blocked calls go on; those that come later block anew."""
        self._gate.set()
        with self._lock:
            self._gate = threading.Event()

    def write_late(self, byte: int) -> None:
        """Reads that linger write to all memory that they may still write to."""
        for until, memory in self.lingering:
            if time.monotonic() < until:
                memory[:] = bytes([byte]) * len(memory)

    # -- the calls --------------------------------------------------------------------------

    def lend(self, block: memoryview) -> None:
        self._begin("lend")
        self._store.lend(block)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        fault = self._begin("exists")
        found = self._store.exists(keys)
        return _fewer(fault, [False] * len(keys) if fault is Fault.MISSING else found)

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        fault = self._begin("read", targets)
        if fault is Fault.MISSING:
            return [MISSING] * len(keys)
        lengths = self._store.read(keys, targets)
        for number, target in enumerate(targets):
            if fault is Fault.SHORT and lengths[number] > 0:
                lengths[number] -= 1
            elif fault is Fault.FLIP and lengths[number] > 0:
                target[lengths[number] // 3] ^= 0x10
        return _fewer(fault, lengths)

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[bool]:
        fault = self._begin("write")
        if fault is Fault.REFUSE:
            return [False] * len(keys)
        return _fewer(fault, self._store.write(keys, sources))

    def remove(self, keys: Sequence[bytes]) -> int:
        self._begin("remove")
        return self._store.remove(keys)

    def clear(self) -> Removed:
        self._begin("clear")
        return self._store.clear()

    def status(self) -> StoreStatus:
        self._begin("status")
        return self._store.status()

    def close(self) -> None:
        self._begin("close")
        self._store.close()

    # -- the steps --------------------------------------------------------------------------

    def _begin(self, call: str, targets: Sequence[memoryview] = ()) -> Fault | None:
        with self._lock:
            self.calls[call] += 1
            named = self._next[call].popleft() if self._next[call] else self.always.get(call)
            fault = named or self._draw(call)
            if fault is not None:
                self.met[call, fault] += 1
            gate = self._gate
        if fault is Fault.RAISE:
            raise StoreError(f"{call} does not work")
        if fault is Fault.CRASH:
            raise FaultError(f"{call} crashed")
        if fault is Fault.EXIT:
            raise SystemExit(f"{call} ends the thread")
        if fault is Fault.LINGER:
            until = time.monotonic() + 0.8 * self.lingers_s
            self.lingering += [(until, one) for one in targets]
            raise LingeringError(f"{call} did not end", self.lingers_s)
        if fault is Fault.BLOCK:
            self._wait(gate)
        elif fault is Fault.SLOW:
            time.sleep(self.slow_s)
        return fault

    def _wait(self, gate: threading.Event) -> None:
        with self._lock:
            self.waiting += 1
        gate.wait()
        with self._lock:
            self.waiting -= 1


def _fewer(fault: Fault | None, answers: list[T]) -> list[T]:
    return answers[:-1] if fault is Fault.MISCOUNT else answers
