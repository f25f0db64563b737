"""What native calls take of a layer: made once for its place, completed for each call."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from ctypes import POINTER, cast

import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import AttentionParams, AttentionParts, Projection, QKVParams
from kvtide.layers.backend.packed_weight import PackedWeight
from kvtide.layers.forward import Place
from kvtide.layers.native.c_functions import (
    FORMS,
    TYPES,
    AttentionCall,
    GatedMLPCall,
    HeadsCall,
    Kept,
    ProjectionCall,
    SelfAttentionCall,
    WeightRows,
)
from kvtide.layers.native.native_arithmetic import MOST_ROWS
from kvtide.spec import Encoding

_FLOATS = -1
"""The form of rows that are not packed."""


class NativeLayer:
    """What every call for one place has alike: filled once, copied and completed for a call.

    The first call's new keys and values stand for those of all calls: dtypes and strides of heads
    do not change.
    """

    def __init__(self, place: Place, view: Mapping[str, Tensor]) -> None:
        self.place, self.at = place, whereabouts(view)
        self.how: QKVParams | None = None
        self.heads: HeadsCall | None = None
        self.attention: AttentionCall | None = None
        pool = place.pool
        self.parts: AttentionParts | None = None
        self.whole: SelfAttentionCall | None = None
        self.readable = (
            pool.hot is None
            and pool.tokens_per_entry == 1
            and pool.entry.encoding is Encoding.PLAIN
            and all(field.dtype in TYPES for field in view.values())
        )
        k, v = view.get("k"), view.get("v")
        self.by_head = (
            self.readable
            and (k is not None and v is not None)
            and (k.shape, k.dtype) == (v.shape, v.dtype)
        )

    def of_parts(
        self, view: Mapping[str, Tensor], parts: AttentionParts, page_tokens: int
    ) -> SelfAttentionCall | None:
        """The call of the whole layer; None where it is made of several calls."""
        if self.parts is not parts:
            fits = self.by_head and norms_fit(parts.preparing, view["k"].shape[-1])
            self.parts = parts
            self.whole = self_attention_call(view, parts, page_tokens) if fits else None
        return self.whole


def whereabouts(view: Mapping[str, Tensor]) -> tuple[object, ...]:
    """Addresses, not tensors: a model must keep no pages."""
    field = next(iter(view.values()))
    return field.data_ptr(), *field.stride()[:2], field.dtype


def norms_fit(how: QKVParams, dim: int) -> bool:
    """Whether native kernels norm queries and keys of so many channels by these weights."""
    norms = [norm for norm in (how.query_norm, how.key_norm) if norm is not None]
    return all(norm.weight.dtype is torch.float32 and norm.weight.shape == (dim,) for norm in norms)


def heads_call(
    view: Mapping[str, Tensor], heads: int, how: QKVParams, page_tokens: int
) -> HeadsCall:
    k, query_norm, key_norm = view["k"], how.query_norm, how.key_norm
    return HeadsCall(
        query_norm=None if query_norm is None else query_norm.weight.data_ptr(),
        key_norm=None if key_norm is None else key_norm.weight.data_ptr(),
        key_pages=k.data_ptr(),
        value_pages=view["v"].data_ptr(),
        slot_stride=k.stride(0) * k.element_size(),
        entry_stride=k.stride(1) * k.element_size(),
        heads=heads,
        kv_heads=how.kv_heads,
        dim=k.shape[-1],
        page_tokens=page_tokens,
        page_type=TYPES[k.dtype],
        query_eps=0.0 if query_norm is None else query_norm.eps,
        key_eps=0.0 if key_norm is None else key_norm.eps,
        key_gain=how.key_gain,
    )


def attention_call(
    view: Mapping[str, Tensor], names: Sequence[str], heads: int, kv_heads: int, page_tokens: int
) -> AttentionCall:
    """`names` are fields: of keys, in one or two parts, and of values."""
    fields = [_kept(view[name]) for name in names]
    return AttentionCall(
        key=fields[0],
        key_rest=fields[1] if len(fields) == 3 else Kept(),
        value=fields[-1],
        heads=heads,
        kv_heads=kv_heads,
        page_tokens=page_tokens,
    )


def set_params(call: AttentionCall, how: AttentionParams) -> None:
    call.sinks = None if how.sinks is None else how.sinks.data_ptr()
    call.window, call.scale, call.cap = how.window or 0, how.scale, how.cap or 0.0


def self_attention_call(
    view: Mapping[str, Tensor], parts: AttentionParts, page_tokens: int
) -> SelfAttentionCall | None:
    """None where a projection is not one that native kernels multiply, or where shapes disagree."""
    qkv, out = projection_call(parts.qkv), projection_call(parts.out)
    if qkv is None or out is None:
        return None
    dim, kv_heads = view["k"].shape[-1], parts.preparing.kv_heads
    heads = qkv.outputs // dim - 2 * kv_heads
    if heads <= 0 or heads % kv_heads or (heads * dim, qkv.outputs % dim) != (out.inputs, 0):
        return None
    if (sinks := parts.how.sinks) is not None and len(sinks) != heads:
        return None
    attention = attention_call(view, ("k", "v"), heads, kv_heads, page_tokens)
    set_params(attention, parts.how)
    stride = kv_heads * dim * torch.float32.itemsize
    attention.key.fresh_stride = attention.value.fresh_stride = stride
    prepared = heads_call(view, heads, parts.preparing, page_tokens)
    return SelfAttentionCall(qkv=qkv, out=out, heads=prepared, attention=attention)


def _kept(pages: Tensor) -> Kept:
    """A field of pages (slots, entries, *shape)."""
    size = pages.element_size()
    return Kept(
        pages=pages.data_ptr(),
        slot_stride=pages.stride(0) * size,
        entry_stride=pages.stride(1) * size,
        page_type=TYPES[pages.dtype],
        dim=pages.shape[-1],
    )


def point_to(field: Kept, fresh: Tensor) -> None:
    """To the step's vectors (tokens, heads, dim)."""
    field.fresh, field.fresh_type = fresh.data_ptr(), TYPES[fresh.dtype]
    field.fresh_stride = fresh.stride(0) * fresh.element_size()


# -- projections ---------------------------------------------------------------------------------


def projection_call(projection: Projection) -> ProjectionCall | None:
    """None of what native kernels do not multiply. The weight must outlive the call."""
    held, bias = projection.held, projection.bias
    if projection.ranks.count > 1 or not (bias is None or _is_floats(bias)):
        return None
    if isinstance(held, PackedWeight):
        rows = [WeightRows(run.data.data_ptr(), run.count, FORMS[run.form]) for run in held.runs]
        inputs = held.inputs
    elif _is_floats(held):
        rows, inputs = [WeightRows(held.data_ptr(), len(held), _FLOATS)], held.shape[1]
    else:
        return None
    runs = (WeightRows * len(rows))(*rows)
    return ProjectionCall(
        runs=cast(runs, POINTER(WeightRows)),
        bias=None if bias is None else bias.data_ptr(),
        run_count=len(rows),
        inputs=inputs,
        outputs=len(held),
    )


class MLPCalls:
    """The calls of gated MLPs, by the projections that they are made of."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Projection, Projection, int, GatedMLPCall | None]] = {}

    def of(self, gate_up: Projection, down: Projection, activation: int) -> GatedMLPCall | None:
        known = self._known.get(id(down))
        if known is None or known[:3] != (gate_up, down, activation):
            first, last = projection_call(gate_up), projection_call(down)
            call = None
            if first is not None and last is not None and first.outputs == 2 * last.inputs:
                call = GatedMLPCall(gate_up=first, down=last, activation=activation)
            known = self._known[id(down)] = gate_up, down, activation, call
        return known[3]


def rows_at_most(*projections: Projection) -> int:
    """How many rows these projections multiply by native kernels."""
    packed = all(isinstance(each.held, PackedWeight) for each in projections)
    return sys.maxsize if packed else MOST_ROWS


def _is_floats(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous()
