"""kvtide's stores as an L2 adapter of LMCache's server.

    lmcache server --l1-size-gb 20 --eviction-policy LRU --l2-adapter '{"type": "plugin",
      "module_path": "kvtide.integrations.lmcache", "class_name": "KvtideL2Adapter",
      "adapter_params": {"url": "file:///var/cache/kvtide?cap=200GB", "fingerprint": "main"}}'

A chunk of an object group is one object (`page_objects`). Its key is all of LMCache's: chunk hash,
model, rank, group, salt. What that lacks is in the pool (shapes and dtypes) and in the space (the
fingerprint).

LMCache's controllers submit tasks, which run on threads (`page_tasks`), and are woken by event fds.
LMCache's locks on its memory lapse, those for reading after 300 s: a chunk is copied within about
a minute, or not at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvtide.integrations.engine_versions import require_version

TESTED = ("0.5.6",)
require_version("lmcache", ["lmcache"], TESTED)

from lmcache.lmcache_native import Bitmap  # noqa: E402
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey  # noqa: E402
from lmcache.v1.distributed.internal_api import L2StoreResult  # noqa: E402
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface  # noqa: E402
from lmcache.v1.platform import create_event_notifier  # noqa: E402

from kvtide.integrations.engine_settings import (  # noqa: E402
    refuse_unknown,
    require_store,
    weights_of,
)
from kvtide.integrations.page_objects import (  # noqa: E402
    MemoryRuns,
    PageObjects,
    PagePool,
    space_of,
)
from kvtide.integrations.page_tasks import Page, PageTasks  # noqa: E402
from kvtide.storage import StoreError  # noqa: E402

ASKING, LOADING, STORING = 1, 4, 4
"""Threads. Loads have their own: a request waits for them."""
BATCH_BYTES = 16 << 20
"""Of staging memory per thread, or one chunk: one batch is copied while another is on its way."""
_WHERE = '"adapter_params"'


class KvtideL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Chunks in any store, whose cap bounds them. LMCache removes some for its quotas alone."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        url = require_store(params, _WHERE)
        refuse_unknown(params, _WHERE)
        space = space_of("lmcache", weights_of(params, _WHERE, ""), {})
        self.objects = PageObjects("lmcache", url, space, batch_bytes=BATCH_BYTES)
        self._pools: dict[tuple[object, ...], dict[str, PagePool]] = {}
        self._lookups: PageTasks[Bitmap] = self._tasks("look-up", ASKING)
        self._loads: PageTasks[Bitmap] = self._tasks("load", LOADING)
        self._stores: PageTasks[L2StoreResult] = self._tasks("store", STORING)

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.notifier.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.notifier.fileno()

    def get_store_event_fd(self) -> int:
        return self._stores.notifier.fileno()

    # -- tasks ------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: Mapping[int, MemoryLayoutDesc]
    ) -> int:
        """Nothing is locked: a chunk that the store evicts meanwhile is a miss of the load."""
        layouts = ((key, group_layout_descs[key.object_group_id]) for key in keys)
        pages = [self._page(key, layout.shapes, layout.dtypes) for key, layout in layouts]
        return self._lookups.submit(pages, self._exists, _bitmap)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """A look-up locks nothing."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        return self._loads.submit(self._pages(keys, objects), self._load, _bitmap)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """The result has the bytes that were not there yet."""
        written: list[int] = []

        def store(pool: PagePool, pages: list[Page]) -> list[bool]:
            names, memory = [one.name for one in pages], [one.runs for one in pages]
            before, now = self.objects.add(pool, names, memory)
            new = [not found and ok for found, ok in zip(before, now, strict=True)]
            if stored := [page.key for page in itertools.compress(pages, new)]:
                sizes = [pool.format.payload_bytes] * len(stored)
                written.append(sum(sizes))
                self._notify_keys_stored(stored, sizes)
            return now

        pages = self._pages(keys, objects)
        return self._stores.submit(pages, store, lambda ok: L2StoreResult(all(ok), sum(written)))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    # -- the rest of the interface ----------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove chunks, of whatever layouts this server has seen of their group."""
        names: dict[PagePool, list[bytes]] = {}
        sizes: dict[ObjectKey, int] = {}
        for key in keys:
            for pool in self._seen(key).copy().values():
                names.setdefault(pool, []).append(_name(key))
                sizes[key] = pool.format.payload_bytes
        for pool, some in names.items():
            self.objects.remove(pool, some)
        if sizes:
            self._notify_keys_deleted(list(sizes), list(sizes.values()))

    def report_status(self) -> dict[str, Any]:
        """A store that fails costs misses, and is no reason to restart the server."""
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "store": self.objects.store.name,
            "chunks": dict(self.objects.counts),
            "last_error": self.objects.last_error,
        }

    def close(self) -> None:
        for tasks in (self._lookups, self._loads, self._stores):
            tasks.close()
        self.objects.close()

    # -- on threads -------------------------------------------------------------------------

    def _exists(self, pool: PagePool, pages: list[Page]) -> list[bool]:
        return self.objects.exists(pool, [page.name for page in pages])

    def _load(self, pool: PagePool, pages: list[Page]) -> list[bool]:
        done = self.objects.read(pool, [one.name for one in pages], [one.runs for one in pages])
        if loaded := [page.key for page, ok in zip(pages, done, strict=True) if ok]:
            self._notify_keys_accessed(loaded)
        return done

    # -- chunks -----------------------------------------------------------------------------

    def _tasks(self, name: str, threads: int) -> PageTasks[Any]:
        return PageTasks(name, threads, self.objects, create_event_notifier())

    def _pages(self, keys: list[ObjectKey], objects: list[Any]) -> list[Page]:
        pages = []
        for key, one in zip(keys, objects, strict=True):
            runs = (memoryview(one.byte_array).cast("B"),)
            pages.append(self._page(key, one.get_shapes(), one.get_dtypes(), runs))
        return pages

    def _page(
        self, key: ObjectKey, shapes: Sequence[Any], dtypes: Sequence[Any], runs: MemoryRuns = ()
    ) -> Page:
        """A chunk, with the format that look-ups, loads and stores all describe."""
        layout = {"shapes": [[*shape] for shape in shapes], "dtypes": [str(one) for one in dtypes]}
        if layout["dtypes"] == ["torch.uint8"] and len(shapes[0]) == 1:
            raise StoreError(
                "LMCache stores serialized chunks and looks up plain ones; leave out "
                '"serde", with which kvtide would find nothing'
            )
        seen, described = self._seen(key), repr(layout)
        if described not in seen:
            sizes = (math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
            seen[described] = self.objects.pool(f"group {key.object_group_id}", sum(sizes), layout)
        assert not runs or len(runs[0]) == seen[described].format.payload_bytes
        return Page(key, _name(key), seen[described], runs)

    def _seen(self, key: ObjectKey) -> dict[str, PagePool]:
        """The formats of a group: one, unless engines of one name have different layouts."""
        return self._pools.setdefault((key.model_name, key.kv_rank, key.object_group_id), {})


def _name(key: ObjectKey) -> bytes:
    parts = (key.chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
    return repr(parts).encode()


def _bitmap(there: list[bool]) -> Bitmap:
    bitmap = Bitmap(len(there))
    for number, found in enumerate(there):
        if found:
            bitmap.set(number)
    return bitmap
