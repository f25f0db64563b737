"""Stages and tensor ranks, each in a process of its own, say what one rank says.

Stages compute the same numbers, to the last bit; tensor ranks add in another order. A world of each
shape plays all scenarios of `rank_serving`; every scenario is a test here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from tests.engine import rank_serving
from tests.engine.rank_serving import Grid, scenarios
from tests.models.tiny import oracle
from tests.worlds import Report, Scenario, check, play


@dataclass(frozen=True, slots=True)
class Shape:
    stages: int
    tensor_ranks: int

    def __str__(self) -> str:
        return f"pp{self.stages}-tp{self.tensor_ranks}"

    def scenarios(self) -> dict[str, Scenario]:
        models, engines = (
            [name for name, shapes in table.items() if self in shapes]
            for table in (MODELS, ENGINES)
        )
        return scenarios(models, engines)


PP, TP, BOTH = SHAPES = (Shape(2, 1), Shape(1, 2), Shape(2, 2))
MODELS = {
    "llama": SHAPES,
    "gpt_oss": SHAPES,
    "falcon_h1": SHAPES,
    "deepseek_v4": SHAPES,
}
"""One family of each form of memory. All are tried with two ranks and two stages in one process, in
`tests/models`."""

ENGINES = {
    "llama": (PP, BOTH),
    "gpt_oss": (TP,),
    "falcon_h1": (PP, TP),
    "deepseek_v4": (PP, TP, BOTH),
}
"""Those that are served as well. The first of a shape is the one that faults are tried with."""

CASES = [(shape, scenario) for shape in SHAPES for scenario in shape.scenarios()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What one rank does, and the checkpoints it does it with."""
    folder = tmp_path_factory.mktemp("one")
    for name in MODELS:
        oracle(name).save_pretrained(folder / "models" / name)
    return {"models": folder / "models", **rank_serving.expected(folder, [*MODELS], [*ENGINES])}


@pytest.fixture(scope="module")
def worlds(
    expected: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> dict[Shape, list[Report]]:
    played = {}
    for shape in SHAPES:
        folder = tmp_path_factory.mktemp(str(shape))
        (folder / "models").symlink_to(expected["models"])
        torch.save(expected, folder / "expected")
        ranks = shape.stages * shape.tensor_ranks
        kind = partial(Grid, stages=shape.stages)
        played[shape] = play(ranks, folder, shape.scenarios(), kind)
    return played


@pytest.mark.parametrize(("shape", "scenario"), CASES, ids=str)
def test_ranks(worlds: dict[Shape, list[Report]], shape: Shape, scenario: str) -> None:
    check(worlds[shape], scenario)
