"""Families with recurrent layers beside attention: Mamba2, gated delta, KDA, short convolutions.

A recurrent layer's state is whole only where a checkpoint was taken, so its pool is an anchor of
its own with one entry a page. Convolution inputs are declared part by part (x, B, C or q, k, v),
so that each divides over tensor ranks by its own heads or groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.spec.config import Config
from kvtide.spec.families.layer_kinds import LayerKind, every, layer_count, listed_kinds, of_kind
from kvtide.spec.families.pool_parts import (
    Choices,
    Conv,
    KVDType,
    attention_entry,
    checkpoint,
    history,
    latent_entry,
    recurrent_state,
)
from kvtide.spec.pool import Field, PoolSpec


@dataclass(frozen=True, slots=True)
class _Mamba2:
    """The shape of a Mamba2 mixer. Heads share B and C by group."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int

    def fields(self, kv: KVDType) -> tuple[Field, ...]:
        conv = Conv(self.kernel, kv.unpacked)
        return (
            *conv.inputs("conv_x", self.heads, self.head_dim),
            *conv.inputs("conv_b", self.groups, self.state),
            *conv.inputs("conv_c", self.groups, self.state),
            recurrent_state("ssm", self.heads, self.head_dim, self.state),
        )


def _mamba2(config: Config) -> _Mamba2:
    """As falcon_h1, bamba and granitemoehybrid spell it."""
    heads = config.count("mamba_n_heads")
    inner = config.count("mamba_d_ssm", default=0) or (
        config.count("mamba_expand", default=2) * config.count("hidden_size")
    )
    auto = config.find("mamba_d_head") in (None, "auto")
    head_dim = inner // heads if auto else config.count("mamba_d_head")
    if heads * head_dim != inner:
        raise config.refusal(
            f"{heads} Mamba heads of {head_dim} do not make up {inner} inner channels; "
            "check `mamba_n_heads`, `mamba_d_head` and `mamba_expand` or `mamba_d_ssm`"
        )
    return _Mamba2(
        heads,
        head_dim,
        config.count("mamba_n_groups", default=1),
        config.count("mamba_d_state"),
        config.count("mamba_d_conv", default=4),
    )


def falcon_h1(config: Config, choices: Choices) -> list[PoolSpec]:
    """Attention and Mamba2 side by side in every layer."""
    layers = range(layer_count(config))
    return [
        history(layers, attention_entry(config, choices.kv)),
        checkpoint(layers, _mamba2(config).fields(choices.kv), choices),
    ]


def _attention_or(
    kinds: Sequence[LayerKind], config: Config, fields: tuple[Field, ...], choices: Choices
) -> list[PoolSpec]:
    """Each layer is attention by head, or recurrent with these fields, or keeps nothing."""
    recurrent = of_kind(kinds, LayerKind.LINEAR) + of_kind(kinds, LayerKind.CONV)
    return [
        history(of_kind(kinds, LayerKind.FULL), attention_entry(config, choices.kv)),
        checkpoint(sorted(recurrent), fields, choices),
    ]


def granite_hybrid(config: Config, choices: Choices) -> list[PoolSpec]:
    kinds = listed_kinds(config, LayerKind.FULL, LayerKind.LINEAR) or [
        LayerKind.LINEAR
    ] * layer_count(config)
    # Some are published without a mixer; what their configs say of one need not make sense.
    fields = _mamba2(config).fields(choices.kv) if LayerKind.LINEAR in kinds else ()
    return _attention_or(kinds, config, fields, choices)


def bamba(config: Config, choices: Choices) -> list[PoolSpec]:
    layers = layer_count(config)
    full = config.indices(layers, "attn_layer_indices") or ()
    kinds = [LayerKind.FULL if layer in full else LayerKind.LINEAR for layer in range(layers)]
    return _attention_or(kinds, config, _mamba2(config).fields(choices.kv), choices)


def nemotron_h(config: Config, choices: Choices) -> list[PoolSpec]:
    mixer = _Mamba2(
        config.count("mamba_num_heads"),
        config.count("mamba_head_dim"),
        config.count("n_groups", "mamba_n_groups"),
        config.count("ssm_state_size"),
        config.count("conv_kernel", "mamba_d_conv", default=4),
    )
    kinds = listed_kinds(
        config, LayerKind.FULL, LayerKind.LINEAR, LayerKind.NOTHING
    ) or _nemotron_pattern(config)
    return _attention_or(kinds, config, mixer.fields(choices.kv), choices)


def _nemotron_pattern(config: Config) -> list[LayerKind]:
    """One letter a layer: M Mamba2, * attention, - MLP, E experts."""
    letters = {
        "M": LayerKind.LINEAR,
        "*": LayerKind.FULL,
        "-": LayerKind.NOTHING,
        "E": LayerKind.NOTHING,
    }
    pattern = config.find("hybrid_override_pattern")
    if not isinstance(pattern, str) or not set(pattern) <= set(letters):
        raise config.refusal(
            f"`hybrid_override_pattern` is {pattern!r}; use one of M * - E for every layer, "
            "or list `layers_block_type`"
        )
    if len(pattern) < layer_count(config):
        raise config.refusal(
            f"`hybrid_override_pattern` has {len(pattern)} letters for {layer_count(config)} "
            "layers; give every layer one"
        )
    return [letters[letter] for letter in pattern[: layer_count(config)]]


def gated_delta(config: Config, choices: Choices) -> list[PoolSpec]:
    """qwen3_next and qwen3_5: gated delta layers, and attention every few layers."""
    keys, values = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    key_dim, value_dim = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    conv = Conv(config.count("linear_conv_kernel_dim", default=4), choices.kv.unpacked)
    fields = (
        *conv.inputs("conv_q", keys, key_dim),
        *conv.inputs("conv_k", keys, key_dim),
        *conv.inputs("conv_v", values, value_dim),
        recurrent_state("delta", values, key_dim, value_dim),
    )
    period = config.count("full_attention_interval", default=4)
    by_rule = every(config, period, LayerKind.FULL, others=LayerKind.LINEAR)
    kinds = listed_kinds(config, LayerKind.FULL, LayerKind.LINEAR) or by_rule
    return _attention_or(kinds, config, fields, choices)


def gated_delta_mtp(config: Config, choices: Choices) -> list[PoolSpec]:
    """Its next-token layer has attention, whatever the layers before it have."""
    return [history([0], attention_entry(config, choices.kv))]


def kimi_linear(config: Config, choices: Choices) -> list[PoolSpec]:
    """KDA layers, and latent attention every few layers."""
    linear = config.nested("linear_attn_config")
    linear = config if linear is None else linear
    heads = linear.count("linear_num_heads", "num_heads")
    head_dim = linear.count("linear_head_dim", "head_dim")
    kernel = linear.count("linear_conv_kernel_dim", "short_conv_kernel_size", default=4)
    conv = Conv(kernel, choices.kv.unpacked)
    fields = (
        *conv.inputs("conv_q", heads, head_dim),
        *conv.inputs("conv_k", heads, head_dim),
        *conv.inputs("conv_v", heads, head_dim),
        recurrent_state("delta", heads, head_dim, head_dim),
    )
    kinds = listed_kinds(config, LayerKind.FULL, LayerKind.LINEAR) or _kimi_kinds(config, linear)
    return [
        history(of_kind(kinds, LayerKind.FULL), latent_entry(config, choices.kv)),
        checkpoint(of_kind(kinds, LayerKind.LINEAR), fields, choices),
    ]


def _kimi_kinds(config: Config, linear: Config) -> list[LayerKind]:
    layers = layer_count(config)
    # The published list counts layers from 1.
    counted = linear.indices(layers + 1, "full_attn_layers")
    if counted is None:
        return [LayerKind.FULL if i and i % 4 == 0 else LayerKind.LINEAR for i in range(layers)]
    return [LayerKind.FULL if i + 1 in counted else LayerKind.LINEAR for i in range(layers)]


def lfm2(config: Config, choices: Choices) -> list[PoolSpec]:
    """Short convolutions, and attention at the listed layers (all of them if none is listed)."""
    layers = layer_count(config)
    full = config.indices(layers, "full_attn_idxs")
    full = tuple(range(layers)) if full is None else full
    by_rule = [LayerKind.FULL if layer in full else LayerKind.CONV for layer in range(layers)]
    kinds = listed_kinds(config, LayerKind.FULL, LayerKind.CONV) or by_rule
    conv = Conv(config.count("conv_L_cache", default=3), choices.kv.unpacked)
    fields = conv.inputs("conv", config.count("hidden_size"), 1)
    return _attention_or(kinds, config, fields, choices)
