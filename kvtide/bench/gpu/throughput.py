"""Prefill and decode, beside the FLOPs they compute and the bytes they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch

from kvtide.bench.gpu.ceilings import Ceilings
from kvtide.bench.gpu.engine_bed import (
    Bed,
    flush,
    median_s,
    start,
    step_s,
    stop,
    ttft_s,
)
from kvtide.bench.gpu.history import graph_replay_s
from kvtide.engine import Engine, RequestParams, SamplingParams
from kvtide.engine.sampling.sampling_params import GREEDY
from kvtide.engine.scheduler import MIXED_STEP_TOKENS
from kvtide.spec import Tier


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """`utilization`: of the GEMM ceiling (prefill) or of the memory bandwidth (decode).

    `work`: FLOPs of a prefill, bytes read by a decode step.
    """

    what: str
    seconds: float
    work: float
    utilization: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def prefill(
    bed: Bed, config: Mapping[str, Any], tokens: int, ceilings: Ceilings
) -> ThroughputResult:
    """A prompt in one step, from submission to its first token."""
    page = bed.model.memory.page_tokens
    with bed.engine(2 * tokens + 4 * page, chunk_tokens=tokens) as engine:
        seeds = count(1001)

        def once() -> float:
            flush(engine, Tier.DEVICE)
            return ttft_s(engine, bed.prompt(tokens, next(seeds)))[0]

        once()
        seconds = median_s(once, 5)
    flops = prefill_flops(config, tokens)
    return ThroughputResult(
        f"prefill of {tokens:,} tokens", seconds, flops, flops / seconds / ceilings.flops
    )


def decode(
    bed: Bed, config: Mapping[str, Any], batch: int, context: int, ceilings: Ceilings, steps: int
) -> ThroughputResult:
    """A decode step of a full batch, in steady state."""
    page = bed.model.memory.page_tokens
    longest = context + steps + 2 * page + 64
    with bed.engine(batch * (longest + page), max_running=batch) as engine:
        decode_step_s(bed, engine, batch, context, steps)  # To warm up.
        seconds = decode_step_s(bed, engine, batch, context, steps)
    read = weight_bytes(config) + batch * (context + steps // 2) * kv_bytes(config)
    what = f"decode, batch {batch}, context {context:,}"
    return ThroughputResult(what, seconds, read, read / seconds / ceilings.bytes_s)


def decode_step_s(
    bed: Bed,
    engine: Engine,
    batch: int,
    context: int,
    steps: int,
    sampling: SamplingParams = GREEDY,
) -> float:
    """Seconds of a step in which the whole batch decodes."""
    lead = context * batch // min(engine.scheduler.chunk_tokens, MIXED_STEP_TOKENS) + 16
    prompts = [bed.prompt(context, 7000 + number) for number in range(batch)]
    start(engine, [RequestParams(tokens, steps + lead, sampling) for tokens in prompts])
    seconds = step_s(bed, engine, steps)
    stop(engine)
    return seconds


def prefill_flops(config: Mapping[str, Any], tokens: int) -> float:
    """FLOPs of a dense model: two per weight and token, and causal attention."""
    heads, dim = config["num_attention_heads"], config["head_dim"]
    attention = 4 * heads * dim * tokens * (tokens + 1) / 2
    return float(config["num_hidden_layers"] * (2 * tokens * _layer_weights(config) + attention))


def weight_bytes(config: Mapping[str, Any]) -> float:
    """Weights of a dense model in half precision, without the embedding table."""
    head = config["vocab_size"] * config["hidden_size"]
    return float(2 * (config["num_hidden_layers"] * _layer_weights(config) + head))


def kv_bytes(config: Mapping[str, Any]) -> float:
    """KV of one token in half precision."""
    entry = 2 * config["num_key_value_heads"] * config["head_dim"]
    return float(2 * config["num_hidden_layers"] * entry)


def _layer_weights(config: Mapping[str, Any]) -> int:
    hidden, heads, dim = (
        config[name] for name in ("hidden_size", "num_attention_heads", "head_dim")
    )
    attention = 2 * hidden * dim * (heads + config["num_key_value_heads"])
    return int(attention + 3 * hidden * config["intermediate_size"])


# -- DeepSeek-V4 ------------------------------------------------------------------------------


def decode_v4(
    bed: Bed, config: Mapping[str, Any], batch: int, context: int, ceilings: Ceilings
) -> ThroughputResult:
    """A decode step of DeepSeek-V4 as a CUDA graph, over a random KV history."""
    seconds = graph_replay_s(bed, batch, context)
    read = decode_v4_bytes(config, bed, batch, context)
    what = f"decode, batch {batch}, context {context:,}"
    return ThroughputResult(what, seconds, read, read / seconds / ceilings.bytes_s)


def decode_v4_bytes(config: Mapping[str, Any], bed: Bed, batch: int, context: int) -> float:
    """Bytes that a decode step reads: active weights, windows, top-k entries, all index keys.

    No two tokens share a routed expert, as long as there are enough experts.
    """
    routed, shared = config["n_routed_experts"], config["n_shared_experts"]
    active = min(routed, batch * config["num_experts_per_tok"])
    total = 0.0
    for tensor in weights_of(bed.model):
        if not tensor.is_floating_point():
            continue  # Integer tables are looked up, not read whole.
        # Shared experts, which all tokens use, may stand behind the routed ones.
        shared_here = len(tensor) - routed if tensor.dim() == 3 else -1
        fraction = (active + shared_here) / len(tensor) if 0 <= shared_here <= shared else 1.0
        total += fraction * tensor.numel() * tensor.element_size()
    # The embedding table is looked up too.
    total -= config["vocab_size"] * config["hidden_size"] * 2
    for pool in bed.model.memory.pools:
        each, seen = pool.entry.bytes, context // pool.tokens_per_entry
        if pool.name == "swa":
            seen = min(context, config["sliding_window"])
        elif pool.tokens_per_entry == 4 and not pool.name.endswith("_index"):
            seen = min(seen, config["index_topk"])
        elif pool.tail_entries is not None:
            seen = 1
        total += batch * len(pool.layers) * each * seen
    return float(total)


def weights_of(model: object) -> list[torch.Tensor]:
    """Every tensor that a model holds, once each."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    left: list[object] = [model]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found[one.data_ptr()] = one
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
        elif type(one).__module__.startswith("kvtide."):
            slots = (name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ()))
            names = {*getattr(one, "__dict__", ()), *slots}
            left += [getattr(one, name) for name in names if hasattr(one, name)]
    return list(found.values())
