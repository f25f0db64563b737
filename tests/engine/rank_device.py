"""What every rank of `test_ranks_on_device` plays: ranks that share one device, over gloo.

The same code runs in the test itself, as one rank alone, for what has to come out. On a GPU models
run kernels, and tensors go through host memory. Nothing here needs `transformers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtide.cache import CacheConfig, Ranks, TieredCache, Tokens
from kvtide.cache.rank_agreement import Agreement, Alone
from kvtide.engine import Engine, RankTopology, RequestParams, SamplingParams
from kvtide.layers.tensor_ranks import RankGroup
from kvtide.models import Model, build
from kvtide.models.checkpoint import OnDevice, open_checkpoint
from kvtide.spec import Tier
from kvtide.spec.families import KVDType
from tests import worlds
from tests.engine.rank_serving import CHUNKS, PAGE, PROMPT, conversations, text
from tests.models.playing import Player

CLOSE, CLOSE_LOGPROBS = 2e-4, 1e-3
"""How far logits and log-probabilities of tensor ranks may be off: they add in another order."""
MIN_EQUAL = 0.97
ANSWER = 12

Answers = list[list[tuple[int, float]]]


@dataclass
class OneRank:
    """One rank."""

    folder: Path
    device: torch.device
    topology: RankTopology = field(default_factory=RankTopology)

    def agreement(self) -> Agreement:
        return Alone()


class DeviceGrid(worlds.World):
    """Ranks in so many stages, all on one device."""

    def __init__(
        self, rank: int, ranks: int, folder: Path, stages: int, kind: str, backend: str = "gloo"
    ) -> None:
        super().__init__(rank, ranks, folder)
        self.device = torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(0)
        self.topology = RankTopology.joined(stages, ranks // stages, backend)

    def agreement(self) -> Agreement:
        return Ranks(timeout_s=120.0)

    @property
    def expected(self) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self.folder / "expected", weights_only=False)
        return found

    @property
    def exact(self) -> bool:
        return self.topology.tensor.count == 1


Place = DeviceGrid | OneRank


def model_at(place: Place, name: str) -> Model:
    saved = open_checkpoint(place.folder / "models" / name)
    with place.device:
        return build(
            saved.config,
            OnDevice(saved.weights, place.device),
            page_tokens=PAGE,
            kv_dtype=KVDType.FP32,
            stage=place.topology.stage,
            stages=place.topology.stages,
            ranks=place.topology.tensor,
        )


# -- models --------------------------------------------------------------------------------------


def logits(place: Place, name: str) -> Tensor:
    """Of every token: a prompt in chunks, and decodes."""
    with place.device:
        player = Player(model_at(place, name), topology=place.topology)
        return player.prefill(text(1, PROMPT), *CHUNKS).cpu()


def a_model_says_what_one_rank_says(grid: DeviceGrid, name: str) -> None:
    wanted, found = grid.expected["logits", name], logits(grid, name)
    off = float((found - wanted).abs().max())
    assert off == 0 if grid.exact else off <= CLOSE, off
    grid.same(found.sum())


# -- engines -------------------------------------------------------------------------------------


def answers(place: Place, name: str) -> Answers:
    """Two turns of conversations, one by one; pages of the first come back from the host."""
    model = model_at(place, name)
    config = CacheConfig(
        Tokens(40 * PAGE),
        Tokens(400 * PAGE),
        device=place.device.type,
        tokens_per_checkpoint=PAGE,
    )
    cache = TieredCache(model.memory, config, agreement=place.agreement())
    engine = Engine(
        model, cache, chunk_tokens=64, max_running=4, topology=place.topology, cuda_graphs=False
    )
    engine.warm_up()
    found: Answers = []
    for turn in (conversations()[:6], conversations()[6:]):
        found += _answered(engine, turn)
        assert cache.drain(60.0)
        cache.flush(Tier.DEVICE)
    assert cache.stats().transfers.get(("load", "landed"), 0) > 0
    assert cache.validate() == []
    assert cache.close()
    return found


def _answered(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> Answers:
    found: Answers = []
    for prompt in prompts:
        request = engine.submit(RequestParams(prompt, ANSWER, SamplingParams(logprobs=1)))
        while not engine.idle:
            engine.step()
        found.append([(one.token, one.logprob) for one in request.output])
    return found


def conversations_are_answered_as_by_one_rank(grid: DeviceGrid, name: str) -> None:
    wanted, found = grid.expected["answers", name], answers(grid, name)
    grid.same(found)
    if grid.exact:
        assert found == wanted
        return
    equal = []
    for ours, theirs in zip(found, wanted, strict=True):
        for (token, logprob), (other, its) in zip(ours, theirs, strict=True):
            equal.append(token == other)
            if token != other:
                break  # From here on the histories differ.
            assert abs(logprob - its) <= CLOSE_LOGPROBS
    assert sum(equal) >= MIN_EQUAL * len(equal), equal


# -- collectives ---------------------------------------------------------------------------------


class Elsewhere(Tensor):
    """A tensor of the host that has to be copied there, as one of a GPU has."""

    def cpu(self, *_: object, **__: object) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor).clone()


def tensors_of(grid: DeviceGrid, dtype: torch.dtype) -> Tensor:
    values = torch.arange(6, dtype=dtype, device=grid.device).view(2, 3) + 10 * grid.rank
    return values if grid.device.type == "cuda" else values.as_subclass(Elsewhere)


def plain(found: Tensor) -> list[list[float]]:
    return found.as_subclass(Tensor).cpu().tolist()


def tensors_of_a_device_are_exchanged(grid: DeviceGrid, name: str) -> None:
    """`name` is a dtype's."""
    group, dtype, ranks = grid.topology.group, getattr(torch, name), grid.ranks
    each = [
        [[10 * rank + 3 * row + n for n in range(3)] for row in (0, 1)] for rank in range(ranks)
    ]
    total = [[sum(one[row][n] for one in each) for n in range(3)] for row in (0, 1)]
    assert plain(group.all_reduce(tensors_of(grid, dtype))) == total
    side_by_side = [[value for one in each for value in one[row]] for row in (0, 1)]
    assert plain(group.all_gather(tensors_of(grid, dtype), ranks)) == side_by_side
    # Rows of a transposed tensor do not lie one after another.
    turned = group.broadcast(tensors_of(grid, dtype).T, ranks - 1)
    assert plain(turned) == [[row[n] for row in each[-1]] for n in range(3)]
    if ranks > 1:
        _pass_on(grid, group, dtype, each)


def _pass_on(
    grid: DeviceGrid, group: RankGroup, dtype: torch.dtype, each: list[list[list[int]]]
) -> None:
    """Every rank but the first receives the tensor of the rank before."""
    if grid.rank + 1 < grid.ranks:
        group.send(tensors_of(grid, dtype), grid.rank + 1)
    if grid.rank:
        room = torch.zeros_like(tensors_of(grid, dtype))
        assert group.receive(room, grid.rank - 1) is room
        assert plain(room) == each[grid.rank - 1]


# -- what is played ------------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "int64")


def expected(folder: Path, device: torch.device, names: Sequence[str]) -> dict[Any, Any]:
    """What one rank computes."""
    solo = OneRank(folder, device)
    found: dict[Any, Any] = {("logits", name): logits(solo, name) for name in names}
    return found | {("answers", name): answers(solo, name) for name in names}


def exchanges() -> dict[str, worlds.Scenario]:
    return {name: partial(tensors_of_a_device_are_exchanged, name=name) for name in DTYPES}


def scenarios(names: Sequence[str]) -> dict[str, worlds.Scenario]:
    played = (a_model_says_what_one_rank_says, conversations_are_answered_as_by_one_rank)
    models = {
        f"{name}: {one.__name__}": partial(one, name=name) for name in names for one in played
    }
    return {**exchanges(), **models}
