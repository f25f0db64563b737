"""A draft's weights before training: those of a trained draft, or what its target knows already.

From a target, where shapes allow: its last layer that has weights of the draft's names gives its
own; the rest of the first layer's wider inputs begin small. The head has the target's rows of the
draft's tokens, and the projection of captured states passes the last of them through.

From a trained draft: all its weights. Tokens that it lacks begin with the target's rows, moved as
its own rows have moved away from the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvtide.layers import Weights
from kvtide.models.eagle3 import target_tokens
from kvtide.models.model import Decoder
from kvtide.training.draft_vocabulary import DraftVocabulary
from kvtide.training.publish import HEAD
from kvtide.training.trainable_eagle3 import TrainableEagle3, TrainableLayer

_SMALL = 0.02
_RIDGE = 0.1
"""Of the mean square of a column."""


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


@torch.no_grad()
def start_from_draft(
    draft: TrainableEagle3,
    target: Decoder,
    weights: Weights,
    vocabulary: DraftVocabulary | None,
) -> None:
    """Give the draft a trained draft's weights. Its vocabulary may have more tokens."""
    state = {name: weights.get(name).float() for name in draft.state_dict()}
    trained = state[HEAD]
    if len(trained) < draft.shape.predicted:
        known = target_tokens(weights)
        assert known is not None, "a draft without d2t has all tokens"
        tokens = torch.arange(draft.shape.predicted) if vocabulary is None else vocabulary.tokens
        state[HEAD] = extended_rows(trained, known, tokens, target.head.weight.float().cpu())
    draft.load_state_dict(state)


def extended_rows(trained: Tensor, known: Tensor, tokens: Tensor, head: Tensor) -> Tensor:
    """Rows of `tokens`, ascending: those of `known` tokens as they are, others predicted."""
    if head.shape[1] == trained.shape[1]:
        rows = head[tokens] + _with_one(head[tokens]) @ _moves(trained, head[known])
    else:
        rows = trained.mean(0).repeat(len(tokens), 1)
    rows[torch.searchsorted(tokens, known)] = trained
    return rows


def _moves(trained: Tensor, began: Tensor) -> Tensor:
    """How training moved rows, as a linear function of where they began: a ridge regression."""
    given = _with_one(began)
    square = given.T @ given
    ridge = _RIDGE * square.diagonal().mean() * torch.eye(len(square))
    found: Tensor = torch.linalg.solve(square + ridge, given.T @ (trained - began))
    return found


def _with_one(rows: Tensor) -> Tensor:
    return functional.pad(rows, (0, 1), value=1.0)


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
