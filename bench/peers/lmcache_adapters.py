"""L2 adapters of LMCache's server as file stores: its own, and kvtide's by its plug-in factory.

A turn goes the way of LMCache's controllers: memory objects of one chunk each, one task, the
adapter's event fd.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kvtide.bench.store_speed import MemoryBlocks

TASK_S = 60.0
"""How long a task may take."""


def specs(folder: Path) -> dict[str, dict[str, Any]]:
    """What `--l2-adapter` says, by the name of the table's row."""
    return {
        "kvtide inside LMCache": {
            "type": "plugin",
            "module_path": "kvtide.integrations.lmcache",
            "class_name": "KvtideL2Adapter",
            "adapter_params": {"url": f"file://{folder}/lmcache-kvtide", "fingerprint": "bench"},
        },
        "LMCache fs": {"type": "fs", "base_path": f"{folder}/lmcache-fs"},
        "LMCache fs, O_DIRECT": {
            "type": "fs",
            "base_path": f"{folder}/lmcache-fs-direct",
            "use_odirect": True,
        },
        "LMCache fs_native": {"type": "fs_native", "base_path": f"{folder}/lmcache-native"},
        "LMCache fs_native, O_DIRECT": {
            "type": "fs_native",
            "base_path": f"{folder}/lmcache-native-direct",
            "use_odirect": True,
        },
    }


class LMCacheAdapter:
    """One adapter. Its chunks lie in the benchmark's memory."""

    def __init__(self, name: str, spec: dict[str, Any], blocks: MemoryBlocks) -> None:
        adapters = "lmcache.v1.distributed.l2_adapters"
        config: Any = import_module(f"{adapters}.config").get_l2_adapter_config_class(spec["type"])
        self.name = name
        self._blocks = blocks
        self._size = 0
        self._adapter = import_module(adapters).create_l2_adapter(config.from_dict(spec))
        self._key: Any = import_module("lmcache.v1.distributed.api").ObjectKey
        self._memory: Any = import_module("lmcache.v1.memory_management")
        self._consume: Any = import_module("lmcache.v1.platform").consume_fd

    def load(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        self._size = len(sources[0])

    def write(self, keys: Sequence[bytes]) -> None:
        adapter, chunks = self._adapter, self._chunks(self._blocks.source, len(keys))
        task = adapter.submit_store_task(self._keys(keys), chunks)
        self._wait(adapter.get_store_event_fd())
        if not adapter.pop_completed_store_tasks()[task].is_successful():
            raise OSError(f"{self.name} refused a chunk")

    def read(self, keys: Sequence[bytes]) -> None:
        adapter, chunks = self._adapter, self._chunks(self._blocks.target, len(keys))
        task = adapter.submit_load_task(self._keys(keys), chunks)
        self._wait(adapter.get_load_event_fd())
        if adapter.query_load_result(task).popcount() != len(keys):
            raise OSError(f"{self.name} lost a chunk")

    def unload(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        """The bytes are there."""

    def remove(self, keys: Sequence[bytes]) -> None:
        self._adapter.delete(self._keys(keys))

    def close(self) -> None:
        self._adapter.close()

    def _keys(self, keys: Sequence[bytes]) -> list[Any]:
        return [self._key(key, "bench", 1 << 24) for key in keys]

    def _chunks(self, block: memoryview, count: int) -> list[Any]:
        size = self._size
        shape = torch.Size((2, 1, 1, size // 2))
        return [
            self._memory.TensorMemoryObj(
                torch.frombuffer(block[n * size : (n + 1) * size], dtype=torch.uint8),
                self._memory.MemoryObjMetadata(
                    shape, torch.uint8, 0, size, 1, shapes=[shape], dtypes=[torch.uint8]
                ),
                None,
            )
            for n in range(count)
        ]

    def _wait(self, event_fd: int) -> None:
        poller = select.poll()
        poller.register(event_fd, select.POLLIN)
        if not poller.poll(TASK_S * 1000):
            raise OSError(f"{self.name} has not ended a task within {TASK_S:g} s")
        self._consume(event_fd)
