"""Steps over recurrent states in scattered pages, for tests of recurrent kernels.

All that no page holds is NaN. In a decode step, kernels see nothing but its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import ConvWeights
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.packing import Fields
from kvtide.layers.step import Batch, Rows, Step
from kvtide.spec import Entry, Field, ModelMemory, PoolSpec, Reuse
from kvtide.tiers import Arrangement, Buffers, Layout
from tests.layers.kernels.repeating import same_again

PAGE = 16
STEPS = {
    "prompts": [(0, 70), (0, 2)],
    "decoding": [(70, 1), (16, 1), (0, 1), (3, 1)],
    "all at once": [(45, 1), (0, 20), (33, 18), (90, 2), (64, 1)],
}
"""Tokens before the step and in it, of every sequence."""


@dataclass
class World:
    """A step with a recurrent state for every sequence that has earlier tokens."""

    place: Place
    run: ForwardPass
    rows: tuple[Rows, ...]
    buffers: Buffers
    states: list[Fields | None]

    def after(self, number: int) -> Fields:
        """What is kept of a sequence."""
        rows = self.rows[number]
        slot = int(rows.slots["state"][(rows.total - 1) // PAGE])
        view = self.buffers.view("state", 0)
        return {name: field[slot, -1] for name, field in view.items()}

    def gone_on(self, kernel: Callable[[], Tensor]) -> Tensor:
        """What a kernel gives, from the states as they are: every time the same, as are those that
        it leaves."""
        before = self.buffers.data.clone()

        def once() -> tuple[Tensor, Tensor]:
            self.buffers.data.copy_(before)
            return kernel(), self.buffers.data

        return same_again(once)[0]


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def world(
    fields: tuple[Field, ...],
    step: list[tuple[int, int]],
    device: torch.device,
    layout: Layout = Layout.PAGE_FIRST_DIRECT,
    *,
    kept: bool = True,
) -> World:
    """`kept`: whether pages have slots."""
    pool = PoolSpec("state", (0,), Entry(fields), tail_entries=1, reuse=Reuse(reach=1, stride=PAGE))
    memory = ModelMemory("test", PAGE, (pool,), layers=1)
    arrangement = Arrangement(memory, {"state": 2 * len(step) + 3}, layout)
    block = torch.full((arrangement.bytes,), 0xFF, dtype=torch.uint8, device=device)
    buffers = Buffers(arrangement, block)
    generator = torch.Generator().manual_seed(5)
    free = torch.randperm(2 * len(step) + 3, generator=generator).tolist()
    rows, states, start = [], [], 0
    view = buffers.view("state", 0)
    for past, count in step:
        slots = [-1] * -(-(past + count) // PAGE)
        for page in {max(past - 1, 0) // PAGE, (past + count - 1) // PAGE}:
            slots[page] = free.pop() if kept else -1
        state: Fields | None = None
        if past:
            slot = slots[(past - 1) // PAGE]
            state = {}
            for field in fields:
                view[field.name][slot, -1] = randn(generator, *field.shape).to(device)
                state[field.name] = view[field.name][slot, -1].clone()
        states.append(state)
        table = torch.tensor(slots, device=device)
        rows.append(Rows(start, start + count, past, {"state": table}))
        start += count
    at = torch.cat([torch.arange(one.past, one.total) for one in rows]).to(device)
    batch = Batch.of(rows, device)
    seen = () if batch.bounds.longest == 1 else tuple(rows)
    run = ForwardPass(Step(at, at, seen, PAGE, buffers.view, lambda layer: None, batch))
    return World(Place(pool, 0), run, tuple(rows), buffers, states)


def assert_within_a_rounding(
    name: str, pairs: Iterable[tuple[Tensor, Tensor]], times: float = 1.0
) -> None:
    """Nothing is further off, of the whole, than so many roundings to half precision."""
    for number, (found, wanted) in enumerate(pairs):
        off, once = (
            float((other - wanted).norm() / wanted.norm())
            for other in (found, wanted.bfloat16().float())
        )
        print(f"{name} {number}: off by {off:.2e}, a rounding {once:.2e}")
        assert off <= once * times


def convolution(taps: Tensor, bias: Tensor | None, kept: list[Field]) -> ConvWeights:
    return ConvWeights(taps, bias, tuple(kept))
