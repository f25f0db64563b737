"""Host pages as the objects that a store keeps.

Where a host page is one run with space for a header behind it, a store reads and writes it in
place. Otherwise its rows are gathered into a staging buffer in canonical order, or scattered from
there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtide.storage.objects import DIRECT_ALIGN, DIRECT_BYTES, ObjectFormat
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.row_copies import expand
from kvtide.transfer.peer.cpu_copies import copies
from kvtide.transfer.shapes import PagePart

ByteArray = npt.NDArray[np.uint8]
_FIRST_SLOT = np.zeros(1, np.int64)


def tails(formats: Mapping[str, ObjectFormat]) -> dict[str, int]:
    """Bytes to leave free behind a host page, by pool, so that a store can use it in place.

    Small pages are copied instead: the tail would be large beside them. A sidecar of a large page
    takes whole blocks, so that the next page begins with one.
    """
    return {
        pool: -(-one.bytes // DIRECT_ALIGN) * DIRECT_ALIGN - one.payload_bytes
        for pool, one in formats.items()
        if formats[one.anchor].payload_bytes >= DIRECT_BYTES
    }


class HostPages:
    """The host's pages, by pool of their object and slot. `block` is all of the host's memory."""

    def __init__(self, host: Buffers, formats: Mapping[str, ObjectFormat]) -> None:
        self._data: ByteArray = host.data.numpy()
        self.block = memoryview(self._data)  # type: ignore[arg-type]
        self._arrangement = host.arrangement
        self._rows = {
            pool: [row for row in host.arrangement.rows(one.anchor) if row.pool in one.pools]
            for pool, one in formats.items()
        }

    def in_place(self, one: ObjectFormat, slot: int) -> memoryview | None:
        """The page with its tail, if that can hold an object."""
        run = self._arrangement.run(one.pool)
        if run is None or run.bytes < one.bytes:
            return None
        start = run.offset + slot * run.stride
        return self.block[start : start + one.bytes]

    def gather(self, pool: str, slot: int, target: memoryview) -> None:
        """Copy a page's rows, in canonical order, to the beginning of `target`."""
        there: ByteArray = np.frombuffer(target, np.uint8)
        at = 0
        for row in self._rows[pool]:
            start = row.offset + slot * row.stride
            there[at : at + row.bytes] = self._data[start : start + row.bytes]
            at += row.bytes

    def scatter(self, pool: str, slot: int, source: memoryview) -> None:
        """Copy a payload in canonical order to a page's rows."""
        here: ByteArray = np.frombuffer(source, np.uint8)
        at = 0
        for row in self._rows[pool]:
            start = row.offset + slot * row.stride
            self._data[start : start + row.bytes] = here[at : at + row.bytes]
            at += row.bytes

    def fill(self, part: PagePart, slot: int, source: memoryview) -> None:
        """Copy what ranks of another shape stored to the rows and heads of a page that it has."""
        anchor = part.format.anchor
        runs = expand(part.copies, {anchor: _FIRST_SLOT}, anchor, [0], [slot])
        here: ByteArray = np.frombuffer(source, np.uint8)
        sources, targets = here.ctypes.data + runs.source, self._data.ctypes.data + runs.target
        for _ in copies(sources, targets, runs.bytes):
            pass
