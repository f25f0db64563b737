"""The index behind the contract that benchmarks of prefix indexes use: prepare, start, finish.

A contestant times its own calls: `start` matches, pins and reserves (evicting if need be), `finish`
commits and releases. `prepare` is not timed: it brings the tokens into the index's own form. The
classes differ only in the memory they declare and in how many slots each anchor gets. They evict by
LRU and keep checkpoints where prompts end or part, because that is what peers do; `FullLearned` and
`DeepSeekV4Learned` do as this project does by default, which finds more and costs more.

Times are CPU time of the thread, so that a busy machine does not count; KVBENCH_CLOCK=wall asks
for wall time.
"""

from __future__ import annotations

import os
import time

import numpy as np
import numpy.typing as npt

from kvtide.index import DEFAULT_POLICY, Branches, CostBased, Index, IndexLease, Placement, Prompt
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Reuse, Tier, with_draft

_now = time.perf_counter_ns if os.environ.get("KVBENCH_CLOCK") == "wall" else time.thread_time_ns
_ENTRY = Entry((Field("kv", (1,), DType.UINT8),))
_WINDOW = 128

Timings = dict[str, list[int]]


class Handle:
    """What passes from `start` to `finish`; `matched` counts hit tokens."""

    __slots__ = ("lease", "matched", "tokens")

    def __init__(self, lease: IndexLease, matched: int, tokens: int) -> None:
        self.lease = lease
        self.matched = matched
        self.tokens = tokens


class Contestant:
    """The shared half. Subclasses declare a memory and slots per anchor."""

    page_tokens: int | None = None
    eviction = "lru"
    placement: type[Placement] = Branches

    def __init__(self, capacity: int, page_size: int, eviction: str | None = None) -> None:
        self.page = self.page_tokens or page_size
        self.index = Index(
            self.memory(),
            {Tier.DEVICE: self.slots(capacity)},
            eviction=eviction or self.eviction,
            placement=self.placement(),
        )

    def memory(self) -> ModelMemory:
        return ModelMemory("bench", self.page, self.pools(), layers=1)

    def pools(self) -> tuple[PoolSpec, ...]:
        raise NotImplementedError

    def slots(self, capacity: int) -> dict[str, int]:
        raise NotImplementedError

    def prepare(self, number: int, tokens: npt.NDArray[np.int64]) -> Prompt:
        return self.index.prompt(tokens)

    def start(self, prompt: Prompt, timings: Timings) -> Handle:
        index, tokens = self.index, prompt.tokens
        begun = _now()
        hit = index.match(prompt)
        matched = _now()
        lease = index.pin(hit)
        pinned = _now()
        fits = index.reserve(lease, tokens)
        reserved = _now()
        assert fits, "the capacity does not hold one prompt"
        timings["match"].append(matched - begun)
        timings["lock"].append(pinned - matched)
        timings["alloc"].append(reserved - pinned)
        return Handle(lease, hit.boundary * self.page, tokens)

    def finish(self, handle: Handle, timings: Timings) -> None:
        begun = _now()
        self.index.commit(handle.lease, handle.tokens)
        committed = _now()
        self.index.release(handle.lease)
        released = _now()
        timings["insert"].append(committed - begun)
        timings["unlock"].append(released - committed)

    def cached_tokens(self) -> int:
        return self.index.resident_pages(Tier.DEVICE, "kv") * self.page

    def close(self) -> None:
        self.__dict__.clear()


class Full(Contestant):
    """Full attention: one anchor that keeps the whole history."""

    def pools(self) -> tuple[PoolSpec, ...]:
        return (PoolSpec("kv", (0,), _ENTRY),)

    def slots(self, capacity: int) -> dict[str, int]:
        return {"kv": capacity // self.page}


class FullLearned(Full):
    """Full attention with the default eviction policy."""

    eviction = DEFAULT_POLICY


class Drafted(Full):
    """Full attention, and a draft whose pages follow."""

    def memory(self) -> ModelMemory:
        return with_draft(super().memory(), super().memory())


class Window(Full):
    """Full attention beside a sliding window of 128 tokens, whose pool is a tenth as large."""

    def pools(self) -> tuple[PoolSpec, ...]:
        return (*super().pools(), PoolSpec("swa", (0,), _ENTRY, reuse=Reuse(_WINDOW - 1)))

    def slots(self, capacity: int) -> dict[str, int]:
        pages = capacity // self.page
        return {"kv": pages, "swa": max(pages // 10, 8, 4096 // self.page)}


class Recurrent(Full):
    """Full attention beside a recurrent state, with one snapshot per 4,096 tokens of capacity."""

    def pools(self) -> tuple[PoolSpec, ...]:
        state = PoolSpec("state", (0,), _ENTRY, tail_entries=1, reuse=Reuse(1, stride=self.page))
        return (*super().pools(), state)

    def slots(self, capacity: int) -> dict[str, int]:
        return {"kv": capacity // self.page, "state": max(capacity // 4096, 64)}


class DeepSeekV4Index(Window):
    """DeepSeek-V4: pages of 256 tokens, compressed streams following a zero-byte anchor, window."""

    page_tokens = 256

    def pools(self) -> tuple[PoolSpec, ...]:
        return (
            PoolSpec("kv", (), Entry(())),
            PoolSpec("c4", (0,), _ENTRY, tokens_per_entry=4, follows="kv"),
            PoolSpec("c4_index", (0,), _ENTRY, tokens_per_entry=4, follows="kv"),
            PoolSpec("c128", (0,), _ENTRY, tokens_per_entry=128, follows="kv"),
            PoolSpec("swa", (0,), _ENTRY, reuse=Reuse(_WINDOW - 1)),
            PoolSpec("c4_state", (0,), _ENTRY, tail_entries=8, follows="swa", reuse=Reuse(8)),
        )

    def slots(self, capacity: int) -> dict[str, int]:
        pages = -(-capacity // self.page)
        return {"kv": pages, "swa": max(pages // 10, 16384 // self.page)}


class DeepSeekV4Learned(DeepSeekV4Index):
    """DeepSeek-V4 with learned checkpoints."""

    placement = CostBased
