"""Small declarations of every kind of memory, with several layers and rows of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvtide.spec import ALL, DType, Entry, Field, ModelMemory, PoolSpec, Reuse, with_draft
from kvtide.spec.residency import served_hot

PAGE = 4


def _memory(name: str, *pools: PoolSpec, layers: int = 4) -> ModelMemory:
    return ModelMemory(name, PAGE, pools, layers=layers)


def _pool(
    name: str,
    layers: Sequence[int],
    entry_bytes: int,
    reach: object = ALL,
    stride: int | None = None,
    **more: Any,
) -> PoolSpec:
    entry = Entry((Field("x", (entry_bytes,), DType.UINT8),))
    required = more.pop("required", True)
    reuse = Reuse(reach, stride, required)  # type: ignore[arg-type]
    return PoolSpec(name, tuple(layers), entry, reuse=reuse, **more)


_STATE = {"reach": 1, "stride": PAGE, "tail_entries": 1}

FULL = _memory("full", _pool("kv", range(4), 5))
WINDOW = _memory("window", _pool("kv", (0, 2), 8), _pool("swa", (1, 3), 12, 2 * PAGE - 1))
WINDOW_ONLY = _memory("window only", _pool("swa", range(4), 4, 3 * PAGE - 1))
RECURRENT = _memory("recurrent", _pool("kv", (1, 3), 4), _pool("state", (0, 2), 100, **_STATE))
THREE = _memory(
    "window and state",
    _pool("kv", (0,), 4),
    _pool("swa", (1, 2), 9, 3 * PAGE - 1),
    _pool("state", (3,), 40, **_STATE),
)
TWO_HISTORIES = _memory("two histories", _pool("kv", (0, 1), 4), _pool("other", (2, 3), 16))
V4 = _memory(
    "v4",
    PoolSpec("kv", (), Entry(())),
    _pool("c4", (1, 2), 10, tokens_per_entry=2, follows="kv"),
    _pool("c4_index", (1, 2), 3, tokens_per_entry=2, follows="kv"),
    _pool("c128", (3,), 33, tokens_per_entry=4, follows="kv"),
    _pool("swa", range(4), 7, PAGE - 1),
    _pool("c4_state", (1, 2), 20, 2, follows="swa", tail_entries=2),
)
OPTIONAL = _memory(
    "optional anchor", _pool("kv", range(3), 8), _pool("draft", (3,), 4, required=False)
)
DRAFTED = with_draft(WINDOW, _memory("draft", _pool("kv", (0, 1), 6), layers=2))
V4_DRAFTED = with_draft(V4, _memory("draft", _pool("kv", (0,), 6), layers=1))
STAGE = V4.slice(range(0, 1))
"""A pipeline stage whose history anchor has no byte at all: tree without anything to copy."""

LAST_STAGE = V4_DRAFTED.slice(range(2, 5))
"""A stage that does not begin at layer 0: code that counts layers from there is found out."""

HOT = served_hot(
    _memory("hot", _pool("kv", range(4), 9, selected=2), _pool("index", (0, 2), 4, follows="kv")),
    entries=3,
)
HOT_V4 = served_hot(
    _memory(
        "hot v4",
        PoolSpec("kv", (), Entry(())),
        _pool("c4", (1, 2), 10, tokens_per_entry=2, follows="kv", selected=1),
        _pool("c4_index", (1, 2), 3, tokens_per_entry=2, follows="kv"),
        _pool("swa", range(4), 7, PAGE - 1),
        _pool("c4_state", (1, 2), 20, 2, follows="swa", tail_entries=2),
    ),
    entries=4,
)
HOT_DRAFTED = with_draft(HOT, _memory("draft", _pool("kv", (0,), 6), layers=1))

ALL_MEMORIES = {
    "full": FULL,
    "window": WINDOW,
    "window_only": WINDOW_ONLY,
    "recurrent": RECURRENT,
    "window_and_state": THREE,
    "two_histories": TWO_HISTORIES,
    "v4": V4,
    "optional_anchor": OPTIONAL,
    "drafted": DRAFTED,
    "v4_drafted": V4_DRAFTED,
    "stage": STAGE,
    "last_stage": LAST_STAGE,
    "hot": HOT,
    "hot_v4": HOT_V4,
    "hot_drafted": HOT_DRAFTED,
}

every_memory = pytest.mark.parametrize("memory", ALL_MEMORIES.values(), ids=ALL_MEMORIES)
