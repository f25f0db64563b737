"""Stages and tensor ranks, each in a process of its own, say what one rank says.

Stages compute the same numbers, to the last bit; tensor ranks add in another order. A world of each
shape plays the scenarios of `rank_serving` that the run selects; every scenario is a test here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as cached
from functools import partial

import pytest
import torch

from tests.engine import rank_serving
from tests.engine.rank_serving import Grid, scenarios
from tests.grids import covered
from tests.models.tiny import oracle
from tests.worlds import Report, Scenario, cells, check, play


@dataclass(frozen=True, slots=True)
class Shape:
    stages: int
    tensor_ranks: int

    def __str__(self) -> str:
        return f"pp{self.stages}-tp{self.tensor_ranks}"

    def scenarios(self) -> dict[str, Scenario]:
        models, engines, stores = (
            [name for name, shapes in table.items() if self in shapes]
            for table in (MODELS, ENGINES, STORES)
        )
        return scenarios(models, engines, stores)


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
    "deepseek_v32 hot:24": (PP, TP, BOTH),  # Every stage has layers of the hot pool.
    "deepseek_v4 hot:7": (PP, TP),  # The last stage has none.
    "glm_moe_dsa hot:25": (PP, TP),
}
"""Those that are served as well. The first of a shape is the one that faults are tried with."""

STORES = {
    "llama": SHAPES,
    "falcon_h1": SHAPES,
    "deepseek_v4": SHAPES,
    "deepseek_v32 hot:24": (PP, TP),
}
"""Those whose pages one rank and ranks of a shape find in each other's stores."""


def cases(*shapes: Shape) -> list[tuple[object, ...]]:
    return [(shape, *name.split(": ")) for shape in shapes for name in shape.scenarios()]


QUICK = ("llama", "falcon_h1")
CASES = [
    *covered(case for case in cases(PP, TP) if case[1] in QUICK),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in cases(PP, TP, BOTH)
        if case[0] == BOTH or case[1] not in QUICK
    ),
]
"""Shapes, families and scenarios; the quick run has each scenario once, with two ranks."""


@pytest.fixture(scope="module")
def expected(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, object]:
    """What one rank does in the cases of this run, and the checkpoints it does it with."""
    folder = tmp_path_factory.mktemp("one")
    cases = {(cell["family"], cell["scenario"]) for cell in cells(request)}
    for name in {family for family, _ in cases}:
        model = rank_serving.resident(name)
        oracle(model).save_pretrained(folder / "models" / model)
    return {"models": folder / "models", **rank_serving.expected(folder, cases)}


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest,
    expected: dict[str, object],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Shape], list[Report]]:
    """The reports of a world of a shape, which is started once."""

    @cached
    def reports(shape: Shape) -> list[Report]:
        folder = tmp_path_factory.mktemp(str(shape))
        (folder / "models").symlink_to(expected["models"])
        torch.save(expected, folder / "expected")
        mine = [cell for cell in cells(request) if cell["shape"] == shape]
        names = {f"{cell['family']}: {cell['scenario']}" for cell in mine}
        scenarios = {name: one for name, one in shape.scenarios().items() if name in names}
        kind = partial(Grid, stages=shape.stages)
        return play(shape.stages * shape.tensor_ranks, folder, scenarios, kind)

    return reports


@pytest.mark.parametrize(("shape", "family", "scenario"), CASES, ids=str)
def test_ranks(
    played: Callable[[Shape], list[Report]], shape: Shape, family: str, scenario: str
) -> None:
    check(played(shape), f"{family}: {scenario}")
