"""The L2 adapter over stand-ins for LMCache's types, and under its real storage manager.

LMCache is unpacked for it, and runs in a process of its own.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.storage import StoreError
from tests.integrations import engines
from tests.integrations.stand_ins import MemoryLayoutDesc, MemoryObj, ObjectKey, plug_in

ROOT = Path(__file__).resolve().parents[2]
CHECKS = [
    line.split("(")[0].removeprefix("def ")
    for line in (ROOT / "tests/integrations/lmcache_checks.py").read_text().splitlines()
    if line.startswith("def check_")
]
MAX_S = 60.0
LAYOUT = MemoryLayoutDesc([torch.Size((2, 3, 16, 8))], [torch.bfloat16])
STATES = MemoryLayoutDesc([torch.Size((4, 9)), torch.Size((2, 8))], [torch.float32, torch.uint8])
GROUPS = {0: LAYOUT, 1: STATES}
SERIALIZED = MemoryLayoutDesc([torch.Size((100,))], [torch.uint8])


@pytest.fixture
def lmcache() -> Iterator[Any]:
    with plug_in("lmcache") as module:
        yield module


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory:{tmp_path}"


def adapter(lmcache: Any, url: str, fingerprint: str = "r1") -> Any:
    return lmcache.KvtideL2Adapter({"url": url, "fingerprint": fingerprint}, l1_memory_desc=None)


def keys(count: int = 6) -> list[ObjectKey]:
    """Of two object groups in turn."""
    return [ObjectKey(bytes([number]) * 32, object_group_id=number % 2) for number in range(count)]


def chunks(some: Sequence[ObjectKey], seed: int = 0) -> list[MemoryObj]:
    return [
        MemoryObj(GROUPS[key.object_group_id], seed + number) for number, key in enumerate(some)
    ]


def wait(event_fd: int) -> None:
    poller = select.poll()
    poller.register(event_fd, select.POLLIN)
    assert poller.poll(MAX_S * 1000)
    os.eventfd_read(event_fd)


def store(one: Any, some: list[ObjectKey], objects: list[MemoryObj] | None = None) -> int:
    task = one.submit_store_task(some, objects or chunks(some))
    wait(one.get_store_event_fd())
    done: dict[int, int] = one.pop_completed_store_tasks()
    assert list(done) == [task]
    return done[task]


def found(
    one: Any, some: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc] = GROUPS
) -> list[bool]:
    task = one.submit_lookup_and_lock_task(some, layouts)
    wait(one.get_lookup_and_lock_event_fd())
    return list(one.query_lookup_and_lock_result(task))


def load(one: Any, some: list[ObjectKey], objects: list[MemoryObj]) -> list[bool]:
    task = one.submit_load_task(some, objects)
    wait(one.get_load_event_fd())
    return list(one.query_load_result(task))


def test_chunks_of_several_groups_come_back_in_another_adapter(lmcache: Any, url: str) -> None:
    writer, reader = adapter(lmcache, url), adapter(lmcache, url)
    wanted, target = chunks(keys()), chunks(keys(7), seed=50)
    kept = target[6].data.copy()
    size = sum(chunk.data.nbytes for chunk in wanted)
    assert store(writer, keys(), wanted) == size
    assert found(reader, keys(7)) == [True] * 6 + [False]
    assert load(reader, keys(7), target) == [True] * 6 + [False]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(wanted, target, strict=False))
    assert np.array_equal(target[6].data, kept)
    reader.submit_unlock(keys())
    assert sorted(writer.notified[0][1] + writer.notified[1][1], key=str) == sorted(keys(), key=str)
    assert {event for event, _ in writer.notified} == {"stored"}
    assert {event for event, _ in reader.notified} == {"accessed"}
    writer.close()
    reader.close()


def test_chunks_that_are_there_are_not_written_again(lmcache: Any, url: str) -> None:
    one = adapter(lmcache, url)
    store(one, keys(4))
    one.notified.clear()
    assert store(one, keys()) == sum(chunk.data.nbytes for chunk in chunks(keys())[4:])
    assert sorted(key for _, some in one.notified for key in map(str, some)) == [
        *map(str, keys()[4:])
    ]
    assert one.objects.counts["written"] == 6
    one.close()


@pytest.mark.parametrize(
    "other",
    [
        ObjectKey(b"\1" * 32),
        ObjectKey(b"\0" * 31),
        ObjectKey(b"\0" * 32, model_name="other"),
        ObjectKey(b"\0" * 32, kv_rank=1),
        ObjectKey(b"\0" * 32, object_group_id=1),
        ObjectKey(b"\0" * 32, cache_salt="someone"),
        ObjectKey(b"\0" * 32, model_name="model', 16777216, 0, 'x"),
    ],
)
def test_every_part_of_a_key_counts(lmcache: Any, url: str, other: ObjectKey) -> None:
    one = adapter(lmcache, url)
    store(one, keys(1))
    assert found(one, [*keys(1), other], {0: LAYOUT, 1: LAYOUT}) == [True, False]
    one.close()


@pytest.mark.parametrize(
    ("layout", "fingerprint"),
    [
        (MemoryLayoutDesc(LAYOUT.shapes, [torch.float16]), "r1"),
        (MemoryLayoutDesc([torch.Size((3, 2, 16, 8))], LAYOUT.dtypes), "r1"),
        (MemoryLayoutDesc([torch.Size((2, 3, 8, 8))] * 2, LAYOUT.dtypes * 2), "r1"),
        (LAYOUT, "r2"),
    ],
)
def test_what_the_key_lacks_counts_too(
    lmcache: Any, url: str, layout: MemoryLayoutDesc, fingerprint: str
) -> None:
    writer, reader = adapter(lmcache, url), adapter(lmcache, url, fingerprint)
    store(writer, keys(1))
    assert found(reader, keys(1), {0: layout}) == [False]
    assert load(reader, keys(1), [MemoryObj(layout, 0)]) == [False]
    writer.close()
    reader.close()


def test_deleted_chunks_are_gone_and_others_are_not(lmcache: Any, url: str) -> None:
    one = adapter(lmcache, url)
    store(one, keys())
    one.notified.clear()
    one.delete([*keys()[1:3], ObjectKey(b"", model_name="unseen")])
    assert found(one, keys()) == [True, False, False, True, True, True]
    assert one.notified == [("deleted", keys()[1:3])]
    one.close()


def test_a_store_that_fails_costs_misses(
    lmcache: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = adapter(lmcache, url)
    store(one, keys(2))

    def fails(*arguments: object) -> None:
        raise StoreError("the server is gone; start it")

    for call in ("exists", "read", "write"):
        monkeypatch.setattr(one.objects.store, call, fails)
    assert found(one, keys(2)) == [False, False]
    assert load(one, keys(2), chunks(keys(2))) == [False, False]
    assert store(one, keys(2)) == -1
    status = one.report_status()
    assert status["is_healthy"] and status["last_error"] == "the server is gone; start it"
    assert status["chunks"]["failed"] == 4
    one.close()


def test_a_task_ends_where_a_listener_of_lmcache_fails(lmcache: Any, url: str) -> None:
    one = adapter(lmcache, url)
    one.listener = lambda: [][0]
    assert store(one, keys(1)) == -1
    assert found(one, keys(1)) == [True]
    assert load(one, keys(1), chunks(keys(1))) == [False]
    assert one.objects.counts["failed"] == 2
    one.close()


def test_serialized_chunks_are_refused(lmcache: Any, url: str) -> None:
    one = adapter(lmcache, url)
    with pytest.raises(StoreError, match='looks up plain ones; leave out "serde"'):
        one.submit_store_task(keys(1), [MemoryObj(SERIALIZED, 0)])
    one.close()


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({}, '"adapter_params" names no store; add "url", such as "file:'),
        ({"url": "memory:", "cap": "1GB"}, '"adapter_params" has cap; kvtide knows url and'),
        ({"url": "memory:"}, 'of the models are not known on this machine.*add "fingerprint"'),
        ({"url": "files:///nowhere", "fingerprint": "r1"}, "no such store; use file:"),
    ],
)
def test_bad_settings_are_refused(lmcache: Any, params: dict[str, str], sentence: str) -> None:
    with pytest.raises(StoreError, match=sentence):
        lmcache.KvtideL2Adapter(params)


def test_event_fds_are_distinct_and_lmcache_is_not_to_evict(lmcache: Any, url: str) -> None:
    one = adapter(lmcache, url)
    files = {
        *(one.get_store_event_fd(), one.get_load_event_fd()),
        one.get_lookup_and_lock_event_fd(),
    }
    assert len(files) == 3 and one.max_capacity_bytes == 0
    one.close()


def test_the_adapter_without_lmcache_is_a_sentence() -> None:
    code = "import kvtide.integrations.lmcache"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "needs lmcache 0.5.6, and none is installed; pip install" in done.stderr


@pytest.mark.full
def test_every_check_holds_under_the_real_storage_manager(tmp_path: Path) -> None:
    folder = engines.lmcache("0.5.6")
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.lmcache_checks", str(tmp_path)],
        env={
            **os.environ,
            **{"LMCACHE_LOG_LEVEL": "CRITICAL", "LMCACHE_TRACK_USAGE": "false"},
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line for line in done.stdout.split() if line.startswith("check_")]
    assert names == CHECKS and len(CHECKS) == 10
