"""Which bytes of one side's memory belong where in the other's, by pool, layer and field.

The *sources* are the ranks that computed pages, the *targets* those that get them. Both have
pipeline stages, tensor ranks, layouts and memory kinds of their own. `pair` looks every target row
up in the sources by pool and global layer, and divides fields by *unit* (head, channel, group):

    source, 2 tensor ranks     rank 0 │ k0 k1 v0 v1 │    rank 1 │ k2 k3 v2 v3 │     of each entry
                                         └──┐ └──────┐             │     │
    target, 1 tensor rank             │ k0 k1   k2 k3   v0 v1   v2 v3 │

A unit that several sources have, since ranks are more than units or the field does not divide, is
sent by the first of them. Everything that does not fit is refused here, before a byte moves.

`Pairing.copies` are strided copies in the fewest contiguous runs; `row_copies.expand` gives those
of certain pages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvtide.tiers.manifest import RUNNING, Area, FieldPlace, MemoryManifest, RowPlace, RowShape
from kvtide.tiers.row_copies import RowCopy, joined


class PairingError(ValueError):
    """Two sides that cannot exchange pages. The message names the remedy."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which of a source's rows go to which target.

    absent  optional pools of the targets that the sources do not have, or not of the same draft:
            pages arrive without them
    """

    absent: frozenset[str]
    _copies: Mapping[tuple[int, int, str], tuple[RowCopy, ...]]

    def copies(self, source: int, target: int, area: str) -> tuple[RowCopy, ...]:
        """What this source writes of a page to an area of this target; both by their position."""
        return self._copies.get((source, target, area), ())

    def targets(self, source: int, area: str) -> list[int]:
        """The targets that this source writes to."""
        return sorted(t for s, t, name in self._copies if s == source and name == area)


# -- pairing --------------------------------------------------------------------------------


def pair(sources: Sequence[MemoryManifest], targets: Sequence[MemoryManifest]) -> Pairing:
    """Find every required row of every target in the sources, or refuse.

    Optional pools that the sources lack are absent; pools that only sources have stay there.
    """
    _check_sides(sources, targets)
    found = _Sources.of(sources)
    for target in targets:
        _check_dtypes(found, target)
    _check_fingerprints(sources, targets)
    same_draft = sources[0].draft_fingerprint == targets[0].draft_fingerprint
    absent = frozenset(
        row.pool
        for target in targets
        for _, row in _target_rows(target)
        if not row.required and not (same_draft and found.have(row))
    )
    copies: dict[tuple[int, int, str], list[RowCopy]] = defaultdict(list)
    for number, target in enumerate(targets):
        for area, row in _target_rows(target):
            if row.pool not in absent:
                for source, copy in found.copies_to(target, area, row):
                    copies[source, number, area.name].append(copy)
    return Pairing(absent, {key: joined(every) for key, every in copies.items()})


def _target_rows(target: MemoryManifest) -> Iterator[tuple[Area, RowPlace]]:
    for area in target.areas:
        if area.name != RUNNING:
            yield from ((area, row) for row in area.rows)


class _Segment(NamedTuple):
    """Bytes of an entry."""

    source: int
    target: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Sources:
    """The sources' rows by pool and layer, each with its area and the source's position."""

    manifests: Sequence[MemoryManifest]
    rows: Mapping[tuple[str, int], list[tuple[int, Area, RowPlace]]]
    segments: dict[object, dict[int, list[_Segment]]]

    @classmethod
    def of(cls, manifests: Sequence[MemoryManifest]) -> _Sources:
        rows: dict[tuple[str, int], list[tuple[int, Area, RowPlace]]] = defaultdict(list)
        for number, manifest in enumerate(manifests):
            for area, row in manifest.rows(RUNNING):
                rows[row.pool, row.layer].append((number, area, row))
        return cls(manifests, rows, {})

    def have(self, row: RowPlace) -> bool:
        return (row.pool, row.layer) in self.rows

    def copies_to(
        self, target: MemoryManifest, area: Area, row: RowPlace
    ) -> Iterator[tuple[int, RowCopy]]:
        """How the sources together write one target row."""
        found = self.rows.get((row.pool, row.layer), [])
        if not found:
            raise PairingError(
                f"{_named(row)}: the decode side needs it and no prefill rank has it; serve the "
                "same model on both sides, and connect all prefill ranks"
            )
        # All rows of a pool share their shape, and all shapes live as long as this object does.
        ranks = tuple((number, id(other.shape)) for number, _, other in found)
        key = (ranks, id(row.shape), target.tensor_rank)
        if key not in self.segments:
            self.segments[key] = self._segments(target, row, found)
        for number, its_area, its_row in found:
            for segment in self.segments[key].get(number, ()):
                yield number, _row_copy(segment, (its_area, its_row), (area, row))

    def _segments(
        self, target: MemoryManifest, row: RowPlace, found: list[tuple[int, Area, RowPlace]]
    ) -> dict[int, list[_Segment]]:
        """The bytes of an entry that each of the sources writes, joined."""
        for _, _, other in found:
            _check_shapes(other, row)
        segments: dict[int, list[_Segment]] = defaultdict(list)
        for field in row.shape.fields:
            ranks = [
                (number, self.manifests[number], _field(other, field.name))
                for number, _, other in found
            ]
            for number, segment in _field_segments(row, (target, field), ranks):
                segments[number].append(segment)
        return {number: _adjoined(every) for number, every in segments.items()}


def _row_copy(
    segment: _Segment, source: tuple[Area, RowPlace], target: tuple[Area, RowPlace]
) -> RowCopy:
    (its_area, its_row), (area, row) = source, target
    copy = RowCopy(
        (row.pool,),
        its_area.region,
        its_row.anchor,
        its_area.base + its_row.offset + segment.source,
        its_row.stride,
        area.region,
        row.anchor,
        area.base + row.offset + segment.target,
        row.stride,
        row.slots,
        segment.bytes,
        row.shape.entries,
        its_row.shape.entry_bytes,
        row.shape.entry_bytes,
    )
    if segment.bytes == its_row.shape.entry_bytes == row.shape.entry_bytes:
        # Whole entries lie side by side. So do whole rows, with their padding.
        same = its_row.shape.bytes == row.shape.bytes
        size = row.shape.bytes if same else segment.bytes * copy.count
        return replace(copy, bytes=size, count=1, source_step=0, target_step=0)
    return copy if copy.count > 1 else replace(copy, source_step=0, target_step=0)


def _adjoined(segments: list[_Segment]) -> list[_Segment]:
    joined: list[_Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if last is not None and (
            (last.source + last.bytes, last.target + last.bytes) == segment[:2]
        ):
            joined[-1] = last._replace(bytes=last.bytes + segment.bytes)
        else:
            joined.append(segment)
    return joined


# -- units ----------------------------------------------------------------------------------


def _field_segments(
    row: RowPlace,
    wanted: tuple[MemoryManifest, FieldPlace],
    ranks: Sequence[tuple[int, MemoryManifest, FieldPlace]],
) -> Iterator[tuple[int, _Segment]]:
    """Which source writes which units of a target's field; neighbours of one source as one."""
    target, field = wanted
    units = _all_units(row, (ranks[0][1], ranks[0][2]), wanted)
    first, size = _first_unit(target, units), field.unit_bytes
    unit = first
    while unit < first + field.units:
        kept = ((n, _first_unit(m, units), f) for n, m, f in ranks)
        holders = ((n, at, f) for n, at, f in kept if at <= unit < at + f.units)
        number, at, its = next(holders, (-1, 0, field))
        if number < 0:
            raise PairingError(
                f"{_named(row)}, field {field.name}: the decode side needs unit {unit} of {units} "
                "and no prefill rank has it; connect all prefill ranks"
            )
        end = min(at + its.units, first + field.units)
        here, there = its.offset + (unit - at) * size, field.offset + (unit - first) * size
        yield number, _Segment(here, there, (end - unit) * size)
        unit = end


def _all_units(
    row: RowPlace,
    source: tuple[MemoryManifest, FieldPlace],
    target: tuple[MemoryManifest, FieldPlace],
) -> int:
    """The units of a field on all tensor ranks together.

    Where every rank of both sides has one unit, it may be a copy of another rank's. The greatest
    number that divides both counts of ranks then tells apart what can differ.
    """
    known = [_known_units(*side) for side in (source, target)]
    ranks = [manifest.tensor_ranks for manifest, _ in (source, target)]
    if known[0] is None and known[1] is None:
        return math.gcd(*ranks)
    units = known[0] or known[1] or 1
    fits = (units == own or (own is None and n % units == 0)
            for own, n in zip(known, ranks, strict=True))  # fmt: skip
    if all(fits):
        return units
    has, needs = (field.units for _, field in (source, target))
    raise PairingError(
        f"{_named(row)}, field {source[1].name}: {has} heads or groups on each of {ranks[0]} "
        f"tensor ranks of the prefill side and {needs} on each of {ranks[1]} of the decode side "
        "are not of one model; serve the same model on both"
    )


def _known_units(manifest: MemoryManifest, field: FieldPlace) -> int | None:
    """None: the ranks may be more than the units."""
    if not field.sharded:
        return 1
    if field.units == 1 and manifest.tensor_ranks > 1:
        return None
    return field.units * manifest.tensor_ranks


def _first_unit(manifest: MemoryManifest, units: int) -> int:
    """As `TensorRanks.shard` divides them."""
    return manifest.tensor_rank * units // manifest.tensor_ranks


# -- what is refused ------------------------------------------------------------------------


def _check_sides(sources: Sequence[MemoryManifest], targets: Sequence[MemoryManifest]) -> None:
    for side, ranks in (("prefill", sources), ("decode", targets)):
        if not ranks:
            raise PairingError(f"the {side} side has no rank; connect all of its ranks")
        for what in ("fingerprint", "draft_fingerprint", "page_tokens", "tensor_ranks"):
            values = {getattr(rank, what) for rank in ranks}
            if len(values) > 1:
                raise PairingError(
                    f"the ranks of the {side} side differ in `{what}`; start them as one server"
                )
    ours, theirs = sources[0].page_tokens, targets[0].page_tokens
    if ours != theirs:
        raise PairingError(
            f"the prefill side has pages of {ours} tokens and the decode side of {theirs}; start "
            "both with the same --page-tokens"
        )


def _check_dtypes(sources: _Sources, target: MemoryManifest) -> None:
    """Before fingerprints, since this says what to change."""
    for _, row in _target_rows(target):
        for _, _, other in sources.rows.get((row.pool, row.layer), ()):
            if row.required:
                _check_packing(other, row)


def _check_packing(source: RowPlace, target: RowPlace) -> None:
    ours, theirs = _packing(source.shape), _packing(target.shape)
    if ours != theirs:
        raise PairingError(
            f"{_named(target)}: the prefill side keeps {ours} and the decode side {theirs}; start "
            "both with the same --kv-dtype"
        )


def _packing(shape: RowShape) -> str:
    fields = ", ".join(f"{field.name} in {field.dtype!r}" for field in shape.fields)
    return f"{fields} ({shape.encoding!r})"


def _check_fingerprints(
    sources: Sequence[MemoryManifest], targets: Sequence[MemoryManifest]
) -> None:
    ours, theirs = sources[0].fingerprint, targets[0].fingerprint
    if ours != theirs:
        raise PairingError(
            f"the prefill side has the fingerprint {ours.hex()[:12]} and the decode side "
            f"{theirs.hex()[:12]}; serve the same weights with the same --dtype on both, with "
            "--deterministic or without"
        )


def _check_shapes(source: RowPlace, target: RowPlace) -> None:
    ours, theirs = source.shape, target.shape
    for what in ("entries", "tokens_per_entry", "tail_entries"):
        got, wanted = getattr(ours, what), getattr(theirs, what)
        if got != wanted:
            raise PairingError(
                f"{_named(target)}: `{what}` is {got} on the prefill side and {wanted} on the "
                "decode side; serve the same model on both"
            )
    _check_packing(source, target)
    for field in theirs.fields:
        its = _field(source, field.name)
        if its.unit_shape != field.unit_shape:
            raise PairingError(
                f"{_named(target)}, field {field.name}: {its.units} × {its.unit_shape} on the "
                f"prefill side and {field.units} × {field.unit_shape} on the decode side; serve "
                "the same model on both"
            )


def _field(row: RowPlace, name: str) -> FieldPlace:
    return next(field for field in row.shape.fields if field.name == name)


def _named(row: RowPlace) -> str:
    return f"pool {row.pool}, layer {row.layer}"
