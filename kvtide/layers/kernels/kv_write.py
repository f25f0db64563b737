"""Entries into pages as device programs: packed and written at once, for all tokens of a step.

The bytes are those of `packing.pack`, which is why numbers are rounded here by their bits: so they
are the same on every device, and in an interpreter. A vector has one program per token; the slot
is looked up there, so nothing depends on which tokens are kept.
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
from kvtide.layers.kernels.jit import program
from kvtide.layers.packing import Fields
from kvtide.spec import Encoding
from kvtide.spec.pool import JOINED_GROUP, SCALED_GROUP

_AS_IS, _E4M3, _BF16, _CAST, _SCALED, _JOINED = range(6)
"""How numbers become what is stored: one by one, or groups of them."""
_FORMS = {torch.float8_e4m3fn: _E4M3, torch.bfloat16: _BF16}


def kv_write(run: ForwardPass, place: Place, entries: Mapping[str, Tensor]) -> Fields:
    """Writes one entry for every token, and returns them as `packing.unpack` gives them."""
    kept = {name: _room(place, name, value) for name, value in entries.items()}
    _write(run, place, entries, kept)
    return kept


def kv_write_only(run: ForwardPass, place: Place, entries: Mapping[str, Tensor]) -> None:
    """As `kv_write`, for those who read pages afterwards."""
    _write(run, place, entries, {})


def _room(place: Place, name: str, value: Tensor) -> Tensor:
    """The value itself, where it is stored as it is; else room for what it becomes."""
    field = place.field(name)
    dtype = getattr(torch, field.dtype.torch_name)
    if value.dtype is dtype and field in place.pool.entry.fields:
        return value
    return torch.empty(value.shape, dtype=dtype, device=value.device)


def _write(
    run: ForwardPass, place: Place, entries: Mapping[str, Tensor], kept: Mapping[str, Tensor]
) -> None:
    assert place.pool.tokens_per_entry == 1, f"pool {place.pool.name}: not an entry for every token"
    view = run.step.view(place.pool.name, place.layer)
    if place.pool.entry.encoding is Encoding.JOINED:
        _write_joined(run, place, view, entries["kv"], kept.get("kv"))
        return
    scales = place.pool.entry.scales
    vectors = []
    for name, value in entries.items():
        scale = view[scales[name].name] if name in scales else None
        back = kept.get(name)
        vectors.append(_Vector.of(value, view[name], scale, None if back is value else back))
    for first in range(0, len(vectors), 2):
        _write_vectors(run, place, vectors[first], vectors[min(first + 1, len(vectors) - 1)])


def bits(field: Tensor) -> Tensor:
    """The same memory, in a dtype of which programs know every bit."""
    if field.dtype.itemsize == 1:
        return field.view(torch.uint8)
    return field.view(torch.int16) if field.dtype is torch.bfloat16 else field


# -- vectors of their own, with or without scales ------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Vector:
    """A value (tokens, heads, dim) for a field, and what the program is told of both."""

    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]
    shape: tuple[int, int]
    kind: tuple[int, bool, bool]

    @classmethod
    def of(cls, value: Tensor, field: Tensor, scale: Tensor | None, back: Tensor | None) -> _Vector:
        value = value.flatten(2) if value.dim() > 3 else value
        value = value if value.dim() == 3 else value[:, None]
        value = value if value.stride(-1) == 1 else value.contiguous()
        raw, form = bits(field), _form(value, field)
        scales = raw if scale is None else scale
        tensors = (bits(value), raw, scales)
        strides = (*value.stride()[:2], *raw.stride()[:2], *scales.stride()[:2])
        kind = (form, scale is not None, back is not None)
        back = raw if back is None else bits(back)
        return cls((*tensors, back), strides, (value.shape[1], value.shape[2]), kind)


def _form(value: Tensor, field: Tensor) -> int:
    if value.dtype is field.dtype:
        return _AS_IS
    return _FORMS.get(field.dtype, _CAST)


def _write_vectors(run: ForwardPass, place: Place, one: _Vector, other: _Vector) -> None:
    batch = run.batch
    slots = batch.slots[place.anchor]
    widths = [vector.shape[0] * vector.shape[1] for vector in (one, other)]
    blocks = [power_of_two(width) for width in widths]
    rounded = [-(-block // SCALED_GROUP) for block in blocks]
    _vectors[(len(run.positions), 1 if one is other else 2)](
        *(batch.rows, batch.owners, slots, slots.stride(0)),
        *one.tensors, *one.strides, *other.tensors, *other.strides,
        PAGE=run.step.page_tokens,
        FORM=one.kind[0], SCALED=one.kind[1], BACK=one.kind[2],
        DIM=one.shape[1], WIDTH=widths[0], GROUPS=rounded[0],
        FORM2=other.kind[0], SCALED2=other.kind[1], BACK2=other.kind[2],
        DIM2=other.shape[1], WIDTH2=widths[1], GROUPS2=rounded[1],
        GROUP=SCALED_GROUP,
        num_warps=max(1, min(8, max(blocks) // 256)),
    )  # fmt: skip


# -- DeepSeek-V4's key and value in one ----------------------------------------------------------


def _write_joined(
    run: ForwardPass, place: Place, view: Mapping[str, Tensor], value: Tensor, back: Tensor | None
) -> None:
    batch, value = run.batch, value if value.stride(-1) == 1 else value.contiguous()
    slots = batch.slots[place.anchor]
    fields = joined_fields(view)
    _joined[(len(value),)](
        *(batch.rows, batch.owners, slots, slots.stride(0)),
        *(bits(value), value.stride(0), value if back is None else back),
        *fields,
        PAGE=run.step.page_tokens,
        BACK=back is not None,
        **joined_shape(place),
        num_warps=1,
    )


def joined_fields(view: Mapping[str, Tensor]) -> tuple[Tensor | int, ...]:
    """What `store_joined` takes of a view: each field and its strides."""
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


# -- any one vector, for programs that make what they write --------------------------------------


def entry_fields(place: Place, view: Mapping[str, Tensor]) -> tuple[Tensor | int, ...]:
    """What `store_entry` takes of a view of a pool with one vector."""
    if place.pool.entry.encoding is Encoding.JOINED:
        return joined_fields(view)
    name, scales = place.packing.parts[0].logical.name, place.pool.entry.scales
    scale = view[scales[name].name] if name in scales else view[name]
    return _fields(view[name], view[name], scale, scale)


def entry_shape(place: Place, view: Mapping[str, Tensor]) -> dict[str, int]:
    """Its constants: KIND is how it is stored, or one of two packings."""
    if place.pool.entry.encoding is Encoding.JOINED:
        return {"KIND": _JOINED, **joined_shape(place)}
    (part,) = place.packing.parts
    name, width = part.logical.name, part.logical.shape[0]
    groups = power_of_two(-(-width // SCALED_GROUP))
    kind = _SCALED if name in place.pool.entry.scales else _FORMS.get(view[name].dtype, _CAST)
    return {
        "KIND": kind,
        "NOPE": width,
        "ROPE": 0,
        "PAD": 0,
        "GROUP": SCALED_GROUP,
        "GROUPS": groups,
    }


def _fields(*fields: Tensor) -> tuple[Tensor | int, ...]:
    raw = [bits(field) for field in fields]
    return (*raw, *(stride for field in raw for stride in field.stride()[:2]))


# fmt: off
# -- numbers -------------------------------------------------------------------------------------


@triton.jit
def e4m3(x):  # type: ignore[no-untyped-def]
    """The byte that is nearest, of two the even one. It saturates; a NaN stays one."""
    raw = x.to(tl.int32, bitcast=True)
    size = raw & 0x7FFFFFFF
    # Below 2⁻⁶ there are only multiples of 2⁻⁹, which is what a sum with 2¹⁴ leaves.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < (121 << 23), small, tl.minimum(large, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((raw >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(code):  # type: ignore[no-untyped-def]
    """What a byte stands for, in fp32."""
    raw = code.to(tl.int32)
    size = ((raw & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    size = tl.where((raw & 0x7F) == 0x7F, 0x7FC00000, size.to(tl.int32, bitcast=True))
    return (size | ((raw & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def bf16(x):  # type: ignore[no-untyped-def]
    """The upper half of an fp32, of two the even one, as an integer."""
    raw = x.to(tl.int32, bitcast=True)
    upper = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    return tl.where((raw & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, upper).to(tl.int16)


@triton.jit
def from_bf16(code):  # type: ignore[no-untyped-def]
    return (code.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def widened(x):  # type: ignore[no-untyped-def]
    """In fp32, of what `bits` gives."""
    if x.dtype == tl.int16:
        return from_bf16(x)
    else:
        return x.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def bounded(x, MOST: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Within what a group can hold; a NaN stays one."""
    return tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))


@triton.jit
def largest(x):  # type: ignore[no-untyped-def]
    """The largest magnitude of every row; a NaN does not count."""
    sizes = tl.where(x == x, tl.abs(x), 0.0)
    return tl.maximum(tl.max(sizes, 1), 1e-4)


@triton.jit  # type: ignore[untyped-decorator]
def located(rows, owners, slots, slots_sequence, token, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """A token's slot, -1 for none, and its place in there."""
    owner = tl.load(owners + token)
    position = tl.load(rows + 3 * owner + 2) + token - tl.load(rows + 3 * owner)
    slot = tl.load(slots + owner * slots_sequence + position // PAGE)
    return slot.to(tl.int64), position % PAGE


# -- vectors -------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def store_plain(value, field, there, mask, FORM: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Stores numbers one by one, and gives what was written."""
    if FORM == 0:
        code = value
    elif FORM == 1:
        code = e4m3(widened(value))
    elif FORM == 2:
        code = bf16(widened(value))
    else:
        code = widened(value).to(field.dtype.element_ty)
    tl.store(field + there, code, mask=mask)
    return code


@triton.jit  # type: ignore[untyped-decorator]
def store_scaled(  # type: ignore[no-untyped-def]
    value, field, there, mask, scales, live,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
):
    """Packs a vector (groups, GROUP) in fp32, and gives it as it was written."""
    group = tl.arange(0, GROUPS)
    value = bounded(value, 2.9774707105582116e+38)
    scale = tl.div_rn(largest(value), tl.full([GROUPS], 448.0, tl.float32))
    code = e4m3(tl.div_rn(value, tl.broadcast_to(scale[:, None], [GROUPS, GROUP])))
    tl.store(scales + group, scale, mask=live & (group * GROUP < WIDTH))
    tl.store(field + there, code, mask=mask)
    return from_e4m3(code) * scale[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _vector(  # type: ignore[no-untyped-def]
    values, field, scales, back, token, slot, place,
    value_token, value_head, field_slot, field_entry, scale_slot, scale_entry,
    FORM: tl.constexpr, SCALED: tl.constexpr, BACK: tl.constexpr, DIM: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
):
    at = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside, live = at < WIDTH, slot >= 0
    here = token.to(tl.int64) * value_token + (at // DIM) * value_head + at % DIM
    value = tl.load(values + here, mask=inside, other=0)
    there = slot * field_slot + place * field_entry + at
    if SCALED:
        scales += slot * scale_slot + place * scale_entry
        kept = store_scaled(widened(value), field, there, live & inside, scales, live,
                            WIDTH, GROUPS, GROUP)
    else:
        kept = store_plain(value, field, there, live & inside, FORM)
    if BACK:
        tl.store(back + token.to(tl.int64) * WIDTH + at, kept, mask=inside)


@program("rows", "owners", "slots", "slots_sequence")  # type: ignore[untyped-decorator]
def _vectors(  # type: ignore[no-untyped-def]
    rows, owners, slots, slots_sequence,
    values, field, scales, back,
    value_token, value_head, field_slot, field_entry, scale_slot, scale_entry,
    values2, field2, scales2, back2,
    value_token2, value_head2, field_slot2, field_entry2, scale_slot2, scale_entry2,
    PAGE: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
    FORM: tl.constexpr, SCALED: tl.constexpr, BACK: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,  # noqa: N803
    FORM2: tl.constexpr, SCALED2: tl.constexpr, BACK2: tl.constexpr,  # noqa: N803
    DIM2: tl.constexpr, WIDTH2: tl.constexpr, GROUPS2: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0)
    slot, place = located(rows, owners, slots, slots_sequence, token, PAGE)
    if tl.program_id(1) == 0:
        _vector(values, field, scales, back, token, slot, place,
                value_token, value_head, field_slot, field_entry, scale_slot, scale_entry,
                FORM, SCALED, BACK, DIM, WIDTH, GROUPS, GROUP)
    else:
        _vector(values2, field2, scales2, back2, token, slot, place,
                value_token2, value_head2, field_slot2, field_entry2, scale_slot2, scale_entry2,
                FORM2, SCALED2, BACK2, DIM2, WIDTH2, GROUPS2, GROUP)


# -- joined --------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def store_joined(  # type: ignore[no-untyped-def]
    vector, slot, place, nope, rope, scale, pad,
    nope_slot, nope_entry, rope_slot, rope_entry, scale_slot, scale_entry, pad_slot, pad_entry,
    NOPE: tl.constexpr, ROPE: tl.constexpr, PAD: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, GROUPS: tl.constexpr,  # noqa: N803
):
    """Packs a vector (groups, GROUP) in fp32, and gives it as it was written."""
    group, column = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    at, live = group[:, None] * GROUP + column[None, :], slot >= 0
    plain = bounded(tl.where(at < NOPE, vector, 0.0), 2.9774707105582116e+38)
    raw = largest(plain).to(tl.int32, bitcast=True)
    exponent = (raw >> 23) - 135 + ((raw & 0x7FFFFF) > 0x600000).to(tl.int32)
    code = e4m3(plain * ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, None])
    upper = bf16(vector)
    nope += slot * nope_slot + place * nope_entry
    tl.store(nope + at, code, mask=live & (at < NOPE))
    rope += slot * rope_slot + place * rope_entry
    tl.store(rope + at - NOPE, upper, mask=live & (at >= NOPE) & (at < NOPE + ROPE))
    scale += slot * scale_slot + place * scale_entry
    tl.store(scale + group, (exponent + 127).to(tl.uint8), mask=live & (group * GROUP < NOPE))
    if PAD > 0:
        pad += slot * pad_slot + place * pad_entry
        tl.store(pad + column, tl.zeros([GROUP], tl.uint8), mask=live & (column < PAD))
    power = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(at < NOPE, from_e4m3(code) * power[:, None], from_bf16(upper))


@program("rows", "owners", "slots", "slots_sequence")  # type: ignore[untyped-decorator]
def _joined(  # type: ignore[no-untyped-def]
    rows, owners, slots, slots_sequence, values, value_token, back, nope, rope, scale, pad,
    nope_slot, nope_entry, rope_slot, rope_entry, scale_slot, scale_entry, pad_slot, pad_entry,
    PAGE: tl.constexpr, BACK: tl.constexpr,  # noqa: N803
    NOPE: tl.constexpr, ROPE: tl.constexpr, PAD: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, GROUPS: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0)
    slot, place = located(rows, owners, slots, slots_sequence, token, PAGE)
    at = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = at < NOPE + ROPE
    vector = tl.load(values + token.to(tl.int64) * value_token + at, mask=inside, other=0)
    kept = store_joined(
        widened(vector), slot, place, nope, rope, scale, pad,
        nope_slot, nope_entry, rope_slot, rope_entry, scale_slot, scale_entry, pad_slot, pad_entry,
        NOPE, ROPE, PAD, GROUP, GROUPS)
    if BACK:
        tl.store(back + token.to(tl.int64) * (NOPE + ROPE) + at, kept, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def store_entry(  # type: ignore[no-untyped-def]
    vector, slot, place, field, rope, scale, pad,
    field_slot, field_entry, rope_slot, rope_entry, scale_slot, scale_entry, pad_slot, pad_entry,
    KIND: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, PAD: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, GROUPS: tl.constexpr,  # noqa: N803
):
    """A vector (groups, GROUP) in fp32 into an entry that has no other; as it was written."""
    at = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there, live = slot * field_slot + place * field_entry + at, slot >= 0
    if KIND == 5:
        return store_joined(
            vector, slot, place, field, rope, scale, pad, field_slot, field_entry,
            rope_slot, rope_entry, scale_slot, scale_entry, pad_slot, pad_entry,
            NOPE, ROPE, PAD, GROUP, GROUPS)
    elif KIND == 4:
        scale += slot * scale_slot + place * scale_entry
        return store_scaled(vector, field, there, live & (at < NOPE), scale, live,
                            NOPE, GROUPS, GROUP)
    else:
        return store_plain(vector, field, there, live & (at < NOPE), KIND)
# fmt: on
