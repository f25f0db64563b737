"""The codec benchmark: it counts what it stores, compares in turns, and leaves nothing behind."""

from __future__ import annotations

import json
import secrets

import pytest
import torch

from kvtide.bench.codecs import codec_speed
from kvtide.cli.main import main
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec
from kvtide.storage import StoreError, object_formats
from kvtide.storage.codec.opening import CODECS
from kvtide.storage.memory_store import _SHARED, MemoryStore

KEY = b"k" * 32


def _quietly(items, total, label):
    return items


@pytest.fixture
def objects():
    entry = Entry(tuple(Field(name, (2, 32), DType.BF16) for name in ("k", "v")))
    memory = ModelMemory("made", 64, (PoolSpec("kv", (0, 1), entry),), layers=2)
    (one,) = object_formats(memory, b"s" * 32).values()
    found = []
    for seed in range(3):
        made = torch.Generator().manual_seed(seed)
        values = torch.randn(one.payload_bytes // 2, generator=made).bfloat16()
        whole = bytearray(one.bytes)
        whole[: one.payload_bytes] = values.view(torch.uint8).numpy().tobytes()
        one.seal(memoryview(whole), KEY)
        found.append((one, bytes(whole)))
    return found


def test_ratios_are_those_of_bytes(objects):
    found = {one.codec: one for one in codec_speed.alone(objects, 2, _quietly)}
    assert found.keys() == {codec_speed.ZLIB, *CODECS}
    raw = sum(len(one) for _, one in objects)
    for one in found.values():
        assert one.raw_bytes == raw and one.ratio == raw / one.coded_bytes
        assert one.encode_gb_s > 0 and one.decode_gb_s > 0
    assert 1.2 < found["lossless"].ratio < 2 < found["fp8"].ratio


def test_a_store_is_measured_with_every_codec_and_is_empty_at_the_end(objects):
    name = secrets.token_hex(8)
    found = codec_speed.in_store(f"memory:{name}", objects, 1 << 20, 2, _quietly)
    assert [one.codec for one in found] == ["none", *CODECS]
    assert (found[0].write_ratio, found[0].read_ratio) == (1.0, 1.0)
    spaces = [kept for (shared, _), kept in _SHARED.items() if shared == name]
    assert len(spaces) == 1 + len(CODECS) and not any(spaces)


def test_a_store_that_loses_objects_is_refused(objects, monkeypatch):
    monkeypatch.setattr(MemoryStore, "_read", lambda self, key, target: -1)
    with pytest.raises(StoreError, match="6 objects refused or lost; raise its capacity"):
        codec_speed.in_store("memory:", objects * 2, 1, 1, _quietly)


@pytest.mark.full
def test_a_real_models_pages_and_answers(capsys):
    assert main(["bench", "codec", "--tokens", "64", "--turns", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    alone = {one["codec"]: one["ratio"] for one in found["alone"]}
    assert 1.3 < alone["lossless"] < 2 < alone["fp8"]
    (restored,) = found["restored"].values()
    assert 0 < restored["kl_mean"] < 0.05 and restored["restored"] == 64


def test_what_cannot_be_measured_is_refused(capsys):
    assert main(["bench", "codec", "--turns", "0"]) == 2
    assert "use --turns, --tokens and --bytes above 0" in capsys.readouterr().err
