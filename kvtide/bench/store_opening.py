"""Open a store and say how long that took and how much memory: `kvtide bench storage` runs this in
a process of its own."""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path

from kvtide.storage import open_store
from kvtide.storage.store_registry import STORES
from kvtide.storage.url import StoreURL


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def main(url: str, space: str) -> None:
    known = STORES.get(StoreURL.parse(url).scheme)
    if known is not None:
        import_module(known.partition(":")[0])
    before, start = resident_bytes(), time.perf_counter()
    store = open_store(url, bytes.fromhex(space))
    store.exists([bytes(32)])
    took = time.perf_counter() - start
    print(json.dumps({"seconds": took, "bytes": resident_bytes() - before}))
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
