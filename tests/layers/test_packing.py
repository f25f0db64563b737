"""Packed entries: the bytes of a slow encoder that knows nothing of torch, and back."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvtide.layers import ForwardPass, Place, Rows, Step
from kvtide.layers.packing import Packing, packing, stored
from kvtide.layers.reference.kv_write import kv_write
from kvtide.spec import DType, Encoding, Entry, Field, ModelMemory, PoolSpec, Reuse, SpecError
from kvtide.spec.config import Config
from kvtide.spec.families.pool_parts import KVDType, latent_entry, packed, scaled
from kvtide.tiers import Arrangement, Buffers, Layout

PACKED = packed(512, 64, KVDType.FP8)
INDEX = scaled("index_key", 128, KVDType.FP8)
SHORT = packed(120, 16, KVDType.FP8)
"""104 values in e4m3: a group of 64 and one of 40."""
RAGGED = scaled("latent", 300, KVDType.FP8)
VECTORS = {"packed": PACKED, "index": INDEX, "short": SHORT, "ragged": RAGGED}
every_vector = pytest.mark.parametrize("name", VECTORS)

FP32_MAX = float(torch.finfo(torch.float32).max)


# -- the slow encoder --------------------------------------------------------------------------


def e4m3(code: int) -> float:
    """What a byte stands for: a sign, four bits of exponent, three of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return -size if code & 128 else size


POSITIVE = [e4m3(code) for code in range(127)]
MIDPOINTS = [(a + b) / 2 for a, b in pairwise(POSITIVE)]


def nearest(value: float) -> int:
    """The byte whose value is nearest, of two the even one; it saturates."""
    size = min(abs(value), 448.0)
    best = min(range(127), key=lambda code: (abs(POSITIVE[code] - size), code & 1))
    return best | (128 if math.copysign(1, value) < 0 else 0)


def fp32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def bf16_bytes(value: float) -> bytes:
    """Rounded to the nearest, of two the even one: the upper half of an fp32."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return struct.pack("<H", bits + 0x7FFF + (bits >> 16 & 1) >> 16)


def largest_of(group: Sequence[float]) -> float:
    return max(fp32(1e-4), *(abs(value) for value in group))


def slow_packed(values: Sequence[float], nope: int, pad: int) -> bytes:
    codes, scales = b"", b""
    for start in range(0, nope, 64):
        group = values[start : min(start + 64, nope)]
        exponent = next(e for e in range(-40, 128) if largest_of(group) <= math.ldexp(448, e))
        codes += bytes(nearest(math.ldexp(value, -exponent)) for value in group)
        scales += bytes([exponent + 127])
    return codes + b"".join(map(bf16_bytes, values[nope:])) + scales + bytes(pad)


def slow_scaled(values: Sequence[float]) -> bytes:
    """A quotient of two fp32 numbers is the same rounded from fp64: that has bits enough."""
    codes, scales = b"", b""
    for start in range(0, len(values), 128):
        group = values[start : start + 128]
        scale = fp32(largest_of(group) / 448)
        codes += bytes(nearest(fp32(value / scale)) for value in group)
        scales += struct.pack("<f", scale)
    return codes + scales


def slow(entry: Entry, values: Sequence[float]) -> bytes:
    by_name = {field.name: field.shape[0] for field in entry.fields}
    if entry.encoding is Encoding.JOINED:
        return slow_packed(values, by_name["nope"], by_name.get("pad", 0))
    return slow_scaled(values)


# -- rows to encode ----------------------------------------------------------------------------


def width_of(entry: Entry) -> int:
    (logical,) = (part.logical for part in packing(entry).parts)
    assert logical.dtype is DType.FP32
    return logical.shape[0]


def rows(width: int, seed: int = 3) -> Tensor:
    """Random ones of many sizes, and those at which something might go wrong."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(24, width, generator=generator)
    sizes = torch.randint(-40, 40, (24, 1), generator=generator)
    spread = torch.randint(-30, 10, (8, width), generator=generator)
    found = [noise, noise * 2.0**sizes, noise[:8] * 2.0**spread]
    edges = [0.0, -0.0, 1e-4, 1e-40, -1e-45, 2.0**-126, 1.0, 448.0, 464.0, 1e30, 448 * 2.0**119]
    edges += [448 * 2.0**k for k in (-30, -22, -21, 3, 40)] + [2.0**k for k in (-14, -13, 0, 7)]
    for edge in edges:
        near = torch.tensor([edge, edge, edge], dtype=torch.float32)
        near[1], near[2] = near[1].nextafter(torch.tensor(-9e38)), near[2].nextafter(-near[2])
        for value in near:
            row = noise[0] * value.abs() / (noise[0].abs().max() * 1.001)
            row[width // 3] = value
            found.append(row[None])
            found.append(torch.full((1, width), float(value)))
    # In the first group of a row whose scale is 1, every value of e4m3 and every midpoint.
    grid = torch.tensor(MIDPOINTS)
    for part in torch.cat([torch.tensor(POSITIVE), grid, -grid]).split(60):
        row = torch.zeros(width)
        row[: len(part)], row[61] = part, 448.0
        found.append(row[None])
    return torch.cat(found).clamp(-448 * 2.0**119, 448 * 2.0**119)


def together(entry: Entry, fields: dict[str, Tensor]) -> Tensor:
    """An entry's bytes, in the order of its fields."""
    parts = [fields[field.name].contiguous().view(torch.uint8) for field in entry.fields]
    return torch.cat(parts, dim=-1)


def pack(entry: Entry, values: Tensor) -> dict[str, Tensor]:
    return packing(entry).pack({packing(entry).parts[0].logical.name: values})


def unpack(entry: Entry, fields: dict[str, Tensor]) -> Tensor:
    (value,) = packing(entry).unpack(fields).values()
    return value


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


# -- bytes -------------------------------------------------------------------------------------


def test_entries_have_the_published_sizes_and_order() -> None:
    sizes = [(field.name, field.bytes) for field in PACKED.fields]
    assert sizes == [("nope", 448), ("rope", 128), ("scale", 7), ("pad", 1)]
    assert [(field.name, field.bytes) for field in INDEX.fields] == [
        ("index_key", 128),
        ("index_key_scale", 4),
    ]
    for entry, size in ((PACKED, 584), (INDEX, 132)):
        row = torch.ones(1, width_of(entry))
        assert together(entry, pack(entry, row)).shape == (1, entry.bytes) == (1, size)


@pytest.mark.quick(name=["short"])
@every_vector
def test_bytes_are_those_of_the_slow_encoder(name: str, device: torch.device) -> None:
    entry = VECTORS[name]
    values = rows(width_of(entry))
    found = together(entry, pack(entry, values.to(device))).cpu()
    for row, bytes_of_row in zip(values.tolist(), found, strict=True):
        assert bytes(bytes_of_row.tolist()) == slow(entry, row)


@every_vector
def test_bf16_is_packed_as_the_same_numbers_in_fp32(name: str, device: torch.device) -> None:
    entry = VECTORS[name]
    values = rows(width_of(entry)).to(device).bfloat16()
    ours, theirs = pack(entry, values), pack(entry, values.float())
    assert torch.equal(together(entry, ours), together(entry, theirs))


@every_vector
def test_a_rows_bytes_do_not_depend_on_the_rows_beside_it(name: str, device: torch.device) -> None:
    entry = VECTORS[name]
    values = rows(width_of(entry)).to(device)
    whole = together(entry, pack(entry, values))
    for start, count in ((0, 1), (3, 1), (5, 7), (2, 33), (1, len(values) - 1)):
        part = together(entry, pack(entry, values[start : start + count]))
        assert torch.equal(part, whole[start : start + count])
    sliced = torch.stack([values, values], dim=-1)[..., 1]
    assert torch.equal(together(entry, pack(entry, sliced)), whole)
    shaped = together(entry, pack(entry, values[:12].view(3, 4, -1)))
    assert torch.equal(shaped.flatten(0, 1), whole[:12])


def test_the_cast_to_e4m3_rounds_to_the_nearest_and_of_two_to_the_even_one(
    device: torch.device,
) -> None:
    """Wherever in a tensor a number stands, since the last few may take another path."""
    values = torch.tensor([*POSITIVE, *MIDPOINTS, 2.0**-11, 1e-45])
    values = torch.cat([values, values * (1 + 2.0**-23), values * (1 - 2.0**-23)]).clamp(max=448)
    values = torch.cat([values, -values])
    wanted = torch.tensor([nearest(value) for value in values.tolist()], dtype=torch.uint8)
    for first in range(0, 40):
        cast = values[first:].to(device).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(cast.cpu(), wanted[first:])


def test_eight_bits_saturate() -> None:
    value = torch.tensor([1e4, -math.inf, 0.3])
    assert stored(value, torch.float8_e4m3fn).float().tolist() == [448.0, -448.0, 0.3125]


# -- values ------------------------------------------------------------------------------------


@every_vector
def test_what_comes_out_is_near_what_went_in_and_finite(name: str, device: torch.device) -> None:
    entry = VECTORS[name]
    values = rows(width_of(entry)).to(device)
    back = unpack(entry, pack(entry, values))
    assert back.dtype is torch.float32 and bool(back.isfinite().all())
    group = 64 if entry.encoding is Encoding.JOINED else 128
    for start in range(0, values.shape[1], group):
        ours, theirs = back[:, start : start + group], values[:, start : start + group]
        largest = theirs.abs().amax(-1, keepdim=True).clamp(min=1e-4)
        assert bool(((ours - theirs).abs() <= theirs.abs() / 16 + largest / 2**17).all())


@every_vector
def test_infinities_saturate_and_a_nan_stays_alone(name: str, device: torch.device) -> None:
    entry, logical = VECTORS[name], width_of(VECTORS[name])
    values = torch.ones(3, logical, device=device)
    values[0, 3], values[1, 3], values[2, 3] = math.inf, -FP32_MAX, math.nan
    back = unpack(entry, pack(entry, values))
    assert back[0, 3] == -back[1, 3] == 448 * 2.0**119
    assert back[2, 3].isnan()
    assert not back[2, 4:].isnan().any() and torch.equal(back[2, 4:20], values[2, 4:20])


@pytest.mark.parametrize("name", ["packed", "short"])
def test_powers_of_two_keep_values_when_packed_again(name: str, device: torch.device) -> None:
    """And bytes, but for the groups whose largest value was rounded to half of the range."""
    entry = VECTORS[name]
    first = pack(entry, torch.cat([rows(width_of(entry), seed) for seed in range(4)]).to(device))
    values = unpack(entry, first)
    second = pack(entry, values)
    assert same_bits(unpack(entry, second), values)
    finer = first["scale"].view(torch.uint8).int() - second["scale"].view(torch.uint8).int()
    largest = first["nope"].float().abs().split(64, dim=-1)
    halves = torch.stack([part.amax(-1) == 224 for part in largest], dim=-1)
    above_least = first["scale"].view(torch.uint8) > 127 - 22
    assert torch.equal(finer, (halves & above_least).int()) and bool(finer.any())
    same = ~finer.bool().any(-1)
    assert torch.equal(together(entry, second)[same], together(entry, first)[same])
    third = pack(entry, unpack(entry, second))
    assert torch.equal(together(entry, third), together(entry, second))


@pytest.mark.parametrize("name", ["index", "ragged"])
def test_scales_in_fp32_keep_bytes_when_packed_again(name: str, device: torch.device) -> None:
    entry = VECTORS[name]
    values = torch.cat([rows(width_of(entry), seed) for seed in range(4)]).to(device)
    first = pack(entry, values)
    second = pack(entry, unpack(entry, first))
    assert torch.equal(together(entry, first), together(entry, second))


def test_a_scale_in_fp32_comes_back_from_the_largest_value_it_stands_for() -> None:
    """Of every significand there is, which is all that matters to a quotient."""
    largest = torch.arange(127 << 23, 128 << 23, dtype=torch.int32).view(torch.float32)
    maximum = torch.tensor(448.0)
    scale = largest / maximum
    assert torch.equal(scale * maximum / maximum, scale)


# -- entries of several fields -----------------------------------------------------------------


def names_of(found: Packing) -> list[str]:
    return [part.logical.name for part in found.parts]


def test_plain_fields_stay_as_they_are() -> None:
    entry = Entry((Field("k", (2, 3), DType.BF16), Field("scale", (3,), DType.FP32)))
    found = packing(entry)
    assert names_of(found) == ["k", "scale"] and found.find("k") == entry.fields[0]
    value = torch.randn(5, 2, 3)
    kept = found.pack({"k": value})
    assert kept.keys() == {"k"} and torch.equal(kept["k"], value.bfloat16())
    assert found.unpack(kept, "k")["k"] is kept["k"]
    assert torch.equal(found.rounded("k", value), value.bfloat16().float())


@pytest.mark.parametrize("entry", [PACKED, INDEX], ids=["joined", "scaled"])
def test_names_do_not_make_an_entry_packed(entry: Entry) -> None:
    found = packing(replace(entry, encoding=Encoding.PLAIN))
    assert tuple(part.logical for part in found.parts) == entry.fields


def test_a_latent_with_its_scales_lies_beside_a_plain_rotary_key() -> None:
    config = Config("toy", {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    found = packing(latent_entry(config, KVDType.FP8))
    assert names_of(found) == ["latent", "rope"]
    fields = found.pack({"latent": torch.randn(4, 512), "rope": torch.randn(4, 64)})
    assert [fields[name].dtype for name in ("latent", "latent_scale", "rope")] == [
        torch.float8_e4m3fn,
        torch.float32,
        torch.bfloat16,
    ]
    assert [value.dtype for value in found.unpack(fields).values()] == [
        torch.float32,
        torch.bfloat16,
    ]


def test_a_field_that_is_not_there_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"no field nope among \['kv'\]"):
        packing(PACKED).pack({"nope": torch.ones(448)})
    with pytest.raises(AssertionError, match="100 values for a field of 128"):
        packing(INDEX).pack({"index_key": torch.ones(100)})


# -- in pages ----------------------------------------------------------------------------------

HISTORY = PoolSpec("c4", (0, 1), PACKED, tokens_per_entry=2, follows="kv")
KEYS = PoolSpec("c4_index", (0, 1), INDEX, tokens_per_entry=2, follows="kv")
WINDOW = PoolSpec("swa", (0, 1, 2), PACKED, reuse=Reuse(reach=3))
MEMORY = ModelMemory("toy", 8, (PoolSpec("kv", (), Entry(())), HISTORY, KEYS, WINDOW), 3)
PLACES = {pool.name: Place(pool, 1) for pool in (HISTORY, KEYS, WINDOW)}


def forward_pass(buffers: Buffers, past: int, new: int, slots: list[int]) -> ForwardPass:
    tables = {name: torch.tensor(slots, device=buffers.data.device) for name in ("kv", "swa")}
    at = torch.arange(past, past + new, device=buffers.data.device)
    rows = (Rows(0, new, past, tables),)
    return ForwardPass(Step(at, at, rows, 8, buffers.view, lambda layer: None))


@pytest.mark.parametrize("layout", list(Layout), ids=lambda one: one.value)
def test_packed_entries_come_back_from_pages(layout: Layout, device: torch.device) -> None:
    """As they were kept, byte for byte in their slots, whatever lay there before."""
    arrangement = Arrangement(MEMORY, {"kv": 6, "swa": 6}, layout)
    block = torch.full((arrangement.bytes,), 0xFF, dtype=torch.uint8, device=device)
    buffers, slots, tokens = Buffers(arrangement, block), [4, 1, 5], 22
    generator = torch.Generator().manual_seed(1)
    for name, place in PLACES.items():
        field = place.field("index_key" if name == "c4_index" else "kv")
        count = tokens // place.pool.tokens_per_entry
        values = torch.randn((count, *field.shape), generator=generator).to(device)
        kept = kv_write(forward_pass(buffers, 0, tokens, slots), place, {field.name: values})
        assert kept.keys() == {field.name}
        run = forward_pass(buffers, tokens, 1, slots)
        assert torch.equal(run.rounded(place, field.name, values), kept[field.name])
        first = 19 if name == "swa" else 0
        back = run.read_entries(place, run.sequences[0], first)
        assert back.keys() == kept.keys()
        assert same_bits(back[field.name], kept[field.name][first // place.pool.tokens_per_entry :])
        wanted = together(place.pool.entry, pack(place.pool.entry, values))
        row = buffers.rows(place.pool.name, 1)[slots[-1]]
        size, last = place.pool.entry.bytes, 21 // place.pool.tokens_per_entry
        at = last % (MEMORY.page_tokens // place.pool.tokens_per_entry)
        assert torch.equal(row[at * size : (at + 1) * size], wanted[last])


def test_places_are_found_by_the_names_that_layers_know() -> None:
    assert Place.holding("kv", MEMORY, 1).pool is HISTORY
    assert Place.holding("kv", MEMORY, 2).pool is WINDOW
    assert Place.holding("index_key", MEMORY, 0).field("index_key").shape == (128,)
    assert Place.holding("kv", MEMORY, 0).field("kv") == Field("kv", (512,), DType.FP32)
    for stored_only in ("nope", "scale", "pad", "index_key_scale"):
        with pytest.raises(SpecError, match=f"layer 0 has no pool with a field {stored_only}"):
            Place.holding(stored_only, MEMORY, 0)


def test_the_slow_encoder_decodes_what_torch_decodes() -> None:
    order = random.Random(2).sample(range(256), 256)
    theirs = torch.tensor(order, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    for code, value in zip(order, theirs, strict=True):
        assert math.isnan(value) if code & 127 == 127 else value == e4m3(code)
