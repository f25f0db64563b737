"""Decode over a long KV history of random numbers, which no prefill has to compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kvtide.bench.gpu.ceilings import timed
from kvtide.bench.gpu.engine_bed import Bed
from kvtide.cache import TieredCache
from kvtide.engine.graphs.graph_capture import graph_capture
from kvtide.engine.graphs.graph_inputs import GraphKind, GraphRow, GraphSize
from kvtide.engine.graphs.step_graphs import StepGraph, View
from kvtide.layers.packing import packing
from kvtide.spec import ALL, ModelMemory
from kvtide.tiers import Arrangement, Buffers, Layout


def graph_replay_s(bed: Bed, batch: int, context: int) -> float:
    """Seconds of one CUDA graph replay: a decode step of `batch` sequences of `context` tokens."""
    model, memory = bed.model, bed.model.memory
    pages = -(-(context + 1) // memory.page_tokens)
    held = {anchor.name: pages if anchor.reuse.reach is ALL else 2 for anchor in memory.anchors}
    slots = {name: batch * count for name, count in held.items()}
    arrangement = Arrangement(memory, slots, Layout.PAGE_FIRST_DIRECT)
    block = torch.zeros(arrangement.bytes, dtype=torch.uint8, device=bed.device)
    buffers = Buffers(arrangement, block)
    fill(memory, buffers.view)
    size = GraphSize(GraphKind.DECODE, batch, batch, 0, 1, context + 1)
    graph = StepGraph(model, buffers.view, graph_capture(bed.device), size, batch)
    order = np.random.default_rng(0)
    free = {name: order.permutation(count).astype(np.int32) for name, count in slots.items()}
    rows = []
    for number in range(batch):
        table = {}
        for name, count in held.items():
            table[name] = np.full(pages, -1, dtype=np.int32)
            table[name][pages - count :] = free[name][number * count : (number + 1) * count]
        token = number % model.vocabulary
        rows.append(GraphRow([token], context, context, number, (0, 0, 0), table))
    return timed(lambda: graph.launch(rows, lambda layer: None), bed.device, 20)


def commit(cache: TieredCache, prompts: Iterable[Sequence[int]]) -> None:
    """Put random pages of these prompts into the cache: a request finds them, and computes the
    tokens behind the last full page."""
    fill(cache.memory, cache.view)
    for tokens in prompts:
        lease = cache.reserve(cache.match(cache.prompt(tokens)))
        assert lease is not None, "the capacity holds all prompts"
        cache.commit(lease, len(tokens))
        cache.retain(lease)
        cache.release(lease)


def fill(memory: ModelMemory, view_of: View) -> None:
    """Write random values into every field of every pool, the same ones every time."""
    generators: dict[torch.device, torch.Generator] = {}
    for pool in memory.pools:
        for layer in pool.layers:
            view = view_of(pool.name, layer)
            kind = packing(pool.entry)
            for part in kind.parts:
                some = next(iter(view.values()))
                shape = (*some.shape[:2], *part.logical.shape)
                if some.device not in generators:
                    generators[some.device] = torch.Generator(some.device).manual_seed(0)
                generator = generators[some.device]
                values = torch.randn(shape, device=some.device, generator=generator)
                if pool.tail_entries is not None:
                    # Compressor states hold sums of weights, which are positive.
                    values = values.abs() + 1
                for name, stored in part.pack(values).items():
                    view[name].copy_(stored)
