"""Families in captured CUDA graphs: the logits of eager steps.

Here they run in an interpreter, as `test_kernels`. A graph knows nothing of a step but its
tensors, and padding is in them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from kvtide.engine.graphs import step_graphs
from kvtide.engine.graphs.graph_capture import graph_capture
from kvtide.engine.graphs.graph_inputs import GraphKind, GraphRow
from kvtide.engine.graphs.step_graphs import StepGraphs
from kvtide.layers import Step
from kvtide.layers.kernels.attention import indexer
from kvtide.models import Model
from tests.models import tiny
from tests.models.playing import Player
from tests.models.with_kernels import by_kernels, in_torch

NAMES = (
    "deepseek_v4",
    "falcon_h1",  # Mamba2 beside attention.
    "gemma2",  # Windows.
    "glm_moe_dsa-shared",  # Latents, an indexer, experts.
    "gpt_oss",  # Sinks.
    "kimi_linear",  # KDA beside latents.
    "lfm2",  # A convolution between gates.
    "qwen3_next",  # Gated delta.
)
CLOSE = 1e-4


class Unasked(TorchDispatchMode):
    """Refuses what a device would have to be asked for: it could not be captured."""

    ASKS = (
        *("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "_unique", "equal"),
        *("bincount", "repeat_interleave.Tensor"),
    )
    METHODS = ("tolist", "numpy", "cpu", "__iter__", "__array__")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        masks = name in ("index.Tensor", "index_put_.default") and any(
            one is not None and one.dtype is torch.bool for one in args[1]
        )
        assert not masks and not name.startswith(self.ASKS), f"{name} asks the device"
        return func(*args, **(kwargs or {}))

    @classmethod
    @contextmanager
    def watching(cls) -> Iterator[None]:
        """What the interpreter does for a kernel is no part of the step."""
        within, run = False, GridExecutor.__call__

        def running(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
            nonlocal within
            within = True
            with _disable_current_modes():
                try:
                    return run(self, *args, **kwargs)
                finally:
                    within = False

        def refusing(name: str) -> Callable[..., Any]:
            usual = getattr(Tensor, name)

            def asked(self: Tensor, *args: Any, **kwargs: Any) -> Any:
                assert within, f"{name} asks the device"
                return usual(self, *args, **kwargs)

            return asked

        with pytest.MonkeyPatch.context() as patch, cls():
            patch.setattr(GridExecutor, "__call__", running)
            for name in cls.METHODS:
                patch.setattr(Tensor, name, refusing(name))
            yield


class GraphPlayer(Player):
    """`sizes`, `kinds`: of the graphs that were replayed; `loading`: as if a prefix were on its
    way."""

    def __init__(self, model: Model, max_requests: int, verify_rows: int) -> None:
        super().__init__(model)
        self.loading, self.sizes, self.kinds = False, [], []
        forward, where = model.forward, graph_capture(torch.device("cpu"))

        def watched(step: Step) -> Tensor:
            with Unasked.watching():
                return forward(step)

        model.forward = watched
        self._graphs = StepGraphs(
            model, self.buffers.view, where, max_requests, 16, verify_rows=verify_rows
        )

    def _logits(self, step: Step) -> Tensor:
        rows = [
            GraphRow(
                step.tokens[one.start : one.end].tolist(),
                one.past,
                one.past,
                number,
                (one.past, one.end, 0),
                {name: slots.numpy() for name, slots in one.slots.items()},
            )
            for number, one in enumerate(step.sequences)
        ]
        found = self._graphs.fitting(rows, self.loading)
        assert found is not None
        size = found._size
        self.sizes.append((size.tokens, size.sequences, size.prefills))
        self.kinds.append(size.kind)
        given = found.launch(rows, step.wait)
        if found.kind is not GraphKind.MIXED:
            self.waited = list(self.memory.own_layers)
        if found.kind is GraphKind.DECODE:
            return given
        return self.model.logits(given)


Steps = list[tuple[tuple[int, int], ...]]
"""Of each, which sequences have how many tokens in it."""
EVERY: Steps = [
    ((0, 15),),
    ((0, 1), (1, 6)),
    ((0, 2), (1, 5)),
    ((1, 1), (0, 1)),
    ((1, 1), (0, 1)),
]


def played(player: Player, steps: Steps) -> Tensor:
    """All logits. During the last step a prefix is on its way."""
    sequences = [player.begin(tiny.prompt(30, seed=seed)) for seed in range(3)]
    logits: list[Tensor] = []
    for number, step in enumerate(steps, 1):
        player.loading = number == len(steps)
        logits += player.step(*((sequences[which], count) for which, count in step))
    return torch.cat(logits)


def compared(
    name: str,
    max_requests: int,
    steps: Steps,
    monkeypatch: pytest.MonkeyPatch,
    verify_rows: int = 0,
) -> GraphPlayer:
    """Graphs that give the logits of eager steps."""
    monkeypatch.setattr(step_graphs, "MIXED_TOKENS", (8, 16))
    monkeypatch.setattr(step_graphs, "TOKENS_PER_PREFILL", 8)
    monkeypatch.setattr(step_graphs, "MIN_LENGTH", 64)
    wanted = played(Player(in_torch(name)), steps)
    player = GraphPlayer(by_kernels(name, monkeypatch), max_requests, verify_rows)
    assert float((played(player, steps) - wanted).abs().max()) <= CLOSE
    return player


@pytest.fixture(autouse=True)
def _on_a_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("CUDA graphs are tested on a device: tests/engine/test_on_device")


@pytest.mark.quick(name=["lfm2"])
@pytest.mark.parametrize("name", NAMES)
def test_captured_steps_give_the_same_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills alone, beside decodes, and together; then decodes."""
    sizes = compared(name, 3, EVERY, monkeypatch).sizes
    assert sizes == [(16, 3, 3), (8, 3, 1), (16, 3, 3), (2, 2, 0), (8, 3, 1)]


@pytest.mark.quick(max_requests=[1])
@pytest.mark.parametrize(
    ("max_requests", "steps"),
    [
        (1, [((0, 6),), ((0, 1),)]),
        (2, [((0, 5),), ((0, 1), (1, 9)), ((0, 1), (1, 7)), ((0, 1), (1, 6))]),
        (3, [((0, 8),), ((0, 1), (1, 6), (2, 1)), ((2, 1), (1, 6)), ((2, 5), (1, 3))]),
        (3, [((0, 2), (1, 3), (2, 2)), ((0, 4), (1, 5), (2, 6))]),
    ],
)
def test_full_steps_and_few_sequences(
    max_requests: int, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token left over or none, and no more sequences than there may be."""
    assert len(compared("gemma2", max_requests, steps, monkeypatch).sizes) == len(steps)


@pytest.mark.quick(name=["lfm2"])
@pytest.mark.parametrize("name", NAMES)
def test_verify_steps_give_the_same_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with a few tokens, beside others with one, and padding of several sequences."""
    steps: Steps = [
        ((0, 15),),
        ((1, 9),),
        ((0, 4), (1, 1)),
        ((0, 3), (1, 4)),
        ((0, 1), (1, 2)),
        ((0, 1), (1, 2)),
    ]
    kinds = compared(name, 3, steps, monkeypatch, verify_rows=4).kinds
    mixed, verify = GraphKind.MIXED, GraphKind.VERIFY
    assert kinds == [mixed, mixed, verify, verify, verify, mixed]


def test_kernels_take_a_chunk_of_the_smallest_graph_as_a_decode_step() -> None:
    assert step_graphs.MIXED_TOKENS[0] <= indexer.FEW_QUERIES


@pytest.mark.parametrize(
    "asks",
    [
        lambda some: some.sum().item(),
        lambda some: some.nonzero(),
        lambda some: torch.tensor([1]),
        lambda some: some[some > 0],
        lambda some: some.tolist(),
        lambda some: some.cpu(),
        lambda some: some.numpy(),
        lambda some: list(some),
        lambda some: some.long().bincount(),
    ],
)
def test_what_could_not_be_captured_is_noticed(asks: Callable[[Tensor], object]) -> None:
    some = torch.ones(3)
    with Unasked.watching(), pytest.raises(AssertionError, match="asks the device"):
        asks(some)
