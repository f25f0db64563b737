"""The store that a doctor measures: real servers, and nothing is left in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch

from kvtide.doctor import judged_store, probes
from kvtide.doctor.judged_store import JudgedStore, codec_gain, store_rates
from kvtide.doctor.probes import Measured, measure_machine
from kvtide.spec import DType, catalog
from kvtide.storage import StoreError, open_store
from kvtide.storage.codec.coder import Lossless
from kvtide.storage.codec.planes import ByteArray
from kvtide.storage.trial import in_memory, new_objects, new_space
from tests.processes import free_port
from tests.storage import servers
from tests.storage.mooncake_pool import Master, apart

MEMORY = catalog.resolve("qwen3-8b", 16, "fp32")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged_store, "MEASURED_BYTES", 4 << 20)
    monkeypatch.setattr(judged_store, "SHORT_S", 60.0)
    for name, value in (("CPU_BLOCK_BYTES", 1 << 20), ("CASE_BYTES", 1 << 20), ("CPU_GEMM", 64)):
        monkeypatch.setattr(probes, name, value)


@pytest.fixture(params=["redis", pytest.param("s3", marks=pytest.mark.full), "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store with objects of others in it."""
    if request.param == "file":
        (tmp_path / "my pages").mkdir()
        yield f"file://{quote(str(tmp_path / 'my pages'))}?cap=32MB&floor=0&threads=2"
        return
    if request.param == "redis":
        server = servers.redis(tmp_path)
        server.start()
        made = f"redis://127.0.0.1:{server.port}/0"
    else:
        server = servers.s3_in_memory(tmp_path, "pages", "key", "sesame")
        made = f"s3://key:sesame@pages/tests?endpoint=http://127.0.0.1:{server.port}"
    yield made
    server.stop()


def test_a_store_is_measured_and_left_as_it_was(url: str, tmp_path: Path) -> None:
    space, objects = new_space(), new_objects([10_000] * 8)
    others = open_store(url, space)
    try:
        assert all(others.write(list(objects), in_memory(objects)))
        before = others.status().all_bytes or 0
        judged = JudgedStore(url)
        rates = store_rates(judged, MEMORY)
        assert {*rates} == {"storage_write", "storage_read"} and min(rates.values()) > 0
        gain = codec_gain(judged, MEMORY, DType.FP32)
        assert gain.codec == "lossless" and gain.read_ratio > 0
        assert others.exists(list(objects)) == [True] * len(objects)
        assert (others.status().all_bytes or 0) < before + (64 << 10)
    finally:
        others.close()
    if judged.folder is not None:
        assert not list(judged.folder.glob(".kvtide-doctor-*"))


@pytest.mark.full
@apart
def test_a_pool_of_mooncake_is_measured() -> None:
    master = Master()
    rates = store_rates(JudgedStore(master.url("128MB")), MEMORY)
    assert min(rates.values()) > 0
    master.kill()


def measured(url: str) -> Measured:
    return measure_machine(CPU, JudgedStore(url), MEMORY)


def test_a_store_that_is_not_there_is_reported_without_its_password(tmp_path: Path) -> None:
    found = measured(f"redis://user:sesame@127.0.0.1:{free_port()}/0?timeout=1")
    why = found.unmeasured["storage_read"]
    assert "redis://127.0.0.1" in why and "sesame" not in why
    assert found.codec is None and "codec" not in found.unmeasured, "one reason is enough"
    assert found.cells, "the rest is measured"


def test_a_class_of_ones_own_is_measured_and_its_errors_show_no_password() -> None:
    found = measured("memory:doctored")
    assert found.rates["storage_read"] > 0 and found.codec is not None
    broken = measured("tests.server.stores:Telling?x=1")
    assert "no way in" in broken.unmeasured["storage_write"]


def test_a_codec_that_is_asked_for_is_left_out_of_the_plain_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []

    def opening(url: str, space: bytes) -> object:
        opened.append(url)
        return open_store(url, space)

    monkeypatch.setattr(judged_store, "open_store", opening)
    store_rates(JudgedStore("memory:plain?codec=lossless&coders=2"), None)
    assert opened == ["memory:plain"]


def test_random_pages_shrink_about_as_computed_ones(tmp_path: Path) -> None:
    """SmolLM2's and Gemma's in bf16 shrink to 1 / 1.45 (docs/benchmarks.md, codecs)."""
    raw = judged_store._random_bytes(1 << 20, DType.BF16)
    codec = Lossless()
    target: ByteArray = np.empty(codec.bound(len(raw)), np.uint8)
    ratio = len(raw) / codec.encode(np.frombuffer(raw, np.uint8), target)
    assert 1.4 < ratio < 1.55


def test_a_slow_store_is_judged_by_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged_store, "SHORT_S", 0.0)
    sizes: list[int] = []
    measure = judged_store.store_speed.measure

    def noting(case: object, *rest: object) -> object:
        sizes.append(case.bytes)  # type: ignore[attr-defined]
        return measure(case, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(judged_store.store_speed, "measure", noting)
    store_rates(JudgedStore("memory:slow"), None)
    assert sizes == [1 << 20], "one object"


def test_settings_are_added_and_dropped_without_touching_the_rest() -> None:
    store = JudgedStore("s3://k:p%40@bucket/kv?endpoint=https://s3.example.com:9000&codec=fp8")
    changed = store.with_settings(codec=None, cap="1GB")
    assert changed == "s3://k:p%40@bucket/kv?endpoint=https://s3.example.com:9000&cap=1GB"
    assert JudgedStore.of_folder(Path("/a b")).with_settings(cap="2MB") == "file:///a%20b?cap=2MB"


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judged_store.existing(tmp_path / "a" / "b") == tmp_path
    monkeypatch.setattr(judged_store.os, "access", lambda path, mode: False)
    with pytest.raises(StoreError, match=f"{tmp_path} cannot be written"):
        judged_store.existing(tmp_path / "a")
