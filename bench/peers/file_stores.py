"""File stores as drivers of one benchmark: kvtide's, SGLang's, LMCache's, and the plain disk.

`load` and `unload` are not timed: they move bytes between the benchmark's memory and the memory
that a store writes from and reads into.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import gpu_stubs
import torch
from lmcache_adapters import LMCacheAdapter, specs

from kvtide.bench.storage_drivers import RawDisk
from kvtide.bench.store_speed import MemoryBlocks, Ours
from kvtide.storage import open_store
from kvtide.storage.trial import new_space
from kvtide.storage.url import StoreURL

torch.set_num_threads(
    1
)  # Threads of torch for pages this small cost SGLang's reads more than half.

Memories = Sequence[memoryview]
ALIGN = 4096


class FileStore(Protocol):
    name: str

    def load(self, keys: Sequence[bytes], sources: Memories) -> None: ...
    def write(self, keys: Sequence[bytes]) -> None: ...
    def read(self, keys: Sequence[bytes]) -> None: ...
    def unload(self, keys: Sequence[bytes], targets: Memories) -> None: ...
    def remove(self, keys: Sequence[bytes]) -> None: ...
    def close(self) -> None: ...


def open_all(folder: Path, blocks: MemoryBlocks, max_bytes: int) -> list[FileStore]:
    """All stores, each in a folder of its own; kvtide's is the first."""
    return [
        Kvtide(folder / "kvtide", blocks),
        Disk(folder / "disk", blocks, max_bytes),
        SglangFile(folder / "sglang", blocks),
        SglangFileV2(folder / "sglang-v2", blocks),
        SglangKvtide(folder / "sglang-kvtide", blocks),
        LMCacheDisk(folder / "lmcache", max_bytes, use_odirect=False),
        LMCacheDisk(folder / "lmcache-direct", max_bytes, use_odirect=True),
        *(LMCacheAdapter(name, spec, blocks) for name, spec in specs(folder).items()),
    ]


class _InPlace:
    """Writes from the benchmark's source block and reads into its target block."""

    def __init__(self, folder: Path, blocks: MemoryBlocks) -> None:
        folder.mkdir()
        self.blocks = blocks
        self.size = 0

    def load(self, keys: Sequence[bytes], sources: Memories) -> None:
        self.size = len(sources[0])

    def unload(self, keys: Sequence[bytes], targets: Memories) -> None:
        """The bytes are there."""

    def _cut(self, block: memoryview, count: int) -> list[memoryview]:
        return [block[n * self.size : (n + 1) * self.size] for n in range(count)]


class Kvtide(_InPlace):
    name = "kvtide"

    def __init__(self, folder: Path, blocks: MemoryBlocks) -> None:
        super().__init__(folder, blocks)
        self._store = open_store(f"file://{folder}", new_space())
        self._driver = Ours(self._store, blocks)

    def write(self, keys: Sequence[bytes]) -> None:
        self._driver.write(keys, self._cut(self.blocks.source, len(keys)))

    def read(self, keys: Sequence[bytes]) -> None:
        self._driver.read(keys, self._cut(self.blocks.target, len(keys)))

    def remove(self, keys: Sequence[bytes]) -> None:
        self._driver.remove(keys)

    def close(self) -> None:
        self._store.close()


class Disk(_InPlace):
    """One preallocated file without any store."""

    def __init__(self, folder: Path, blocks: MemoryBlocks, max_bytes: int) -> None:
        super().__init__(folder, blocks)
        self._driver = RawDisk(StoreURL.parse(f"file://{folder}"), max_bytes)
        self.name = self._driver.name

    def write(self, keys: Sequence[bytes]) -> None:
        self._driver.write(keys, self._cut(self.blocks.source, len(keys)))

    def read(self, keys: Sequence[bytes]) -> None:
        self._driver.read(keys, self._cut(self.blocks.target, len(keys)))

    def remove(self, keys: Sequence[bytes]) -> None:
        self._driver.remove(keys)

    def close(self) -> None:
        self._driver.close()


# -- SGLang -----------------------------------------------------------------------------------


class SglangFile(_InPlace):
    """HiCacheFile by its first interface: tensors of a list of keys."""

    name = "SGLang HiCacheFile"

    def __init__(self, folder: Path, blocks: MemoryBlocks) -> None:
        super().__init__(folder, blocks)
        gpu_stubs.install()
        self.library: Any = import_module("sglang.srt.mem_cache.hicache_storage")
        config = self.library.HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench",
        )
        self.store = self._open(config, folder)

    def _open(self, config: Any, folder: Path) -> Any:
        return self.library.HiCacheFile(config, str(folder))

    def write(self, keys: Sequence[bytes]) -> None:
        values = [_tensor(part) for part in self._cut(self.blocks.source, len(keys))]
        if not self.store.batch_set([key.hex() for key in keys], values):
            raise OSError("HiCacheFile refused an object")

    def read(self, keys: Sequence[bytes]) -> None:
        targets = [_tensor(part) for part in self._cut(self.blocks.target, len(keys))]
        found = self.store.batch_get([key.hex() for key in keys], targets)
        if any(one is None for one in found):
            raise OSError("HiCacheFile lost an object")

    def remove(self, keys: Sequence[bytes]) -> None:
        self.store.clear()

    def close(self) -> None:
        """It holds nothing open."""


class SglangFileV2(SglangFile):
    """HiCacheFile by its second interface: pages of a registered host pool."""

    name = "SGLang HiCacheFile v2"

    def write(self, keys: Sequence[bytes]) -> None:
        self._move(self.store.batch_set_v2, keys, self.blocks.source)

    def read(self, keys: Sequence[bytes]) -> None:
        self._move(self.store.batch_get_v2, keys, self.blocks.target)

    def _move(self, call: Callable[..., Any], keys: Sequence[bytes], block: memoryview) -> None:
        kv = self.library.PoolName.KV
        self.store.register_mem_host_pool_v2(_HostPool(_tensor(block), self.size), kv)
        transfer = self.library.PoolTransfer(
            name=kv, host_indices=torch.arange(len(keys)), keys=[key.hex() for key in keys]
        )
        if not all(call([transfer])[kv]):
            raise OSError(f"{self.name} failed with an object")


class SglangKvtide(SglangFileV2):
    """kvtide's backend of HiCache, made by SGLang's factory, with labels and checksums."""

    name = "kvtide inside SGLang"

    def _open(self, config: Any, folder: Path) -> Any:
        factory: Any = import_module("sglang.srt.mem_cache.storage.backend_factory")
        config.extra_config = {
            "backend_name": "kvtide",
            "module_path": "kvtide.integrations.sglang",
            "class_name": "KvtideStorage",
            "interface_v1": 1,
            "url": f"file://{folder}",
            "fingerprint": "bench",
        }
        return factory.StorageBackendFactory.create_backend("dynamic", config, None)

    def close(self) -> None:
        self.store.close()


class _HostPool:
    """The part of a host pool that storage backends call: whole pages, one index each."""

    page_size = 1
    dtype = torch.uint8
    layout = "page_first"

    def __init__(self, block: torch.Tensor, size: int) -> None:
        self._block, self._size = block, size

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self._block[index * self._size : (index + 1) * self._size]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = [self.get_data_page(int(index)).data_ptr() for index in indices]
        return pages, [self._size] * len(pages)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self._size, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.get_data_page(index).copy_(page)


# -- LMCache ----------------------------------------------------------------------------------


class LMCacheDisk:
    """LocalDiskBackend, which writes from memory objects and reads into new ones."""

    def __init__(self, folder: Path, max_bytes: int, *, use_odirect: bool) -> None:
        folder.mkdir()
        self.name = f"LMCache local disk, {'O_DIRECT' if use_odirect else 'buffered'}"
        backends = "lmcache.v1.storage_backend"
        config = import_module("lmcache.v1.config").LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            max_local_cpu_size=2.5 * max_bytes / 2**30 + 0.25,
            local_disk=str(folder),
            max_local_disk_size=4 * max_bytes / 2**30 + 1,
            extra_config={"use_odirect": use_odirect, "local_cpu.pinned_align_bytes": ALIGN},
        )
        metadata = import_module("lmcache.v1.metadata").LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 2, 256, 1, 128),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        memory: Any = import_module(f"{backends}.local_cpu_backend")
        disk: Any = import_module(f"{backends}.local_disk_backend")
        self._memory = memory.LocalCPUBackend(config, metadata, "cpu")
        self._disk = disk.LocalDiskBackend(config, self._loop, self._memory, "cpu")
        self._key: Any = import_module("lmcache.utils").CacheEngineKey
        self._format: Any = import_module("lmcache.v1.memory_management").MemoryFormat.KV_2LTD
        self._objects: list[Any] = []

    def load(self, keys: Sequence[bytes], sources: Memories) -> None:
        for source in sources:
            shape = torch.Size((2, 1, 1, len(source) // 2))
            made = self._memory.allocate(shape, torch.uint8, self._format)
            made.tensor.view(-1).copy_(_tensor(source))
            self._objects.append(made)

    def write(self, keys: Sequence[bytes]) -> None:
        written = threading.Semaphore(0)
        self._disk.batched_submit_put_task(
            self._keys(keys), self._objects, on_complete_callback=lambda key: written.release()
        )
        for _ in keys:
            if not written.acquire(timeout=60):
                raise OSError("LMCache refused an object")
        for one in self._objects:
            one.ref_count_down()

    def read(self, keys: Sequence[bytes]) -> None:
        self._objects = self._disk.batched_get_blocking(self._keys(keys))
        if any(one is None for one in self._objects):
            raise OSError("LMCache lost an object")

    def unload(self, keys: Sequence[bytes], targets: Memories) -> None:
        for one, target in zip(self._objects, targets, strict=True):
            _tensor(target).copy_(one.tensor.view(-1))
            one.ref_count_down()
        self._objects = []

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in self._keys(keys):
            self._disk.remove(key)
        self._disk.current_cache_size = 0.0  # `remove` leaves it as it was.

    def close(self) -> None:
        self._disk.close()
        self._memory.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _keys(self, keys: Sequence[bytes]) -> list[Any]:
        numbers = (int.from_bytes(key[:8], "little") for key in keys)
        return [self._key("bench", 1, 0, number, torch.uint8) for number in numbers]


def _tensor(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
