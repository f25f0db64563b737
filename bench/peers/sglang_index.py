"""SGLang's prefix trees as contestants of `kvtide bench index`.

They keep the contract of `kvtide.bench.contestants`: `prepare` (untimed), `start` (match, lock,
evict, allocate), `finish` (insert, unlock). The core operations are measured, without the peer's
request objects. Pools hold one byte per token, because only their indices matter here.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from array import array
from importlib import import_module
from typing import Any

import gpu_stubs
import numpy as np
import numpy.typing as npt

gpu_stubs.install()
warnings.filterwarnings("ignore")
logging.getLogger().setLevel(logging.WARNING)

torch: Any = import_module("torch")
torch.set_num_threads(1)

_CACHE = "sglang.srt.mem_cache"
_base: Any = import_module(f"{_CACHE}.base_prefix_cache")
_radix: Any = import_module(f"{_CACHE}.radix_cache")
_unified: Any = import_module(f"{_CACHE}.unified_radix_cache")
_pools: Any = import_module(f"{_CACHE}.memory_pool")
_allocator: Any = import_module(f"{_CACHE}.allocator")
_swa_allocator: Any = import_module(f"{_CACHE}.allocator.swa")
_CacheInitParams: Any = import_module(f"{_CACHE}.cache_init_params").CacheInitParams
_Component: Any = import_module(f"{_CACHE}.unified_cache.component_type").ComponentType
_server_args: Any = import_module("sglang.srt.server_args")

WINDOW = 128
"""Tokens of the sliding window, as in DeepSeek-V4."""
SWA_RATIO = 0.1
"""Window pool over full pool: the peer's setting for DeepSeek-V4."""
TOKENS_PER_STATE = 4096
"""Capacity in tokens per recurrent state."""

_now = time.perf_counter_ns if os.environ.get("KVBENCH_CLOCK") == "wall" else time.thread_time_ns
Timings = dict[str, list[int]]


def _up(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


class _Handle:
    __slots__ = ("key", "lock", "matched", "new", "node", "prefix", "state", "swa_from")

    key: Any
    lock: Any
    matched: int
    new: Any
    node: Any
    prefix: Any
    state: Any
    swa_from: int


class _Sglang:
    """The shared half: the tokens as the peer keeps them, and its global settings."""

    def __init__(self, page: int) -> None:
        self.page = page
        arguments = _server_args.ServerArgs(model_path="dummy", page_size=page, device="cpu")
        arguments._mamba_cache_chunk_size = max(64, page)
        _server_args.set_global_server_args_for_scheduler(arguments)

    def prepare(self, number: int, tokens: npt.NDArray[np.int64]) -> Any:
        key = array("q")
        key.frombytes(tokens.tobytes())
        return key

    def close(self) -> None:
        self.__dict__.clear()


def _paged(capacity: int, page: int) -> Any:
    if page == 1:
        return _allocator.TokenToKVPoolAllocator(capacity, torch.bfloat16, "cpu", None, False)
    return _allocator.PagedTokenToKVPoolAllocator(
        capacity, page, torch.bfloat16, "cpu", None, False
    )


class SglangRadix(_Sglang):
    """RadixCache under LRU, with the paged allocator."""

    policy = "lru"

    def __init__(self, capacity: int, page_size: int) -> None:
        super().__init__(page_size)
        self.allocator = _paged(capacity, page_size)
        self.tree = _radix.RadixCache(
            _CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                eviction_policy=self.policy,
            )
        )

    def start(self, key: Any, timings: Timings) -> _Handle:
        handle, tree = _Handle(), self.tree
        begun = _now()
        match = _base.MatchPrefixParams(key=_radix.RadixKey(key, limit=len(key) - 1))
        hit = tree.match_prefix(match)
        matched = _now()
        handle.node = hit.last_device_node
        tree.inc_lock_ref(handle.node)
        locked = evicted = _now()
        handle.matched = len(hit.device_indices)
        need = _up(len(key), self.page) - handle.matched
        free = self.allocator.available_size()
        if free < need:
            tree.evict(_base.EvictParams(num_tokens=need - free))
            evicted = _now()
            timings["evict"].append(evicted - locked)
        handle.new = self.allocator.alloc(need)
        assert handle.new is not None, "the capacity does not hold one prompt"
        allocated = _now()
        handle.key, handle.prefix = key, hit.device_indices
        timings["match"].append(matched - begun)
        timings["lock"].append(locked - matched)
        timings["alloc"].append(allocated - evicted)
        return handle

    def finish(self, handle: _Handle, timings: Timings) -> None:
        tokens = len(handle.key)
        aligned = tokens // self.page * self.page
        begun = _now()
        value = torch.cat([handle.prefix, handle.new])
        insert = _base.InsertParams(key=_radix.RadixKey(handle.key), value=value[:aligned])
        known = self.tree.insert(insert).prefix_len
        if known > handle.matched:
            duplicates = value[handle.matched : known]
            self.allocator.free_segment(duplicates, start_pos=handle.matched)
        if aligned < tokens:
            self.allocator.free_segment(value[aligned:], start_pos=aligned)
        inserted = _now()
        self.tree.dec_lock_ref(handle.node)
        timings["insert"].append(inserted - begun)
        timings["unlock"].append(_now() - inserted)

    def cached_tokens(self) -> int:
        return int(self.tree.evictable_size() + self.tree.protected_size())


class SglangRadixSlru(SglangRadix):
    policy = "slru"


class SglangRadixLfu(SglangRadix):
    policy = "lfu"


class SglangFull(_Sglang):
    """UnifiedRadixCache with full attention only."""

    has_window = False
    has_state = False

    def __init__(self, capacity: int, page_size: int) -> None:
        super().__init__(page_size)
        self.allocator = self._allocator(capacity)
        components = [_Component.FULL]
        if self.has_window:
            components.append(_Component.SWA)
        requests = None
        if self.has_state:
            components.append(_Component.MAMBA)
            requests = _state_pool(page_size, max(capacity // TOKENS_PER_STATE, 64))
            self.states = requests.mamba_allocator
        self.tree = _unified.UnifiedRadixCache(
            _CacheInitParams(
                disable=False,
                req_to_token_pool=requests,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.page,
                tree_components=tuple(components),
                enable_mamba_extra_buffer=self.has_state and page_size > 1,
                sliding_window_size=WINDOW if self.has_window else None,
            )
        )

    def _allocator(self, capacity: int) -> Any:
        return _paged(capacity, self.page)

    def start(self, key: Any, timings: Timings) -> _Handle:
        handle, tree = _Handle(), self.tree
        begun = _now()
        match = _base.MatchPrefixParams(key=_radix.RadixKey(key, limit=len(key) - 1))
        hit = tree.match_prefix(match)
        matched = _now()
        handle.node = hit.last_device_node
        handle.lock = tree.inc_lock_ref(handle.node).to_dec_params()
        locked = _now()
        handle.key, handle.prefix = key, hit.device_indices
        handle.matched = len(hit.device_indices)
        evicted = self._allocate(handle, locked, timings)
        allocated = _now()
        if self.has_state:
            self._allocate_state(handle, timings)
        timings["match"].append(matched - begun)
        timings["lock"].append(locked - matched)
        timings["alloc"].append(allocated - evicted)
        return handle

    def _allocate(self, handle: _Handle, begun: int, timings: Timings) -> int:
        """Take slots for the rest of the prompt; when the evictions before it ended."""
        need = _up(len(handle.key), self.page) - handle.matched
        free = self.allocator.available_size()
        if free < need:
            self.tree.evict(_base.EvictParams(num_tokens=need - free))
            ended = _now()
            timings["evict"].append(ended - begun)
            begun = ended
        handle.swa_from = 0
        handle.new = self.allocator.alloc(need)
        assert handle.new is not None, "the capacity does not hold one prompt"
        return begun

    def _allocate_state(self, handle: _Handle, timings: Timings) -> None:
        handle.state = self.states.alloc(1)
        if handle.state is None:
            begun = _now()
            self.tree.evict(_base.EvictParams(mamba_num=1))
            timings["evict"].append(_now() - begun)
            handle.state = self.states.alloc(1)
        assert handle.state is not None

    def finish(self, handle: _Handle, timings: Timings) -> None:
        tokens = len(handle.key)
        aligned = tokens // self.page * self.page
        begun = _now()
        value = torch.cat([handle.prefix, handle.new])
        insert = _base.InsertParams(
            key=_radix.RadixKey(handle.key),
            value=value[:aligned],
            prev_prefix_len=handle.matched,
            swa_evicted_seqlen=min(handle.swa_from, aligned),
        )
        if self.has_state:
            insert.mamba_value = handle.state
        result = self.tree.insert(insert)  # It frees duplicates behind the prefix itself.
        if aligned < tokens:
            self.allocator.free_segment(value[aligned:], start_pos=aligned)
        if self.has_state and result.mamba_exist:
            self.states.free(handle.state)
        inserted = _now()
        self.tree.dec_lock_ref(handle.node, handle.lock)
        timings["insert"].append(inserted - begun)
        timings["unlock"].append(_now() - inserted)

    def cached_tokens(self) -> int:
        core = self.tree.tree_core
        evictable, protected = core.component_evictable_size_, core.component_protected_size_
        return int(evictable[_Component.FULL] + protected[_Component.FULL])


class SglangWindow(SglangFull):
    """With a sliding window. Only the last window of a prompt gets window slots."""

    has_window = True

    def _allocator(self, capacity: int) -> Any:
        window = max(_up(int(capacity * SWA_RATIO), self.page), 8 * self.page, 4096)
        pool = import_module(f"{_CACHE}.swa_memory_pool").SWAKVPool(
            size=capacity,
            size_swa=window,
            page_size=self.page,
            dtype=torch.uint8,
            head_num=1,
            head_dim=1,
            swa_attention_layer_ids=[0],
            full_attention_layer_ids=[1],
            device="cpu",
        )
        return _window_allocator(capacity, window, self.page, pool)

    def _allocate(self, handle: _Handle, begun: int, timings: Timings) -> int:
        tokens, page, pools = len(handle.key), self.page, self.allocator
        end, aligned = _up(tokens, page), tokens // page * page
        need = end - handle.matched
        handle.swa_from = max(handle.matched, (aligned - max(WINDOW, page)) // page * page)
        window_need = end - handle.swa_from
        full, window = pools.full_available_size(), pools.swa_available_size()
        if full < need or window < window_need:
            lack, window_lack = max(0, need - full), max(0, window_need - window)
            self.tree.evict(_base.EvictParams(num_tokens=lack, swa_num_tokens=window_lack))
            ended = _now()
            timings["evict"].append(ended - begun)
            begun = ended
        handle.new = pools.full_attn_allocator.alloc(need)
        slots = pools.swa_attn_allocator.alloc(window_need)
        assert handle.new is not None and slots is not None, "the capacity holds no prompt"
        pools.set_full_to_swa_mapping(handle.new[need - window_need :], slots)
        return begun


class SglangRecurrent(SglangFull):
    """With a recurrent state at the end of every prompt."""

    has_state = True


class SglangDeepSeekV4(SglangWindow):
    """DeepSeek-V4's pools: pages of 256 tokens, one layer of each kind."""

    def __init__(self, capacity: int, page_size: int) -> None:
        super().__init__(capacity, 256)

    def _allocator(self, capacity: int) -> Any:
        capacity = _up(capacity, self.page)
        window = max(_up(int(capacity * SWA_RATIO), self.page), 16384)
        pool = import_module(f"{_CACHE}.deepseek_v4_memory_pool").DeepSeekV4TokenToKVPool(
            max_num_reqs=4,
            swa_size=window,
            c4_size=capacity // 4,
            c128_size=capacity // 128,
            c4_state_pool_size=256,
            c128_state_pool_size=256,
            page_size=self.page,
            swa_page_size=self.page,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=3,
            device="cpu",
            enable_memory_saver=False,
            compression_ratios=[0, 4, 128],
        )
        return _window_allocator(capacity, window, self.page, pool)


def _window_allocator(capacity: int, window: int, page: int, pool: Any) -> Any:
    return _swa_allocator.SWATokenToKVPoolAllocator(
        size=capacity,
        size_swa=window,
        page_size=page,
        dtype=torch.uint8,
        device="cpu",
        kvcache=pool,
        need_sort=False,
    )


def _state_pool(page: int, states: int) -> Any:
    mamba: Any = import_module("sglang.srt.configs.mamba_utils")
    environment: Any = import_module("sglang.srt.environ").envs
    with environment.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
        shape = mamba.Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=16,
            n_groups=1,
            num_heads=1,
            head_dim=16,
            state_size=1,
            conv_kernel=2,
        )
        params = mamba.Mamba2CacheParams(shape=shape, layers=[0])
    return _pools.HybridReqToTokenPool(
        size=4,
        mamba_size=states,
        mamba_spec_state_size=1,
        max_context_len=8,
        device="cpu",
        enable_memory_saver=False,
        cache_params=params,
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=page > 1,
        speculative_num_draft_tokens=None,
    )
