"""What native kernels save on a CPU: a decode step by family, and GEMMs of packed weights.

Steps: eight sequences decode after 1,024 tokens each. The models are those of the tests, so that a
step costs little but attention, recurrences and Python. GEMMs: all projections of some layers of
the default model, whose weights stay packed, and of the same weights in fp32, by rows. Times are
CPU time of the thread, of one core:

    PYTHONPATH=. python bench/cpu_kernels.py
    PYTHONPATH=. python bench/cpu_kernels.py --gemm
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest import mock

import torch
from torch import Tensor

from kvtide.bench.gpu.engine_bed import Bed, start
from kvtide.engine import RequestParams
from kvtide.layers.backend import choice
from kvtide.layers.backend.arithmetic import Batched
from kvtide.layers.dense import Linear
from kvtide.models import Model, build
from kvtide.models.checkpoint import open_checkpoint
from kvtide.models.default_model import default_model
from kvtide.models.llama import LlamaLayer
from tests.models import tiny

FAMILIES = (
    *("llama", "gemma3", "gpt_oss", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
    *("qwen3_next", "falcon_h1"),
)
SEQUENCES, CONTEXT, STEPS = 8, 1024, 24
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LAYERS = 4
"""Enough that fp32 weights come from memory, as they do in a whole model."""
LEAST_SECONDS, LEAST_TURNS = 2.0, 5


def step_ms(model: Model) -> float:
    bed = Bed(model, torch.device("cpu"))
    with bed.engine(4 * SEQUENCES * CONTEXT, max_running=SEQUENCES) as engine:
        prompts = (bed.prompt(CONTEXT, seed) for seed in range(SEQUENCES))
        start(engine, [RequestParams(prompt, 4 * STEPS) for prompt in prompts])
        times = []
        for _ in range(STEPS):
            began = time.thread_time()
            engine.step()
            times.append(time.thread_time() - began)
    return statistics.median(times) * 1e3


def steps(families: list[str]) -> None:
    print("| family | torch, ms | native, ms | |\n|---|---|---|---|")
    for family in families or FAMILIES:
        with mock.patch.object(choice, "library", return_value=None):
            by_torch = step_ms(tiny.ours(family))
        native = step_ms(tiny.ours(family))
        print(
            f"| {family} | {by_torch:.1f} | {native:.1f} | {by_torch / native:.1f}× |", flush=True
        )


def projections() -> list[Linear]:
    checkpoint = open_checkpoint(default_model())
    layers = list(build(checkpoint.config, checkpoint.weights).layers.values())[:LAYERS]
    found = []
    for layer in layers:
        assert isinstance(layer, LlamaLayer)
        attention, mlp = layer.attention, layer.mlp
        found += [attention.qkv, attention.out, mlp.gate_up, mlp.down]
    return found


def gemms() -> None:
    """The least of many times, in turns: what other processes do falls on all alike."""
    packed = projections()
    whole = [Linear(each.arithmetic, each.weight) for each in packed]
    torches = [Linear(Batched(), each.weight) for each in whole]
    print("| rows | packed, ms | fp32, ms | fp32 by torch, ms | fp32 / packed |")
    print("|---:|---:|---:|---:|---:|")
    for rows in ROWS:
        inputs = [torch.randn(rows, each.weight.shape[1]) for each in whole]
        times = least_ms(inputs, packed, whole, torches)
        cells = " | ".join(f"{each:.2f}" for each in times)
        print(f"| {rows} | {cells} | {times[1] / times[0]:.2f}× |", flush=True)


def least_ms(inputs: list[Tensor], *ways: list[Linear]) -> list[float]:
    times: list[list[float]] = [[] for _ in ways]
    until = time.monotonic() + LEAST_SECONDS
    while time.monotonic() < until or len(times[0]) < LEAST_TURNS:
        for found, way in zip(times, ways, strict=True):
            began = time.thread_time()
            for linear, x in zip(way, inputs, strict=True):
                linear(x)
            found.append(time.thread_time() - began)
    return [min(found) * 1e3 for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="of decode steps (all)")
    parser.add_argument("--gemm", action="store_true", help="GEMMs in place of steps")
    given = parser.parse_args()
    torch.set_num_threads(1)
    gemms() if given.gemm else steps(given.families)


if __name__ == "__main__":
    main()
