"""Models that compute with kernels, as on a GPU; on a CPU they run in an interpreter."""

from __future__ import annotations

import pytest

from kvtide.layers.backend.triton_ops import TritonOps
from kvtide.models import Model, build
from kvtide.spec.families import KVDType
from tests.models.tiny import checkpoint

FEW = {
    name: {"index_topk": 2, "hc_sinkhorn_iters": 3, "sliding_window": 7}
    for name in ("deepseek_v4", "deepseek_v4-no-hash-other-shapes")
}
"""So that few tokens suffice for blocks to be left out, and rounds take no minutes."""


def in_torch(name: str, kv: KVDType = KVDType.FP32) -> Model:
    saved = checkpoint(name)
    config = {**saved.config, **FEW.get(name, {})}
    return build(config, saved.weights, page_tokens=16, kv_dtype=kv)


def by_kernels(name: str, monkeypatch: pytest.MonkeyPatch, kv: KVDType = KVDType.FP32) -> Model:
    # An interpreter takes long for every kernel.
    monkeypatch.setattr("kvtide.layers.kernels.qkv.FEW_TOKENS", 0)
    with monkeypatch.context() as patch:
        choose = "kvtide.models.family_registry.choose"
        patch.setattr(choose, lambda deterministic, device: TritonOps())
        return in_torch(name, kv)
