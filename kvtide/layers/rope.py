"""Rotary position embeddings: the frequency of each pair of dimensions, and the rotation.

Frequencies come from a config in any of its spellings: `rope_theta` with `rope_scaling` as labs
publish it, or `rope_parameters` as `transformers` writes it, flat or by layer type. Rope types
that depend on the length of the sequence (dynamic, longrope) are refused: they would change keys
that are cached already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtide.spec.config import Config

_TURN = 2 * math.pi


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """`frequencies`: radians per position, for each pair. `gain` multiplies cosines and sines."""

    frequencies: Tensor
    gain: float = 1.0
    _placed: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def dims(self) -> int:
        """How many dimensions of a head are rotated."""
        return 2 * len(self.frequencies)

    def __call__(self, positions: Tensor) -> Tensor:
        """Cosines and sines at these positions: (tokens, 2, pairs).

        Angles are reduced to less than a full turn first. Torch reduces a vector of angles in one
        of two ways, by the largest of them: one token's result would depend on its neighbours.
        """
        angles = (positions[:, None].float() * self._on(positions.device)).double()
        angles = angles - torch.round(angles / _TURN) * _TURN
        cos_sin = torch.stack([angles.cos(), angles.sin()], dim=1)
        return cos_sin.float() * self.gain

    def _on(self, device: torch.device) -> Tensor:
        """The frequencies on this device: copied once."""
        if device not in self._placed:
            self._placed[device] = self.frequencies.to(device)
        return self._placed[device]


def rotate_half(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotates pairs (i, i + n) of the first 2n dimensions of every head, as GPT-NeoX does.

    cos_sin  (tokens, 2, pairs), as a `Rope` gives them
    The dimensions after them stay as they are.
    """
    pairs = cos_sin.shape[-1]
    cos, sin = cos_sin[:, None, 0], cos_sin[:, None, 1]
    first, second = x[..., :pairs].float(), x[..., pairs : 2 * pairs].float()
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*(half.to(x.dtype) for half in rotated), x[..., 2 * pairs :]], dim=-1)


def rotate_interleaved(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotates pairs (2i, 2i + 1) of the last 2n dimensions of every head, as GPT-J does.

    `inverse_rotation` gives the way back.
    """
    rotary = 2 * cos_sin.shape[-1]
    shape = (len(x), *[1] * (x.dim() - 2), rotary // 2)
    cos, sin = cos_sin[:, 0].view(shape), cos_sin[:, 1].view(shape)
    pairs = x[..., -rotary:].float().unflatten(-1, (-1, 2))
    first, second = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([x[..., :-rotary], rotated.flatten(-2).to(x.dtype)], dim=-1)


def inverse_rotation(cos_sin: Tensor) -> Tensor:
    """Cosines and sines that rotate back."""
    return torch.stack([cos_sin[:, 0], -cos_sin[:, 1]], dim=1)


def rope_parameters(config: Config, layer_type: str = "full_attention") -> Config:
    """What a config says of rotary positions, for layers of this type, in one spelling."""
    given = config.nested("rope_parameters") or config.nested("rope_scaling")
    given = Config(config.model, {}) if given is None else given
    given = given.nested(layer_type) or given
    outer = ("rope_theta", "partial_rotary_factor", "max_position_embeddings")
    given = given.beneath({name: config.find(name) for name in outer})
    original = config.find("original_max_position_embeddings")
    if original is None:
        original = given.find("original_max_position_embeddings", "max_position_embeddings")
    values = {**given.values, "original_max_position_embeddings": original}
    return Config(config.model, values)


def rope(parameters: Config, head_dim: int) -> Rope:
    """The rotation that these parameters describe, for heads of so many dimensions."""
    kind = parameters.find("rope_type", "type") or "default"
    scale = _SCALINGS.get(str(kind))
    if scale is None:
        raise parameters.refusal(
            f"rope type {kind!r} is not one that cached keys can use; use {', '.join(_SCALINGS)}"
        )
    dims = int(head_dim * parameters.number("partial_rotary_factor", default=1.0))
    theta = parameters.number("rope_theta", default=10_000.0)
    exponents = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
    return scale(parameters, 1.0 / theta**exponents)


def _unscaled(parameters: Config, frequencies: Tensor) -> Rope:
    return Rope(frequencies)


def _linear(parameters: Config, frequencies: Tensor) -> Rope:
    return Rope(frequencies / parameters.number("factor"))


def _llama3(parameters: Config, frequencies: Tensor) -> Rope:
    """Low frequencies are divided by `factor`, high ones are kept, those between interpolated."""
    factor, low = parameters.number("factor"), parameters.number("low_freq_factor")
    high = parameters.number("high_freq_factor")
    turns = parameters.number("original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return Rope((1 - kept) * frequencies / factor + kept * frequencies)


def _yarn(parameters: Config, frequencies: Tensor) -> Rope:
    """As llama3, but interpolated by the number of a pair, and with a gain."""
    original = parameters.number("original_max_position_embeddings")
    stretched = parameters.number("max_position_embeddings", default=original) / original
    factor = parameters.number("factor", default=stretched)
    theta, pairs = parameters.number("rope_theta", default=10_000.0), len(frequencies)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    low = pair_that_turns(parameters.number("beta_fast", default=32.0))
    high = pair_that_turns(parameters.number("beta_slow", default=1.0))
    if parameters.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    # A ramp from and to the same pair is a step.
    width = (high - low) or 0.001
    slowed = ((torch.arange(pairs, dtype=torch.float32) - low) / width).clamp(0, 1)
    return Rope(
        frequencies / factor * slowed + frequencies * (1 - slowed), _yarn_gain(parameters, factor)
    )


def _yarn_gain(parameters: Config, factor: float) -> float:
    both = [parameters.number(name, default=0.0) for name in ("mscale", "mscale_all_dim")]
    one, all_dims = (_stretched(factor, weight) for weight in both)
    default = one / all_dims if all(both) else _stretched(factor, 1.0)
    return parameters.number("attention_factor", default=default)


def _stretched(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def softmax_gain(parameters: Config) -> float:
    """What attention scores are multiplied by where `mscale_all_dim` asks for it (DeepSeek).

    The gain is for queries and keys alike, hence squared, also for dimensions without rotation.
    """
    kind = parameters.find("rope_type", "type") or "default"
    weight = parameters.number("mscale_all_dim", default=0.0)
    if kind == "default" or weight == 0:
        return 1.0
    return _stretched(parameters.number("factor"), weight) ** 2


_SCALINGS: dict[str, Callable[[Config, Tensor], Rope]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
