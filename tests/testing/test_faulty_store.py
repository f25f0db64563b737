"""The faulty store is one while nothing is asked of it, and has every fault when it is."""

from __future__ import annotations

import threading
import time

import pytest

from kvtide.storage import Store, StoreError, open_store
from kvtide.storage.store import MISSING, LingeringError
from kvtide.testing.faults import FaultError
from kvtide.testing.faulty_store import FAULTS, Draw, Fault, FaultyStore

KEYS = [bytes([n]) * 32 for n in range(3)]


def _memory(byte: int) -> list[memoryview]:
    return [memoryview(bytearray([byte] * 16)) for _ in KEYS]


def _filled() -> FaultyStore:
    store = FaultyStore(open_store("memory:", bytes(32)))
    assert store.write(KEYS, _memory(7)) == [True] * 3
    return store


def test_it_is_a_store() -> None:
    store: Store = _filled()
    targets = _memory(0)
    store.lend(targets[0])
    assert store.exists(KEYS) == [True] * 3
    assert store.read(KEYS, targets) == [16] * 3 and targets == _memory(7)
    assert store.remove(KEYS[:1]) == 1 and store.exists(KEYS) == [False, True, True]
    assert store.status().objects == 2 and store.clear().objects == 2
    store.close()


@pytest.mark.parametrize("call", FAULTS)
@pytest.mark.parametrize(
    ("fault", "error"),
    [(Fault.RAISE, StoreError), (Fault.CRASH, FaultError), (Fault.EXIT, SystemExit)],
)
def test_every_call_can_raise(call: str, fault: Fault, error: type[BaseException]) -> None:
    store = _filled()
    store.next(call, fault)
    arguments: dict[str, tuple[object, ...]] = {
        "lend": (_memory(0)[0],), "exists": (KEYS,), "remove": (KEYS,),
        "read": (KEYS, _memory(0)), "write": (KEYS, _memory(1)),
    }  # fmt: skip
    with pytest.raises(error):
        getattr(store, call)(*arguments.get(call, ()))
    getattr(store, call)(*arguments.get(call, ()))
    assert store.met == {(call, fault): 1}


def test_reads_are_missing_short_flipped_or_too_few() -> None:
    store, targets = _filled(), _memory(0)
    store.next("read", Fault.MISSING, Fault.SHORT, Fault.FLIP, Fault.MISCOUNT)
    assert store.read(KEYS, targets) == [MISSING] * 3 and targets == _memory(0)
    assert store.read(KEYS, targets) == [15] * 3
    assert store.read(KEYS, targets) == [16] * 3
    assert all(sum(byte != 7 for byte in target) == 1 for target in targets)
    assert store.read(KEYS, targets) == [16] * 2


def test_refused_objects_are_not_there() -> None:
    store = FaultyStore(open_store("memory:", bytes(32)))
    store.always["write"] = Fault.REFUSE
    assert store.write(KEYS, _memory(7)) == [False] * 3
    store.heal()
    assert store.exists(KEYS) == [False] * 3
    store.always["exists"] = Fault.MISCOUNT
    assert len(store.exists(KEYS)) == 2


def test_a_blocked_call_goes_on_when_it_is_released() -> None:
    store, targets = _filled(), _memory(0)
    store.next("read", Fault.BLOCK)
    thread = threading.Thread(target=store.read, args=(KEYS, targets), daemon=True)
    thread.start()
    while not store.waiting:
        time.sleep(0.001)
    assert targets == _memory(0)
    store.release()
    thread.join(5.0)
    assert not thread.is_alive() and targets == _memory(7) and store.waiting == 0


def test_what_lingers_can_write_later() -> None:
    store, targets = _filled(), _memory(0)
    store.next("read", Fault.LINGER)
    with pytest.raises(LingeringError):
        store.read(KEYS, targets)
    assert targets == _memory(0)
    store.write_late(9)
    assert targets == _memory(9)


def test_a_draw_is_the_same_for_the_same_seed_and_meets_every_fault() -> None:
    draws = [Draw(1, 0.5), Draw(1, 0.5)]
    calls = list(FAULTS) * 200
    first, again = ([draw(call) for call in calls] for draw in draws)
    assert first == again
    for call, faults in FAULTS.items():
        met = {fault for at, fault in zip(calls, first, strict=True) if at == call}
        assert met == {None, *faults}
    assert {Draw(2, 1.0, [Fault.FLIP])(call) for call in FAULTS} == {None, Fault.FLIP}
