"""Small declarations of every kind of memory, and the capacities the tests give them."""

from __future__ import annotations

from dataclasses import replace

from kvtide.spec import ALL, DType, Entry, Field, ModelMemory, PoolSpec, Reuse, with_draft
from kvtide.spec.residency import served_hot

PAGE = 4
_ENTRY = Entry((Field("x", (1,), DType.UINT8),))


def _memory(name: str, *pools: PoolSpec) -> ModelMemory:
    return ModelMemory(name, PAGE, pools, layers=2)


def _pool(name: str, reach: object = ALL, **more: object) -> PoolSpec:
    stride = more.pop("stride", None)
    required = more.pop("required", True)
    return PoolSpec(name, (0,), _ENTRY, reuse=Reuse(reach, stride, required), **more)


FULL = _memory("full", _pool("kv"))
WINDOW = _memory("window", _pool("kv"), _pool("swa", 2 * PAGE - 1))
WINDOW_ONLY = _memory("window only", _pool("swa", 3 * PAGE - 1))
RECURRENT = _memory("recurrent", _pool("kv"), _pool("state", 1, stride=PAGE, tail_entries=1))
THREE = _memory(
    "window and state",
    _pool("kv"),
    _pool("swa", 3 * PAGE - 1),
    _pool("state", 1, stride=PAGE, tail_entries=1),
)
TWO_HISTORIES = _memory("two histories", _pool("kv"), _pool("other"))
V4 = _memory(
    "v4",
    PoolSpec("kv", (), Entry(())),
    _pool("c4", tokens_per_entry=2, follows="kv"),
    _pool("swa", PAGE - 1),
    _pool("c4_state", 2, follows="swa", tail_entries=2),
)
HOT = served_hot(_memory("hot", _pool("kv", selected=2), _pool("index", follows="kv")), entries=3)
HOT_V4 = served_hot(
    _memory(
        "hot v4",
        PoolSpec("kv", (), Entry(())),
        _pool("c4", tokens_per_entry=2, follows="kv", selected=1),
        _pool("c4_index", tokens_per_entry=2, follows="kv"),
        _pool("swa", PAGE - 1),
    ),
    entries=4,
)
HOT_DRAFTED = with_draft(HOT, FULL)
OPTIONAL = _memory("optional anchor", _pool("kv"), _pool("draft", required=False))
DRAFTED = with_draft(WINDOW, FULL)
DRAFTED_TWICE = with_draft(WINDOW, replace(WINDOW, model="a draft with a window"))

ALL_MEMORIES = {
    memory.model: memory
    for memory in (
        FULL, WINDOW, WINDOW_ONLY, RECURRENT, THREE, TWO_HISTORIES, V4, OPTIONAL, DRAFTED,
        DRAFTED_TWICE, HOT, HOT_V4, HOT_DRAFTED,
    )
}  # fmt: skip
