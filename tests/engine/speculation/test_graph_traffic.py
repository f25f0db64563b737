"""Random traffic as in `test_drafted_traffic`, with steps that run as graphs.

What is launched ahead, on tokens, drafts and acceptance that only the device knows, gives the
answers without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as cached
from pathlib import Path
from typing import Any

import pytest

from kvtide.engine import Request, RequestParams, SamplingParams
from kvtide.engine.speculation.drafter import DraftWish, UnreadDrafts, UnreadStep
from kvtide.engine.speculation.model_drafter import ModelDrafter, _Launched
from kvtide.models.draft import DraftModel
from tests.engine.speculation.test_draft_restores import PAIRS
from tests.engine.speculation.test_drafted_traffic import Run, alone, reference
from tests.engine.torch_graphs import use_torch_graphs
from tests.grids import everything

NAMES = (
    "eagle3-llama",
    "eagle3-llama-two-layers",
    "eagle3-gpt_oss",  # Windows.
    "eagle3-falcon_h1",  # Mamba2: states go back.
    "deepseek_v3-mtp",
    "qwen3_next-mtp",  # Gated delta.
    "deepseek_v4-mtp",  # Open entries.
)


class InformedGraphDrafter(ModelDrafter):
    """Graphs of a draft, whose result is now and then replaced by the right tokens. `behind`: how
    often it was drafted behind unread tokens, `moved` of them with drafts accepted, `undone`
    requests of them."""

    def __init__(self, run: Run, draft: DraftModel) -> None:
        super().__init__(draft, draft.captures, run.cache, run.target.vocabulary)
        self._random, self.answers = run.rng, dict[Request, list[int]]()
        self.behind = self.moved = self.undone = 0
        self.chance = 0.7

    def _launch(self, *args: Any) -> _Launched | None:
        launched = super()._launch(*args)
        if launched is not None:
            rows = launched.drafts.rows
            launched = self._informed(launched.drafts, {each: len(each.output) for each in rows})
        return launched

    def draft_ahead(self, step: UnreadStep, wishes: Sequence[DraftWish]) -> UnreadDrafts | None:
        drafts = super().draft_ahead(step, wishes)
        if drafts is None:
            return None
        accepted = dict(zip(step.sampled.firsts, step.sampled.accepted.tolist(), strict=True))
        self.behind += 1
        self.moved += any(accepted.values())
        done = {each: len(each.output) + accepted[each] + 1 for each in drafts.rows}
        self._launched = self._informed(drafts, done)
        return drafts

    def undo_ahead(self, request: Request) -> None:
        super().undo_ahead(request)
        self.undone += 1

    def _informed(self, drafts: UnreadDrafts, done: dict[Request, int]) -> _Launched:
        """What a graph wrote, before the verify step reads it."""
        for request, row in drafts.rows.items():
            rest = self.answers.get(request, [])[done[request] :]
            if rest and self._random.random() < self.chance:
                right = rest[: self._random.randint(1, drafts.tokens.shape[1])]
                drafts.tokens[row, : len(right)] = drafts.tokens.new_tensor(right)
        return _Launched(drafts, self._staging.read_back([drafts.tokens]))


class GraphRun(Run):
    """Nothing is launched ahead of an oracle: there is none."""

    max_running = (2, 3, 4)
    draft_tokens = (1, 2, 3)
    check_rates = (0.0,)

    def _drafter(self, model: DraftModel) -> InformedGraphDrafter:
        return InformedGraphDrafter(self, model)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cached(lambda name: PAIRS[name](tmp_path_factory.mktemp("drafts")))


@pytest.mark.quick(seed=range(1), name=["eagle3-llama", "qwen3_next-mtp"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", NAMES)
def test_all_that_is_asked_ends_and_is_right(
    name: str, seed: int, pairs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = pairs(name)
    reference(name, target)  # It has no graphs.
    use_torch_graphs(monkeypatch, target)
    if seed % 2:  # Many tokens take a second look: the device knows another one.
        monkeypatch.setattr("kvtide.engine.sampling.sampler.CANDIDATES", 2)
    run = GraphRun(name, pairs(name), seed, tmp_path)
    run.play(run.rng.randrange(14, 24) // (1 if everything() else 2))
    run.check()
    assert run.engine.steps_by_kind["verify_graph"] > 0
    if seed == 0:  # Of others some have requests that wait for room all the time.
        assert run.drafter.behind > 4 and run.drafter.moved > 2


@pytest.mark.quick(seed=[1], name=["eagle3-llama"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["eagle3-llama", "eagle3-gpt_oss"])
def test_tokens_that_take_a_second_look_end_what_the_device_accepts(
    name: str, seed: int, pairs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts behind such a token may be right; what is launched has overwritten their entries."""
    target, _ = pairs(name)
    reference(name, target)
    use_torch_graphs(monkeypatch, target)
    monkeypatch.setattr("kvtide.engine.sampling.sampler.CANDIDATES", 2)
    run = GraphRun(name, pairs(name), 4 * seed, tmp_path)
    run.drafter.chance = 1.0
    for number, temperature in enumerate((1.5, 1.5, 0.0)):
        sampling = SamplingParams(temperature, top_k=5, seed=10 * seed + number, logprobs=1)
        asked = RequestParams(run._words(20 + number), 24, sampling)
        wanted = alone(name, target, asked)
        request = run.engine.submit(asked)
        run.drafter.answers[request] = [one.token for one in wanted.output]
        run.requests.append((0, request, wanted))
    while not run.engine.idle:
        run.engine.step()
    run.check()
    assert run.drafter.undone > 2
