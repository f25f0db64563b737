"""The L2 adapter under LMCache's real storage manager: run by `test_lmcache` with LMCache unpacked.

    PYTHONPATH=FOLDER:. python -m tests.integrations.lmcache_checks SCRATCH

Its plug-in factory makes the adapter, its controllers store and prefetch, chunks lie in its memory.
Prints the name of every check that holds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.storage_manager import StorageManager

from kvtide.integrations import engine_versions

CHUNKS = 12
MAX_S = 60.0
KV = MemoryLayoutDesc([torch.Size((2, 4, 16, 64))], [torch.bfloat16])
STATE = MemoryLayoutDesc([torch.Size((4, 300)), torch.Size((2, 8))], [torch.float32, torch.uint8])
GROUPS = ((KV, -1), (STATE, 1))
"""Attention, which needs all of a prefix, and a recurrent state, of which the last is enough."""


class Server:
    """What a server of LMCache has of its storage: 64 MiB of memory, and kvtide behind it."""

    def __init__(self, folder: str, more: dict[str, Any] | None = None, **params: str) -> None:
        spec = {
            "type": "plugin",
            "module_path": "kvtide.integrations.lmcache",
            "class_name": "KvtideL2Adapter",
            "adapter_params": {
                "url": f"file://{folder}?cap=64MB&floor=0",
                "fingerprint": "r1",
                **params,
            },
        }
        arguments = ["--l1-size-gb", "0.0625", "--eviction-policy", "LRU", "--l2-adapter"]
        self.manager = StorageManager(
            parse_args([*arguments, json.dumps({**spec, **(more or {})})])
        )
        adapter = self.manager.l2_adapters()[0][1]
        self.adapter = getattr(adapter, "inner_adapter", adapter)
        assert type(self.adapter).__name__ == "KvtideL2Adapter"

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.adapter.objects.counts)

    def store(self, keys: list[ObjectKey], layout: MemoryLayoutDesc = KV) -> None:
        """As an engine's workers do. The controller stores it in the background."""
        for key, chunk in self.manager.reserve_write(keys, layout).items():
            for index in range(len(layout.shapes)):
                chunk.get_tensor(index).copy_(content(key, layout, index))
        self.manager.finish_write(keys)

    def stored(self, count: int) -> None:
        """Wait until so many chunks are in the store."""
        until(lambda: self.counts.get("written", 0) >= count)

    def loaded(
        self,
        rows: list[list[ObjectKey]],
        groups: tuple[tuple[MemoryLayoutDesc, int], ...] = GROUPS,
    ) -> list[list[bool]]:
        """Which chunks of which group a prompt gets. All of them are as they were written."""
        pairs = list(zip(rows, groups, strict=False))
        spec = [
            GroupedObjectKeys(keys, number, layout, window)
            for number, (keys, (layout, window)) in enumerate(pairs)
        ]
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec(spec))
        assert self.manager.wait_prefetch_status(handle, MAX_S)
        result = self.manager.query_prefetch_status(handle)
        for (keys, (layout, _)), row in zip(pairs, result.hit_cells, strict=True):
            self._compare(row.gather(keys), layout)
        return [[row.test(n) for n in range(len(row))] for row in result.hit_cells]

    def _compare(self, keys: list[ObjectKey], layout: MemoryLayoutDesc) -> None:
        with self.manager.read_prefetched_results(keys) as chunks:
            for key, chunk in zip(keys, chunks, strict=True):
                for index in range(len(layout.shapes)):
                    assert torch.equal(chunk.get_tensor(index), content(key, layout, index)), key
        self.manager.finish_read_prefetched(keys)

    def close(self) -> None:
        self.manager.close()


@contextmanager
def server(folder: str, more: dict[str, Any] | None = None, **params: str) -> Iterator[Server]:
    one = Server(folder, more, **params)
    try:
        yield one
    finally:
        one.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MAX_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def content(key: ObjectKey, layout: MemoryLayoutDesc, index: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(hash((key.chunk_hash[0], key.object_group_id, index)))
    shape, dtype = layout.shapes[index], layout.dtypes[index]
    return torch.randint(0, 100, tuple(shape), generator=rng).to(dtype)


def keys(group: int = 0, count: int = CHUNKS, **fields: Any) -> list[ObjectKey]:
    """Those of one prompt, in order."""
    rank = ObjectKey.ComputeKVRank(2, 1, 2, 1)
    return [
        ObjectKey(bytes([number]) * 32, "model", rank, group, **fields) for number in range(count)
    ]


def filled(folder: str) -> None:
    with server(folder) as one:
        one.store(keys())
        one.store(keys(1), STATE)
        one.stored(2 * CHUNKS)


def killed(run: Callable[[], None]) -> None:
    """Run it in a process that is killed behind it."""
    child = os.fork()
    if not child:
        run()
        os.kill(os.getpid(), 9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9


def prefix(length: int, window: int = -1) -> list[bool]:
    """What a prompt gets of a group whose chunks are there up to a length."""
    first = 0 if window < 0 else length - window
    return [first <= number < length for number in range(CHUNKS)]


def check_what_was_stored_survives_kill_minus_nine(folder: str) -> None:
    def serve() -> None:
        one = Server(folder)
        one.store(keys())
        one.store(keys(1), STATE)
        one.stored(2 * CHUNKS)

    killed(serve)
    with server(folder) as one:
        assert one.loaded([keys(), keys(1)]) == [prefix(CHUNKS), prefix(CHUNKS, window=1)]
        assert one.counts["read"] == CHUNKS + 1 and "failed" not in one.counts


def check_a_kill_while_chunks_are_stored_leaves_whole_ones(folder: str) -> None:
    lengths = set()
    for stop in range(1, CHUNKS, 3):
        part = Path(folder, str(stop))

        def serve(stop: int = stop, part: Path = part) -> None:
            one = Server(str(part))
            for key in keys():
                one.store([key])
            one.stored(stop)

        killed(serve)
        with server(str(part)) as one:
            assert one.adapter.objects.store.status().objects >= stop
            (found,) = one.loaded([keys()])
            length = found.index(False) if False in found else CHUNKS
            assert found == prefix(length)
            lengths.add(length)
    assert lengths - {0}, "nothing was found after any kill"


def check_another_server_loads_what_the_first_one_stored(folder: str) -> None:
    filled(folder)
    with server(folder) as one:
        more = keys(count=CHUNKS + 3)
        (found,) = one.loaded([more])
        assert found == [True] * CHUNKS + [False] * 3
        assert one.manager.report_status()["is_healthy"]


def check_other_models_users_layouts_and_weights_find_nothing(folder: str) -> None:
    filled(folder)
    half = MemoryLayoutDesc(KV.shapes, [torch.float16])
    turned = MemoryLayoutDesc([torch.Size((4, 2, 16, 64))], KV.dtypes)
    with server(folder) as one:
        assert not any(one.loaded([keys(cache_salt="someone")])[0])
        for layout in (half, turned):
            assert not any(one.loaded([keys()], ((layout, -1),))[0])
        assert one.counts.get("read", 0) == 0
    with server(folder, fingerprint="r2") as one:
        assert not any(one.loaded([keys()])[0])


def check_a_damaged_chunk_ends_the_prefix_and_is_stored_again(folder: str) -> None:
    filled(folder)
    with server(folder) as one:
        read = one.adapter.objects.store.read
        damaged = [5]

        def damages(names: list[bytes], targets: list[memoryview]) -> list[int]:
            lengths = read(names, targets)
            for target in targets:
                if damaged and target[:64] == bytes_of(keys()[5])[:64]:
                    target[100] ^= 1
                    damaged.pop()
            return lengths

        one.adapter.objects.store.read = damages
        assert one.loaded([keys()]) == [prefix(5)]
        assert one.counts["corrupt"] == 1
    with server(folder) as one:
        assert one.loaded([keys()]) == [prefix(5)]
        one.store(keys()[5:6])
        one.stored(1)
    with server(folder) as one:
        assert one.loaded([keys()]) == [prefix(CHUNKS)]


def check_torn_files_are_misses_and_never_other_bytes(folder: str) -> None:
    filled(folder)
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    data = max(files, key=lambda path: path.stat().st_blocks)
    with data.open("r+b") as file:
        for at in range(0, data.stat().st_blocks * 512, 64 << 10):
            file.seek(at + 5000)
            file.write(b"torn")
    with server(folder) as one:
        (found,) = one.loaded([keys()])
        assert not all(found)
        assert one.counts["corrupt"] or one.counts["missing"]


def bytes_of(key: ObjectKey) -> bytes:
    return bytes(content(key, KV, 0).view(torch.uint8).flatten().tolist())


def check_an_overfull_store_keeps_its_cap_and_the_latest_chunks(folder: str) -> None:
    url = f"file://{folder}?cap=2MB&floor=0&segment=256KiB"
    many = [ObjectKey(number.to_bytes(2, "little") * 16, "model", 1 << 24) for number in range(200)]
    with server(folder, url=url) as one:
        for number, key in enumerate(many):
            one.store([key])
            one.stored(number + 1)
        status = one.adapter.objects.store.status()
        assert 0 < status.all_bytes <= 2_000_000
        assert one.manager.report_status()["is_healthy"]
    with server(folder, url=url) as one:
        assert one.loaded([many[:CHUNKS]], ((KV, -1),)) == [prefix(0)]
        assert one.loaded([many[-CHUNKS:]], ((KV, -1),)) == [prefix(CHUNKS)]


def check_quotas_of_lmcache_remove_chunks_of_their_users(folder: str) -> None:
    eviction = {"eviction": {"eviction_policy": "IsolatedLRU", "eviction_ratio": 0.5}}
    ours, theirs = keys(cache_salt="ours"), keys(cache_salt="theirs")
    with server(folder, eviction) as one:
        one.manager.quota_manager.set_quota("ours", 1 << 30)
        one.manager.quota_manager.set_quota("theirs", 1000)
        for some in (ours, theirs):
            one.store(some)
        one.stored(2 * CHUNKS)
        until(lambda: "theirs" not in one.adapter.get_usage().bytes_by_cache_salt)
    with server(folder) as one:
        assert one.loaded([ours]) == [prefix(CHUNKS)]
        assert one.loaded([theirs]) == [prefix(0)]


def check_a_serializer_is_refused_and_the_server_goes_on(folder: str) -> None:
    refused: list[str] = []
    with server(folder, {"serde": {"type": "fp8"}}) as one:
        submit = one.adapter.submit_store_task

        def submits(*task: Any) -> int:
            refused.append(refusal(lambda: submit(*task)))
            return submit(*task)

        one.adapter.submit_store_task = submits
        one.store(keys())
        until(lambda: bool(refused))
        assert 'leave out "serde"' in refused[0]
        until(lambda: not one.manager.report_status()["store_controller"]["in_flight_task_count"])
        one.manager.clear()
        assert one.loaded([keys()]) == [prefix(0)]
        assert one.counts.get("written", 0) == 0 and one.manager.report_status()["is_healthy"]


def check_an_untested_version_and_bad_settings_are_sentences(folder: str) -> None:
    assert "has cap; kvtide knows url and fingerprint" in refusal(lambda: Server(folder, cap="1"))
    assert "no such store; use file:" in refusal(lambda: Server(folder, url="files:///nowhere"))
    module = sys.modules.pop("kvtide.integrations.lmcache")
    found, engine_versions.version = engine_versions.version, lambda package: "0.6.0"
    try:
        sentence = refusal(lambda: Server(folder))
    finally:
        engine_versions.version = found
        sys.modules["kvtide.integrations.lmcache"] = module
    assert "was tested with lmcache 0.5.6, and 0.6.0 is installed" in sentence


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return "it was not refused"


def main() -> None:
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            folder = Path(sys.argv[1]) / name
            folder.mkdir()
            check(str(folder))
            print(name, flush=True)


if __name__ == "__main__":
    main()
