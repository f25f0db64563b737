"""What layers are built from: a checkpoint's tensors by name, the config, the declared memory.

`Weights` is all that model code knows of a checkpoint: tensors by the names of `transformers`. A
`Blueprint` joins it with everything else that a layer's constructor needs; sublayers get the same
blueprint with a longer prefix.

Under tensor parallelism, a layer's constructor says how each projection is sharded: `columns` by
outputs, `rows` by inputs, `fused` by outputs part by part. Units (a head, a group) stay whole.
`embedding` and `head` are sharded by tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.ops import Ops
from kvtide.layers.backend.packed_weight import PackedWeight, Weight, joined
from kvtide.layers.dense import Embedding, GatedMLP, Head, Linear, RMSNorm, numbers
from kvtide.layers.elementwise import ACTIVATIONS, Activation
from kvtide.layers.forward import Place
from kvtide.layers.tensor_ranks import ALONE, TensorRanks
from kvtide.spec import ModelMemory
from kvtide.spec.config import Config


class Weights(Protocol):
    """A checkpoint. Names are those of `transformers`: `model.layers.0.mlp.up_proj.weight`."""

    def get(self, name: str) -> Tensor: ...

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of what `get` gives; nothing is read."""

    def get_rows(self, name: str, rows: range) -> Tensor:
        """`get(name)[rows]`, as far as possible without reading other rows."""

    def packed(self, name: str) -> PackedWeight | None:
        """A matrix as the checkpoint packs it, None where it holds fp32 or packs in other forms."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A run of channels: so many units (heads, groups) of so many channels each, on all ranks."""

    units: int
    width: int = 1

    @property
    def channels(self) -> int:
        return self.units * self.width


@dataclass(frozen=True, slots=True)
class Blueprint:
    """`norm_offset` is added to the weights of norms (Gemma stores them around zero)."""

    config: Config
    weights: Weights
    memory: ModelMemory
    ops: Ops
    dtype: torch.dtype
    norm_offset: float = 0.0
    ranks: TensorRanks = ALONE
    prefix: str = ""

    @property
    def arithmetic(self) -> Arithmetic:
        return self.ops.arithmetic

    def under(self, name: str) -> Blueprint:
        return replace(self, prefix=f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        return self.weights.has(self.prefix + name)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A weight in the model's dtype, or in this one."""
        return self.weights.get(self.prefix + name).detach().to(dtype or self.dtype).contiguous()

    def weight(self, name: str) -> Weight:
        """A matrix as it is multiplied: packed as the checkpoint has it where that is possible."""
        forms = self.arithmetic.packed_forms
        if forms and self.ranks.count == 1 and self.dtype is torch.float32:
            packed = self.weights.packed(self.prefix + name)
            if packed is not None and packed.is_of(forms):
                return packed
        return self.tensor(name)

    def layers(self) -> Iterator[tuple[int, Blueprint]]:
        """The number of every layer of this pipeline stage, and the blueprint under its name."""
        return ((n, self.under(f"layers.{n}")) for n in self.memory.own_layers)

    def keeps(self, layer: int, field: str) -> bool:
        """Whether the memory has such a field for the layer: it tells attention from recurrence."""
        pools = (pool for pool in self.memory.pools if layer in pool.layers)
        return any(kept.name == field for pool in pools for kept in pool.entry.fields)

    def place(self, layer: int, field: str) -> Place:
        return Place.holding(field, self.memory, layer)

    def pool(self, name: str, layer: int) -> Place:
        """The pool of this name, for families whose pools have fields of the same name."""
        return Place(self.memory.pool(name), layer)

    @property
    def head_dim(self) -> int:
        """Of keys and values by head, as the memory declares them."""
        fields = (field for pool in self.memory.pools for field in pool.entry.fields)
        return next(field.shape[1] for field in fields if field.name == "k")

    # -- this rank's shard ---------------------------------------------------------------------

    def shard(self, weight: Tensor, unit: int = 1, *, axis: int = 0) -> Tensor:
        """This rank's shard of a weight along an axis, in units of so many rows.

        It is a copy: a view would keep the whole weight in memory.
        """
        units = weight.shape[axis] // unit
        mine = self.ranks.shard(units)
        if mine is None:
            raise self.config.refusal(
                f"{self.prefix[:-1]} has {units} units that do not divide over {self.ranks.count} "
                "tensor ranks; use fewer ranks, or as many as divide them"
            )
        if len(mine) == units:
            return weight.contiguous()
        part = weight.narrow(axis, mine.start * unit, len(mine) * unit)
        return part.clone(memory_format=torch.contiguous_format)

    def shard_parts(self, weight: Tensor, parts: Sequence[WeightPart]) -> Tensor:
        """This rank's shard of each of several parts, which stand side by side."""
        runs = weight.split([part.channels for part in parts])
        pairs = zip(runs, parts, strict=True)
        return torch.cat([self.shard(run, part.width) for run, part in pairs])

    def fused(self, name: str, parts: Sequence[WeightPart]) -> Linear:
        """A projection that gives several parts side by side: this rank's shard of each."""
        whole = self.linear(name)
        if self.ranks.count == 1:
            return whole
        bias = None if whole.bias is None else self.shard_parts(whole.bias, parts)
        return replace(whole, held=self.shard_parts(whole.weight, parts), bias=bias)

    def columns(self, *names: str, unit: int = 1) -> Linear:
        """As `linear`, sharded by the outputs of each projection, in units of so many."""
        if self.ranks.count == 1:
            return self.linear(*names)
        parts = [self.linear(name) for name in names]
        weights = [self.shard(part.weight, unit) for part in parts]
        if all(part.bias is None for part in parts):
            return Linear(self.arithmetic, torch.cat(weights))
        biases = [self.shard(part.bias_or_zeros, unit) for part in parts]
        return Linear(self.arithmetic, torch.cat(weights), torch.cat(biases))

    def rows(self, name: str, *, unit: int = 1) -> Linear:
        """A projection sharded by inputs: the ranks' partial sums are reduced to the whole.

        No two ranks have the same unit, which would count twice.
        """
        whole = self.linear(name)
        if self.ranks.count == 1:
            return whole
        if (units := whole.weight.shape[1] // unit) < self.ranks.count:
            raise self.config.refusal(
                f"{self.prefix}{name} takes {units} units, which do not divide over "
                f"{self.ranks.count} tensor ranks; use at most {units} ranks"
            )
        return replace(whole, held=self.shard(whole.weight, unit, axis=1), ranks=self.ranks)

    def embedding(self, name: str) -> Embedding:
        """Rows by token: those of this rank's shard of the vocabulary. No others are read."""
        return Embedding(self.arithmetic, *self._vocabulary_shard(name), self.ranks)

    def head(self, weight: str, bias: str | None = None) -> Head:
        """The projection to logits: this rank's shard of the vocabulary. No more is read."""
        rows, tokens = self._vocabulary_shard(weight)
        biases = None
        if bias is not None and self.has(bias):
            held, _ = self._vocabulary_shard(bias)
            biases = numbers(self.arithmetic, held)
        return Head(Linear(self.arithmetic, rows, biases), tokens, self.ranks)

    def _vocabulary_shard(self, name: str) -> tuple[Weight, int]:
        """This rank's rows of a weight that has one for each token, and how many tokens there are
        on all ranks. Where they do not divide, the last ranks' rows are padded with zeros."""
        if self.ranks.count == 1:
            whole = self.weight(name)
            return whole, len(whole)
        tokens, *row = self.weights.shape(self.prefix + name)
        padded = torch.zeros(self.ranks.vocabulary_rows(tokens), *row, dtype=self.dtype)
        if mine := self.ranks.vocabulary_shard(tokens):
            padded[: len(mine)] = self.weights.get_rows(self.prefix + name, mine).detach()
        return padded, tokens

    # -- projections, norms, MLPs --------------------------------------------------------------

    def linear(self, *names: str) -> Linear:
        """One GEMM for several projections of the same input, their outputs side by side."""
        weights = [self.weight(f"{name}.weight") for name in names]
        biases = None
        if any(self.has(f"{name}.bias") for name in names):
            biases = torch.cat(
                [
                    self.tensor(f"{name}.bias")
                    if self.has(f"{name}.bias")
                    else torch.zeros(len(weight), dtype=self.dtype, device=weight.device)
                    for name, weight in zip(names, weights, strict=True)
                ]
            )
        return Linear(self.arithmetic, self._beside(weights), biases)

    def _beside(self, weights: Sequence[Weight]) -> Weight:
        """The rows of several weights; packed if all of them are."""
        packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
        if len(packed) == len(weights):
            return joined(packed)
        return torch.cat([numbers(self.arithmetic, weight) for weight in weights])

    def norm(self, name: str) -> RMSNorm:
        weight = self.tensor(f"{name}.weight", torch.float32) + self.norm_offset
        eps = self.config.number("rms_norm_eps", "norm_eps", "layer_norm_epsilon", default=1e-6)
        return RMSNorm(self.ops, weight, eps)

    def activation(self) -> Activation:
        given = self.config.find("hidden_act", "hidden_activation", "mlp_hidden_act")
        name = str(given or "silu")
        if name not in ACTIVATIONS:
            raise self.config.refusal(
                f"activation {name!r} is not known here; use {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]

    def mlp(self, *names: str, limit: float | None = None) -> GatedMLP:
        """`names` are those of the gate, up and down projections, if not the usual ones."""
        gate, up, down = names or ("gate_proj", "up_proj", "down_proj")
        both = self.columns(gate, up)
        return GatedMLP(self.ops, both, self.rows(down), self.activation(), limit)
