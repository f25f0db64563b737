"""Page tables of a step's sequences: worked out per lease, and sent to a device in one piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtide.cache import Lease, TieredCache
from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.staging import Staging
from kvtide.layers import Rows
from kvtide.layers.step import Batch, Bounds

Numbers = NDArray[np.int32]
TableVersion = tuple[int, ...]
"""Changes when the lease's slots may have changed."""
Table = Mapping[str, Numbers]


class PageTables:
    """Every lease's slots by anchor, made again when it grew, committed or landed."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._known: WeakKeyDictionary[Lease, tuple[TableVersion, Table]] = WeakKeyDictionary()

    def of(self, lease: Lease) -> tuple[TableVersion, Table]:
        """The slots and their version: equal versions of a lease have equal slots."""
        version = lease.table_version
        known = self._known.get(lease)
        if known is None or known[0] != version:
            table = {
                anchor.name: self._cache.page_table(lease, anchor.name).astype(np.int32)
                for anchor in self._cache.memory.anchors
            }
            known = self._known[lease] = (version, table)
        return known


def chunk_spans(chunks: Sequence[ScheduledChunk]) -> Numbers:
    """(chunks, 3): first row, end row, tokens before the step."""
    ends = np.cumsum([0, *(chunk.tokens for chunk in chunks)])
    past = [chunk.start for chunk in chunks]
    return np.stack([ends[:-1], ends[1:], past], axis=1).astype(np.int32)


def batch_tables(
    rows: Numbers, tables: Sequence[Table], staging: Staging
) -> tuple[tuple[Rows, ...], Batch | None]:
    """The rows as layers take them: one by one, and on a CUDA device all together too."""
    if staging.device.type != "cuda":
        each = [
            {name: torch.from_numpy(t.astype(np.int64)) for name, t in own.items()}
            for own in tables
        ]
        return _sequences(rows, each), None
    counts = rows[:, 1] - rows[:, 0]
    owners = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    names = list(tables[0])
    tables_of = [padded([table[name] for table in tables]) for name in names]
    parts = staging.to_device(rows, owners, *tables_of)
    slots = dict(zip(names, parts[2:], strict=True))
    batch = Batch(parts[0], parts[1], slots, Bounds.of(rows.tolist()))
    wide = {name: table.long() for name, table in slots.items()}
    each = [{name: table[i] for name, table in wide.items()} for i in range(len(rows))]
    return _sequences(rows, each), batch


def _sequences(rows: Numbers, slots: Sequence[Mapping[str, Tensor]]) -> tuple[Rows, ...]:
    pairs = zip(rows.tolist(), slots, strict=True)
    return tuple(Rows(start, end, past, own) for (start, end, past), own in pairs)


def padded(tables: Sequence[Numbers]) -> Numbers:
    """Tables of different lengths as one, with -1 beyond the shorter ones' ends."""
    together = np.full((len(tables), max(map(len, tables))), -1, dtype=np.int32)
    for row, table in zip(together, tables, strict=True):
        row[: len(table)] = table
    return together
