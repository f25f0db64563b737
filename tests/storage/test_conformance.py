"""The checks pass on a sound store, and each finds the fault that it is there for."""

from __future__ import annotations

import secrets
import threading
import time

import pytest

from kvtide.cli.main import main
from kvtide.storage import conformance, open_store
from kvtide.storage.memory_store import MemoryStore
from kvtide.storage.store import MISSING, Removed, StoreError, StoreStatus
from kvtide.storage.url import StoreURL

_SHORT = "shorter targets are misses"
_SPACES = "spaces never meet"


def _results(open_space):
    return {r.check: r for r in (conformance.run_check(c, open_space) for c in conformance.CHECKS)}


def test_a_shared_memory_store_passes_every_check():
    name = secrets.token_hex(8)
    results = _results(lambda space: open_store(f"memory:{name}", space))
    assert len(results) == len(conformance.CHECKS)
    assert [r for r in results.values() if r.violations or r.left_out] == []


def test_a_store_that_forgets_passes_and_says_which_check_was_left_out():
    results = _results(lambda space: open_store("memory:", space))
    assert [r for r in results.values() if r.violations] == []
    assert [r.check for r in results.values() if r.left_out] == [
        "what was acknowledged is found again"
    ]


def test_nothing_is_left_behind():
    name, spaces = secrets.token_hex(8), set()

    def open_space(space):
        spaces.add(space)
        return open_store(f"memory:{name}", space)

    assert conformance.violations(open_space) == []
    assert spaces
    assert sum(open_space(space).status().objects for space in spaces) == 0


# -- faults ---------------------------------------------------------------------------------


class LosesOneOfAHundred(MemoryStore):
    def write(self, keys, sources):
        answer = super().write(keys, sources)
        for key in keys[99::100]:
            self._objects.pop(key, None)
        return answer


class LosesTheLargest(MemoryStore):
    def write(self, keys, sources):
        large = [len(source) > 4 << 20 for source in sources]
        kept = [(k, s) for k, s, skip in zip(keys, sources, large, strict=True) if not skip]
        super().write([k for k, _ in kept], [s for _, s in kept])
        return [True] * len(keys)


class RefusesOddSizes(MemoryStore):
    def write(self, keys, sources):
        return [super(RefusesOddSizes, self).write([k], [s])[0] if len(s) % 2 == 0 else False
                for k, s in zip(keys, sources, strict=True)]  # fmt: skip


class SwapsNeighbours(MemoryStore):
    def read(self, keys, targets):
        order = list(keys)
        if len(keys) > 500:
            order[0], order[7] = order[7], order[0]
        return super().read(order, targets)


class Truncates(MemoryStore):
    def write(self, keys, sources):
        return super().write(keys, [source[: 64 << 10] for source in sources])


class PadsToTheTarget(MemoryStore):
    def read(self, keys, targets):
        lengths = super().read(keys, targets)
        return [n if n == MISSING else len(t) for n, t in zip(lengths, targets, strict=True)]


class ReadsPartOfALongObject(MemoryStore):
    def _read(self, key, target):
        found = self._objects.get(key)
        if found is None:
            return MISSING
        length = min(len(found), len(target))
        target[:length] = found[:length]
        return length


class RaisesForATooShortTarget(MemoryStore):
    def _read(self, key, target):
        if len(self._objects.get(key, b"")) > len(target):
            raise StoreError("object too long")
        return super()._read(key, target)


class FailsTheBatchOfAMissingObject(MemoryStore):
    def read(self, keys, targets):
        lengths = super().read(keys, targets)
        return [MISSING] * len(keys) if MISSING in lengths else lengths


class CutsKeysAtZeroBytes(MemoryStore):
    def _cut(self, keys):
        return [key.split(b"\0")[0] for key in keys]

    def exists(self, keys):
        return super().exists(self._cut(keys))

    def read(self, keys, targets):
        return super().read(self._cut(keys), targets)

    def write(self, keys, sources):
        return super().write(self._cut(keys), sources)


class Overwrites(MemoryStore):
    def write(self, keys, sources):
        self.remove(keys)
        return super().write(keys, sources)


class RefusesDuplicates(MemoryStore):
    def write(self, keys, sources):
        answer = []
        for key, source in zip(keys, sources, strict=True):
            answer.append(key not in self._objects)
            super().write([key], [source])
        return answer


class OneSpaceForAll(MemoryStore):
    def __init__(self, url, space):
        super().__init__(url, bytes(32))


class SpacesByTheirFirstBytes(MemoryStore):
    def __init__(self, url, space):
        super().__init__(url, space[:16].ljust(32, b"\0"))


class SpacesByTheirLastBytes(MemoryStore):
    def __init__(self, url, space):
        super().__init__(url, space[16:].rjust(32, b"\0"))


class ClearReportsNothing(MemoryStore):
    def clear(self):
        super().clear()
        return Removed(0)


class ClearKeepsEverything(MemoryStore):
    def clear(self):
        kept = self.status()
        return Removed(kept.objects, kept.bytes)


class ClearEmptiesOthers(MemoryStore):
    every = []  # noqa: RUF012

    def __init__(self, url, space):
        super().__init__(url, space)
        self.every.append(self)

    def clear(self):
        removed = super().clear()
        for other in self.every:
            other._objects.clear()
        return removed


class RemoveCountsKeys(MemoryStore):
    def remove(self, keys):
        super().remove(keys)
        return len(keys)


class RemoveKeepsObjects(MemoryStore):
    def remove(self, keys):
        return sum(self.exists(keys))


class StatusCountsWrong(MemoryStore):
    def status(self):
        return StoreStatus(1, 1)


class ForgetsWhenClosed(MemoryStore):
    def close(self):
        self._objects.clear()


class RemovedComesBack(MemoryStore):
    """A journal that does not record removals."""

    def __init__(self, url, space):
        super().__init__(url, space)
        self._removed = {}

    def remove(self, keys):
        self._removed |= {key: self._objects[key] for key in keys if key in self._objects}
        return super().remove(keys)

    def close(self):
        self._objects.update(self._removed)


class KeepsForItselfUntilClosed(MemoryStore):
    """A cache that is written back at the end."""

    def __init__(self, url, space):
        super().__init__(url, space)
        self._shared, self._objects = self._objects, dict(self._objects)

    def remove(self, keys):
        for key in keys:
            self._shared.pop(key, None)
        return super().remove(keys)

    def close(self):
        self._shared.update(self._objects)


class RemembersThatItWasAsked(MemoryStore):
    """Caches what is missing, and does not notice when it is written."""

    def __init__(self, url, space):
        super().__init__(url, space)
        self._missing = set()

    def exists(self, keys):
        self._missing |= {key for key in keys if key not in self._objects}
        return [key not in self._missing for key in keys]


class VisibleLater(MemoryStore):
    def write(self, keys, sources):
        copies = [bytes(source) for source in sources]
        later = threading.Timer(0.01, lambda: super(VisibleLater, self).write(keys, copies))
        later.start()
        return [True] * len(keys)


class VisibleBeforeWhole(MemoryStore):
    def write(self, keys, sources):
        for key, source in zip(keys, sources, strict=True):
            if key not in self._objects and len(source) > 1 << 20:
                self._objects[key] = bytes(source[: len(source) // 2])
                time.sleep(0.02)
                self._objects[key] = bytes(source)
        return super().write(keys, sources)


class KeepsTheCallersMemory(MemoryStore):
    def write(self, keys, sources):
        for key, source in zip(keys, sources, strict=True):
            self._objects.setdefault(key, source)
        return [True] * len(keys)


class ReadsLate(MemoryStore):
    def read(self, keys, targets):
        lengths = super().read(keys, targets)
        threading.Timer(0.02, lambda: super(ReadsLate, self).read(keys, targets)).start()
        return lengths


class NeedsAlignedMemory(MemoryStore):
    def read(self, keys, targets):
        import ctypes

        places = [ctypes.addressof(ctypes.c_char.from_buffer(t)) for t in targets]
        lengths = super().read(keys, targets)
        return [n if p % 512 == 0 else MISSING for n, p in zip(lengths, places, strict=True)]


class BreaksInLentMemory(MemoryStore):
    lent = False

    def lend(self, block):
        self.lent = True

    def read(self, keys, targets):
        return [MISSING] * len(keys) if self.lent else super().read(keys, targets)


class NotThreadSafe(MemoryStore):
    """One buffer for all calls."""

    _buffer = b""

    def _read(self, key, target):
        self._buffer = self._objects.get(key)
        time.sleep(0)
        found = self._buffer
        time.sleep(1e-5)
        found = self._buffer
        if found is None or len(found) > len(target):
            return MISSING
        target[: len(found)] = found
        return len(found)


class ClosesOnce(MemoryStore):
    closed = False

    def close(self):
        if self.closed:
            raise StoreError("not open")
        self.closed = True


class AnswersZerosAndOnes(MemoryStore):
    def exists(self, keys):
        return [int(there) for there in super().exists(keys)]


class FailsOnEmptyBatches(MemoryStore):
    def read(self, keys, targets):
        return super().read(keys, targets) or [max(len(t) for t in targets)]


class ConfusesRepeatedKeys(MemoryStore):
    def read(self, keys, targets):
        last = dict(zip(keys, targets, strict=True))
        lengths = dict(zip(last, super().read(list(last), list(last.values())), strict=True))
        return [lengths[key] for key in keys]


class SeesWhatIsNotThere(MemoryStore):
    def exists(self, keys):
        return [True] * len(keys)


class HasNoName(MemoryStore):
    def __init__(self, url, space):
        super().__init__(url, space)
        self.name = ""


FAULTS = {
    LosesOneOfAHundred: "large batches come back",
    LosesTheLargest: "objects of any size come back",
    RefusesOddSizes: "objects of any size come back",
    SwapsNeighbours: "large batches come back",
    Truncates: "objects of any size come back",
    PadsToTheTarget: "longer targets are fine",
    ReadsPartOfALongObject: _SHORT,
    RaisesForATooShortTarget: _SHORT,
    FailsTheBatchOfAMissingObject: "present and missing are distinguished",
    CutsKeysAtZeroBytes: "keys may hold any byte",
    Overwrites: "what was there stays",
    RefusesDuplicates: "what was there stays",
    OneSpaceForAll: _SPACES,
    SpacesByTheirFirstBytes: _SPACES,
    SpacesByTheirLastBytes: _SPACES,
    ClearReportsNothing: "clear empties its space alone",
    ClearKeepsEverything: "clear empties its space alone",
    ClearEmptiesOthers: "clear empties its space alone",
    RemoveCountsKeys: "removed objects are gone",
    RemoveKeepsObjects: "removed objects are gone",
    StatusCountsWrong: "status counts what is there",
    ForgetsWhenClosed: "what was acknowledged is found again",
    KeepsForItselfUntilClosed: "what was acknowledged is found again",
    RemovedComesBack: "what was acknowledged is found again",
    RemembersThatItWasAsked: "calls in any order agree with a dictionary",
    VisibleLater: "what is written is there at once",
    VisibleBeforeWhole: "nothing is seen before it is whole",
    KeepsTheCallersMemory: "memory is the callers again",
    ReadsLate: "memory is the callers again",
    NeedsAlignedMemory: "memory need not be aligned",
    BreaksInLentMemory: "lent memory works",
    NotThreadSafe: "threads do not disturb each other",
    ClosesOnce: "closing twice is fine",
    AnswersZerosAndOnes: "answers are plain lists",
    FailsOnEmptyBatches: "empty batches do nothing",
    ConfusesRepeatedKeys: "keys may repeat in a batch",
    SeesWhatIsNotThere: "an empty store has nothing",
    HasNoName: "an empty store has nothing",
}


@pytest.mark.parametrize("faulty", FAULTS, ids=lambda faulty: faulty.__name__)
def test_a_fault_is_found_by_its_check(faulty):
    url = StoreURL.parse(f"memory:{secrets.token_hex(8)}")
    (check,) = (c for c in conformance.CHECKS if conformance.name_of(c) == FAULTS[faulty])
    result = conformance.run_check(check, lambda space: faulty(url, space))
    assert result.violations, f"{faulty.__name__} was not found"


def test_every_check_has_a_fault_that_it_finds():
    assert {conformance.name_of(check) for check in conformance.CHECKS} == set(FAULTS.values())


# -- the command ----------------------------------------------------------------------------


def test_the_command_prints_every_check_and_succeeds(capsys):
    assert main(["storage", "check", f"memory:{secrets.token_hex(8)}"]) == 0
    printed = capsys.readouterr().out
    assert all(f"ok        {conformance.name_of(c)}" in printed for c in conformance.CHECKS)
    assert f"{len(conformance.CHECKS)} passed, 0 failed, 0 left out" in printed


def test_the_command_says_what_is_wrong_with_a_store_of_ones_own(capsys):
    assert main(["storage", "check", f"{__name__}:Truncates"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG     objects of any size come back" in printed
    assert "read returns 65536 for an object of 70,001 B" in printed


def test_the_command_refuses_what_it_cannot_open(capsys):
    assert main(["storage", "check", "gopher://somewhere"]) == 2
    assert "no such store; use file:" in capsys.readouterr().err
