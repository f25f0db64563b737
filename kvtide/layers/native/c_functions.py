"""The C functions of the native kernels, and the structures that they take, as in `calls.h`."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As `vectors.h` numbers them."""
FORMS = {
    name: number
    for number, name in enumerate(
        (
            *("BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"),
            "F8_E4M3",
        )
    )
}
"""Of packed weights, as `packed.h` numbers them."""


class Kept(Structure):
    """A vector of every token, in pages and of the step."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("pages", "fresh")),
        *((name, c_int64) for name in ("slot_stride", "entry_stride", "fresh_stride")),
        *((name, c_int32) for name in ("page_type", "fresh_type", "dim", "unused")),
    ]


class AttentionCall(Structure):
    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("out", "queries", "rows", "slots", "sinks")),
        *((name, Kept) for name in ("key", "key_rest", "value")),
        *((name, c_int64) for name in ("table_width", "sequences")),
        *((name, c_int32) for name in ("heads", "kv_heads", "page_tokens", "window")),
        *((name, c_int32) for name in ("threads", "unused")),
        *((name, c_float) for name in ("scale", "cap")),
    ]


class HeadsCall(Structure):
    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("queries", "keys", "values", "by_head", "cos_sin")),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "key_pages", "value_pages")),
        *((name, c_void_p) for name in ("rows", "owners", "slots")),
        *((name, c_int64) for name in ("token_stride", "slot_stride", "entry_stride")),
        *((name, c_int64) for name in ("table_width", "tokens")),
        *((name, c_int32) for name in ("heads", "kv_heads", "dim", "pairs", "page_tokens")),
        *((name, c_int32) for name in ("threads", "page_type")),
        *((name, c_float) for name in ("query_eps", "key_eps", "key_gain")),
    ]


class WeightRows(Structure):
    _fields_: ClassVar = [("data", c_void_p), ("count", c_int64), ("form", c_int64)]


class ProjectionCall(Structure):
    _fields_: ClassVar = [
        ("runs", POINTER(WeightRows)),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("run_count", "inputs", "outputs")),
    ]


class GatedMLPCall(Structure):
    _fields_: ClassVar = [
        *((name, ProjectionCall) for name in ("gate_up", "down")),
        ("activation", c_int64),
    ]


class SelfAttentionCall(Structure):
    _fields_: ClassVar = [
        *((name, ProjectionCall) for name in ("qkv", "out")),
        ("heads", HeadsCall),
        ("attention", AttentionCall),
    ]


class StepTables(Structure):
    """What all layers of a step have alike."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("cos_sin", "rows", "owners", "slots")),
        *((name, c_int64) for name in ("table_width", "sequences", "tokens", "pairs")),
        ("threads", c_int64),
    ]


class States(Structure):
    """Recurrent states of a step's sequences: `recurrent.cpp` has its fields."""

    _fields_: ClassVar = [
        ("pages", c_void_p),
        ("slot_stride", c_int64),
        *((name, c_void_p) for name in ("before", "after", "rows")),
        ("sequences", c_int64),
    ]


@dataclass(frozen=True, slots=True)
class Functions:
    """The library's functions, with the types of their arguments."""

    attention: Any
    self_attention: Any
    gated_mlp: Any
    linear: Any
    packed_linear: Any
    unpack: Any
    rms_norm: Any
    gated: Any
    heads: Any
    delta: Any
    scan: Any

    @classmethod
    def of(cls, library: ctypes.CDLL) -> Functions:
        p, n, i, f = c_void_p, c_int64, c_int, c_float
        return cls(
            attention=_typed(library.kvtide_attention, c_int, POINTER(AttentionCall)),
            self_attention=_typed(
                library.kvtide_self_attention,
                c_int,
                *(POINTER(SelfAttentionCall), POINTER(StepTables), p, p),
            ),
            gated_mlp=_typed(library.kvtide_gated_mlp, None, POINTER(GatedMLPCall), p, p, n, i),
            linear=_typed(library.kvtide_linear, None, p, p, p, p, n, n, n, i),
            packed_linear=_typed(library.kvtide_packed_linear, None, *[p] * 4, i, *[n] * 4, i),
            unpack=_typed(library.kvtide_unpack, None, p, p, i, n, n, i),
            rms_norm=_typed(library.kvtide_rms_norm, None, p, p, p, p, p, n, n, n, f, i),
            gated=_typed(library.kvtide_gated, None, p, p, p, n, n, n, n, i, i),
            heads=_typed(library.kvtide_heads, None, POINTER(HeadsCall)),
            delta=_typed(library.kvtide_delta, None, p, p, p, p, POINTER(States), *[n] * 5, i),
            scan=_typed(library.kvtide_scan, None, p, p, p, p, POINTER(States), *[n] * 4, i),
        )


def _typed(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, list(arguments)
    return function
