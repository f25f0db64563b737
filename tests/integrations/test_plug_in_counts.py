"""What plug-ins count for Prometheus: pages by what happened to them, bytes by direction."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from kvtide.storage import StoreError
from tests.integrations.stand_ins import (
    HiCacheStorageConfig,
    HostPool,
    MemoryLayoutDesc,
    MemoryObj,
    ObjectKey,
    plug_in,
)

MAX_S = 60.0
PAGE_BYTES = 256
EVENTS = ("read", "written", "missing", "corrupt", "refused", "failed")
Rows = Callable[[int], list[bool]]
Plugged = AbstractContextManager[tuple[Any, Rows, Rows]]


@contextmanager
def sglang(url: str) -> Iterator[tuple[Any, Rows, Rows]]:
    """The plug-in, and how its engine writes and reads the first so many pages."""
    with plug_in("sglang") as module:
        extra = {"interface_v1": 1, "url": url, "fingerprint": "r1"}
        one = module.KvtideStorage(HiCacheStorageConfig(extra_config=extra))
        one.register_mem_pool_host(HostPool(page_bytes=PAGE_BYTES))
        keys = [f"{number:064x}" for number in range(8)]
        yield (
            one,
            lambda count: one.batch_set_v1(keys[:count], torch.arange(count)),
            lambda count: one.batch_get_v1(keys[:count], torch.arange(count)),
        )
        one.close()


@contextmanager
def lmcache(url: str) -> Iterator[tuple[Any, Rows, Rows]]:
    with plug_in("lmcache") as module:
        one = module.KvtideL2Adapter({"url": url, "fingerprint": "r1"})
        layout = MemoryLayoutDesc([torch.Size((2, PAGE_BYTES // 4))], [torch.bfloat16])
        keys = [ObjectKey(bytes([number]) * 32) for number in range(8)]

        def wait(event_fd: int) -> None:
            poller = select.poll()
            poller.register(event_fd, select.POLLIN)
            assert poller.poll(MAX_S * 1000)
            os.eventfd_read(event_fd)

        def write(count: int) -> list[bool]:
            one.submit_store_task(keys[:count], [MemoryObj(layout, n) for n in range(count)])
            wait(one.get_store_event_fd())
            (result,) = one.pop_completed_store_tasks().values()
            return [result >= 0] * count

        def read(count: int) -> list[bool]:
            task = one.submit_load_task(keys[:count], [MemoryObj(layout, 0)] * count)
            wait(one.get_load_event_fd())
            return list(one.query_load_result(task))

        yield one, write, read
        one.close()


def counted(engine: str) -> dict[str, float]:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, {"engine": engine, **labels}) or 0.0

    return {
        **{event: value("kvtide_engine_pages_total", event=event) for event in EVENTS},
        "bytes read": value("kvtide_engine_bytes_total", direction="read"),
        "bytes written": value("kvtide_engine_bytes_total", direction="written"),
    }


@pytest.mark.parametrize("opened", [sglang, lmcache], ids=lambda opened: opened.__name__)
def test_a_plug_in_counts_hits_misses_bytes_corrupt_and_failed_pages(
    opened: Callable[[str], Plugged], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened.__name__
    with opened(f"memory:{tmp_path}") as (plugged, write, read):
        before = counted(engine)

        def since(**expected: float) -> bool:
            now = counted(engine)
            found = {name: now[name] - before[name] for name in now if now[name] != before[name]}
            return found == {name.replace("_", " "): value for name, value in expected.items()}

        assert write(4) == [True] * 4
        assert since(written=4, bytes_written=4 * PAGE_BYTES)
        assert read(6) == [True] * 4 + [False] * 2
        done = {"written": 4, "bytes_written": 4 * PAGE_BYTES, "missing": 2}
        assert since(**done, read=4, bytes_read=4 * PAGE_BYTES)
        stored = plugged.objects.store._objects
        key, kept = next(iter(stored.items()))
        stored[key] = kept[:20] + bytes([kept[20] ^ 1]) + kept[21:]
        assert read(4).count(True) == 3
        done |= {"corrupt": 1, "read": 7, "bytes_read": 7 * PAGE_BYTES}
        assert since(**done)

        def fails(*arguments: object) -> None:
            raise StoreError("the server is gone; start it")

        monkeypatch.setattr(plugged.objects.store, "read", fails)
        assert read(4) == [False] * 4
        assert since(**done, failed=4)
        seconds = REGISTRY.get_sample_value(
            "kvtide_engine_seconds_total", {"engine": engine, "call": "read"}
        )
        assert seconds is not None and seconds > 0
