"""One pool: what a model keeps of one kind of state, and what it takes to resume with it.

A pool is pure data. It says what a page costs (`layers`, `entry`, `tokens_per_entry`,
`tail_entries`), whose slots it uses (`follows`) and when it allows a resume (`reuse`). Buffers,
matching, leases, eviction, transfers and stored objects are all derived from it; nothing else in
the project may know more about a model's memory than stands here.

Layer numbers are global: a pipeline stage's pool still says 30, not 0.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from enum import Enum

from kvtide.spec.tier import Tier


class SpecError(ValueError):
    """A declaration that cannot work. The message names the remedy."""


class Everything(Enum):
    """The type of `ALL`, the reach that goes back to the first token."""

    ALL = "all"

    def __repr__(self) -> str:
        return "ALL"


ALL = Everything.ALL
Reach = int | Everything


@dataclass(frozen=True, slots=True)
class Reuse:
    """What must be resident for generation to resume at a boundary b.

    reach     ALL: every page of [0, b). An integer w: the last w tokens before b. 0: nothing; the
              pool holds state within a page, and never leaves the device.
    stride    None: every page carries the state. An integer s: the state exists only where a
              checkpoint was taken, and regular checkpoints stand at multiples of s tokens.
    required  False: a resume without it is allowed (a draft's KV). Never stale, possibly absent.
    """

    reach: Reach = ALL
    stride: int | None = None
    required: bool = True

    def __post_init__(self) -> None:
        if self.reach is not ALL and self.reach < 0:
            raise SpecError(f"reuse: a reach of {self.reach} tokens; use 0 or more, or ALL")
        if self.stride is not None and self.stride < 1:
            raise SpecError(f"reuse: a stride of {self.stride} tokens; use at least 1, or None")
        if self.stride is not None and self.reach is ALL:
            raise SpecError(
                "reuse: checkpoints (stride) replace history, so a reach of ALL contradicts them; "
                "use a reach of one page"
            )

    def reach_pages(self, page_tokens: int) -> int | None:
        """Whole pages that the reach touches behind a page boundary; None for all of them."""
        return None if self.reach is ALL else math.ceil(self.reach / page_tokens)


class DType(Enum):
    """Element types a pool can hold, with their size in bytes and what torch calls them."""

    FP32 = ("fp32", 4, "float32")
    BF16 = ("bf16", 2, "bfloat16")
    FP16 = ("fp16", 2, "float16")
    FP8_E4M3 = ("fp8_e4m3", 1, "float8_e4m3fn")
    UE8M0 = ("ue8m0", 1, "float8_e8m0fnu")
    UINT8 = ("uint8", 1, "uint8")

    def __init__(self, label: str, size_bytes: int, torch_name: str) -> None:
        self.label = label
        self.size_bytes = size_bytes
        self.torch_name = torch_name

    def __repr__(self) -> str:
        return self.label


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of an entry. `sharded`: its first axis (heads, channels) divides over ranks.

    `groups` is how many indivisible units the sharded axis holds (KV heads): with more ranks
    than units each rank keeps one whole unit, as a copy.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    sharded: bool = False
    groups: int | None = None

    def __post_init__(self) -> None:
        if not self.shape or any(n < 1 for n in self.shape):
            raise SpecError(f"field {self.name}: shape {self.shape} is empty; every axis needs ≥ 1")
        if self.groups is not None and self.shape[0] % self.groups:
            raise SpecError(
                f"field {self.name}: {self.shape[0]} rows do not divide into {self.groups} groups"
            )

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size_bytes

    def shard(self, ranks: int) -> Field:
        """This field on one of `ranks` tensor ranks."""
        if not self.sharded or ranks == 1:
            return self
        units = self.groups or self.shape[0]
        if units % ranks and ranks % units:
            raise SpecError(
                f"field {self.name}: {units} heads or groups do not divide over {ranks} tensor "
                f"ranks; use a divisor or a multiple of {units}"
            )
        kept = max(1, units // ranks)
        rows = self.shape[0] // units * kept
        return replace(
            self,
            shape=(rows, *self.shape[1:]),
            groups=None if self.groups is None else kept,
        )


ROW_ALIGN_BYTES = 16
"""Every row is a multiple of this, so that all copies and all views of it are aligned."""


class Encoding(Enum):
    """How the vectors that layers see lie in an entry's fields (`layers/packing.py`).

    PLAIN   every field is one by itself, as it is.
    SCALED  a vector X in e4m3 has its scales beside it in X_scale, an fp32 for every 128 values.
            A field without scales is plain.
    JOINED  one vector in all fields: `nope` in e4m3, `rope` in bf16, `scale` with a power of two
            for every 64 values of `nope`, and `pad` where bytes are missing up to a multiple of 8.
    """

    PLAIN = "plain"
    SCALED = "scaled"
    JOINED = "joined"

    def __repr__(self) -> str:
        return self.value


SCALED_GROUP, JOINED_GROUP = 128, 64
"""Values that share a scale, by encoding. The last group may be shorter."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one layer keeps for `tokens_per_entry` tokens: fields, in byte order, without gaps.

    `row_align_bytes`: one layer's entries of one page are padded up to a multiple of this, and of
    ROW_ALIGN_BYTES in any case.
    """

    fields: tuple[Field, ...]
    row_align_bytes: int = ROW_ALIGN_BYTES
    encoding: Encoding = Encoding.PLAIN

    def __post_init__(self) -> None:
        if self.encoding is Encoding.SCALED:
            _check_scaled(self)
        if self.encoding is Encoding.JOINED:
            _check_joined(self)

    @property
    def bytes(self) -> int:
        return sum(field.bytes for field in self.fields)

    @property
    def scales(self) -> dict[str, Field]:
        """The scales of every scaled vector, by its name."""
        if self.encoding is not Encoding.SCALED:
            return {}
        by_name = {field.name: field for field in self.fields}
        pairs = ((name, by_name.get(f"{name}_scale")) for name in by_name)
        return {name: scale for name, scale in pairs if scale is not None}

    def shard(self, ranks: int) -> Entry:
        return replace(self, fields=tuple(field.shard(ranks) for field in self.fields))


def _check_scaled(entry: Entry) -> None:
    scales = entry.scales
    if not scales:
        names = ", ".join(field.name for field in entry.fields)
        raise SpecError(
            f"entry of {names or 'nothing'}: scaled, and no field has scales; add them as X_scale "
            "to the vector X, or leave the entry plain"
        )
    for field in entry.fields:
        scale = scales.get(field.name)
        if scale is not None and not _fits(field, scale, SCALED_GROUP, DType.FP32):
            raise SpecError(
                f"field {field.name}: {field.shape} in {field.dtype!r} with scales {scale.shape} "
                f"in {scale.dtype!r}; use a vector in fp8_e4m3 with an fp32 for every "
                f"{SCALED_GROUP} values, neither of them sharded"
            )


def _check_joined(entry: Entry) -> None:
    found = [(field.name, field.dtype) for field in entry.fields]
    whole = all(len(field.shape) == 1 and not field.sharded for field in entry.fields)
    if len(found) < 3 or found != _JOINED[: len(found)] or not whole:
        wanted = ", ".join(f"{name} in {dtype!r}" for name, dtype in _JOINED)
        raise SpecError(
            f"entry of {', '.join(name for name, _ in found)}: joined; use the vectors {wanted}, "
            "in this order and not sharded (pad may be left out)"
        )
    nope, _, scale, *_ = entry.fields
    if not _fits(nope, scale, JOINED_GROUP, DType.UE8M0):
        raise SpecError(
            f"field scale: {scale.shape} for {nope.shape} of nope; use one for every "
            f"{JOINED_GROUP} values"
        )


_JOINED = [
    ("nope", DType.FP8_E4M3),
    ("rope", DType.BF16),
    ("scale", DType.UE8M0),
    ("pad", DType.UINT8),
]


def _fits(values: Field, scale: Field, group: int, dtype: DType) -> bool:
    """Whether a vector in eight bits has a scale of this dtype for each of its groups."""
    if values.dtype is not DType.FP8_E4M3 or scale.dtype is not dtype or len(values.shape) != 1:
        return False
    groups = -(-values.shape[0] // group)
    return scale.shape == (groups,) and not (values.sharded or scale.sharded)


NOTHING = Entry(())


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One kind of state across its layers.

    tail_entries  None: a page keeps all its entries. n: a page keeps only its last n entries
                  (1 for a recurrent state: the state after the page's last token).
    follows       None: the pool is an anchor and owns slots. A name: it is a sidecar and its
                  page lies at the slot number of that anchor's page.
    selected      None: attention reads all entries. n: a query reads n of them at most, which an
                  indexer selects.
    hot           None: pages of running requests are on the device. n: they are on the host, and a
                  running request has n entries on the device (`spec/residency.py`).

    The last two say nothing about stored bytes, and are not part of the schema.
    """

    name: str
    layers: tuple[int, ...]
    entry: Entry
    tokens_per_entry: int = 1
    tail_entries: int | None = None
    follows: str | None = None
    reuse: Reuse = Reuse()
    selected: int | None = dataclasses.field(default=None, repr=False)
    hot: int | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if list(self.layers) != sorted(set(self.layers)):
            raise SpecError(
                f"pool {self.name}: layers {self.layers} must be distinct and ascending; "
                "sort them and drop repeats"
            )
        if self.tokens_per_entry < 1:
            raise SpecError(f"pool {self.name}: tokens_per_entry must be at least 1")
        if self.tail_entries is not None and self.tail_entries < 1:
            raise SpecError(f"pool {self.name}: tail_entries must be at least 1, or None for all")

    @property
    def is_anchor(self) -> bool:
        return self.follows is None

    @property
    def home(self) -> Tier:
        """The tier that has the pages of running requests."""
        return Tier.DEVICE if self.hot is None else Tier.HOST

    def entries_per_page(self, page_tokens: int) -> int:
        entries = page_tokens // self.tokens_per_entry
        return entries if self.tail_entries is None else min(entries, self.tail_entries)

    def row_bytes(self, page_tokens: int) -> int:
        """Bytes one layer keeps per page, its padding included."""
        align = math.lcm(self.entry.row_align_bytes, ROW_ALIGN_BYTES)
        return -(-self.entries_per_page(page_tokens) * self.entry.bytes // align) * align

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes all layers of the pool keep per page."""
        return len(self.layers) * self.row_bytes(page_tokens)

    def on_layers(self, layers: range, tensor_ranks: int) -> PoolSpec:
        """The part of this pool that one pipeline stage and tensor rank owns."""
        return replace(
            self,
            layers=tuple(layer for layer in self.layers if layer in layers),
            entry=self.entry.shard(tensor_ranks),
        )
