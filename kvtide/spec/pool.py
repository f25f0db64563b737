"""One pool: what a model keeps of one kind of state, and what it takes to resume with it.

A pool is pure data. It says what a page costs (`layers`, `entry`, `tokens_per_entry`,
`tail_entries`), whose slots it uses (`follows`) and when it allows a resume (`reuse`). Buffers,
matching, leases, eviction, transfers and stored objects are all derived from it; nothing else in
the project may know more about a model's memory than stands here.

Layer numbers are global: a pipeline stage's pool still says 30, not 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum


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

    reach     ALL: every page of [0, b). An integer w: the last w tokens before b.
    stride    None: every page carries the state. An integer s: the state exists only where a
              checkpoint was taken, and regular checkpoints stand at multiples of s tokens.
    required  False: a resume without it is allowed (a draft's KV). Never stale, possibly absent.
    """

    reach: Reach = ALL
    stride: int | None = None
    required: bool = True

    def __post_init__(self) -> None:
        if self.reach is not ALL and self.reach < 1:
            raise SpecError(
                f"reuse: a reach of {self.reach} tokens keeps nothing; "
                "leave the pool out or use a reach of at least 1"
            )
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
    """Element types a pool can hold, with their size in bytes."""

    FP32 = ("fp32", 4)
    BF16 = ("bf16", 2)
    FP16 = ("fp16", 2)
    FP8_E4M3 = ("fp8_e4m3", 1)
    UE8M0 = ("ue8m0", 1)
    UINT8 = ("uint8", 1)

    def __init__(self, label: str, size_bytes: int) -> None:
        self.label = label
        self.size_bytes = size_bytes

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


@dataclass(frozen=True, slots=True)
class Entry:
    """What one layer keeps for `tokens_per_entry` tokens: fields, in byte order, without gaps.

    `row_align_bytes`: one layer's entries of one page are padded up to a multiple of this, and of
    ROW_ALIGN_BYTES in any case.
    """

    fields: tuple[Field, ...]
    row_align_bytes: int = ROW_ALIGN_BYTES

    @property
    def bytes(self) -> int:
        return sum(field.bytes for field in self.fields)

    def shard(self, ranks: int) -> Entry:
        return replace(self, fields=tuple(field.shard(ranks) for field in self.fields))


NOTHING = Entry(())


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One kind of state across its layers.

    tail_entries  None: a page keeps all its entries. n: a page keeps only its last n entries
                  (1 for a recurrent state: the state after the page's last token; 8 for a
                  compressor that needs the last 8 tokens).
    follows       None: the pool is an anchor and owns slots. A name: it is a sidecar and its
                  page lies at the slot number of that anchor's page.
    """

    name: str
    layers: tuple[int, ...]
    entry: Entry
    tokens_per_entry: int = 1
    tail_entries: int | None = None
    follows: str | None = None
    reuse: Reuse = Reuse()

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
