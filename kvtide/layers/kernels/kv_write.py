"""KV write: entries packed and stored into pages, for all tokens of a step.

Torch reference: `layers/reference/kv_write.py`, `kv_write`; the bytes are identical. Conversions
work on bits, so that they are the same on every device and in the interpreter.

`_write_vectors`  grid (tokens, 1 or 2 vectors): plain vectors, or e4m3 with a scale per group
`_write_joined`   grid (tokens,): DeepSeek-V4's joined key and value

`store_entry` and the functions below it serve kernels that compute what they write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.grid import power_of_two
from kvtide.layers.kernels.jit import kernel
from kvtide.layers.packing import Fields
from kvtide.spec import Encoding
from kvtide.spec.pool import JOINED_GROUP, SCALED_GROUP

_AS_IS, _E4M3, _BF16, _CAST, _SCALED, _JOINED = range(6)
"""Conversions to the stored format: elementwise, or by group (the last two)."""
_CONVERSIONS = {torch.float8_e4m3fn: _E4M3, torch.bfloat16: _BF16}


def kv_write(run: ForwardPass, place: Place, entries: Mapping[str, Tensor]) -> Fields:
    """Writes one entry per token, and returns entries as `packing.unpack` would."""
    assert place.pool.tokens_per_entry == 1, f"pool {place.pool.name}: an entry is not one token"
    kept = {name: _output_like(place, name, value) for name, value in entries.items()}
    view = run.step.view(place.pool.name, place.layer)
    if place.pool.entry.encoding is Encoding.JOINED:
        _launch_joined(run, place, view, entries["kv"], kept["kv"])
        return kept
    scales = place.pool.entry.scales
    vectors = []
    for name, value in entries.items():
        scale = view[scales[name].name] if name in scales else None
        back = kept[name]
        vectors.append(
            _VectorArguments.of(value, view[name], scale, None if back is value else back)
        )
    for first in range(0, len(vectors), 2):
        _launch_vectors(run, place, vectors[first], vectors[min(first + 1, len(vectors) - 1)])
    return kept


def _output_like(place: Place, name: str, value: Tensor) -> Tensor:
    """The value itself if it is stored unchanged, else an empty tensor for the stored value."""
    field = place.field(name)
    dtype = getattr(torch, field.dtype.torch_name)
    if value.dtype is dtype and field in place.pool.entry.fields:
        return value
    return torch.empty(value.shape, dtype=dtype, device=value.device)


def bits(field: Tensor) -> Tensor:
    """A view as integers, for dtypes whose conversion works on bits."""
    if field.dtype.itemsize == 1:
        return field.view(torch.uint8)
    return field.view(torch.int16) if field.dtype is torch.bfloat16 else field


# -- vectors of their own, with or without scales ------------------------------------------------


@dataclass(frozen=True, slots=True)
class _VectorArguments:
    """Arguments of `_write_vector`: a value (tokens, heads, dim) and its field."""

    tensors: tuple[Tensor, ...]
    strides: tuple[tuple[int, ...], ...]
    shape: tuple[int, int]
    kind: tuple[int, bool, bool]

    @classmethod
    def of(
        cls, value: Tensor, field: Tensor, scale: Tensor | None, back: Tensor | None
    ) -> _VectorArguments:
        value = value.flatten(2) if value.dim() > 3 else value
        value = value if value.dim() == 3 else value[:, None]
        value = value if value.stride(-1) == 1 else value.contiguous()
        raw, form = bits(field), _conversion(value, field)
        scales = raw if scale is None else scale
        tensors = (bits(value), raw, scales)
        strides = (value.stride()[:2], raw.stride()[:2], scales.stride()[:2])
        kind = (form, scale is not None, back is not None)
        back = raw if back is None else bits(back)
        return cls((*tensors, back), strides, (value.shape[1], value.shape[2]), kind)


def _conversion(value: Tensor, field: Tensor) -> int:
    if value.dtype is field.dtype:
        return _AS_IS
    return _CONVERSIONS.get(field.dtype, _CAST)


def _launch_vectors(
    run: ForwardPass, place: Place, one: _VectorArguments, other: _VectorArguments
) -> None:
    batch = run.batch
    slots = batch.slots[place.anchor]
    widths = [vector.shape[0] * vector.shape[1] for vector in (one, other)]
    blocks = [power_of_two(width) for width in widths]
    rounded = [-(-block // SCALED_GROUP) for block in blocks]
    _write_vectors[(len(run.positions), 1 if one is other else 2)](
        *(batch.rows, batch.owners, slots, slots.stride(0)),
        *one.tensors, *one.strides, *other.tensors, *other.strides,
        PAGE_TOKENS=run.step.page_tokens,
        CONVERSION=one.kind[0], SCALED=one.kind[1], BACK=one.kind[2],
        DIM=one.shape[1], WIDTH=widths[0], GROUPS=rounded[0],
        CONVERSION2=other.kind[0], SCALED2=other.kind[1], BACK2=other.kind[2],
        DIM2=other.shape[1], WIDTH2=widths[1], GROUPS2=rounded[1],
        GROUP=SCALED_GROUP,
        num_warps=max(1, min(8, max(blocks) // 256)),
    )  # fmt: skip


# -- DeepSeek-V4's key and value in one ----------------------------------------------------------


def _launch_joined(
    run: ForwardPass, place: Place, view: Mapping[str, Tensor], value: Tensor, back: Tensor
) -> None:
    batch, value = run.batch, value if value.stride(-1) == 1 else value.contiguous()
    slots = batch.slots[place.anchor]
    fields = joined_fields(view)
    _write_joined[(len(value),)](
        *(batch.rows, batch.owners, slots, slots.stride(0)),
        *(bits(value), value.stride(0), back),
        *fields,
        PAGE_TOKENS=run.step.page_tokens,
        **joined_shape(place),
        num_warps=1,
    )


def joined_fields(view: Mapping[str, Tensor]) -> tuple[Tensor | tuple[int, ...], ...]:
    """Arguments of `store_joined`: a view's fields and their strides."""
    return _fields(view["nope"], view["rope"], view["scale"], view.get("pad", view["scale"]))


def joined_shape(place: Place) -> dict[str, int]:
    widths = {field.name: field.shape[0] for field in place.pool.entry.fields}
    whole = widths["nope"] + widths["rope"]
    return {
        "NOPE": widths["nope"],
        "ROPE": widths["rope"],
        "PAD": widths.get("pad", 0),
        "GROUP": JOINED_GROUP,
        "GROUPS": power_of_two(-(-whole // JOINED_GROUP)),
    }


# -- one vector per entry, for kernels that compute it -------------------------------------------


def entry_fields(place: Place, view: Mapping[str, Tensor]) -> tuple[Tensor | tuple[int, ...], ...]:
    """Arguments of `store_entry`: fields and strides of a pool with one vector per entry."""
    if place.pool.entry.encoding is Encoding.JOINED:
        return joined_fields(view)
    name, scales = place.packing.parts[0].logical.name, place.pool.entry.scales
    scale = view[scales[name].name] if name in scales else view[name]
    return _fields(view[name], view[name], scale, scale)


def entry_shape(place: Place, view: Mapping[str, Tensor]) -> dict[str, int]:
    """Constants of `store_entry`: KIND is the conversion."""
    if place.pool.entry.encoding is Encoding.JOINED:
        return {"KIND": _JOINED, **joined_shape(place)}
    (part,) = place.packing.parts
    name, width = part.logical.name, part.logical.shape[0]
    groups = power_of_two(-(-width // SCALED_GROUP))
    kind = _SCALED if name in place.pool.entry.scales else _CONVERSIONS.get(view[name].dtype, _CAST)
    return {
        "KIND": kind,
        "NOPE": width,
        "ROPE": 0,
        "PAD": 0,
        "GROUP": SCALED_GROUP,
        "GROUPS": groups,
    }


def _fields(*fields: Tensor) -> tuple[Tensor | tuple[int, ...], ...]:
    raw = [bits(field) for field in fields]
    return (*raw, *(field.stride()[:2] for field in raw))


# fmt: off
# -- numbers -------------------------------------------------------------------------------------


@triton.jit
def e4m3(x):  # type: ignore[no-untyped-def]
    """e4m3 bits, rounded to nearest even; saturates, and NaN stays NaN."""
    raw = x.to(tl.int32, bitcast=True)
    size = raw & 0x7FFFFFFF
    # Below 2⁻⁶ e4m3 has multiples of 2⁻⁹; adding 2¹⁴ rounds to them.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < (121 << 23), small, tl.minimum(large, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((raw >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(code):  # type: ignore[no-untyped-def]
    """e4m3 bits to fp32."""
    raw = code.to(tl.int32)
    size = ((raw & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    size = tl.where((raw & 0x7F) == 0x7F, 0x7FC00000, size.to(tl.int32, bitcast=True))
    return (size | ((raw & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def bf16(x):  # type: ignore[no-untyped-def]
    """bf16 bits of an fp32, rounded to nearest even."""
    raw = x.to(tl.int32, bitcast=True)
    upper = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    return tl.where((raw & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, upper).to(tl.int16)


@triton.jit
def from_bf16(code):  # type: ignore[no-untyped-def]
    return (code.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def widened(x):  # type: ignore[no-untyped-def]
    """fp32 of a value as `bits` views it."""
    if x.dtype == tl.int16:
        return from_bf16(x)
    else:
        return x.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def clamped(x, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Clamped to ±LIMIT; NaN stays NaN."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit
def row_max(x):  # type: ignore[no-untyped-def]
    """The largest magnitude of every row, ignoring NaN."""
    sizes = tl.where(x == x, tl.abs(x), 0.0)
    return tl.maximum(tl.max(sizes, 1), 1e-4)


@triton.jit  # type: ignore[untyped-decorator]
def locate(  # type: ignore[no-untyped-def]
    rows, owners, slots, stride_slots_row, token,
    PAGE_TOKENS: tl.constexpr,
):
    """A token's slot, -1 for none, and its offset in the page."""
    owner = tl.load(owners + token)
    position = tl.load(rows + 3 * owner + 2) + token - tl.load(rows + 3 * owner)
    slot = tl.load(slots + owner * stride_slots_row + position // PAGE_TOKENS)
    return slot.to(tl.int64), position % PAGE_TOKENS


# -- vectors -------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def store_plain(  # type: ignore[no-untyped-def]
    value, field, offsets, mask,
    CONVERSION: tl.constexpr,
):
    """Stores a vector elementwise, and returns the stored bits."""
    if CONVERSION == 0:
        code = value
    elif CONVERSION == 1:
        code = e4m3(widened(value))
    elif CONVERSION == 2:
        code = bf16(widened(value))
    else:
        code = widened(value).to(field.dtype.element_ty)
    tl.store(field + offsets, code, mask=mask)
    return code


@triton.jit  # type: ignore[untyped-decorator]
def store_scaled(  # type: ignore[no-untyped-def]
    value, field, offsets, mask, scales, valid,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):
    """Packs and stores a vector (groups, GROUP) in fp32, and returns it dequantized."""
    group = tl.arange(0, GROUPS)
    value = clamped(value, 2.9774707105582116e+38)
    scale = tl.div_rn(row_max(value), tl.full([GROUPS], 448.0, tl.float32))
    code = e4m3(tl.div_rn(value, tl.broadcast_to(scale[:, None], [GROUPS, GROUP])))
    tl.store(scales + group, scale, mask=valid & (group * GROUP < WIDTH))
    tl.store(field + offsets, code, mask=mask)
    return from_e4m3(code) * scale[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _write_vector(  # type: ignore[no-untyped-def]
    values, field, scales, back, token, slot, entry_index, values_strides, field_strides,
    scales_strides,
    CONVERSION: tl.constexpr, SCALED: tl.constexpr, BACK: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):
    offs = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    in_width, valid = offs < WIDTH, slot >= 0
    source = token.to(tl.int64) * values_strides[0]
    source = source + (offs // DIM) * values_strides[1] + offs % DIM
    value = tl.load(values + source, mask=in_width, other=0)
    offsets = slot * field_strides[0] + entry_index * field_strides[1] + offs
    if SCALED:
        scales += slot * scales_strides[0] + entry_index * scales_strides[1]
        stored = store_scaled(widened(value), field, offsets, valid & in_width, scales, valid,
                            WIDTH, GROUPS, GROUP)
    else:
        stored = store_plain(value, field, offsets, valid & in_width, CONVERSION)
    if BACK:
        tl.store(back + token.to(tl.int64) * WIDTH + offs, stored, mask=in_width)


@kernel("rows", "owners", "slots", "stride_slots_row")  # type: ignore[untyped-decorator]
def _write_vectors(  # type: ignore[no-untyped-def]
    rows, owners, slots, stride_slots_row, values, field, scales, back, values_strides,
    field_strides, scales_strides, values2, field2, scales2, back2, values2_strides, field2_strides,
    scales2_strides,
    PAGE_TOKENS: tl.constexpr, GROUP: tl.constexpr, CONVERSION: tl.constexpr, SCALED: tl.constexpr,
    BACK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    CONVERSION2: tl.constexpr, SCALED2: tl.constexpr, BACK2: tl.constexpr, DIM2: tl.constexpr,
    WIDTH2: tl.constexpr, GROUPS2: tl.constexpr,
):
    token = tl.program_id(0)
    slot, entry_index = locate(rows, owners, slots, stride_slots_row, token, PAGE_TOKENS)
    if tl.program_id(1) == 0:
        _write_vector(values, field, scales, back, token, slot, entry_index,
                values_strides, field_strides, scales_strides,
                CONVERSION, SCALED, BACK, DIM, WIDTH, GROUPS, GROUP)
    else:
        _write_vector(values2, field2, scales2, back2, token, slot, entry_index,
                values2_strides, field2_strides, scales2_strides,
                CONVERSION2, SCALED2, BACK2, DIM2, WIDTH2, GROUPS2, GROUP)


# -- joined --------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def store_joined(  # type: ignore[no-untyped-def]
    vector, slot, entry_index, nope, rope, scale, pad, nope_strides, rope_strides, scale_strides,
    pad_strides,
    NOPE: tl.constexpr, ROPE: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Packs and stores a vector (groups, GROUP) in fp32, and returns it dequantized."""
    group, column = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    offs, valid = group[:, None] * GROUP + column[None, :], slot >= 0
    nope_value = clamped(tl.where(offs < NOPE, vector, 0.0), 2.9774707105582116e+38)
    raw = row_max(nope_value).to(tl.int32, bitcast=True)
    exponent = (raw >> 23) - 135 + ((raw & 0x7FFFFF) > 0x600000).to(tl.int32)
    code = e4m3(nope_value * ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, None])
    upper = bf16(vector)
    nope += slot * nope_strides[0] + entry_index * nope_strides[1]
    tl.store(nope + offs, code, mask=valid & (offs < NOPE))
    rope += slot * rope_strides[0] + entry_index * rope_strides[1]
    tl.store(rope + offs - NOPE, upper, mask=valid & (offs >= NOPE) & (offs < NOPE + ROPE))
    scale += slot * scale_strides[0] + entry_index * scale_strides[1]
    tl.store(scale + group, (exponent + 127).to(tl.uint8), mask=valid & (group * GROUP < NOPE))
    if PAD > 0:
        pad += slot * pad_strides[0] + entry_index * pad_strides[1]
        tl.store(pad + column, tl.zeros([GROUP], tl.uint8), mask=valid & (column < PAD))
    power = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(offs < NOPE, from_e4m3(code) * power[:, None], from_bf16(upper))


@kernel("rows", "owners", "slots", "stride_slots_row")  # type: ignore[untyped-decorator]
def _write_joined(  # type: ignore[no-untyped-def]
    rows, owners, slots, stride_slots_row, values, stride_value_token, back, nope, rope, scale, pad,
    nope_strides, rope_strides, scale_strides, pad_strides,
    PAGE_TOKENS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    PAD: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):
    token = tl.program_id(0)
    slot, entry_index = locate(rows, owners, slots, stride_slots_row, token, PAGE_TOKENS)
    offs = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    in_width = offs < NOPE + ROPE
    vector = tl.load(
        values + token.to(tl.int64) * stride_value_token + offs, mask=in_width, other=0)
    stored = store_joined(
        widened(vector), slot, entry_index, nope, rope, scale, pad, nope_strides,
        rope_strides, scale_strides, pad_strides, NOPE, ROPE, PAD, GROUP, GROUPS)
    tl.store(back + token.to(tl.int64) * (NOPE + ROPE) + offs, stored, mask=in_width)


@triton.jit  # type: ignore[untyped-decorator]
def store_entry(  # type: ignore[no-untyped-def]
    vector, slot, entry_index, field, rope, scale, pad, field_strides, rope_strides, scale_strides,
    pad_strides,
    KIND: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, PAD: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):
    """Stores a vector (groups, GROUP) in fp32 as an entry, and returns it as stored."""
    offs = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    offsets, valid = slot * field_strides[0] + entry_index * field_strides[1] + offs, slot >= 0
    if KIND == 5:
        return store_joined(
            vector, slot, entry_index, field, rope, scale, pad, field_strides, rope_strides,
            scale_strides, pad_strides, NOPE, ROPE, PAD, GROUP, GROUPS)
    elif KIND == 4:
        scale += slot * scale_strides[0] + entry_index * scale_strides[1]
        return store_scaled(vector, field, offsets, valid & (offs < NOPE), scale, valid,
                            NOPE, GROUPS, GROUP)
    else:
        return store_plain(vector, field, offsets, valid & (offs < NOPE), KIND)
# fmt: on
