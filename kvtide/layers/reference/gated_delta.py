"""The gated delta rule in two orders of the same sums: as `kernels/recurrent/gated_delta` has it.

    state ← decay ⊙ state        state ← state + beta · key ⊗ (value − keyᵀ state)
    y = queryᵀ state

`delta_tokens` does it as written, token by token, so a token's result depends on its history alone.
`delta_chunks` takes a chunk of tokens together: their deltas solve one triangular system, and the
rest are GEMMs. It is faster, and equal but for rounding.

Shapes: query and key (tokens, heads, keys), value (tokens, heads, values), beta (tokens,
heads), state (heads, keys, values); all fp32. The decay's logarithm is (tokens, heads, 1) with one
decay a head (gated delta), (tokens, heads, keys) with one for each channel of a key (KDA).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import DeltaGates
from kvtide.layers.elementwise import l2norm, sigmoid, softplus
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.reference.ssd_scan import decay_between

_CHUNK_TOKENS = 64
_CHUNK_TOKENS_BY_CHANNEL = 16
"""Fewer: each pair of tokens has a decay for each channel."""


@dataclass(frozen=True, slots=True)
class DeltaInput:
    """The inputs of the recurrence for one sequence's new tokens."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor

    def span(self, start: int, end: int) -> DeltaInput:
        return DeltaInput(*(getattr(self, name)[start:end] for name in self.__slots__))

    def by_head(self) -> DeltaInput:
        """Heads first, for GEMMs."""
        return DeltaInput(*(getattr(self, name).transpose(0, 1) for name in self.__slots__))


def gated_delta(
    arithmetic: Arithmetic,
    run: ForwardPass,
    place: Place,
    convolved: Tensor,
    gates: DeltaGates,
) -> Tensor:
    """(tokens, heads, values) in fp32, from and to the recurrent states.

    Of queries, keys and values side by side in fp32; heads of values may share a query and a key.
    """
    heads, key_dim, value_dim = place.field("delta").shape
    recur = arithmetic.order(delta_chunks, delta_tokens)
    beta = arithmetic.rowwise(sigmoid, gates.beta)
    dt = arithmetic.rowwise(softplus, gates.dt.float() + gates.dt_bias)
    log_decay = gates.decay[:, None] * dt.unflatten(1, (heads, -1))
    values = heads * value_dim
    outputs = []
    for rows in run.sequences:
        before, ours = run.read_state(place, rows), slice(rows.start, rows.end)
        queries_keys, value = convolved[ours].split((convolved.shape[1] - values, values), dim=-1)
        query, key = _l2norm_queries_keys(arithmetic, queries_keys, heads, key_dim)
        value = value.reshape(-1, heads, value_dim)
        shape = (heads, key_dim, value_dim)
        state = convolved.new_zeros(shape) if before is None else before["delta"]
        tokens = DeltaInput(query, key, value, log_decay[ours], beta[ours])
        output, state = recur(tokens, state)
        run.write_state(place, rows, {"delta": state})
        outputs.append(output)
    return torch.cat(outputs)


def _l2norm_queries_keys(
    arithmetic: Arithmetic, queries_keys: Tensor, heads: int, key_dim: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys of length one, for every head of values; queries scaled."""
    by_head = queries_keys.reshape(len(queries_keys), 2, -1, key_dim)
    by_head = arithmetic.rowwise(l2norm, by_head)
    by_head = by_head.repeat_interleave(heads // by_head.shape[2], dim=2)
    return by_head[:, 0] * key_dim**-0.5, by_head[:, 1]


def delta_tokens(tokens: DeltaInput, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (tokens, heads, values) and the state after the last token."""
    outputs = []
    for i in range(len(tokens.query)):
        query, key = tokens.query[i, :, :, None], tokens.key[i, :, :, None]
        state = torch.exp(tokens.log_decay[i])[:, :, None] * state
        residual = tokens.value[i] - (state * key).sum(1)
        state = state + key * (residual * tokens.beta[i, :, None])[:, None]
        outputs.append((state * query).sum(1))
    return torch.stack(outputs), state


def delta_chunks(tokens: DeltaInput, state: Tensor) -> tuple[Tensor, Tensor]:
    """As `delta_tokens`."""
    per_head = tokens.log_decay.shape[-1] == 1
    size = _CHUNK_TOKENS if per_head else _CHUNK_TOKENS_BY_CHANNEL
    outputs = []
    for start in range(0, len(tokens.query), size):
        output, state = _delta_chunk(tokens.span(start, start + size).by_head(), state)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs), state


def _delta_chunk(tokens: DeltaInput, state: Tensor) -> tuple[Tensor, Tensor]:
    """Heads first throughout."""
    between = decay_between(tokens.log_decay.mT)
    from_before, to_end = between[..., 0].mT, between[..., -1, 1:].mT
    between, beta = between[..., 1:], tokens.beta[..., None]
    mixing = beta * _decayed_matmul(tokens.key, tokens.key, between)
    rhs = beta * (tokens.value - (tokens.key * from_before) @ state)
    # Only the part below the diagonal is read; the diagonal counts as ones.
    delta = torch.linalg.solve_triangular(mixing, rhs, upper=False, unitriangular=True)
    output = (tokens.query * from_before) @ state
    output = output + _decayed_matmul(tokens.query, tokens.key, between) @ delta
    state = from_before[:, -1, :, None] * state + (tokens.key * to_end).mT @ delta
    return output, state


def _decayed_matmul(rows: Tensor, columns: Tensor, between: Tensor) -> Tensor:
    """Σ over channels of row · column · the decay from the column's token to the row's."""
    if between.shape[1] == 1:
        return (rows @ columns.mT) * between[:, 0]
    return torch.einsum("hic,hjc,hcij->hij", rows, columns, between)
