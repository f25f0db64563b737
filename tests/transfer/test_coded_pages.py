"""Pages in a store with a codec: the same bits, decoded beside the reads; any fault is a miss."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from kvtide.spec import ModelMemory
from kvtide.storage import open_store
from kvtide.storage.codec import CodedStore, coded_store
from kvtide.storage.codec.coder import Lossless
from kvtide.storage.codec.planes import ByteArray
from kvtide.testing.faulty_store import Fault, FaultyStore
from kvtide.tiers.layout import Layout
from tests.cache.memories import ALL_MEMORIES
from tests.transfer.stores import LARGE, SMALL, SPACE, Desk, key, until


@pytest.fixture
def desks() -> Iterator[partial[Desk]]:
    made: list[Desk] = []

    def make(*args: object, codec: Lossless | None = None, threads: int = 2) -> Desk:
        faulty = FaultyStore(open_store("memory:", SPACE))
        store = CodedStore(faulty, codec or Lossless(), threads)
        made.append(Desk(*args, store=store))
        return made[-1]

    yield make  # type: ignore[misc]
    for desk in made:
        faults(desk).heal()
        desk.close()


def faults(desk: Desk) -> FaultyStore:
    return desk.store.inner


def read(desk: Desk, pages: list) -> object:
    reading = desk.link.read(pages, 60.0)
    until(lambda: reading.over and reading.quiet)
    return reading


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("memory", [LARGE, SMALL], ids=lambda memory: memory.model)
def test_pages_come_back_to_the_bit(desks, memory: ModelMemory, layout: Layout) -> None:
    desk = desks(memory, layout)
    for anchor in (one.name for one in memory.anchors):
        pages = desk.pages(6, 2, anchor)
        before = desk.stored(pages)
        assert read(desk, pages).ready == 6
        assert desk.contents(pages) == before
    assert desk.guarded()


@pytest.mark.parametrize("name", ALL_MEMORIES)
def test_pages_of_every_kind_of_memory_come_back(desks, name: str) -> None:
    memory = ALL_MEMORIES[name]
    desk = desks(memory)
    for anchor in memory.at_rest.anchors:
        if anchor.name in desk.formats:
            pages = desk.pages(4, 1, anchor.name)
            before = desk.stored(pages)
            assert read(desk, pages).ready == 4 and desk.contents(pages) == before


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.SHORT, Fault.MISSING])
def test_spoiled_objects_are_misses_and_leave_the_store_if_corrupt(
    desks, fault: Fault, caplog
) -> None:
    desk = desks(LARGE)
    desk.stored(desk.pages(4))
    faults(desk).next("read", fault)
    reading = read(desk, desk.pages(4))
    corrupt = fault is not Fault.MISSING
    assert reading.ready == reading.count == 0 and reading.error is None
    assert desk.link.counts["corrupt"] == 8 * corrupt and desk.link.counts["read"] == 0
    assert faults(desk).calls["remove"] == 8 * corrupt
    assert ("a coded object is corrupt" in caplog.text) == corrupt
    before = desk.stored(desk.pages(4))
    assert read(desk, desk.pages(4)).ready == 4 and desk.contents(desk.pages(4)) == before


def test_an_object_that_decodes_to_another_page_is_found_by_its_own_label(desks) -> None:
    """The codec's label is right, and what is within is the page of another key."""
    desk = desks(LARGE)
    desk.stored(desk.pages(2))
    one = desk.formats["kv"]
    raw = bytearray(one.bytes)
    assert desk.store.read([one.key(key(0))], [memoryview(raw)]) == [one.bytes]
    desk.store.remove([one.key(key(1))])
    desk.store.write([one.key(key(1))], [memoryview(raw)])
    reading = read(desk, desk.pages(2))
    assert reading.ready == 1 and desk.link.counts["corrupt"] == 1


@pytest.mark.parametrize("call", ["read", "write"])
@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.CRASH, Fault.EXIT, Fault.MISCOUNT])
def test_a_call_that_raises_fails_its_request_alone(desks, call: str, fault: Fault) -> None:
    desk = desks()
    desk.stored(desk.pages(3))
    faults(desk).next(call, fault)
    begin = {"read": desk.link.read, "write": desk.link.write}[call]
    pages = desk.pages(3) if call == "read" else desk.pages(3, 5)
    pages = [page._replace(key=bytes([7, n]) * 16) for n, page in enumerate(pages)]
    request = begin(pages, 60.0)
    until(lambda: request.over and request.quiet)
    assert request.error is not None and request.count == 0
    before = desk.stored(desk.pages(3, 9))
    assert read(desk, desk.pages(3, 9)).ready == 3
    assert len(before) == 3


@pytest.mark.parametrize("call", ["read", "write"])
def test_late_bytes_of_a_failed_call_never_reach_the_host(desks, call: str) -> None:
    """They land in a bounce buffer, which is not used again for as long: slots are free at once."""
    desk = desks(LARGE)
    faults(desk).lingers_s = 60.0
    desk.stored(desk.pages(4))
    faults(desk).next(call, Fault.LINGER)
    pages = [page._replace(key=key(n + 50)) for n, page in enumerate(desk.pages(4, 8))]
    request = desk.link.read(desk.pages(4), 60.0) if call == "read" else desk.link.write(pages, 60)
    until(lambda: request.over and request.quiet)
    assert request.error is not None and request.count == 0
    desk.wipe()
    before = desk.fill(desk.pages(8))
    faults(desk).write_late(0x77)
    assert desk.contents(desk.pages(8)) == before
    before = desk.stored(desk.pages(4, 4))
    reading = read(desk, desk.pages(4, 4))
    faults(desk).write_late(0x77)
    assert reading.ready == 4 and desk.contents(desk.pages(4, 4)) == before


class Meeting(Lossless):
    """Decoding waits until the store is asked for what comes next."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def decode(self, coded: ByteArray, target: ByteArray) -> None:
        assert self.asked.wait(30.0), "the store waits for what is decoded"
        super().decode(coded, target)


def test_the_store_reads_on_while_what_it_read_is_decoded(desks, monkeypatch) -> None:
    monkeypatch.setattr(coded_store, "SLICE_BYTES", 1)
    codec = Meeting()
    desk = desks(LARGE, codec=codec)
    before = desk.stored(desk.pages(4))
    inner_read, calls = faults(desk).read, []

    def counted(keys: list[bytes], targets: list[memoryview]) -> list[int]:
        calls.append(len(keys))
        if len(calls) == 8:
            codec.asked.set()
        return inner_read(keys, targets)

    monkeypatch.setattr(faults(desk), "read", counted)
    assert read(desk, desk.pages(4)).ready == 4
    assert desk.contents(desk.pages(4)) == before and calls == [1] * 8


class Encoding(Lossless):
    """The last object is encoded once the store has written the first."""

    def __init__(self) -> None:
        self.written, self.begun = threading.Event(), 0

    def encode(self, raw: ByteArray, target: ByteArray) -> int:
        self.begun += 1
        assert self.begun < 8 or self.written.wait(30.0), "nothing is written beside encoding"
        return super().encode(raw, target)


def test_the_store_writes_while_what_comes_next_is_encoded(desks, monkeypatch) -> None:
    for name in ("SLICE_BYTES", "JOB_BYTES"):
        monkeypatch.setattr(coded_store, name, 1)
    codec = Encoding()
    desk = desks(LARGE, codec=codec, threads=1)
    inner_write = faults(desk).write

    def noted(keys: list[bytes], sources: list[memoryview]) -> list[bool]:
        codec.written.set()
        return inner_write(keys, sources)

    monkeypatch.setattr(faults(desk), "write", noted)
    before = desk.stored(desk.pages(4))
    assert read(desk, desk.pages(4)).ready == 4 and desk.contents(desk.pages(4)) == before


def test_a_failed_call_returns_when_no_coder_uses_its_memory(desks, monkeypatch) -> None:
    """Jobs in progress end before the call raises; others are dropped."""
    monkeypatch.setattr(coded_store, "SLICE_BYTES", 1)
    codec = Meeting()
    desk = desks(LARGE, codec=codec, threads=1)
    desk.stored(desk.pages(4))
    faults(desk).next("read", None, None, Fault.RAISE)
    codec.asked.set()
    reading = desk.link.read(desk.pages(4), 60.0)
    until(lambda: reading.over and reading.quiet)
    assert reading.error is not None
    before = desk.fill(desk.pages(16))
    threads = desk.store._threads._pool
    threads.submit(int).result(10)
    assert desk.contents(desk.pages(16)) == before
