"""DeepSeek-V4: a window in every layer, and compressed streams of any ratio beside it.

A ratio is how many tokens one entry stands for. The sparse kind (4) compresses overlapping blocks
and has an indexer; the heavy kind (128, and any other ratio) does neither.
"""

from __future__ import annotations

from kvtide.spec.config import Config
from kvtide.spec.families.layers import layer_count
from kvtide.spec.families.parts import Choices, KVDType, packed, scaled, windowed
from kvtide.spec.pool import NOTHING, DType, Entry, Field, PoolSpec, Reuse

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def deepseek_v4(config: Config, choices: Choices) -> list[PoolSpec]:
    """Windows everywhere; most layers also keep one entry for every `ratio` tokens.

    The history anchor keeps no bytes itself: it is the books that the compressed pools share.
    """
    ratios = _v4_ratios(config)
    head_dim = config.count("head_dim")
    entry = packed(head_dim, _v4_rope(config, head_dim), choices.kv)
    pools = [PoolSpec("kv", (), NOTHING)]
    states: list[PoolSpec] = []
    for ratio in sorted(set(ratios) - {0}):
        layers = tuple(i for i, r in enumerate(ratios) if r == ratio)
        pools.append(PoolSpec(f"c{ratio}", layers, entry, tokens_per_entry=ratio, follows="kv"))
        if ratio == _v4_rates(config)[_SPARSE]:
            index_dim = config.count("index_head_dim")
            pools.append(_v4_index(ratio, layers, index_dim, choices.kv))
            states.append(_v4_state(f"c{ratio}_state", ratio, layers, head_dim))
            states.append(_v4_state(f"c{ratio}_index_state", ratio, layers, index_dim))
    return [*pools, *windowed(config, range(len(ratios)), entry), *states]


def _v4_index(ratio: int, layers: tuple[int, ...], width: int, kv: KVDType) -> PoolSpec:
    """The indexer's key of every compressed entry."""
    entry = Entry(scaled("index_key", width, kv))
    return PoolSpec(f"c{ratio}_index", layers, entry, tokens_per_entry=ratio, follows="kv")


def _v4_state(name: str, ratio: int, layers: tuple[int, ...], width: int) -> PoolSpec:
    """What an overlapping compressor needs to go on: its inputs of this block and the last.

    Kept values and gates have two halves each, one for the block they are in and one for the
    next. A compressor that does not overlap needs nothing where pages hold whole entries.
    """
    halves = 2 * width
    rows = Entry((Field("kv", (halves,), DType.FP32), Field("gate", (halves,), DType.FP32)))
    tail = 2 * ratio
    return PoolSpec(name, layers, rows, tail_entries=tail, follows="swa", reuse=Reuse(reach=tail))


def _v4_rates(config: Config) -> dict[str, int]:
    """Tokens per entry of the two kinds: the sparse one has an indexer and overlaps."""
    rates = config.nested("compress_rates") or Config(config.model, {})
    return {
        _SPARSE: rates.count(_SPARSE, default=config.count("compress_rate_csa", default=4)),
        _HEAVY: rates.count(_HEAVY, default=config.count("compress_rate_hca", default=128)),
    }


def _v4_ratios(config: Config) -> list[int]:
    """Per layer, tokens per compressed entry; 0 for a layer with a window only."""
    layers = layer_count(config)
    types = config.per_layer(layers, "layer_types")
    listed = config.per_layer(layers, "compress_ratios")
    known = {"sliding_attention": 0, **_v4_rates(config)}
    if types is not None:
        ratios = [known.get(str(name)) for name in types]
    elif listed is not None:
        ratios = [r if isinstance(r, int) and r >= 0 else None for r in listed]
    else:
        raise config.refusal("config.json has no `compress_ratios` or `layer_types`; add one")
    if None in ratios:
        raise config.refusal(
            f"layer {ratios.index(None)} has no known compression; use ratios such as 0, 4 and "
            f"128 in `compress_ratios`, or {', '.join(known)} in `layer_types`"
        )
    return [ratio for ratio in ratios if ratio is not None]


def _v4_rope(config: Config, head_dim: int) -> int:
    """Rotary dimensions: as the lab says it, or as the share that transformers saves."""
    share = config.find("partial_rotary_factor")
    if config.find("qk_rope_head_dim") is not None or not isinstance(share, float):
        rope = config.count("qk_rope_head_dim")
    else:
        rope = int(head_dim * share)
    if not 0 < rope < head_dim:
        raise config.refusal(f"{rope} rotary dimensions of {head_dim}; use fewer than `head_dim`")
    return rope
