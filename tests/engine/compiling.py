"""Which kernels a device would have to compile: for an engine that starts, and then for steps.

Run by itself, with the name of a model, since Triton interprets in tests. Here it asks for
kernels as it does on a GPU, and neither compiles nor launches any.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine
from kvtide.engine.graphs import graph_capture
from kvtide.engine.graphs.graph_capture import CapturedGraph, Wait
from kvtide.engine.page_tables import batch_tables
from kvtide.engine.staging import Staging
from kvtide.layers import Step
from kvtide.layers.backend.triton_ops import TritonOps
from kvtide.models import Model, build, family_registry
from tests.models import tiny
from tests.models.with_kernels import FEW

LONGEST, MAX_TOKENS, STEPS = 20_000, 8192, 40


class Absent:
    """A device of Hopper's kind, as Triton asks for it."""

    utils = None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Kernel:
    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None: ...

    def run(self, *_: object) -> None: ...


ASKED: list[str] = []


def noted(self: Any, key: str, signature: Any, device: int, *_: object) -> Kernel:
    ASKED.append(f"{self.fn.__name__} {key}")
    kernel = self.device_caches[device][0][key] = Kernel()
    return kernel


class Rehearsed(graph_capture._EagerCapture):
    """A captured pass is computed at its capture, as on a GPU."""

    def capture(
        self, forward: Callable[[Wait], Tensor], output: str, max_rows: int, per_layer: bool
    ) -> CapturedGraph:
        forward(lambda layer: None)
        return super().capture(forward, output, max_rows, per_layer)


def step_of(model: Model, cache: TieredCache, parts: list[tuple[int, int]]) -> Step:
    """Of sequences with so many new tokens and so many earlier ones."""
    counts, past = (np.array(each) for each in zip(*parts, strict=True))
    ends = np.cumsum(counts)
    rows = np.stack([ends - counts, ends, past], 1).astype(np.int32)
    page, names = model.memory.page_tokens, [anchor.name for anchor in model.memory.anchors]
    pages = [-(-(count + before) // page) for count, before in parts]
    tables = [{name: np.zeros(number, np.int32) for name in names} for number in pages]
    sequences, batch = batch_tables(rows, tables, Staging(torch.device("cpu")))
    at = torch.cat([torch.arange(before, before + count) for count, before in parts])
    return Step(torch.zeros_like(at), at, sequences, page, cache.view, lambda layer: None, batch)


def some_parts(rng: random.Random) -> list[tuple[int, int]]:
    """Prefill chunks, alone and beside decode tokens."""
    left, parts = rng.choice([1100, 2048, 5000, MAX_TOKENS]), []
    prompts, alike = rng.choice([1, 1, 3, 9, 16, 40]), rng.random() < 0.3
    for number in range(prompts):
        each = -(-left // (prompts - number))
        count = min(left, each if alike else rng.choice([2, 17, 256, 512, 2048, MAX_TOKENS]))
        if count:
            parts.append((count, rng.choice([0, 64, 5000, LONGEST - MAX_TOKENS])))
        left -= count
    parts[0] = (parts[0][0] + left, parts[0][1])
    singles = rng.choice([0, 1, 5, 24])
    return [*parts, *((1, rng.randint(1, LONGEST - 1)) for _ in range(singles))]


def main(name: str) -> None:
    driver.set_active(Absent())
    saved = tiny.checkpoint(name)
    config = {**saved.config, **FEW.get(name, {}), "max_position_embeddings": LONGEST}
    with (
        mock.patch.object(family_registry, "choose", return_value=TritonOps()),
        mock.patch.object(JITFunction, "_do_compile", noted),
        mock.patch.object(graph_capture, "_EagerCapture", Rehearsed),
        mock.patch.object(torch, "mm", _mm),
        mock.patch.object(torch, "bmm", _bmm),
        mock.patch.object(torch.nn.functional, "linear", _linear),
    ):
        model = build(config, saved.weights, page_tokens=64, dtype=torch.bfloat16)
        cache = TieredCache(model.memory, CacheConfig(Tokens(LONGEST + 64)))
        engine = Engine(model, cache, chunk_tokens=MAX_TOKENS)
        assert engine.max_sequence_tokens >= LONGEST
        engine.warm_up()
        prepared = len(ASKED)
        rng = random.Random(name)
        for _ in range(STEPS):
            model.forward(step_of(model, cache, some_parts(rng)))
        cache.close()
    print(json.dumps({"prepared": prepared, "later": ASKED[prepared:]}))


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Numbers are of no interest, and take their time."""
    return a.new_zeros((len(a), b.shape[1]), dtype=out_dtype or a.dtype)


def _bmm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    return a.new_zeros((len(a), a.shape[1], b.shape[2])) if out is None else out.zero_()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_zeros((*x.shape[:-1], len(weight)))


if __name__ == "__main__":
    main(sys.argv[1])
