"""What layers see of an entry, and the fields in which a pool stores it.

A declaration names the stored fields and their encoding. Some encodings store one vector in several
fields, in eight bits with scales; layers see the vector under one name, and never its parts.

    JOINED  kv  nope | rope | scale | pad   a part in e4m3 with a power of two for every 64 values,
                                            a part in bf16, and zeros up to a multiple of 8 bytes
    SCALED  X   X | X_scale                 e4m3, with an fp32 scale for every 128 values
            Y   Y                           beside it, a field without scales: as in a plain entry
    PLAIN   X   X                           as it is, in the pool's dtype

A packed vector is unpacked to fp32. The last group of a vector may be shorter than the others.

What always holds:
- An entry's bytes depend on its own values alone, not on other rows or the device: every operation
  is exact, or rounded once as IEEE prescribes.
- In eight bits a finite value stays finite, and an infinity saturates. A NaN stays one, and affects
  no other value.
- Packing an unpacked vector gives the same values, and with fp32 scales the same bytes. With powers
  of two, a group whose largest value was rounded down to half of the range (224) gets the next
  finer scale the first time; after that its bytes stay the same too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtide.spec import DType, Encoding, Entry, Field
from kvtide.spec.pool import JOINED_GROUP, SCALED_GROUP

Fields = dict[str, Tensor]

_E4M3_MAX = 448.0
_E4M3_MAX_EXPONENT, _E4M3_MAX_MANTISSA = 9, 0.875
"""448 is 0.875 · 2⁹."""
_MIN_LARGEST = 1e-4
"""A lower bound of the largest value of a group, so that no scale is zero."""
_MAX_VALUE = _E4M3_MAX * 2.0**119
"""Larger values saturate here: the most that both a group and fp32 can hold."""
_FP32_BIAS, _FP32_MANTISSA_BITS = 127, 23


class EntryPart(Protocol):
    """One vector that layers see, and the fields that it is stored in."""

    @property
    def logical(self) -> Field: ...

    def pack(self, value: Tensor) -> Fields: ...

    def unpack(self, fields: Mapping[str, Tensor]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Packing:
    """An entry as layers see it."""

    parts: tuple[EntryPart, ...]

    def find(self, name: str) -> Field | None:
        return next((part.logical for part in self.parts if part.logical.name == name), None)

    def pack(self, values: Mapping[str, Tensor]) -> Fields:
        """Everything that is stored of these values, by stored field."""
        fields: Fields = {}
        for name, value in values.items():
            fields |= self._part(name).pack(value)
        return fields

    def unpack(self, fields: Mapping[str, Tensor], *names: str) -> Fields:
        """What was packed, by logical field: all of them, or these."""
        wanted = [part for part in self.parts if not names or part.logical.name in names]
        return {part.logical.name: part.unpack(fields) for part in wanted}

    def rounded(self, name: str, value: Tensor) -> Tensor:
        """The value, rounded as it is stored."""
        part = self._part(name)
        return part.unpack(part.pack(value)).to(value.dtype)

    def _part(self, name: str) -> EntryPart:
        part = next((part for part in self.parts if part.logical.name == name), None)
        assert part is not None, f"no field {name} among {[p.logical.name for p in self.parts]}"
        return part


@functools.cache
def packing(entry: Entry) -> Packing:
    """The packing of an entry, by its encoding."""
    if entry.encoding is Encoding.JOINED:
        return Packing((_Joined(*entry.fields),))
    scales = entry.scales
    vectors = (field for field in entry.fields if field not in scales.values())
    return Packing(
        tuple(
            _Scaled(field, scales[field.name]) if field.name in scales else _Plain(field)
            for field in vectors
        )
    )


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in a pool's dtype. Eight bits saturate: an infinity would spoil a whole page."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        value = value.clamp(-limit, limit)
    return value.to(dtype)


def plain(field: Tensor) -> Tensor:
    """The same memory in a dtype that torch can index: not all of eight bits are."""
    return field.view(torch.uint8) if field.dtype.itemsize == 1 else field


def at_slots(field: Tensor, slots: Tensor) -> Tensor:
    """A stored field of these slots."""
    return plain(field).index_select(0, slots).view(field.dtype)


# -- the kinds ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plain:
    """Stored as it is."""

    logical: Field

    def pack(self, value: Tensor) -> Fields:
        return {self.logical.name: stored(value, _torch(self.logical.dtype))}

    def unpack(self, fields: Mapping[str, Tensor]) -> Tensor:
        return fields[self.logical.name]


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A vector in e4m3, and the scale of each group."""

    values: Field
    scale: Field

    @property
    def logical(self) -> Field:
        return replace(self.values, dtype=DType.FP32)

    def pack(self, value: Tensor) -> Fields:
        values = _bounded(value, self.values.shape[-1])
        largest = _largest(values, SCALED_GROUP)
        # A tensor, since a GPU multiplies with the reciprocal of a number.
        scale = largest / torch.full_like(largest, _E4M3_MAX)
        quantised = values / _spread(scale, values, SCALED_GROUP)
        return {
            self.values.name: stored(quantised, torch.float8_e4m3fn),
            self.scale.name: scale,
        }

    def unpack(self, fields: Mapping[str, Tensor]) -> Tensor:
        values = fields[self.values.name].float()
        return values * _spread(fields[self.scale.name], values, SCALED_GROUP)


@dataclass(frozen=True, slots=True)
class _Joined:
    """DeepSeek-V4's key and value in one: `nope` in e4m3 with powers of two, `rope` in bf16."""

    nope: Field
    rope: Field
    scale: Field
    padding: Field | None = None

    @property
    def logical(self) -> Field:
        return Field("kv", (self.nope.shape[0] + self.rope.shape[0],), DType.FP32)

    def pack(self, value: Tensor) -> Fields:
        nope, rope = value.split((self.nope.shape[0], self.rope.shape[0]), dim=-1)
        nope = _bounded(nope, self.nope.shape[0])
        exponents = _exponents(_largest(nope, JOINED_GROUP))
        divided = nope * _spread(_power_of_two(-exponents), nope, JOINED_GROUP)
        biased = (exponents + _FP32_BIAS).to(torch.uint8)
        fields = {
            "nope": stored(divided, torch.float8_e4m3fn),
            "rope": stored(rope, torch.bfloat16),
            "scale": biased.view(torch.float8_e8m0fnu),
        }
        if self.padding is not None:
            fields["pad"] = biased.new_zeros((*value.shape[:-1], *self.padding.shape))
        return fields

    def unpack(self, fields: Mapping[str, Tensor]) -> Tensor:
        nope = fields["nope"].float()
        nope = nope * _spread(fields["scale"].float(), nope, JOINED_GROUP)
        return torch.cat([nope, fields["rope"].float()], dim=-1)


# -- groups and their scales -------------------------------------------------------------------


def _bounded(values: Tensor, width: int) -> Tensor:
    assert values.shape[-1] == width, f"{values.shape[-1]} values for a field of {width}"
    return values.float().clamp(-_MAX_VALUE, _MAX_VALUE)


def _largest(values: Tensor, group: int) -> Tensor:
    """The largest magnitude of every group; a NaN does not count."""
    magnitudes = pad(values.abs().nan_to_num(0.0), (0, -values.shape[-1] % group))
    groups: Tensor = magnitudes.unflatten(-1, (-1, group))
    return groups.amax(-1).clamp(min=_MIN_LARGEST)


def _spread(scales: Tensor, values: Tensor, group: int) -> Tensor:
    """A scale for every value."""
    return scales.repeat_interleave(group, dim=-1)[..., : values.shape[-1]]


def _exponents(largest: Tensor) -> Tensor:
    """Of the least powers of two that bring these into the range of e4m3: ⌈log₂(x / 448)⌉."""
    mantissa, exponent = torch.frexp(largest)
    return exponent - _E4M3_MAX_EXPONENT + (mantissa > _E4M3_MAX_MANTISSA)


def _power_of_two(exponents: Tensor) -> Tensor:
    """As fp32, made of its bits: a power function need not be exact."""
    return (exponents.int() + _FP32_BIAS << _FP32_MANTISSA_BITS).view(torch.float32)


def _torch(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.torch_name)
    assert isinstance(found, torch.dtype)
    return found
