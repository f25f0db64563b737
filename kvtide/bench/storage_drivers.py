"""Drivers that stores are measured beside: the disk, the store's own library, a plain socket.

Libraries are loaded by name. A note names those that are not installed.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from kvtide.bench.store_speed import Driver, MemoryBlocks
from kvtide.storage.url import StoreURL

PIECE_BYTES = 1 << 20
FILE_THREADS = 8
S3_REQUESTS = 32


def others(url: StoreURL, blocks: MemoryBlocks, max_bytes: int) -> tuple[list[Driver], list[str]]:
    """Drivers to measure a store beside, and notes about those that are missing."""
    makers: dict[str, list[Callable[[], Driver]]] = {
        "file": [lambda: RawDisk(url, max_bytes)],
        "redis": [lambda: RedisPy(url), Loopback],
        "rediss": [lambda: RedisPy(url), Loopback],
        "s3": [lambda: Obstore(url), Loopback],
        "mooncake": [lambda: Mooncake(url, blocks), Loopback],
    }
    made: list[Driver] = []
    notes: list[str] = []
    for make in makers.get(url.scheme, []):
        try:
            made.append(make())
        except (ImportError, OSError) as error:
            notes.append(f"nothing to measure it beside: {error}")
    return made, notes


class RawDisk:
    """O_DIRECT reads and writes of a preallocated file beside the store, with as many threads.

    Neighbours go in one vectored call of up to a mebibyte. The blocks are allocated anew before
    they are written, as those of new objects are.
    """

    def __init__(self, url: StoreURL, max_bytes: int) -> None:
        threads = url.count("threads", FILE_THREADS)
        self._path = Path(url.path) / f"bench-{secrets.token_hex(8)}"
        self._max_bytes = max_bytes
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._file, how = os.open(self._path, flags | os.O_DIRECT), "O_DIRECT"
        except OSError:  # Some file systems have no way past the page cache.
            self._file, how = os.open(self._path, flags), "page cache"
        self.name = f"{how}, {threads} threads"
        self._pool = ThreadPoolExecutor(threads)
        self._places: dict[bytes, int] = {}
        self.remove([])

    def remove(self, keys: Sequence[bytes]) -> None:
        os.ftruncate(self._file, 0)
        os.posix_fallocate(self._file, 0, self._max_bytes)
        self._places, self._end = {}, 0

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        for key, source in zip(keys, sources, strict=True):
            self._places[key] = self._end
            self._end += len(source)
        self._move(os.pwritev, keys, sources)

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        self._move(os.preadv, keys, targets)

    def _move(
        self,
        move: Callable[[int, list[memoryview], int], int],
        keys: Sequence[bytes],
        memories: Sequence[memoryview],
    ) -> None:
        def run(piece: tuple[int, list[memoryview]]) -> None:
            offset, parts = piece
            if move(self._file, parts, offset) != sum(map(len, parts)):
                raise OSError("a short read or write")

        list(self._pool.map(run, self._pieces(keys, memories)))

    def _pieces(
        self, keys: Sequence[bytes], memories: Sequence[memoryview]
    ) -> list[tuple[int, list[memoryview]]]:
        pieces: list[tuple[int, list[memoryview]]] = []
        size = PIECE_BYTES
        for key, memory in zip(keys, memories, strict=True):
            for start in range(0, len(memory), PIECE_BYTES):
                part = memory[start : start + PIECE_BYTES]
                if size + len(part) > PIECE_BYTES:
                    pieces.append((self._places[key] + start, []))
                    size = 0
                pieces[-1][1].append(part)
                size += len(part)
        return pieces

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._file)
        self._path.unlink()


class RedisPy:
    """redis-py, with its C parser if installed: pipelined, and copied to where pages belong."""

    def __init__(self, url: StoreURL) -> None:
        library: Any = import_module("redis")
        self.name = "redis-py"
        with suppress(ImportError):
            import_module("hiredis")
            self.name = "redis-py[hiredis]"
        self._client = library.Redis(
            host=url.host or "localhost",
            port=url.port or 6379,
            db=int(url.path.strip("/") or 0),
            username=url.user or None,
            password=url.password or None,
            ssl=url.scheme == "rediss",
            ssl_ca_certs=url.settings.get("ca"),
        )
        self._prefix = f"kvtide-bench:{secrets.token_hex(8)}:".encode()
        self._left: set[bytes] = set()

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        self._left.update(keys)
        pipeline = self._client.pipeline(transaction=False)
        for key, source in zip(keys, sources, strict=True):
            pipeline.set(self._prefix + key, source, nx=True)
        pipeline.execute()

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(self._prefix + key)
        for target, found in zip(targets, pipeline.execute(), strict=True):
            target[:] = found

    def remove(self, keys: Sequence[bytes]) -> None:
        self._client.unlink(*(self._prefix + key for key in keys))
        self._left.difference_update(keys)

    def close(self) -> None:
        if self._left:
            self.remove(list(self._left))
        self._client.close()


class Obstore:
    """The same client as the store's, with as many requests at once and nothing around it."""

    name = "obstore"

    def __init__(self, url: StoreURL) -> None:
        self._library: Any = import_module("obstore")
        stores: Any = import_module("obstore.store")
        config = {
            "endpoint": url.settings.get("endpoint"),
            "region": url.settings.get("region", "us-east-1"),
            "access_key_id": url.user,
            "secret_access_key": url.password,
        }
        self._bucket = stores.S3Store(
            url.host,
            prefix=f"{url.path.strip('/')}/kvtide-bench/{secrets.token_hex(8)}".strip("/"),
            config={name: value for name, value in config.items() if value},
            client_options={"allow_http": True, "timeout": timedelta(seconds=url.seconds())},
        )
        self._requests = url.count("requests", S3_REQUESTS)
        self._loop = asyncio.new_event_loop()
        self._left: set[bytes] = set()

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        self._left.update(keys)

        async def write(key: bytes, source: memoryview) -> None:
            await self._library.put_async(self._bucket, key.hex(), source, use_multipart=False)

        self._all(write, keys, sources)

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        async def read(key: bytes, target: memoryview) -> None:
            found = await self._library.get_async(self._bucket, key.hex())
            target[:] = memoryview(await found.bytes_async())

        self._all(read, keys, targets)

    def _all(
        self,
        request: Callable[[bytes, memoryview], Awaitable[None]],
        keys: Sequence[bytes],
        memories: Sequence[memoryview],
    ) -> None:
        async def run() -> None:
            free = asyncio.Semaphore(self._requests)

            async def one(key: bytes, memory: memoryview) -> None:
                async with free:
                    await request(key, memory)

            await asyncio.gather(*map(one, keys, memories))

        self._loop.run_until_complete(run())

    def remove(self, keys: Sequence[bytes]) -> None:
        self._library.delete(self._bucket, [key.hex() for key in keys])
        self._left.difference_update(keys)

    def close(self) -> None:
        if self._left:
            self.remove(list(self._left))
        self._loop.close()


class Mooncake:
    """The library's own zero-copy calls, on registered memory.

    Only where all objects lie in other processes: what lies in this one's own segment is near to
    the store that gave it, and far from any other client.
    """

    name = "mooncake"

    def __init__(self, url: StoreURL, blocks: MemoryBlocks) -> None:
        if url.bytes("segment", 1):
            raise OSError("write ?segment=0, and let another process give memory to the pool")
        library: Any = import_module("mooncake.store")
        self._client = library.MooncakeDistributedStore()
        local, master = url.settings.get("local", url.host), f"{url.host}:{url.port or 50051}"
        protocol, devices = url.settings.get("protocol", "tcp"), url.settings.get("devices", "")
        if self._client.setup(local, "P2PHANDSHAKE", 0, 0, protocol, devices, master):
            raise OSError("the Mooncake client could not be set up a second time")
        for block in (blocks.source, blocks.target):
            self._client.register_buffer(_address(block), len(block))
        self._prefix = f"kvtide-bench:{secrets.token_hex(8)}:"

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        codes = self._client.batch_put_from(*self._words(keys, sources))
        if any(codes):
            raise OSError(f"mooncake answered {sorted(set(codes))} to a write")

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        lengths = self._client.batch_get_into(*self._words(keys, targets))
        if lengths != [len(target) for target in targets]:
            raise OSError(f"mooncake answered {sorted(set(lengths))} to a read")

    def _words(
        self, keys: Sequence[bytes], memories: Sequence[memoryview]
    ) -> tuple[list[str], list[int], list[int]]:
        names = [self._prefix + key.hex() for key in keys]
        return names, [_address(one) for one in memories], [len(one) for one in memories]

    def remove(self, keys: Sequence[bytes]) -> None:
        self._client.batch_remove([self._prefix + key.hex() for key in keys], True)

    def close(self) -> None:
        self._client.remove_by_regex(f"^{self._prefix}", True)
        self._client.close()


class Loopback:
    """A plain copy through a TCP connection of this machine: no store over TCP is faster."""

    name = "socket copy"

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._here = socket.create_connection(listener.getsockname())
            self._there, _ = listener.accept()
        self._scratch = memoryview(mmap.mmap(-1, 8 << 20))

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        sink = threading.Thread(target=self._drain, args=(sum(map(len, sources)),))
        sink.start()
        for source in sources:
            self._here.sendall(source)
        sink.join()

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        spring = threading.Thread(target=self._pour, args=(sum(map(len, targets)),))
        spring.start()
        for target in targets:
            while len(target):
                target = target[self._here.recv_into(target) :]
        spring.join()

    def _drain(self, size: int) -> None:
        while size:
            size -= self._there.recv_into(self._scratch[: min(size, len(self._scratch))])

    def _pour(self, size: int) -> None:
        while size:
            size -= self._there.send(self._scratch[: min(size, len(self._scratch))])

    def remove(self, keys: Sequence[bytes]) -> None:
        """Nothing was kept."""

    def close(self) -> None:
        self._here.close()
        self._there.close()


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
