"""An EAGLE3 draft as a torch module, under the published tensor names.

`models.eagle3` is the same model over pages. This one computes whole sequences, padded at their
ends, and several recurrent steps of all positions at once: at step s a row stands s positions
further on, with the draft's own output of step s - 1 as its feature. It attends to rows of step 0
up to where it began, and to its own rows of the steps between.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvtide.layers.rope import Rope, rope, rope_parameters
from kvtide.models import fp8
from kvtide.spec.config import Config
from kvtide.training.draft_shape import DraftShape, HeadFormat

_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Those that take any mask and have gradients; on CPUs that is flash attention."""


class TrainableNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class _StepKeys:
    """Keys and values of a layer, by recurrent step: (batch, KV heads, positions, dim) each."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []


class TrainableAttention(nn.Module):
    def __init__(self, shape: DraftShape, inputs: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos_sin: Tensor, seen: Tensor, kept: _StepKeys) -> Tensor:
        queries = _rotated(self._by_head(self.q_proj(x), self.heads), cos_sin)
        kept.keys.append(_rotated(self._by_head(self.k_proj(x), self.kv_heads), cos_sin))
        kept.values.append(self._by_head(self.v_proj(x), self.kv_heads))
        groups = self.heads // self.kv_heads
        keys, values = (
            torch.cat(each, 2).repeat_interleave(groups, 1) for each in (kept.keys, kept.values)
        )
        with sdpa_kernel(_BACKENDS):
            out = functional.scaled_dot_product_attention(queries, keys, values, seen)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def _by_head(self, x: Tensor, heads: int) -> Tensor:
        by_head: Tensor = x.unflatten(-1, (heads, self.dim)).transpose(1, 2)
        return by_head


class TrainableMLP(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class TrainableLayer(nn.Module):
    """`hidden_norm`, and attention over twice the width, are the first layer's alone."""

    def __init__(self, shape: DraftShape, *, is_first: bool) -> None:
        super().__init__()
        self.input_layernorm = TrainableNorm(shape.hidden, shape.eps)
        if is_first:
            self.hidden_norm = TrainableNorm(shape.hidden, shape.eps)
        self.self_attn = TrainableAttention(shape, shape.hidden * (1 + is_first))
        self.post_attention_layernorm = TrainableNorm(shape.hidden, shape.eps)
        self.mlp = TrainableMLP(shape)

    def forward(
        self, x: Tensor, token: Tensor | None, cos_sin: Tensor, seen: Tensor, kept: _StepKeys
    ) -> Tensor:
        """`token`: the next token's embedding, for the first layer."""
        normed = self.input_layernorm(x if token is None else token)
        if token is not None:
            normed = torch.cat([normed, self.hidden_norm(x)], dim=-1)
        x = x + self.self_attn(normed, cos_sin, seen, kept)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class TrainableEagle3(nn.Module):
    """Its parameters have the published names, and so has its state in `tensors`."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.captures) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = TrainableLayer(shape, is_first=True)
        self.layers = nn.ModuleDict(
            {
                str(number): TrainableLayer(shape, is_first=False)
                for number in range(1, shape.layers)
            }
        )
        self.norm = TrainableNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.predicted, bias=False)
        parameters = rope_parameters(Config("draft", shape.config()))
        self._rope: Rope = rope(parameters, shape.head_dim)

    def forward(self, captured: Tensor, next_tokens: list[Tensor]) -> list[Tensor]:
        """The hidden states of every recurrent step, (batch, positions, width) each.

        captured     of the target at every position, (batch, positions, captures · width)
        next_tokens  of every step, the embeddings of the tokens that its rows take
        """
        feature = self.fc(captured).float()
        count = captured.shape[1]
        past = torch.ones(count, count, dtype=torch.bool, device=captured.device).tril()
        own = torch.eye(count, dtype=torch.bool, device=captured.device)
        layers = [self.midlayer, *self.layers.values()]
        kept = [_StepKeys() for _ in layers]
        found = []
        for step, tokens in enumerate(next_tokens):
            positions = torch.arange(count, device=captured.device) + step
            cos_sin = self._rope(positions)
            seen = torch.cat([past, *[own] * step], dim=1)
            x = feature
            for number, layer in enumerate(layers):
                x = layer(x, tokens if number == 0 else None, cos_sin, seen, kept[number])
            found.append(x)
            feature = x
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the head as it is published."""
        return functional.linear(self.norm(hidden), self._published_head())

    def _published_head(self) -> Tensor:
        """Rounded, with the gradient of the head that is not (a straight-through estimator)."""
        weight: Tensor = self.lm_head.weight
        if self.shape.lm_head is HeadFormat.BF16:
            return weight
        return weight + (fp8.rounded(weight.detach()) - weight.detach())

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Its weights on the CPU in this dtype, by their published names."""
        state = self.state_dict()
        return {name: one.detach().to("cpu", dtype).contiguous() for name, one in state.items()}


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Pairs (i, i + n) of every head, as `layers.rope.rotate_half` does: (…, positions, dim)."""
    cos, sin = cos_sin.unbind(1)
    pairs = cos.shape[-1]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(half.to(x.dtype) for half in rotated), rest], dim=-1)
