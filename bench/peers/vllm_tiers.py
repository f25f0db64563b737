"""Secondary tiers of vLLM's tiering offload manager as file stores: its own, and kvtide's.

A turn goes the way of vLLM's manager: jobs of some chunks of the CPU tier's memory, submitted
together. What `file_store` measures is in its `--help`.
"""

from __future__ import annotations

import mmap
import shutil
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from file_store import main
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvtide.bench.store_speed import MemoryBlocks

JOB_CHUNKS = 16
"""A job is a request's: vLLM's file tier gives it one thread, kvtide's the store's threads."""


class VllmTier:
    """One tier. The CPU tier's memory has chunks to be written, then as many to be read into."""

    def __init__(self, name: str, config: dict[str, Any], folder: Path) -> None:
        folder.mkdir()
        self.name = name
        self._config = config
        self._folder = folder
        self._tier: Any = None
        self._size = self._count = 0
        self._jobs = count()

    def load(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        if (len(keys), len(sources[0])) != (self._count, self._size):
            self._open(len(keys), len(sources[0]))
        for number, source in enumerate(sources):
            self._memory[number] = source

    def write(self, keys: Sequence[bytes]) -> None:
        self._run(self._tier.submit_store, keys, 0)

    def read(self, keys: Sequence[bytes]) -> None:
        self._run(self._tier.submit_load, keys, self._count)

    def unload(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        for number, target in enumerate(targets):
            target[:] = self._memory[self._count + number].data

    def remove(self, keys: Sequence[bytes]) -> None:
        if hasattr(self._tier, "objects"):
            self._tier.objects.clear()
        else:
            for path in self._folder.rglob("*.bin"):
                path.unlink()

    def close(self) -> None:
        if self._tier is not None:
            self._tier.shutdown()

    # -- the steps --------------------------------------------------------------------------

    def _open(self, chunks: int, size: int) -> None:
        self.close()
        shutil.rmtree(self._folder)
        self._folder.mkdir()
        self._count, self._size = chunks, size
        memory = np.frombuffer(mmap.mmap(-1, 2 * chunks * size), np.uint8)
        self._memory = memory.reshape(2 * chunks, size)
        self._memory[:] = 1  # Pages that were never touched cost their first user.
        self._tier = SecondaryTierFactory.create_secondary_tier(
            self._config, self._memory.data, _offloading()
        )

    def _run(self, submit: Any, keys: Sequence[bytes], first: int) -> None:
        for at in range(0, len(keys), JOB_CHUNKS):
            some = [make_offload_key(key, 0) for key in keys[at : at + JOB_CHUNKS]]
            chunks = np.arange(first + at, first + at + len(some))
            context = ReqContext(req_id="bench")
            submit(TransferJob(next(self._jobs), some, chunks, first > 0, context))
        self._tier.drain_jobs()
        if not all(job.success for job in self._tier.get_finished_jobs()):
            raise OSError(f"{self.name} failed with a chunk")


def _offloading() -> Any:
    """What tiers read of an `OffloadingSpec`."""
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False
    )
    config = SimpleNamespace(
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=("a",))],
        parallel=parallel,
        model=SimpleNamespace(name="bench", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16),
        canonical_layout=False,
        kv_cache_layout=None,
        replicated_layout=False,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)


def open_tiers(folder: Path, blocks: MemoryBlocks, max_bytes: int) -> list[VllmTier]:
    ours = {
        "type": "KvtideTier",
        "module_path": "kvtide.integrations.vllm",
        "url": f"file://{folder}/kvtide?cap={4 * max_bytes + (1 << 30)}&floor=0",
        "fingerprint": "bench",
    }
    theirs = {"type": "fs", "root_dir": f"{folder}/fs"}
    return [
        VllmTier("kvtide inside vLLM", ours, folder / "kvtide"),
        VllmTier("vLLM fs", theirs, folder / "fs"),
    ]


if __name__ == "__main__":
    sys.exit(main(open_tiers, "kvtide inside vLLM"))
