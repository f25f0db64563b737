"""How fast objects get into file stores and out again: kvtide beside SGLang, LMCache and the disk.

All stores take turns in one process and one file system. Writing ends when the file system is
synchronized; reading starts with the page cache dropped. Rates are medians over the turns, a ratio
is the median of kvtide's to the other's within a turn. What is read is compared with what was
written.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from file_stores import ALIGN, FileStore, open_all
from page_cache import drop_page_cache

from kvtide.bench.store_speed import MemoryBlocks, StoreCase
from kvtide.byte_sizes import format_bytes, parse_bytes
from kvtide.cli.console import progress, table
from kvtide.storage.trial import new_keys

Rates = dict[str, list[tuple[float, float]]]


Opened = Callable[[Path, MemoryBlocks, int], Sequence[FileStore]]


def main(open_stores: Opened = open_all, first: str = "kvtide") -> int:
    """`first` is the store that others are compared to, unless another one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    parser.add_argument("--sizes", default="64KiB,1MiB,4MiB", help="object sizes, by commas")
    parser.add_argument("--bytes", default="256MiB", help="written and read in a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--ratio-of", default=first, help="the store that others are compared to")
    parser.add_argument("--stores", default="", help="only those whose names contain this text")
    args = parser.parse_args()
    sizes = [parse_bytes(text) for text in args.sizes.split(",")]
    if args.turns < 1 or any(size % ALIGN for size in sizes):
        parser.error(f"use at least one turn, and sizes that are multiples of {ALIGN}")
    torch.set_num_threads(1)  # More only wait for one another when a busy machine copies pages.
    total = parse_bytes(args.bytes)
    cases = [StoreCase(format_bytes(size), size, max(1, total // size)) for size in sizes]
    max_bytes = max(case.bytes for case in cases)
    blocks = MemoryBlocks(max_bytes)
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(prefix="file-stores-", dir=args.folder) as name:
        folder = Path(name).resolve()
        with ExitStack() as opened:
            stores = open_stores(folder, blocks, max_bytes)
            for store in stores:
                opened.callback(store.close)
            stores = [store for store in stores if args.stores in store.name]
            if args.ratio_of not in (store.name for store in stores):
                parser.error(f"--ratio-of {args.ratio_of!r} is not among the stores")
            for case in cases:
                rates = _measure(case, stores, blocks, folder, args.turns)
                rows += _rows(case, rates, args.ratio_of)
    print(
        f"\nGB/s, medians of {args.turns} turns of {format_bytes(total)}; "
        f"ratio: that of {args.ratio_of} to it\n"
    )
    print(table(("size", "store", "write + sync", "ratio", "cold read", "ratio"), rows))
    return 0


def _measure(
    case: StoreCase, stores: list[FileStore], blocks: MemoryBlocks, folder: Path, turns: int
) -> Rates:
    rates: Rates = {store.name: [] for store in stores}
    for turn in progress(range(turns + 1), turns + 1, case.name):
        first = turn % len(stores)
        for store in [*stores[first:], *stores[:first]]:
            took = _turn(case, store, blocks, folder)
            if turn:  # The first turn warms up threads and allocators.
                write_s, read_s = took
                rates[store.name].append((case.bytes / write_s / 1e9, case.bytes / read_s / 1e9))
    return rates


def _turn(
    case: StoreCase, store: FileStore, blocks: MemoryBlocks, folder: Path
) -> tuple[float, float]:
    keys = new_keys(case.objects)
    sources, targets = blocks.cut(blocks.source, case), blocks.cut(blocks.target, case)
    for target in targets:
        target[:ALIGN] = bytes(ALIGN)
    store.load(keys, sources)
    start = time.perf_counter()
    store.write(keys)
    _sync(folder)
    write_s = time.perf_counter() - start
    drop_page_cache(folder)
    start = time.perf_counter()
    store.read(keys)
    read_s = time.perf_counter() - start
    store.unload(keys, targets)
    if any(source != target for source, target in zip(sources, targets, strict=True)):
        raise OSError(f"{store.name} returned other bytes than were written to it")
    store.remove(keys)
    return write_s, read_s


def _sync(folder: Path) -> None:
    """Wait until the folder's file system is on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(file):
            raise OSError(ctypes.get_errno(), "syncfs failed")
    finally:
        os.close(file)


def _rows(case: StoreCase, rates: Rates, first: str = "kvtide") -> list[tuple[str, ...]]:
    ours = rates[first]
    rows = []
    for name, turns in rates.items():
        cells: list[str] = [case.name, name]
        for way in (0, 1):
            ratio = statistics.median(o[way] / t[way] for o, t in zip(ours, turns, strict=True))
            cells += [f"{statistics.median(t[way] for t in turns):.2f}", f"{ratio:.2f}×"]
        rows.append(tuple(cells))
    return rows


if __name__ == "__main__":
    sys.exit(main())
