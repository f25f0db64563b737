"""What layers are built from: a checkpoint's tensors by name, the config, the declared memory.

`Weights` is all that model code knows of a checkpoint: names as `transformers` writes them, in
whatever file and precision they lie. A `Blueprint` joins it with everything else that a layer's
constructor needs, and is handed down with longer and longer prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic
from kvtide.layers.dense import GatedMLP, Linear, RMSNorm
from kvtide.layers.elementary import ACTIVATIONS
from kvtide.layers.forward import Place
from kvtide.spec import ModelMemory
from kvtide.spec.config import Config


class Weights(Protocol):
    """A checkpoint. Names are those of `transformers`: `model.layers.0.mlp.up_proj.weight`."""

    def get(self, name: str) -> Tensor: ...

    def has(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Blueprint:
    """`norm_offset`: what is added to the weights of norms (Gemma keeps them around zero)."""

    config: Config
    weights: Weights
    memory: ModelMemory
    arithmetic: Arithmetic
    dtype: torch.dtype
    norm_offset: float = 0.0
    prefix: str = ""

    def under(self, name: str) -> Blueprint:
        return replace(self, prefix=f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        return self.weights.has(self.prefix + name)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A weight in the model's dtype, or in this one."""
        return self.weights.get(self.prefix + name).detach().to(dtype or self.dtype).contiguous()

    def layers(self) -> Iterator[tuple[int, Blueprint]]:
        """Every layer's number, and what is under its name."""
        return ((n, self.under(f"layers.{n}")) for n in range(self.memory.layers))

    def place(self, layer: int, field: str) -> Place:
        return Place.holding(field, self.memory, layer)

    @property
    def head_dim(self) -> int:
        """Of keys and values by head, as the memory declares them."""
        fields = (field for pool in self.memory.pools for field in pool.entry.fields)
        return next(field.shape[1] for field in fields if field.name == "k")

    # -- what most layers are made of ----------------------------------------------------------

    def linear(self, *names: str) -> Linear:
        """One product for several projections of the same input, their outputs side by side."""
        weights = [self.tensor(f"{name}.weight") for name in names]
        biases = None
        if any(self.has(f"{name}.bias") for name in names):
            biases = torch.cat(
                [
                    self.tensor(f"{name}.bias")
                    if self.has(f"{name}.bias")
                    else weight.new_zeros(len(weight))
                    for name, weight in zip(names, weights, strict=True)
                ]
            )
        return Linear(self.arithmetic, torch.cat(weights), biases)

    def norm(self, name: str) -> RMSNorm:
        weight = self.tensor(f"{name}.weight", torch.float32) + self.norm_offset
        eps = self.config.number("rms_norm_eps", default=1e-6)
        return RMSNorm(self.arithmetic, weight, eps)

    def mlp(self) -> GatedMLP:
        name = str(self.config.find("hidden_act", "hidden_activation") or "silu")
        if name not in ACTIVATIONS:
            raise self.config.refusal(
                f"activation {name!r} is not known here; use {', '.join(ACTIVATIONS)}"
            )
        gate_up, down = self.linear("gate_proj", "up_proj"), self.linear("down_proj")
        return GatedMLP(self.arithmetic, gate_up, down, ACTIVATIONS[name])
