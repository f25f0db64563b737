"""CUDA graphs without a GPU and without kernels: a replay computes the pass by the torch reference.

The interpreter of kernels takes seconds for a step; this takes milliseconds, so that random traffic
can run. The torch reference refuses to read a page that has no slot.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from kvtide.layers.step import Batch, Rows, Step
from kvtide.models.model import Decoder

SIZES = (4, 16, 32, 64, 128)
"""Of mixed graphs: few, so that little is padding."""


def use_torch_graphs(monkeypatch: pytest.MonkeyPatch, model: Decoder) -> None:
    """Engines of this model run their small steps as graphs, for the rest of the test."""
    for module in ("graphs.step_graphs", "speculation.draft_graphs"):
        monkeypatch.setattr(f"kvtide.engine.{module}.Step", _step)
    monkeypatch.setattr("kvtide.engine.graphs.step_graphs.MIXED_TOKENS", SIZES)
    monkeypatch.setattr("kvtide.engine.graphs.step_graphs.TOKENS_PER_PREFILL", 16)
    monkeypatch.setattr(model, "uses_kernels", True)


def _step(
    tokens: Any,
    positions: Any,
    _: Any,
    page: int,
    view: Any,
    wait: Any,
    batch: Batch,
    hot: Any = MappingProxyType({}),
) -> Step:
    """The step as the numbers of the replay have it."""
    sequences = tuple(
        Rows(start, end, past, {name: table[row].long() for name, table in batch.slots.items()})
        for row, (start, end, past) in enumerate(batch.rows.tolist())
        if start < end
    )
    return Step(tokens, positions, sequences, page, view, wait, None, hot)
