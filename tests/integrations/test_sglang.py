"""The HiCache backend over stand-ins for SGLang's types, and under the real factory.

The tested versions are unpacked for it, and run each in its own process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.storage import StoreError
from tests.integrations import engines
from tests.integrations.stand_ins import (
    AsymmetricMHATokenToKVPoolHost,
    HiCacheStorageConfig,
    HostPool,
    LogicalHostPool,
    MambaPoolHost,
    MLATokenToKVPoolHost,
    PoolName,
    PoolTransfer,
    plug_in,
)

ROOT = Path(__file__).resolve().parents[2]
CHECKS = [
    line.split("(")[0].removeprefix("def ")
    for line in (ROOT / "tests/integrations/hicache_checks.py").read_text().splitlines()
    if line.startswith("def check_")
]
KEYS = ["a" * 64, "b" * 64]
EXTRA = {"interface_v1": 1, "url": "memory:hicache", "fingerprint": "r1"}
MLA = {"is_mla_model": True}


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setitem(EXTRA, "url", f"memory:{tmp_path}")
    with plug_in("sglang") as module:
        yield module


def backend(sglang: Any, pool: HostPool, extra: dict[str, Any] | None = None, **config: Any) -> Any:
    one = sglang.KvtideStorage(
        HiCacheStorageConfig(extra_config={**EXTRA, **(extra or {})}, **config)
    )
    one.register_mem_pool_host(pool)
    return one


def mla(sglang: Any, seed: int, **config: Any) -> Any:
    """A rank of an MLA model with Mamba layers and a draft that has heads."""
    one = backend(sglang, MLATokenToKVPoolHost(seed=seed), is_mla_model=True, **config)
    one.register_mem_host_pool_v2(MLATokenToKVPoolHost(seed=seed), PoolName.INDEXER)
    one.register_mem_host_pool_v2(MambaPoolHost(seed=seed), PoolName.MAMBA)
    one.register_mem_host_pool_v2(AsymmetricMHATokenToKVPoolHost(seed=seed), PoolName.DRAFT)
    return one


def every_pool() -> list[PoolTransfer]:
    return [PoolTransfer(name, KEYS, torch.arange(2)) for name in PoolName]


@pytest.mark.parametrize(
    "reader",
    [
        {"tp_rank": 1, "tp_size": 2},
        {"tp_rank": 0, "tp_size": 1},
        {"tp_rank": 0, "tp_size": 4, "tp_lcm_size": 4},
        {"tp_rank": 3, "tp_size": 4},
    ],
)
def test_tensor_ranks_of_any_size_share_latents_and_nothing_else(
    sglang: Any, reader: dict[str, int]
) -> None:
    writer = mla(sglang, seed=1)
    assert all(map(all, writer.batch_set_v2(every_pool()).values()))
    one = mla(sglang, seed=2, **reader)
    assert one.batch_get_v2(every_pool()) == {
        PoolName.KV: [True, True],
        PoolName.INDEXER: [True, True],
        PoolName.MAMBA: [False, False],
        PoolName.DRAFT: [False, False],
    }
    assert np.array_equal(one.mem_pool_host.buffer[:2], writer.mem_pool_host.buffer[:2])


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (MLA | {"pp_size": 2}, MLA | {"pp_size": 2, "pp_rank": 1}),
        (MLA | {"pp_size": 2}, MLA),
        (MLA | {"dcp_size": 2}, MLA | {"dcp_size": 2, "dcp_rank": 1}),
        (MLA | {"dcp_size": 2}, MLA | {"dcp_size": 2, "tp_size": 4}),
        (MLA | {"dcp_size": 2}, MLA),
        ({}, {"tp_size": 4}),
        ({}, {"tp_rank": 1}),
        ({}, {"model_name": "other"}),
    ],
)
def test_other_slices_find_nothing(
    sglang: Any, writer: dict[str, Any], reader: dict[str, Any]
) -> None:
    one = backend(sglang, MLATokenToKVPoolHost(), **writer)
    assert one.batch_set_v1(KEYS, torch.arange(2)) == [True, True]
    assert one.batch_exists(KEYS) == 2
    assert backend(sglang, MLATokenToKVPoolHost(), **reader).batch_exists(KEYS) == 0


def test_ranks_of_a_context_parallel_group_read_what_its_first_ones_wrote(sglang: Any) -> None:
    """Of four tensor ranks in two such groups, SGLang lets the first two write."""
    config = MLA | {"tp_size": 4, "dcp_size": 2, "dcp_rank": 1}
    writer = backend(sglang, MLATokenToKVPoolHost(), tp_rank=1, **config)
    assert writer.batch_set_v1(KEYS, torch.arange(2)) == [True, True]
    reader = backend(sglang, MLATokenToKVPoolHost(), tp_rank=3, **config)
    assert reader.batch_exists(KEYS) == 2


def test_an_anchor_without_bytes_has_pages_that_are_found(sglang: Any) -> None:
    """DeepSeek-V4: the KV pool numbers pages, and other pools have their bytes."""
    one = backend(sglang, LogicalHostPool(), is_mla_model=True)
    assert one.batch_exists(KEYS) == 0
    assert one.batch_set_v1(KEYS, torch.arange(2)) == [True, True]
    assert one.batch_exists([*KEYS, "c" * 64]) == 2
    assert one.batch_get_v1(KEYS, torch.arange(2)) == [True, True]


def test_a_pool_that_does_not_name_its_memory_is_refused(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostPool, "get_page_buffer_meta", lambda self, indices: None)
    with pytest.raises(StoreError, match="HostPool does not name the memory of its pages"):
        backend(sglang, HostPool()).batch_exists(KEYS)


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"url": None}, "the extra config names no store"),
        ({"interface_v1": 0}, 'lacks "interface_v1": 1'),
        ({"cap": "4GB"}, "has cap; kvtide knows url and fingerprint"),
    ],
)
def test_bad_settings_are_refused(sglang: Any, extra: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StoreError, match=sentence):
        backend(sglang, HostPool(), extra)


def test_retrained_weights_in_the_same_folder_find_nothing(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(EXTRA, "fingerprint")
    with pytest.raises(StoreError, match="the weights of model are not known on this machine"):
        backend(sglang, HostPool())
    weights = tmp_path / "model.safetensors"
    found = []
    for content in (b"first", b"other", b"first"):
        weights.write_bytes(content)
        one = backend(sglang, HostPool(), model_name=str(tmp_path))
        found.append(one.batch_exists(KEYS))
        one.batch_set_v1(KEYS, torch.arange(2))
    assert found == [0, 0, 2]


def test_moved_pages_and_rates_are_reported_once(sglang: Any) -> None:
    one = backend(sglang, HostPool(), enable_storage_metrics=True)
    one.batch_set_v1(KEYS, torch.arange(2))
    one.batch_get_v1([KEYS[0], "f" * 64], torch.arange(2))
    one.batch_get_v1(["f" * 64], torch.arange(1))
    stats = one.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([1], [2])
    assert all(0 < rate < 100 for rate in stats.prefetch_bandwidth + stats.backup_bandwidth)
    assert len(stats.prefetch_bandwidth) == len(stats.backup_bandwidth) == 1
    assert (one.get_stats().prefetch_pgs, one.get_stats().backup_pgs) == ([], [])
    assert backend(sglang, HostPool()).get_stats() is None


def test_ranks_of_data_parallel_servers_share_pages(sglang: Any) -> None:
    writer, reader = (backend(sglang, HostPool(), dp_rank=rank) for rank in (0, 3))
    writer.batch_set_v1(KEYS, torch.arange(2))
    assert reader.batch_exists(KEYS) == 2


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.5.18", "0.5.23"])
def test_every_check_holds_under_the_real_factory(version: str, tmp_path: Path) -> None:
    folder, metrics = engines.sglang(version), tmp_path / "metrics"
    metrics.mkdir()
    path = f"{folder}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.hicache_checks", str(folder), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "PROMETHEUS_MULTIPROC_DIR": str(metrics)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == CHECKS and len(CHECKS) == 10


def test_the_backend_without_sglang_is_a_sentence() -> None:
    code = "import kvtide.integrations.sglang"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "needs sglang 0.5.18 or 0.5.23, and none is installed" in done.stderr
