"""A draft's weights before training: what its target knows already, where shapes allow.

The last layer of the target that has weights of the draft's names gives its own; the rest of the
first layer's wider inputs begin small. The head has the target's rows of the draft's tokens, and
the projection of captured states passes the last of them through.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvtide.layers import Weights
from kvtide.models.model import Decoder
from kvtide.training.draft_vocabulary import DraftVocabulary
from kvtide.training.trainable_eagle3 import TrainableEagle3, TrainableLayer

_SMALL = 0.02


@torch.no_grad()
def start_from_target(
    draft: TrainableEagle3,
    target: Decoder,
    weights: Weights,
    vocabulary: DraftVocabulary | None,
) -> None:
    """Give the draft what it can take over. `weights` are the target's checkpoint's."""
    width = draft.shape.hidden
    head = target.head.weight.float()
    if head.shape[1] == width:
        rows = head if vocabulary is None else head[vocabulary.tokens.to(head.device)]
        draft.lm_head.weight.copy_(rows)
    if hasattr(target, "norm") and target.norm.weight.shape == (width,):
        draft.norm.weight.copy_(target.norm.weight)
    joining = _SMALL * torch.randn_like(draft.fc.weight) * width**-0.5
    joining[:, -width:] += torch.eye(width, device=joining.device)
    draft.fc.weight.copy_(joining)
    last = target.memory.layers - 1
    for number, layer in enumerate([draft.midlayer, *draft.layers.values()]):
        assert isinstance(layer, TrainableLayer)
        from_layer = max(0, last - draft.shape.layers + 1 + number)
        _start_layer(layer, weights, f"{type(target).BASE}.layers.{from_layer}")


def _start_layer(layer: TrainableLayer, weights: Weights, under: str) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    for name in ("q_proj", "k_proj", "v_proj"):
        projection: nn.Linear = getattr(attention, name)
        _copy_right(projection.weight, _found(weights, f"{under}.self_attn.{name}.weight"))
    _copy(attention.o_proj.weight, _found(weights, f"{under}.self_attn.o_proj.weight"))
    first = hasattr(layer, "hidden_norm")
    norm = layer.hidden_norm if first else layer.input_layernorm
    _copy(norm.weight, _found(weights, f"{under}.input_layernorm.weight"))
    after = layer.post_attention_layernorm.weight
    _copy(after, _found(weights, f"{under}.post_attention_layernorm.weight"))
    gate, up, down = (
        _found(weights, f"{under}.mlp.{name}_proj.weight") for name in ("gate", "up", "down")
    )
    if gate is None or up is None or down is None or gate.shape[1] != mlp.gate_proj.in_features:
        return
    kept = _loudest(up, down, mlp.gate_proj.out_features)
    _copy(mlp.gate_proj.weight, gate[kept])
    _copy(mlp.up_proj.weight, up[kept])
    _copy(mlp.down_proj.weight, down[:, kept])


def _found(weights: Weights, name: str) -> Tensor | None:
    return weights.get(name).float() if weights.has(name) else None


def _copy(weight: Tensor, given: Tensor | None) -> None:
    if given is not None and given.shape == weight.shape:
        weight.copy_(given)


def _copy_right(weight: Tensor, given: Tensor | None) -> None:
    """Into the last columns, which take the feature; those of the token begin small."""
    if given is None or len(given) != len(weight) or given.shape[1] > weight.shape[1]:
        return
    left = weight.shape[1] - given.shape[1]
    weight[:, :left] = _SMALL * torch.randn_like(weight[:, :left])
    weight[:, left:] = given.to(weight.device)


def _loudest(up: Tensor, down: Tensor, count: int) -> Tensor:
    """Numbers of the MLP's units with the largest weights, if it has more than `count`."""
    size: Tensor = up.norm(dim=1) * down.norm(dim=0)
    return size.topk(min(count, len(up))).indices.sort().values
