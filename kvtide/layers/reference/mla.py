"""Paged attention of all heads over one vector per token: MLA's latents, and DeepSeek-V4's window
with compressed blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import AttentionParams, CompressedStream
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.packing import Fields
from kvtide.layers.reference.attention import attend, attend_masked
from kvtide.layers.reference.compressor import all_entries
from kvtide.layers.step import Rows


def mla_attention(
    run: ForwardPass,
    place: Place,
    queries: Tensor,
    kept: Fields,
    how: AttentionParams,
    masks: Sequence[Tensor] | None,
    block: int,
) -> Tensor:
    """Attention over latents: (tokens, heads, latent). Masks are (queries, tokens) by sequence."""
    out = []
    for rows, mask in zip(run.sequences, masks or repeat(None), strict=masks is not None):
        ours = queries[rows.start : rows.end]
        keys, latents = _context(run, place, rows, kept)
        if mask is None:
            out.append(attend(ours, keys, latents, how, block))
        else:
            out.append(attend_masked(ours, keys, latents, mask, how, block))
    return torch.cat(out)


def _context(run: ForwardPass, place: Place, rows: Rows, kept: Fields) -> tuple[Tensor, Tensor]:
    """Keys and values of all tokens of a sequence, as one head."""
    past, new = run.read_entries(place, rows), slice(rows.start, rows.end)
    latents, shared = (
        torch.cat([past[name], kept[name][new]]).float() for name in ("latent", "rope")
    )
    return torch.cat([latents, shared], dim=-1)[:, None], latents[:, None]


def block_attention(
    run: ForwardPass,
    window: Place,
    kept: Tensor,
    stream: CompressedStream | None,
    closed: Sequence[Tensor],
    queries: Tensor,
    how: AttentionParams,
    masks: Sequence[Tensor] | None,
    block: int,
) -> Tensor:
    """Attention over the last tokens and over entries of a stream, as one head.

    `closed` are the entries of the step, by sequence. Masks are (queries, entries) by sequence;
    without them all closed blocks are seen.
    """
    out = []
    for number, rows in enumerate(run.sequences):
        new = slice(rows.start, rows.end)
        past = run.read_entries(window, rows, how.first_seen(rows.past))["kv"]
        ours = kept[:0] if stream is None else all_entries(run, stream, rows, closed[number])
        context = torch.cat([past, kept[new], ours])[:, None]
        visible = (run.positions[new] + 1) // (1 if stream is None else stream.ratio)
        blocks = torch.arange(len(ours), device=visible.device) < visible[:, None]
        blocks = blocks if masks is None else masks[number]
        seen = torch.cat([_in_window(rows, len(past), how, visible.device), blocks], dim=1)
        out.append(attend_masked(queries[new], context, context, seen, how, block))
    return torch.cat(out)


def _in_window(rows: Rows, past: int, how: AttentionParams, device: torch.device) -> Tensor:
    """(tokens, past + tokens): which tokens of the window each query sees."""
    key = torch.arange(rows.past - past, rows.total, device=device)
    query = torch.arange(rows.past, rows.total, device=device)[:, None]
    return (key <= query) & (key > query - (how.window or 0))
