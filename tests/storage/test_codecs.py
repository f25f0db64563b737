"""Coded objects: the same bytes come back, and nothing that is not them is believed."""

from __future__ import annotations

import ctypes
import secrets
import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtide.cli.main import main
from kvtide.storage import CorruptObjectError, StoreError, conformance, open_store
from kvtide.storage.codec import CodedStore, coded_object, planes, zstd
from kvtide.storage.codec.coded_store import coded_space
from kvtide.storage.codec.coder import Lossless
from kvtide.storage.codec.opening import CODECS
from kvtide.storage.memory_store import MemoryStore
from kvtide.storage.store import CORRUPT, MISSING
from kvtide.storage.trial import in_memory, memories, new_keys, new_space
from kvtide.storage.url import StoreURL

KEY, SPACE = b"k" * 32, b"s" * 32
GUARD = 0xA5
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "uint8": torch.uint8,
}
SIZES = (1, 2, 3, 64, 100, 4096, 70_001, (1 << 20) - 1, 1 << 20, (1 << 20) + 6, 3 << 20)


def numbers(kind: str, size: int, seed: int = 0) -> bytes:
    """So many bytes of numbers like those of a KV cache."""
    made = torch.Generator().manual_seed(seed)
    dtype = DTYPES[kind]
    count = size // dtype.itemsize + 1
    values = torch.randn(count, generator=made) * torch.rand(count, generator=made).exp2()
    if kind == "uint8":
        values = values.abs() * 50
    return values.to(dtype).view(torch.uint8).numpy().tobytes()[:size]


def there_and_back(raw: bytes, shift: int = 0) -> bytes:
    """Encoded from and decoded to memory that begins so many bytes behind an aligned place."""
    block = np.full(shift + len(raw) + 64, GUARD, np.uint8)
    source = np.zeros(shift + len(raw), np.uint8)[shift:]
    source[:] = np.frombuffer(raw, np.uint8)
    coded = np.empty(shift + planes.bound(len(raw)), np.uint8)[shift:]
    size = planes.encode(source, coded)
    planes.decode(coded[:size], block[shift : shift + len(raw)])
    assert (block[:shift] == GUARD).all() and (block[shift + len(raw) :] == GUARD).all()
    return block[shift : shift + len(raw)].tobytes()


# -- planes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_numbers_of_any_kind_size_and_place_come_back(kind: str, size: int, shift: int) -> None:
    raw = numbers(kind, size)
    assert there_and_back(raw, shift) == raw


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=300),
            st.builds(lambda byte, n: bytes([byte]) * n, st.integers(0, 255), st.integers(0, 2000)),
            st.builds(numbers, st.sampled_from(sorted(DTYPES)), st.integers(0, 2000)),
        ),
        max_size=6,
    ),
    st.integers(0, 9),
    st.sampled_from([64, 68, 1024, 1 << 20]),
)
@example([bytes(1 << 16)], 0, 1 << 20)
def test_any_bytes_come_back(parts: list[bytes], shift: int, block_bytes: int) -> None:
    raw = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planes, "BLOCK_BYTES", block_bytes)
        assert there_and_back(raw, shift) == raw


@pytest.mark.parametrize(
    ("kind", "minimum"), [("bf16", 1.3), ("fp32", 1.1), ("fp16", 1.1), ("fp8", 1.05)]
)
def test_numbers_take_fewer_bytes(kind: str, minimum: float) -> None:
    raw = np.frombuffer(numbers(kind, 1 << 20), np.uint8)
    coded = np.empty(planes.bound(len(raw)), np.uint8)
    assert len(raw) / planes.encode(raw, coded) > minimum


def test_noise_takes_a_directory_more_and_zeros_take_nearly_nothing() -> None:
    noise = np.frombuffer(secrets.token_bytes(3 << 20), np.uint8)
    coded = np.empty(planes.bound(len(noise)), np.uint8)
    assert planes.encode(noise, coded) == len(coded) <= len(noise) + 100
    assert planes.encode(np.zeros_like(noise), coded) < len(noise) / 1000


def test_pools_of_different_kinds_side_by_side_each_get_their_own_width() -> None:
    kinds = [numbers(kind, planes.BLOCK_BYTES) for kind in ("bf16", "fp32", "uint8")]
    raw = np.frombuffer(b"".join(kinds), np.uint8)
    coded = np.empty(planes.bound(len(raw)), np.uint8)
    planes.encode(raw, coded)
    assert [width for width, *_ in planes._BLOCK.iter_unpack(coded[: 3 * 20].tobytes())] == [
        2,
        4,
        1,
    ]


def test_wrong_planes_are_refused_and_nothing_behind_the_target_is_written() -> None:
    """As a checksum that matches by accident would let them through."""
    raw = np.frombuffer(numbers("bf16", 9000), np.uint8)
    coded = np.empty(planes.bound(len(raw)), np.uint8)
    coded = coded[: planes.encode(raw, coded)]
    memory = np.full(len(raw) + 64, GUARD, np.uint8)
    refused = 0
    for at in range(0, len(coded), 3):
        wrong = coded.copy()
        wrong[at] ^= 0x5A
        try:
            planes.decode(wrong, memory[: len(raw)])
        except CorruptObjectError:
            refused += 1
        assert (memory[len(raw) :] == GUARD).all()
    assert refused > 0
    for wrong in (coded[:-1], coded[:10], np.append(coded, np.uint8(0))):
        with pytest.raises(CorruptObjectError):
            planes.decode(wrong, memory[: len(raw)])
    wrong = coded.copy()
    wrong[0] = 3
    with pytest.raises(CorruptObjectError, match="width 3"):
        planes.decode(wrong, memory[: len(raw)])


def test_without_the_library_a_codec_is_refused_in_a_sentence(monkeypatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    zstd.library.cache_clear()
    try:
        with pytest.raises(StoreError, match=r"install it \(apt-get install libzstd1\)"):
            open_store("memory:?codec=lossless", SPACE)
        open_store("memory:?codec=none", SPACE).close()
    finally:
        monkeypatch.undo()
        zstd.library.cache_clear()


# -- coded objects --------------------------------------------------------------------------


def coded(raw: bytes, key: bytes = KEY) -> bytes:
    memory = memoryview(bytearray(coded_object.bound(Lossless(), len(raw))))
    return bytes(memory[: coded_object.encode(Lossless(), key, memoryview(raw), memory)])


def decoded(found: bytes, size: int, key: bytes = KEY) -> bytes | None:
    target = bytearray(size)
    length = coded_object.decode(Lossless(), key, memoryview(found), memoryview(target))
    return None if length is None else bytes(target[:length])


@pytest.mark.parametrize("size", [0, 1, 5000, 70_001, 200_000])
def test_an_object_comes_back_to_targets_that_hold_it(size: int) -> None:
    raw = numbers("bf16", size)
    found = coded(raw)
    assert decoded(found, size) == decoded(found, size + 100) == raw
    if size:
        assert decoded(found, size - 1) is None
    assert len(found) < (64 << 10) or len(found) % 4096 == 0, "disks want whole blocks"


def test_any_changed_byte_before_the_padding_is_found() -> None:
    raw = numbers("bf16", 3000)
    found = coded(raw)
    for at in range(len(found)):
        changed = bytearray(found)
        changed[at] ^= 1
        with pytest.raises(CorruptObjectError):
            decoded(bytes(changed), len(raw))


def test_half_an_object_and_more_than_one_are_refused() -> None:
    found = coded(numbers("bf16", 200_000))
    for cut in (*range(0, 200, 7), 4096, len(found) - 4096, len(found) - 1):
        with pytest.raises(CorruptObjectError):
            decoded(found[:cut], 200_000)
    with pytest.raises(CorruptObjectError):
        decoded(found + bytes(4096), 200_000)


def test_an_object_of_another_key_codec_or_version_is_named() -> None:
    raw = numbers("bf16", 500)
    with pytest.raises(CorruptObjectError, match="another key"):
        decoded(coded(raw, b"x" * 32), 500)
    with pytest.raises(CorruptObjectError, match="no codec's label"):
        decoded(raw, 500)

    class Other(Lossless):
        name, version = "other", 7

    memory = memoryview(bytearray(1000))
    size = coded_object.encode(Other(), KEY, memoryview(raw), memory)
    with pytest.raises(CorruptObjectError, match="coded as other 7, not lossless 1"):
        decoded(bytes(memory[:size]), 500)


# -- coded stores ---------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[CodedStore]:
    found = open_store("memory:?codec=lossless&coders=2", SPACE)
    assert isinstance(found, CodedStore)
    yield found
    found.close()


def inner_objects(store: CodedStore) -> dict[bytes, bytes]:
    assert isinstance(store.inner, MemoryStore)
    return store.inner._objects


@pytest.mark.parametrize("codec", CODECS)
def test_a_coded_store_passes_every_check(codec: str) -> None:
    name = secrets.token_hex(8)
    url = f"memory:{name}?codec={codec}&coders=3"
    assert conformance.violations(lambda space: open_store(url, space)) == []


@pytest.mark.quick(codec=["lossless"])
@pytest.mark.parametrize("codec", CODECS)
def test_the_file_store_passes_every_check_with_a_codec(codec: str, tmp_path) -> None:
    url = f"file://{tmp_path}?cap=1GB&floor=1MB&sync=never&codec={codec}"
    assert conformance.violations(lambda space: open_store(url, space)) == []


def test_kvtide_storage_check_knows_codecs(capsys) -> None:
    assert main(["storage", "check", f"memory:{secrets.token_hex(8)}?codec=lossless"]) == 0
    assert "24 passed, 0 failed" in capsys.readouterr().out
    assert main(["storage", "check", "memory:?codec=gzip"]) != 0
    assert "codec=gzip is not known; use lossless" in capsys.readouterr().err


def test_an_unknown_codec_is_refused_with_the_choices() -> None:
    known = ", ".join((*CODECS, "none"))
    with pytest.raises(StoreError, match=f"memory:: codec=zip is not known; use {known}"):
        open_store("memory:?codec=zip", SPACE)
    with pytest.raises(StoreError, match="coders without a codec; add codec=lossless"):
        open_store("memory:?coders=2", SPACE)
    with pytest.raises(StoreError, match="coders=none is no count"):
        open_store("memory:?codec=lossless&coders=none", SPACE)
    with pytest.raises(StoreError, match="no setting caps; it knows none"):
        open_store("memory:?codec=lossless&caps=1", SPACE)


def test_objects_of_another_codec_or_of_none_are_absent(tmp_path) -> None:
    name = secrets.token_hex(8)
    urls = [f"memory:{name}", *(f"memory:{name}?codec={codec}" for codec in CODECS)]
    (key,) = new_keys(1)
    raw = numbers("bf16", 5000)
    for number, url in enumerate(urls):
        with_codec = open_store(url, SPACE)
        assert with_codec.write([key], in_memory({key: raw})) == [True]
        for other in urls[number + 1 :]:
            reader = open_store(other, SPACE)
            assert reader.exists([key]) == [False]
            assert reader.read([key], memories([5000])) == [MISSING]
            reader.close()
        with_codec.close()
    for url in urls:
        reader = open_store(url, SPACE)
        (target,) = memories([5000])
        assert reader.read([key], [target]) == [5000] and bytes(target) == raw
        reader.close()


def test_every_version_of_a_codec_has_a_space_of_its_own() -> None:
    class Next(Lossless):
        version = Lossless.version + 1

    spaces = {coded_space(SPACE, one) for one in (Lossless(), Next())}
    spaces.add(coded_space(new_space(), Lossless()))
    assert len(spaces | {SPACE}) == 4


def test_a_corrupt_object_is_no_other_ones_fault_and_is_named(store: CodedStore, caplog) -> None:
    raws = {key: numbers("bf16", 9000, n) for n, key in enumerate(new_keys(4))}
    keys = list(raws)
    assert store.write(keys, in_memory(raws)) == [True] * 4
    objects = inner_objects(store)
    flipped = bytearray(objects[keys[1]])
    flipped[300] ^= 4
    objects[keys[1]] = bytes(flipped)
    objects[keys[2]] = objects[keys[3]]
    targets = memories([9000] * 4)
    assert store.read(keys, targets) == [9000, CORRUPT, CORRUPT, 9000]
    assert [bytes(targets[n]) for n in (0, 3)] == [raws[keys[0]], raws[keys[3]]]
    assert "the checksum of the coded bytes does not match" in caplog.text
    assert "the coded object of another key" in caplog.text
    (note,) = (note for note in store.status().notes if "corrupt" in note)
    assert note.startswith("2 coded objects were corrupt")


def test_what_was_coded_is_counted_and_shown(store: CodedStore) -> None:
    raws = {key: numbers("bf16", 200_000, n) for n, key in enumerate(new_keys(3))}
    store.write(list(raws), in_memory(raws))
    size = sum(map(len, inner_objects(store).values()))
    assert store.coded_bytes == {"fetch": 0, "store": size} and size < 450_000
    store.read(list(raws), memories([200_000] * 3))
    assert store.coded_bytes["fetch"] == size
    assert store.status().bytes == size
    assert any(
        "were written as" in note and "a ratio of 1." in note for note in store.status().notes
    )


def test_batches_longer_than_the_buffers_are_done_in_turns(store: CodedStore, monkeypatch) -> None:
    for name, size in (("CALL_BYTES", 30_000), ("SLICE_BYTES", 10_000), ("JOB_BYTES", 5_000)):
        monkeypatch.setattr(f"kvtide.storage.codec.coded_store.{name}", size)
    raws = {key: numbers("bf16", 500 + 997 * n, n) for n, key in enumerate(new_keys(60))}
    assert store.write(list(raws), in_memory(raws)) == [True] * 60
    targets = memories([len(raw) for raw in raws.values()])
    assert store.read(list(raws), targets) == [len(raw) for raw in raws.values()]
    assert [bytes(target) for target in targets] == list(raws.values())
    assert max(len(part) for part in (store._bounce._memory,) if part) < 40 * 4096


def test_settings_of_the_store_itself_pass_through(tmp_path) -> None:
    store = open_store(f"file://{tmp_path}?cap=64MB&floor=1MB&codec=lossless", SPACE)
    assert store.status().capacity_bytes == 64_000_000
    assert store.name == f"file://{tmp_path}?codec=lossless"
    store.close()


def test_the_label_has_the_documented_fields() -> None:
    raw = numbers("bf16", 5000)
    found = coded(raw)
    magic, name, version, zeros, raw_bytes, end, key = struct.unpack("<8s16sIIQQ32s", found[:80])
    assert (magic, name.rstrip(b"\0"), version, zeros) == (b"kvcoded\1", b"lossless", 1, 0)
    assert (raw_bytes, end, key) == (5000, len(found), KEY)


def test_a_url_without_settings_of_codecs_is_passed_on_as_it_was() -> None:
    seen: list[StoreURL] = []

    class Mine(MemoryStore):
        def __init__(self, url: StoreURL, space: bytes) -> None:
            seen.append(url)
            super().__init__(StoreURL("memory"), space)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtide.storage.memory_store.Mine", Mine, raising=False)
        open_store("kvtide.storage.memory_store:Mine?servers=3", SPACE).close()
        open_store("kvtide.storage.memory_store:Mine?servers=3&codec=lossless", SPACE).close()
    assert [url.settings for url in seen] == [{"servers": "3"}, {"servers": "3"}]
