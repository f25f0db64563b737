"""A decode step on a CPU with native kernels and without: tiny models of several families.

Eight sequences decode after 1,024 tokens each. The models are those of the tests, so that a step
costs little but attention, recurrences and Python. Times are CPU time of the thread, of one core:

    PYTHONPATH=. python bench/cpu_kernels.py
"""

from __future__ import annotations

import statistics
import sys
import time
from unittest import mock

import torch

from kvtide.bench.gpu.engine_bed import Bed, start
from kvtide.engine import RequestParams
from kvtide.layers.backend import choice
from kvtide.models import Model
from tests.models import tiny

FAMILIES = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1")
SEQUENCES, CONTEXT, STEPS = 8, 1024, 24


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


def main() -> None:
    torch.set_num_threads(1)
    print("| family | torch, ms | native, ms | |\n|---|---|---|---|")
    for family in sys.argv[1:] or FAMILIES:
        with mock.patch.object(choice, "library", return_value=None):
            by_torch = step_ms(tiny.ours(family))
        native = step_ms(tiny.ours(family))
        print(
            f"| {family} | {by_torch:.1f} | {native:.1f} | {by_torch / native:.1f}× |", flush=True
        )


if __name__ == "__main__":
    main()
