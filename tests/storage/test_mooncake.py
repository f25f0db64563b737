"""Mooncake Store over a real master and real members: killed, frozen, overfilled, wrong."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtide.storage import StoreError, conformance, open_store
from kvtide.storage.mooncake.mooncake_store import THREADS, StuckError
from kvtide.storage.store import MISSING, LingeringError
from tests.processes import free_port
from tests.storage.mooncake_pool import (
    Apart,
    Master,
    Member,
    apart,
    content,
    eventually,
    key,
    within,
)

SHARES = 8
TIMEOUT_S = 3.0
"""The library counts in seconds, and waits for a frozen member up to twice: until the bytes are
taken, and until they are acknowledged. Two seconds would be the very moment of that answer."""
MAX_S = TIMEOUT_S + 0.8
"""What a call may take on a busy machine."""


# -- the rules --------------------------------------------------------------------------------


@pytest.mark.full
def test_it_keeps_the_rules_of_stores():
    code = "from tests.storage.test_mooncake import check_share as check; check({})"
    for share in [Apart(code.format(number)) for number in range(SHARES)]:
        share.finish()


def check_share(number: int) -> None:
    """Every check opens and closes the store a few times, and closing takes a second."""
    master = Master()
    Member(master, "256MB")
    for check in conformance.CHECKS[number::SHARES]:
        url = master.url(buffer="32MB", timeout=5)
        result = conformance.run_check(check, lambda space, url=url: open_store(url, space))
        assert not result.violations and not result.left_out, result


@pytest.mark.full
@apart
def test_a_store_with_a_segment_says_that_it_forgets():
    master = Master()
    store, client = master.open("32MB"), master.open()
    assert store.forgets and not client.forgets
    one = key()
    assert client.write([one], [content()]) == [True]
    store.close()
    assert client.exists([one]) == [False]


# -- memory -----------------------------------------------------------------------------------


@apart
def test_lent_memory_is_not_copied():
    """The buffer is too small for the objects, so they can only have gone straight."""
    store = Master().open("64MB", buffer="64KB")
    block = memoryview(mmap.mmap(-1, 4 << 20))
    store.lend(block)
    store.lend(block[4096:8192])
    one, two, data = key(), key(), content(1 << 20)
    block[: 1 << 20] = data
    assert store.write([one, two], [block[: 1 << 20], content(1 << 20)]) == [True, False]
    assert store.read([one], [block[2 << 20 : 3 << 20]]) == [1 << 20]
    assert block[2 << 20 : 3 << 20] == data
    other = memoryview(bytearray(1 << 20))
    assert store.read([one], [other]) == [MISSING]
    assert store.status().notes == (
        "2 objects did not lie in lent memory, and a buffer of 64,000 B was too small for them",
    )
    store.close()


@pytest.mark.full
@apart
def test_more_than_the_buffer_goes_through_it_in_turns():
    store = Master().open("64MB", buffer="150KB")
    keys, sources = [key() for _ in range(40)], [content(60_000) for _ in range(40)]
    assert store.write(keys, sources) == [True] * 40
    targets = [memoryview(bytearray(70_000)) for _ in keys]
    assert store.read(keys, targets) == [60_000] * 40
    assert all(t[:60_000] == s for t, s in zip(targets, sources, strict=True))
    store.close()


@apart
def test_an_overfilled_pool_refuses_or_forgets_and_never_lies():
    store = Master().open("32MB")
    held = {key(): content(1_000_000) for _ in range(100)}
    answers = [store.write([one], [data])[0] for one, data in held.items()]
    assert 20 <= sum(answers) < 100
    refused = 100 - sum(answers)
    assert store.status().notes == (
        f"{refused} objects were refused: the pool is full, or no process gives it memory "
        "(segment=)",
    )
    target = memoryview(bytearray(1_000_000))
    found = 0
    for one, data in held.items():
        if store.read([one], [target]) != [MISSING]:
            assert target == data
            found += 1
    assert 5 <= found <= sum(answers)
    store.close()


# -- several processes ------------------------------------------------------------------------


@apart
def test_two_processes_share_one_pool():
    master = Master()
    member = Member(master)
    one, data = key(), content(20_000)
    store = master.open()
    assert store.write([one], [data]) == [True]
    code = f"""
from kvtide.storage import open_store
store = open_store({master.url()!r}, bytes(32))
target = memoryview(bytearray(20_000))
assert store.read([bytes.fromhex({one.hex()!r})], [target]) == [20_000]
assert target == bytes.fromhex({data.hex()!r})
assert store.remove([bytes.fromhex({one.hex()!r})]) == 1
store.close()
"""
    Apart(code).finish()
    assert store.exists([one]) == [False]
    store.close()
    assert member.process.poll() is None


@pytest.mark.full
@apart
def test_a_killed_member_takes_its_objects_with_it_and_nothing_else():
    master = Master()
    lost = Member(master)
    store = master.open(timeout=TIMEOUT_S)
    one, target = key(), memoryview(bytearray(100_000))
    assert store.write([one], [content()]) == [True]
    lost.kill()
    with within(MAX_S):
        assert store.read([one], [target]) == [MISSING]
    Member(master)
    eventually(lambda: store.exists([one]) == [False])

    def works() -> bool:
        two, data = key(), content()
        return store.write([two], [data]) == [True] and (
            store.read([two], [target]) == [100_000] and target == data
        )

    eventually(works)
    store.close()


@pytest.mark.full
@apart
def test_a_frozen_member_costs_its_objects_and_no_more_than_the_time_out():
    master = Master()
    member = Member(master)
    store = master.open(timeout=TIMEOUT_S)
    block = memoryview(mmap.mmap(-1, 1 << 20))
    store.lend(block)
    keys = [key() for _ in range(8)]
    assert store.write(keys, [block[:100_000]] * 8) == [True] * 8
    member.freeze()
    with within(MAX_S):
        assert store.read(keys[:2], [block[:100_000]] * 2) == [MISSING] * 2
    with within(MAX_S):
        assert store.write([key()], [content()]) == [False]
    member.thaw()
    eventually(lambda: store.write([key()], [content()]) == [True])
    store.close()


@pytest.mark.full
@apart
def test_calls_that_get_stuck_are_given_up_and_do_not_stand_in_the_way():
    """The library's own time-outs are the user's to set; ours hold all the same."""
    os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] = "30"
    master = Master()
    member = Member(master)
    store = master.open(timeout=1)
    block = memoryview(mmap.mmap(-1, 1 << 20))
    store.lend(block)
    keys = [key() for _ in range(THREADS)]
    assert store.write(keys, [block[:100_000]] * THREADS) == [True] * THREADS
    member.freeze()
    with within(1.8), ThreadPoolExecutor(THREADS) as pool:
        targets = [block[:100_000], memoryview(bytearray(100_000))] * (THREADS // 2)
        reads = [pool.submit(store.read, [one], [t]) for one, t in zip(keys, targets, strict=True)]
        errors = [read.exception() for read in reads]
    assert [type(error) for error in errors[::2]] == [LingeringError] * (THREADS // 2)
    assert [type(error) for error in errors[1::2]] == [StuckError] * (THREADS // 2)
    with within(0.3), pytest.raises(StoreError, match="8 calls are stuck in the library"):
        store.exists(keys)
    with within(1.8):
        store.close()
    with pytest.raises(StoreError, match="closed"):
        store.exists(keys)


# -- the master -------------------------------------------------------------------------------


@pytest.mark.full
@apart
def test_a_killed_master_is_an_error_at_once_and_a_new_one_is_found():
    master = Master()
    member = Member(master)
    store = master.open("32MB", timeout=TIMEOUT_S)
    block = memoryview(mmap.mmap(-1, 1 << 20))
    store.lend(block)
    one, data = key(), content()
    block[:100_000] = data
    assert store.write([one], [block[:100_000]]) == [True]
    member.kill()
    master.kill()
    for _ in range(5):
        with within(0.5), pytest.raises(StoreError, match="mooncake_master --rpc_port="):
            store.exists([one])
    with within(0.5), pytest.raises(StoreError) as raised:
        store.write([one], [block[:100_000]])
    assert not isinstance(raised.value, LingeringError)
    store.lend(memoryview(mmap.mmap(-1, 1 << 20)))
    master.start()
    eventually(lambda: works_again(store))
    assert store.write([one], [block[:100_000]]) == [True]
    block[:100_000] = bytes(100_000)
    assert store.read([one], [block[:100_000]]) == [100_000]
    assert block[:100_000] == data
    store.close()


@pytest.mark.full
@apart
def test_a_frozen_master_costs_no_more_than_the_time_out_and_stops_no_thread():
    master = Master()
    store = master.open("32MB", timeout=TIMEOUT_S)
    one, target = key(), memoryview(bytearray(100_000))
    assert store.write([one], [content()]) == [True]
    master.freeze()
    with longest_pause() as pause:
        for call in (
            lambda: store.exists([one]),
            lambda: store.read([one], [target]),
            lambda: store.write([one], [target]),
            lambda: store.remove([one]),
            store.clear,
            store.status,
        ):
            with within(MAX_S), pytest.raises(StoreError) as raised:
                call()
            assert not isinstance(raised.value, LingeringError)
    assert pause() < 0.5
    master.thaw()
    eventually(lambda: works_again(store))
    store.close()


def works_again(store) -> bool:
    try:
        return store.write([key()], [content()]) == [True]
    except StoreError:
        return False


@pytest.mark.full
@apart
def test_closing_waits_for_no_master():
    master = Master()
    store = master.open("32MB", timeout=TIMEOUT_S)
    master.freeze()
    with longest_pause() as pause, within(MAX_S):
        store.close()
    assert pause() < 0.5
    with within(1):
        store.close()


@apart
def test_a_process_ends_with_its_own_status_while_calls_are_stuck():
    master = Master()
    code = f"""
import sys, threading, time
from kvtide.storage import open_store
store = open_store({master.url("32MB")!r}, bytes(32))
print("open", flush=True)
sys.stdin.readline()
threading.Thread(target=store.exists, args=([bytes(32)],), daemon=True).start()
time.sleep(0.2)
print("bye")
sys.exit(7)
"""
    pipe = subprocess.PIPE
    ending = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
    assert ending.stdout is not None and ending.stdout.readline() == "open\n"
    master.freeze()
    with within(1.5):
        rest, _ = ending.communicate("go\n")
    assert (rest, ending.returncode) == ("bye\n", 7)


@pytest.mark.full
@apart
def test_opening_waits_for_no_master():
    master = Master()
    master.freeze()
    with within(MAX_S), pytest.raises(StoreError, match="mooncake_master"):
        master.open(timeout=TIMEOUT_S)


class longest_pause:  # noqa: N801
    """How long the interpreter stood still."""

    def __enter__(self):
        self._over, self._pause = threading.Event(), 0.0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return lambda: self._pause

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.wait(0.01):
            now = time.monotonic()
            self._pause, last = max(self._pause, now - last), now

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


# -- refusals ---------------------------------------------------------------------------------


@apart
def test_no_server_at_the_address_is_an_error_at_once():
    with (
        within(1),
        pytest.raises(StoreError, match=r"no master there.*mooncake_master --rpc_port="),
    ):
        open_store(f"mooncake://127.0.0.1:{free_port()}?segment=0", bytes(32))
    with pytest.raises(StoreError, match=r"no way to nowhere\.invalid"):
        open_store("mooncake://nowhere.invalid:50051?segment=0", bytes(32))


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("mooncake:50051", "write mooncake://host:port"),
        ("mooncake://127.0.0.1/path", "write mooncake://host:port"),
        ("mooncake://127.0.0.1?protocol=udp", "protocol=udp is not tcp or rdma"),
        ("mooncake://127.0.0.1?segments=1GB", "no setting segments; it knows segment, buffer"),
        ("mooncake://127.0.0.1?segment=lots", "segment=lots is no size"),
        ("mooncake://127.0.0.1?segment=16MB", "segment=16MB is too small; use 16MiB or more, or 0"),
        ("mooncake://127.0.0.1?buffer=0", "buffer=0; make it hold the largest object"),
    ],
)
def test_wrong_urls_are_refused_in_a_sentence(url, sentence):
    with pytest.raises(StoreError, match=sentence):
        open_store(url, bytes(32))


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"pip install 'kvtide\[mooncake\]'"),
        (
            ImportError("libibverbs.so.1: cannot open shared object file: No such file"),
            "apt-get install libibverbs1",
        ),
    ],
)
def test_a_missing_library_names_the_command_that_brings_it(monkeypatch, error, remedy):
    class Refuses:
        def find_spec(self, name, *_):
            if name.startswith("mooncake"):
                raise error

    for name in [name for name in sys.modules if name.startswith("mooncake")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    with pytest.raises(StoreError, match=remedy):
        open_store("mooncake://127.0.0.1:1?segment=0", bytes(32))
