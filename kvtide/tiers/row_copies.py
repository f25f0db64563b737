"""Copies of rows from one rank's memory to another's, and the plain runs of certain pages.

A `RowCopy` repeats from slot to slot at a fixed stride on both sides, as a `layout.Piece` does.
Where only some heads of a row are copied, it also repeats from entry to entry within the row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

RowNumbers = npt.NDArray[np.int64]


class DestinationError(ValueError):
    """Pages that cannot be written as a peer asks. The message names the remedy."""


@dataclass(frozen=True, slots=True)
class RowCopy:
    """For a page in slot s here and slot t there: `count` runs of `bytes` bytes.

    Run i goes from `source_offset + s · source_stride + i · source_step` of the source's region to
    the same in the target's. The slots are those of the two anchors, which may be different pools.
    """

    pools: tuple[str, ...]
    source_region: int
    source_anchor: str
    source_offset: int
    source_stride: int
    target_region: int
    target_anchor: str
    target_offset: int
    target_stride: int
    target_slots: int
    bytes: int
    count: int = 1
    source_step: int = 0
    target_step: int = 0

    @property
    def page_bytes(self) -> int:
        return self.bytes * self.count

    @property
    def fills_slots(self) -> bool:
        """Nothing lies between this of one slot and of the next, on either side."""
        return self.count == 1 and self.bytes == self.source_stride == self.target_stride


def joined(copies: list[RowCopy]) -> tuple[RowCopy, ...]:
    """Copies that lie side by side in every slot of both sides, as one."""
    found: list[RowCopy] = []
    for copy in sorted(copies, key=lambda one: (one.source_region, one.source_offset)):
        if found and _adjoins(found[-1], copy):
            last = found[-1]
            pools = dict.fromkeys((*last.pools, *copy.pools))
            found[-1] = replace(last, bytes=last.bytes + copy.bytes, pools=tuple(pools))
        else:
            found.append(copy)
    return tuple(found)


def _adjoins(before: RowCopy, copy: RowCopy) -> bool:
    return copy == replace(
        before,
        pools=copy.pools,
        source_offset=before.source_offset + before.bytes,
        target_offset=before.target_offset + before.bytes,
        bytes=copy.bytes,
    )


# -- plain copies ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RegionRuns:
    """Plain copies: so many bytes from an offset in a source's region to one in a target's."""

    source_region: RowNumbers
    source: RowNumbers
    target_region: RowNumbers
    target: RowNumbers
    bytes: RowNumbers

    def __len__(self) -> int:
        return len(self.bytes)

    @classmethod
    def joined(cls, parts: Iterable[RegionRuns]) -> RegionRuns:
        """All of these, in their order."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        none = np.empty(0, np.int64)
        return cls(
            np.concatenate([none, *(part.source_region for part in parts)]),
            np.concatenate([none, *(part.source for part in parts)]),
            np.concatenate([none, *(part.target_region for part in parts)]),
            np.concatenate([none, *(part.target for part in parts)]),
            np.concatenate([none, *(part.bytes for part in parts)]),
        )


def expand(
    copies: Sequence[RowCopy],
    source_tables: Mapping[str, npt.NDArray[np.integer]],
    anchor: str,
    pages: Sequence[int] | npt.NDArray[np.integer],
    target_slots: Sequence[int] | npt.NDArray[np.integer],
) -> RegionRuns:
    """The copies that bring these pages into these slots of a target's anchor.

    `source_tables` has a sequence's slots by source anchor and page, negative where there is none.
    Slots that follow each other on both sides become one run, where a copy fills its slots.
    """
    wanted, slots = np.asarray(pages, np.int64), np.asarray(target_slots, np.int64)
    assert len(wanted) == len(slots), f"{len(wanted)} pages for {len(slots)} slots"
    kinds: dict[tuple[str, int, bool], list[RowCopy]] = defaultdict(list)
    for copy in copies:
        if copy.target_anchor == anchor:
            kinds[copy.source_anchor, copy.count, copy.fills_slots].append(copy)
    if not len(wanted) or not kinds:
        return RegionRuns.joined(())
    _check_slots(anchor, slots, min(copy.target_slots for kind in kinds.values() for copy in kind))
    held = {name: _held(source_tables, name, wanted) for name, _, _ in kinds}
    parts = [_expanded(alike, held[name], slots) for (name, _, _), alike in kinds.items()]
    return RegionRuns.joined(parts)


def _check_slots(anchor: str, slots: RowNumbers, count: int) -> None:
    """A peer names the slots; none may lie outside the area."""
    if slots.min() < 0 or slots.max() >= count:
        wrong = slots[(slots < 0) | (slots >= count)][0]
        raise DestinationError(
            f"slot {wrong} of {anchor}: the decode side has {count:,}; name slots of its manifest"
        )


def _held(
    tables: Mapping[str, npt.NDArray[np.integer]], anchor: str, pages: RowNumbers
) -> RowNumbers:
    """The slots of these pages here."""
    table = tables[anchor]
    missing = (pages < 0) | (pages >= len(table))
    if not missing.any():
        slots = table[pages].astype(np.int64)
        missing = slots < 0
    if missing.any():
        raise DestinationError(
            f"page {pages[missing][0]} of {anchor}: the sequence has no such page here; ask for "
            "pages that it has"
        )
    return slots


def _expanded(copies: Sequence[RowCopy], sources: RowNumbers, targets: RowNumbers) -> RegionRuns:
    """Copies of one source anchor that repeat equally often: copies × pages × repeats."""
    columns = np.array(
        [
            (c.source_region, c.source_offset, c.source_stride, c.source_step,
             c.target_region, c.target_offset, c.target_stride, c.target_step, c.bytes)
            for c in copies
        ],
        np.int64,
    ).T[:, :, None, None]  # fmt: skip
    here, source, source_stride, source_step, there, target, target_stride, target_step, sizes = (
        columns
    )
    if copies[0].fills_slots:
        follows = (np.diff(sources) == 1) & (np.diff(targets) == 1)
        starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
        sizes = sizes * np.diff(starts, append=len(sources))[:, None]
        sources, targets = sources[starts], targets[starts]
    repeats = np.arange(copies[0].count)
    from_ = source + source_stride * sources[:, None] + source_step * repeats
    to = target + target_stride * targets[:, None] + target_step * repeats
    return RegionRuns(
        np.broadcast_to(here, from_.shape).ravel(),
        from_.ravel(),
        np.broadcast_to(there, from_.shape).ravel(),
        to.ravel(),
        np.broadcast_to(sizes, from_.shape).ravel(),
    )
