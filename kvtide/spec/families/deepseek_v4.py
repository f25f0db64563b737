"""DeepSeek-V4: a window in every layer, and compressed streams of any ratio beside it.

A ratio is how many tokens one entry stands for. The sparse kind (4) compresses overlapping blocks
and has an indexer; the heavy kind (128, and any other ratio) does neither.

An entry is a weighted mean of its block's tokens. A compressor's state is the unfinished mean:
three numbers a channel (`layers/reference/compressor.py`), whatever the ratio. Pages hold whole
blocks, so at a page's end all blocks are closed. Where blocks overlap, the sums of the last block
for the next one remain: `c4_state` and `c4_index_state`. Means within a page are `…_open`, and
never leave the device.
"""

from __future__ import annotations

from dataclasses import replace

from kvtide.spec.config import Config
from kvtide.spec.families.layer_kinds import layer_count
from kvtide.spec.families.pool_parts import Choices, KVDType, packed, scaled, top_k, windowed
from kvtide.spec.pool import NOTHING, DType, Entry, Field, PoolSpec, Reuse

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def deepseek_v4(config: Config, choices: Choices) -> list[PoolSpec]:
    """Windows everywhere; most layers also keep one entry for every `ratio` tokens.

    The history anchor keeps no bytes itself: the compressed pools follow its slots.
    """
    ratios = _v4_ratios(config)
    head_dim = config.count("head_dim")
    entry = packed(head_dim, rotary_dims(config), choices.kv)
    pools = [PoolSpec("kv", (), NOTHING)]
    states: list[PoolSpec] = []
    for ratio in sorted(set(ratios) - {0}):
        layers = tuple(i for i, r in enumerate(ratios) if r == ratio)
        overlaps = ratio == _v4_rates(config)[_SPARSE]
        selected = top_k(config) if overlaps else None
        pools.append(
            PoolSpec(
                f"c{ratio}",
                layers,
                entry,
                tokens_per_entry=ratio,
                follows="kv",
                selected=selected,
            )
        )
        states += _v4_means(f"c{ratio}", layers, head_dim, overlaps)
        if overlaps:
            index_dim = config.count("index_head_dim")
            pools.append(_v4_index(ratio, layers, index_dim, choices.kv))
            states += _v4_means(f"c{ratio}_index", layers, index_dim, overlaps)
    # What never leaves the device comes last.
    states.sort(key=lambda pool: pool.reuse.reach == 0)
    return [*pools, *windowed(config, range(len(ratios)), entry), *states]


def deepseek_v4_mtp(config: Config, choices: Choices) -> list[PoolSpec]:
    """Its next-token layer has a window only, whatever the layers before it have."""
    first = layer_count(config)
    listed = (config.listing("compress_ratios") or [])[first : first + 1]
    if any(ratio != 0 for ratio in listed):
        raise config.refusal(
            f"`compress_ratios` gives layer {first}, which is for multi-token prediction, "
            f"{listed[0]}; use 0: it attends to a window only"
        )
    head_dim = config.count("head_dim")
    entry = packed(head_dim, rotary_dims(config), choices.kv)
    return windowed(config, range(1), entry)


def _v4_index(ratio: int, layers: tuple[int, ...], width: int, kv: KVDType) -> PoolSpec:
    """The indexer's key of every compressed entry."""
    entry = scaled("index_key", width, kv)
    return PoolSpec(f"c{ratio}_index", layers, entry, tokens_per_entry=ratio, follows="kv")


def _v4_means(name: str, layers: tuple[int, ...], width: int, overlaps: bool) -> list[PoolSpec]:
    """A compressor's unfinished means: of the open block, and its sums for the next one."""
    mean = Entry(tuple(Field(n, (width,), DType.FP32) for n in ("peak", "total", "mixed")))
    open_block = PoolSpec(
        f"{name}_open", layers, mean, tail_entries=1, follows="swa", reuse=Reuse(reach=0)
    )
    if not overlaps:
        return [open_block]
    state = replace(open_block, name=f"{name}_state", reuse=Reuse(reach=1))
    return [state, open_block]


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
        ratios = [r if isinstance(r, int) and r >= 0 and r != 1 else None for r in listed]
    else:
        raise config.refusal("config.json has no `compress_ratios` or `layer_types`; add one")
    if None in ratios:
        raise config.refusal(
            f"layer {ratios.index(None)} has no known compression; use ratios such as 0, 4 and "
            f"128 in `compress_ratios`, or {', '.join(known)} in `layer_types`"
        )
    return [ratio for ratio in ratios if ratio is not None]


def rotary_dims(config: Config) -> int:
    """Of a head: as published, or from the fraction that `transformers` saves."""
    head_dim, fraction = config.count("head_dim"), config.find("partial_rotary_factor")
    if config.find("qk_rope_head_dim") is not None or not isinstance(fraction, float):
        rope = config.count("qk_rope_head_dim")
    else:
        rope = int(head_dim * fraction)
    if not 0 < rope < head_dim:
        raise config.refusal(f"{rope} rotary dimensions of {head_dim}; use fewer than `head_dim`")
    return rope
