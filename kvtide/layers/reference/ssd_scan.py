"""Mamba2's recurrence: the torch reference, in two orders of the same sums.

    state ← exp(dt·decay) · state + dt · x ⊗ B        y = state · C

`scan_tokens` does it as written, token by token, so a token's result depends on its history alone.
`scan_chunks` (SSD) takes a chunk of tokens together, mostly as GEMMs. It is faster, and equal but
for rounding.

Shapes: x (tokens, heads, dim), dt (tokens, heads), decay (heads), B and C (tokens, groups, width),
state (heads, dim, width); all fp32. Heads share B and C by group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import ScanParams
from kvtide.layers.elementwise import softplus
from kvtide.layers.forward import ForwardPass, Place

_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ScanInput:
    """The inputs of the recurrence for one sequence's new tokens."""

    x: Tensor
    dt: Tensor
    decay: Tensor
    b: Tensor
    c: Tensor

    def by_head(self) -> ScanInput:
        """With B and C repeated for every head of their group."""
        each = self.x.shape[1] // self.b.shape[1]
        b, c = (t.repeat_interleave(each, dim=1) for t in (self.b, self.c))
        return ScanInput(self.x, self.dt, self.decay, b, c)

    def span(self, start: int, end: int) -> ScanInput:
        x, dt, b, c = (t[start:end] for t in (self.x, self.dt, self.b, self.c))
        return ScanInput(x, dt, self.decay, b, c)


def ssd_scan(
    arithmetic: Arithmetic,
    run: ForwardPass,
    place: Place,
    how: ScanParams,
    convolved: Tensor,
    dt: Tensor,
) -> Tensor:
    """(tokens, heads · dim) in fp32, the skip included, from and to the recurrent states.

    Of x, B and C side by side in fp32, and time steps (tokens, heads) before their bias.
    """
    heads, dim, width = place.field("ssm").shape
    scan = arithmetic.order(scan_chunks, scan_tokens)
    dt = arithmetic.rowwise(softplus, dt.float() + how.dt_bias).clamp(*how.dt_limits)
    shared = (convolved.shape[1] - heads * dim) // 2
    outputs = []
    for rows in run.sequences:
        ours, before = slice(rows.start, rows.end), run.read_state(place, rows)
        x, b, c = convolved[ours].split((heads * dim, shared, shared), dim=-1)
        x = x.reshape(-1, heads, dim)
        b, c = (t.reshape(len(x), -1, width) for t in (b, c))
        state = x.new_zeros((heads, dim, width)) if before is None else before["ssm"]
        output, state = scan(ScanInput(x, dt[ours], how.decay, b, c), state)
        run.write_state(place, rows, {"ssm": state})
        outputs.append((output + x * how.skip).flatten(1))
    return torch.cat(outputs)


def scan_tokens(tokens: ScanInput, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (tokens, heads, dim) and the state after the last token."""
    tokens = tokens.by_head()
    logs = (tokens.dt * tokens.decay)[:, :, None, None]
    fed = (tokens.dt[:, :, None] * tokens.x)[..., None]
    outputs = []
    for log, given, b, c in zip(logs, fed, tokens.b[:, :, None], tokens.c[:, :, None], strict=True):
        state = torch.exp(log) * state + given * b
        outputs.append((state * c).sum(-1))
    return torch.stack(outputs), state


def scan_chunks(tokens: ScanInput, state: Tensor) -> tuple[Tensor, Tensor]:
    """As `scan_tokens`."""
    tokens = tokens.by_head()
    outputs = []
    for start in range(0, len(tokens.x), _CHUNK_TOKENS):
        output, state = _scan_chunk(tokens.span(start, start + _CHUNK_TOKENS), state)
        outputs.append(output)
    return torch.cat(outputs), state


def _scan_chunk(tokens: ScanInput, state: Tensor) -> tuple[Tensor, Tensor]:
    fed = (tokens.x * tokens.dt[..., None]).transpose(0, 1)
    b, c = tokens.b.transpose(0, 1), tokens.c.transpose(0, 1)
    between = decay_between((tokens.dt * tokens.decay).T)
    from_before, to_end = between[:, :, 0, None], between[:, -1, 1:, None]
    within = (c @ b.mT) * between[:, :, 1:]
    output = within @ fed + (c * from_before) @ state.mT
    state = from_before[:, -1:] * state + fed.mT @ (b * to_end)
    return output.transpose(0, 1), state


def decay_between(logs: Tensor) -> Tensor:
    """From logarithms (…, tokens) to (…, tokens, 1 + tokens): the decay from token j - 1 to i.

    Column 0 is the decay of the state before the chunk; later tokens have zeros. Sums run from j
    to i: differences of sums from the start would cancel.
    """
    count = logs.shape[-1]
    steps = logs[..., None].expand(*logs.shape, count + 1)
    later = torch.ones(count, count + 1, dtype=torch.bool, device=logs.device)
    sums = steps.masked_fill(later.triu(1), 0).cumsum(-2)
    return sums.masked_fill(later.triu(2), -torch.inf).exp()
