"""`fp8`: which bytes are rounded, how far they are off, and that all else stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Reuse, catalog
from kvtide.spec.families import KVDType
from kvtide.storage import CorruptObjectError, ObjectFormat, object_formats, open_store
from kvtide.storage.codec import CodedStore, coded_object, fp8_codec, fp8_rows
from kvtide.storage.codec.fp8_codec import Fp8, byte_runs, rounded_vector
from kvtide.storage.codec.fp8_rows import Kind
from kvtide.storage.trial import in_memory, memories
from kvtide.tiers.layout import Arrangement, Layout
from tests.cache.memories import ALL_MEMORIES

SPACE, KEY = b"s" * 32, b"k" * 32
TORCH = {Kind.BF16: torch.bfloat16, Kind.FP16: torch.float16, Kind.FP32: torch.float32}
DTYPES = {Kind.BF16: DType.BF16, Kind.FP16: DType.FP16, Kind.FP32: DType.FP32}
KINDS = list(TORCH)


def rounded(values: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Vectors (rows, elements), rounded and back."""
    raw = values.to(TORCH[kind]).contiguous().view(torch.uint8).numpy().reshape(-1)
    elements = values.shape[1]
    coded = np.empty(fp8_rows.rounded_bytes(len(raw), kind, elements), np.uint8)
    back = np.empty_like(raw)
    fp8_rows.encode(raw, kind, elements, coded)
    fp8_rows.decode(coded, kind, elements, back)
    return torch.from_numpy(back).view(TORCH[kind]).view(values.shape)


def is_near(values: torch.Tensor, kind: Kind) -> bool:
    """Within half a step of three bits of mantissa, or of the smallest number of the vector."""
    exact = values.to(TORCH[kind]).double()
    off = (rounded(values, kind).double() - exact).abs()
    largest = exact.abs().amax(1, keepdim=True)
    return bool((off <= exact.abs() / 16 + largest * 2.0**-14).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("elements", [8, 64, 576])
def test_numbers_of_any_size_are_off_by_a_sixteenth_at_most(kind: Kind, elements: int) -> None:
    made = torch.Generator().manual_seed(elements)
    values = torch.randn(300, elements, generator=made)
    sizes = torch.linspace(-10, 12 if kind is Kind.FP16 else 100, 300).exp2()[:, None]
    assert is_near(values * sizes, kind)
    assert is_near(values * torch.rand(300, elements, generator=made).mul(-12).exp2(), kind)


@settings(deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(
        st.lists(st.floats(-1e4, 1e4, width=16), min_size=8, max_size=8), min_size=1, max_size=6
    ),
)
def test_any_numbers_are_near_and_rounding_them_again_changes_none(
    kind: Kind, rows: list[list[float]]
) -> None:
    values = torch.tensor(rows)
    assert is_near(values, kind)
    once = rounded(values, kind)
    if kind is not Kind.FP16:  # Whose subnormals have fewer bits.
        assert torch.equal(rounded(once, kind), once)
    there = values.to(TORCH[kind]) != 0
    assert torch.equal(once.sign()[there], values.to(TORCH[kind]).sign()[there])


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_and_the_smallest_numbers_stay_finite_and_zeros_stay_zeros(kind: Kind) -> None:
    limits = torch.finfo(TORCH[kind])
    values = torch.zeros(4, 8)
    values[0], values[1, 0] = limits.max, limits.tiny
    values[2] = torch.tensor([limits.max, *[1.0] * 7])
    found = rounded(values, kind)
    assert found.isfinite().all() and (found[3] == 0).all()
    assert (found[0] >= limits.max * 0.93).all() and float(found[1, 0]) > 0


def test_what_is_no_finite_number_is_seen() -> None:
    for kind in KINDS:
        for wrong in (float("nan"), float("inf"), -float("inf")):
            values = torch.ones(2, 8)
            raw = values.to(TORCH[kind]).view(torch.uint8).numpy().reshape(-1)
            assert fp8_rows.is_finite(raw, kind)
            values[1, 3] = wrong
            assert not fp8_rows.is_finite(
                values.to(TORCH[kind]).view(torch.uint8).numpy().reshape(-1), kind
            )


# -- which bytes ----------------------------------------------------------------------------


def memory(kind: Kind = Kind.BF16, page: int = 16) -> ModelMemory:
    """A history with index keys, and states beside it."""
    dtype = DTYPES[kind]
    heads = Entry(tuple(Field(name, (2, 16), dtype) for name in ("k", "v")))
    state = Entry((Field("state", (2, 16, 16), DType.FP32),))
    pools = (
        PoolSpec("kv", (0, 2), heads),
        PoolSpec("index", (0, 2), Entry((Field("index_key", (24,), dtype),)), follows="kv"),
        PoolSpec("state", (1,), state, tail_entries=1, reuse=Reuse(1, page)),
    )
    return ModelMemory("mixed", page, pools, layers=3)


@pytest.mark.parametrize("name", ALL_MEMORIES)
def test_rows_of_an_object_stand_in_canonical_order(name: str) -> None:
    found = ALL_MEMORIES[name].at_rest
    arrangement = Arrangement(
        found, {anchor.name: 1 for anchor in found.anchors}, Layout.PAGE_FIRST
    )
    for one in object_formats(found, SPACE).values():
        rows = [row for row in arrangement.rows(one.anchor) if row.pool in one.pools]
        assert [(pool.name, size) for pool, size in one.rows] == [
            (row.pool, row.bytes) for row in rows
        ]
        assert sum(part.bytes for part in byte_runs(one)) == one.bytes


ROUNDED: dict[tuple[str, KVDType], set[str]] = {
    ("qwen3-8b", KVDType.BF16): {"kv"},
    ("qwen3-8b", KVDType.FP8): set(),
    ("deepseek-v3.2", KVDType.BF16): {"kv"},
    ("deepseek-v4-flash", KVDType.FP8): set(),
    ("deepseek-v4-flash", KVDType.BF16): {"c4", "c128", "swa"},
}


@pytest.mark.parametrize(("model", "dtype"), ROUNDED, ids=str)
def test_keys_and_values_are_rounded_and_index_keys_states_and_packed_pools_are_not(
    model: str, dtype: KVDType
) -> None:
    pools = catalog.resolve(model, kv_dtype=dtype).at_rest.pools
    assert {pool.name for pool in pools if rounded_vector(pool)} == ROUNDED[model, dtype]


def test_states_and_index_keys_beside_keys_and_values_are_not_rounded() -> None:
    assert {pool.name for pool in memory().pools if rounded_vector(pool)} == {"kv"}


# -- objects --------------------------------------------------------------------------------


def an_object(one: ObjectFormat, spoil: Callable[[np.ndarray], None] | None = None) -> bytearray:
    found = np.zeros(one.bytes, np.uint8)
    made = torch.Generator().manual_seed(3)
    at = 0
    for pool, size in one.rows:
        dtype = getattr(torch, pool.entry.fields[0].dtype.torch_name)
        values = torch.randn(size // dtype.itemsize, generator=made).to(dtype)
        found[at : at + size] = values.view(torch.uint8).numpy()
        at += size
    if spoil is not None:
        spoil(found)
    whole = bytearray(found.tobytes())
    one.seal(memoryview(whole), KEY)
    return whole


def through(codec: Fp8, whole: bytearray, reader: Fp8) -> bytearray:
    coded = memoryview(bytearray(coded_object.bound(codec, len(whole))))
    size = coded_object.encode(codec, KEY, memoryview(whole), coded)
    target = bytearray(len(whole))
    assert coded_object.decode(reader, KEY, coded[:size], memoryview(target)) == len(whole)
    return target


def knowing(*formats: ObjectFormat) -> Fp8:
    codec = Fp8()
    codec.expect(formats)
    return codec


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_comes_back_sealed_with_its_keys_and_values_rounded(kind: Kind) -> None:
    formats = object_formats(memory(kind), SPACE)
    codec = knowing(*formats.values())
    for name, one in formats.items():
        whole = an_object(one)
        found = through(codec, whole, Fp8())  # A reader need not know the rows.
        one.check(memoryview(found), KEY)
        if name == "state":
            assert found == whole
            continue
        assert found != whole
        at = 0
        for pool, size in one.rows:
            here, there = (memoryview(each)[at : at + size] for each in (whole, found))
            if pool.name == "kv":
                before, after = (
                    torch.frombuffer(each, dtype=TORCH[kind]).float() for each in (here, there)
                )
                assert float(((after - before).abs() / before.abs().clamp(min=0.05)).max()) < 0.07
            else:
                assert here == there
            at += size
        assert through(codec, found, Fp8()) == found, "rounded numbers are rounded again"


def test_objects_that_are_unknown_or_not_finite_come_back_as_they_were() -> None:
    one = object_formats(memory(), SPACE)["kv"]

    def spoil(found: np.ndarray) -> None:
        found.view(np.uint16)[5] = 0x7FC0

    for codec, whole in ((knowing(one), an_object(one, spoil)), (Fp8(), an_object(one))):
        found = through(codec, whole, Fp8())
        assert found == whole
        one.check(memoryview(found), KEY)


def test_padding_behind_a_rows_vectors_is_not_taken_for_one() -> None:
    pool = PoolSpec("kv", (0, 1), Entry((Field("kv", (12,), DType.BF16),)))
    odd = ModelMemory("odd", 3, (pool,), layers=2)
    one = object_formats(odd, SPACE)["kv"]
    assert [part[1:] for part in byte_runs(one)] == [
        (Kind.BF16, 12), (Kind.PLAIN, 0), (Kind.BF16, 12), (Kind.PLAIN, 0)
    ]  # fmt: skip
    found = through(knowing(one), an_object(one), Fp8())
    one.check(memoryview(found), KEY)


def test_wrong_runs_are_refused() -> None:
    one = object_formats(memory(), SPACE)["kv"]
    whole = np.frombuffer(an_object(one), np.uint8)
    codec = knowing(one)
    coded = np.empty(codec.bound(len(whole)), np.uint8)
    coded = coded[: codec.encode(whole, coded)]
    target = np.empty(len(whole), np.uint8)
    codec.decode(coded, target)
    refused = 0
    for at in range(4 + 16 * len(byte_runs(one))):
        wrong = coded.copy()
        wrong[at] ^= 0x41
        try:
            codec.decode(wrong, target)
        except CorruptObjectError:
            refused += 1
    assert refused > 4
    with pytest.raises(CorruptObjectError):
        codec.decode(coded[:3], target[:100])


def test_rounded_pages_take_less_than_half_the_bytes() -> None:
    one = object_formats(memory(page=256), SPACE)["kv"]
    store = open_store("memory:?codec=fp8", SPACE)
    assert isinstance(store, CodedStore) and store.codec.lossy
    store.expect([one])
    whole = an_object(one)
    assert store.write([KEY], in_memory({KEY: bytes(whole)})) == [True]
    assert store.coded_bytes["store"] < 0.62 * one.bytes  # Index keys stay as they are.
    (target,) = memories([one.bytes])
    assert store.read([KEY], [target]) == [one.bytes]
    one.check(target, KEY)
    store.close()


def test_runs_that_save_nothing_are_not_named() -> None:
    pool = PoolSpec("kv", (0,), Entry((Field("kv", (8,), DType.BF16),)))
    one = object_formats(ModelMemory("tiny", 1, (pool,), layers=1), SPACE)["kv"]
    assert not fp8_codec._worth_it(byte_runs(one))
    whole = an_object(one)
    assert through(knowing(one), whole, Fp8()) == whole
