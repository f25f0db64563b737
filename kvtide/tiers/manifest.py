"""What a rank tells a peer about its memory: which rows it has, and where they lie.

A manifest is exchanged as JSON before pages are. It has *areas*, each of them in one region of the
rank's memory. Regions are numbered as the transport numbers them; it knows their addresses.

    running   where forward passes read and write: a source has its rows here. Device pages, and
              host pages for pools that are served hot.
    pages     where whole pages land: all pools but those that hold state within a page
    tail      where a sequence's last page lands, which may be partial: all pools

`tiers.pairing` compares the manifests of two sides by pool, layer and field. Nothing in it depends
on the order of rows or on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any, TypeVar

from kvtide.spec import DType, Encoding, Field, ModelMemory, PoolSpec
from kvtide.tiers.layout import Arrangement

RUNNING, PAGES, TAIL = "running", "pages", "tail"
Json = dict[str, Any]
MAX_NUMBER = 1 << 48
"""Of bytes and of anything else: sums and products with slots stay within 64 bits."""


class ManifestError(ValueError):
    """A manifest that cannot be read. The message names the remedy."""


class MemoryKind(Enum):
    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class FieldPlace:
    """A rank's part of one field, from byte `offset` of every entry on.

    units  heads, channels or groups that this rank has; 1 where the field does not divide
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: DType
    sharded: bool
    units: int

    @classmethod
    def of(cls, field: Field, offset: int) -> FieldPlace:
        units = (field.groups or field.shape[0]) if field.sharded else 1
        return cls(field.name, offset, field.shape, field.dtype, field.sharded, units)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size_bytes

    @property
    def unit_bytes(self) -> int:
        return self.bytes // self.units

    @property
    def unit_shape(self) -> tuple[int, ...]:
        return (self.shape[0] // self.units, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a row holds: `entries` entries, then padding up to `bytes`."""

    bytes: int
    entries: int
    entry_bytes: int
    tokens_per_entry: int
    tail_entries: int | None
    encoding: Encoding
    fields: tuple[FieldPlace, ...]

    @classmethod
    def of(cls, pool: PoolSpec, page_tokens: int) -> RowShape:
        fields, at = [], 0
        for field in pool.entry.fields:
            fields.append(FieldPlace.of(field, at))
            at += field.bytes
        return cls(
            pool.row_bytes(page_tokens),
            pool.entries_per_page(page_tokens),
            pool.entry.bytes,
            pool.tokens_per_entry,
            pool.tail_entries,
            pool.entry.encoding,
            tuple(fields),
        )


@dataclass(frozen=True, slots=True)
class RowPlace:
    """One layer of one pool: in slot s of the anchor, from `offset + s · stride` of its area on.

    required  False: a page is usable without it (a draft's)
    slots     how many the anchor has in this area
    """

    pool: str
    layer: int
    anchor: str
    offset: int
    stride: int
    slots: int
    required: bool
    shape: RowShape


@dataclass(frozen=True, slots=True)
class Area:
    """Rows in one region of a rank's memory, from byte `base` of it on.

    An area of one name may lie in several regions, as several of these.
    """

    name: str
    kind: MemoryKind
    region: int
    base: int
    rows: tuple[RowPlace, ...]

    @classmethod
    def of(
        cls,
        name: str,
        arrangement: Arrangement,
        kind: MemoryKind,
        *,
        region: int = 0,
        base: int = 0,
        pools: Collection[str] | None = None,
    ) -> Area:
        """The rows of an arrangement, or of these pools of it.

        Whole pages keep nothing of pools that hold state within a page, so that `pages` has none.
        """
        memory = arrangement.memory
        if name == PAGES:
            memory = memory.at_rest
        named = {pool.name for pool in memory.pools} if pools is None else pools
        chosen = (pool for pool in memory.pools if pool.name in named)
        rows = (row for pool in chosen for row in _rows(arrangement, pool))
        return cls(name, kind, region, base, tuple(rows))


def _rows(arrangement: Arrangement, pool: PoolSpec) -> Iterator[RowPlace]:
    anchor, shape = pool.follows or pool.name, RowShape.of(pool, arrangement.memory.page_tokens)
    slots, required = arrangement.slots[anchor], pool.reuse.required
    for layer in pool.layers:
        row = arrangement.row(pool, layer)
        yield RowPlace(pool.name, layer, anchor, row.offset, row.stride, slots, required, shape)


@dataclass(frozen=True, slots=True)
class MemoryManifest:
    """One rank's memory.

    fingerprint        of weights, precision and method: bytes of others mean something else
    draft_fingerprint  of the draft that writes the optional pools
    """

    fingerprint: bytes
    draft_fingerprint: bytes
    page_tokens: int
    tensor_rank: int
    tensor_ranks: int
    areas: tuple[Area, ...]

    def __post_init__(self) -> None:
        rows = [(area.name, row.pool, row.layer) for area in self.areas for row in area.rows]
        if len(set(rows)) < len(rows):
            area, pool, layer = next(row for row in rows if rows.count(row) > 1)
            raise ManifestError(
                f"area {area}: pool {pool}, layer {layer} has two places; give each row one"
            )

    @classmethod
    def of(
        cls,
        memory: ModelMemory,
        areas: Sequence[Area],
        fingerprint: bytes,
        draft_fingerprint: bytes = b"",
    ) -> MemoryManifest:
        """Of the rank whose slice `memory` is."""
        rank, ranks = (
            (0, 1) if memory.part is None else (memory.part.tensor_rank, memory.part.tensor_ranks)
        )
        page = memory.page_tokens
        return cls(fingerprint, draft_fingerprint, page, rank, ranks, tuple(areas))

    def rows(self, area: str) -> Iterator[tuple[Area, RowPlace]]:
        for one in self.areas:
            if one.name == area:
                yield from ((one, row) for row in one.rows)

    # -- JSON -------------------------------------------------------------------------------

    def to_json(self) -> Json:
        return {
            "fingerprint": self.fingerprint.hex(),
            "draft_fingerprint": self.draft_fingerprint.hex(),
            "page_tokens": self.page_tokens,
            "tensor_rank": self.tensor_rank,
            "tensor_ranks": self.tensor_ranks,
            "areas": [_area_json(area) for area in self.areas],
        }

    @classmethod
    def from_json(cls, values: object) -> MemoryManifest:
        """What `to_json` gave, by a peer that need not be of this version."""
        read = _Reader("manifest", values)
        ranks = read.count("tensor_ranks", minimum=1)
        return cls(
            read.hex("fingerprint"),
            read.hex("draft_fingerprint"),
            read.count("page_tokens", minimum=1),
            read.count("tensor_rank", maximum=ranks - 1),
            ranks,
            tuple(read.each("areas", _read_area)),
        )


def running_areas(
    device: Arrangement, host: Arrangement | None = None, regions: tuple[int, int] = (0, 1)
) -> tuple[Area, ...]:
    """A source's: device pages, and host pages for the pools that are served hot.

    `regions` are the numbers of the device's block and of the host's.
    """
    resident = [pool.name for pool in device.memory.in_device_pages.pools]
    areas = [Area.of(RUNNING, device, MemoryKind.DEVICE, region=regions[0], pools=resident)]
    if hot := [pool.name for pool in device.memory.hot_pools]:
        assert host is not None, f"{', '.join(hot)} are on the host; give its arrangement"
        areas.append(Area.of(RUNNING, host, MemoryKind.HOST, region=regions[1], pools=hot))
    return tuple(areas)


# -- JSON: rows of a pool that differ in layer and offset alone stand together -----------------


def _area_json(area: Area) -> Json:
    def beside(row: RowPlace) -> tuple[object, ...]:
        return (row.pool, row.anchor, row.stride, row.slots, row.required, row.shape)

    return {
        "name": area.name,
        "kind": area.kind.value,
        "region": area.region,
        "base": area.base,
        "pools": [_pool_json(list(rows)) for _, rows in groupby(area.rows, beside)],
    }


def _pool_json(rows: list[RowPlace]) -> Json:
    first = rows[0]
    shape = first.shape
    return {
        "pool": first.pool,
        "anchor": first.anchor,
        "stride": first.stride,
        "slots": first.slots,
        "required": first.required,
        "row_bytes": shape.bytes,
        "entries": shape.entries,
        "entry_bytes": shape.entry_bytes,
        "tokens_per_entry": shape.tokens_per_entry,
        "tail_entries": shape.tail_entries,
        "encoding": shape.encoding.value,
        "fields": [
            {
                "name": field.name,
                "offset": field.offset,
                "shape": list(field.shape),
                "dtype": field.dtype.label,
                "sharded": field.sharded,
                "units": field.units,
            }
            for field in shape.fields
        ],
        "layers": [row.layer for row in rows],
        "offsets": [row.offset for row in rows],
    }


def _read_area(values: object) -> Area:
    read = _Reader("manifest, area", values)
    return Area(
        read.text("name"),
        read.one_of("kind", {kind.value: kind for kind in MemoryKind}),
        read.count("region"),
        read.count("base"),
        tuple(row for rows in read.each("pools", _read_pool) for row in rows),
    )


def _read_pool(values: object) -> list[RowPlace]:
    pool = _Reader("manifest, pool", values).text("pool")
    read = _Reader(f"manifest, pool {pool}", values)
    shape = RowShape(
        read.count("row_bytes"),
        read.count("entries"),
        read.count("entry_bytes"),
        read.count("tokens_per_entry", minimum=1),
        None if read.get("tail_entries") is None else read.count("tail_entries", minimum=1),
        read.one_of("encoding", {encoding.value: encoding for encoding in Encoding}),
        tuple(read.each("fields", _read_field)),
    )
    stride, slots = read.count("stride"), read.count("slots")
    ends = (field.offset + field.bytes for field in shape.fields)
    if max(ends, default=0) > shape.entry_bytes or (
        shape.entries * shape.entry_bytes > shape.bytes or shape.bytes > stride
    ):
        raise read.refusal("a field exceeds its entry, the entries their row, or a row its slot")
    layers, offsets = read.counts("layers"), read.counts("offsets")
    if len(layers) != len(offsets):
        raise read.refusal(f"{len(layers)} layers have {len(offsets)} offsets")
    anchor, required = read.text("anchor"), read.flag("required")
    return [
        RowPlace(pool, layer, anchor, offset, stride, slots, required, shape)
        for layer, offset in zip(layers, offsets, strict=True)
    ]


def _read_field(values: object) -> FieldPlace:
    name = _Reader("manifest, field", values).text("name")
    read = _Reader(f"manifest, field {name}", values)
    shape, units = tuple(read.counts("shape", minimum=1)), read.count("units", minimum=1)
    sharded = read.flag("sharded")
    if not shape or shape[0] % units or (units > 1 and not sharded):
        raise read.refusal(f"a shape of {shape} does not divide into {units} units")
    dtype = read.one_of("dtype", {kind.label: kind for kind in DType})
    return FieldPlace(name, read.count("offset"), shape, dtype, sharded, units)


Value = TypeVar("Value")


class _Reader:
    """One JSON object of a manifest; whatever it lacks is refused by name."""

    def __init__(self, where: str, values: object) -> None:
        self._where = where
        if not isinstance(values, Mapping):
            raise self.refusal(f"wanted an object, got a {type(values).__name__}")
        self._values = values

    def refusal(self, what: str) -> ManifestError:
        return ManifestError(f"{self._where}: {what}; use the same version of kvtide on both sides")

    def get(self, name: str) -> object:
        if name not in self._values:
            raise self.refusal(f"`{name}` is missing")
        return self._values[name]

    def count(self, name: str, minimum: int = 0, maximum: int | None = None) -> int:
        return self._counted(name, self.get(name), minimum, maximum)

    def counts(self, name: str, minimum: int = 0) -> list[int]:
        return [self._counted(name, value, minimum, None) for value in self._list(name)]

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self.refusal(f"`{name}` is {value!r}, not a name")
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.refusal(f"`{name}` is {value!r}, neither true nor false")
        return value

    def hex(self, name: str) -> bytes:
        text = self.text(name)
        try:
            return bytes.fromhex(text)
        except ValueError:
            raise self.refusal(f"`{name}` is not hexadecimal") from None

    def one_of(self, name: str, known: Mapping[str, Value]) -> Value:
        text = self.text(name)
        if text not in known:
            raise self.refusal(f"`{name}` is {text!r}, and known are {', '.join(known)}")
        return known[text]

    def each(self, name: str, read: Callable[[object], Value]) -> Iterable[Value]:
        return [read(value) for value in self._list(name)]

    def _list(self, name: str) -> list[object]:
        value = self.get(name)
        if not isinstance(value, list):
            raise self.refusal(f"`{name}` is {value!r}, not a list")
        return value

    def _counted(self, name: str, value: object, minimum: int, maximum: int | None) -> int:
        maximum = MAX_NUMBER if maximum is None else maximum
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.refusal(f"`{name}` is {value!r}, not a number from {minimum} to {maximum}")
        return value
