"""While nothing is drafted, one pass extends the draft over the tokens of many steps; nothing of it
is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtide.engine import Request, RequestParams, SamplingParams
from kvtide.engine.speculation import deferred_rows
from kvtide.engine.speculation.draft_length import DraftLength
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.spec import Tier
from tests.engine.speculation.drafting import Seen
from tests.engine.speculation.test_draft_restores import PAGE, PAIRS, Bed
from tests.engine.speculation.test_lossless import prompts
from tests.engine.torch_graphs import use_torch_graphs

SAMPLING = SamplingParams(temperature=0.1, seed=5, logprobs=1)
PLAIN, ANSWER = 2 * PAGE + 9, 2 * PAGE + 14
"""A request decodes so many tokens without drafts, and then with some."""


class Play:
    """Requests whose first tokens have no drafts. `passes`: of the draft, over so many tokens."""

    def __init__(
        self, name: str, folder: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch, *, graphs: bool
    ) -> None:
        pair, self.passes = PAIRS[name](folder), list[int]()
        if graphs:
            use_torch_graphs(monkeypatch, pair[0])
        forward: Any = ModelDrafter._forward

        def counted(drafter: ModelDrafter, draft: object, rows: Any, *given: object) -> Any:
            self.passes.append(sum(len(row.tokens) for row in rows))
            return forward(drafter, draft, rows, *given)

        def drafts(_: DraftLength, request: Request) -> int:
            return 3 if len(request.output) >= PLAIN else 0

        monkeypatch.setattr(ModelDrafter, "_forward", counted)
        monkeypatch.setattr(DraftLength, "of", drafts)
        monkeypatch.setattr(DraftLength, "paying", drafts)
        self.bed = Bed(pair, 3, 64, seen, graphs=graphs)

    def _check_committed(self, request: Request) -> None:
        """The draft is extended over all that is committed: it leaves with its page."""
        extended = self.bed.inner._extended.get(request.held)
        committed = request.held.committed_pages * PAGE
        computed_here = committed > request.held.cached_tokens
        assert not computed_here or (extended is not None and extended.end >= committed)

    def serve(self, *asked: tuple[int, ...], retracted: bool = False) -> list[Request]:
        engine = self.bed.engine
        requests = [engine.submit(RequestParams(one, ANSWER, SAMPLING)) for one in asked]
        while not engine.idle:
            engine.step()
            if retracted and len(requests[0].output) == PAGE + 5:
                engine.scheduler.retract(requests[0])
                retracted = False
            assert self.bed.cache.validate() == []
            for request in engine.scheduler.running:
                self._check_committed(request)
        assert self.bed.cache.drain(10)
        return requests


@pytest.mark.quick(name=["eagle3-llama"], graphs=[True])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", ["eagle3-llama", "eagle3-falcon_h1", "deepseek_v4-mtp"])
def test_drafts_behind_deferred_tokens_are_those_of_a_draft_extended_in_every_step(
    name: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, from pages of the device too; a request is retracted meanwhile."""
    asked, seen, outputs, passes = prompts(4, PAGE - 3, 2 * PAGE + 1), Seen(), [], []
    for steps in (1, deferred_rows.MAX_STEPS):
        monkeypatch.setattr(deferred_rows, "MAX_STEPS", steps)
        with monkeypatch.context() as patch:
            play = Play(name, tmp_path, seen, patch, graphs=graphs)
            first = play.serve(*asked, retracted=True)
            passes.append(len(play.passes))
            play.bed.cache.flush(Tier.DEVICE)
            again = play.serve(*(tuple(one.tokens[: len(one.tokens) - 5]) for one in first))
            assert sum(one.by_tier.get(Tier.HOST, 0) for one in again) >= 4 * PAGE
            outputs.append([one.output for one in (*first, *again)])
            assert all(one.verify_steps for one in (*first, *again))
            if steps > 1:
                assert play.bed.drafter.compared > 4, "with the draft of every step"
            play.bed.cache.close()
    assert outputs[0] == outputs[1]
    assert 2 * passes[1] < passes[0]


def test_complete_pages_have_their_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request that never had a draft, up to the last page."""
    play = Play("eagle3-llama", tmp_path, {}, monkeypatch, graphs=False)
    monkeypatch.setattr(DraftLength, "of", lambda *_: 0)
    (asked,) = prompts(4, PAGE + 2)
    (request,) = play.serve(asked)
    assert not request.verify_steps and max(play.passes[1:]) > 10
    assert len(play.passes) <= 1 + ANSWER // PAGE + 1
    cache, tokens = play.bed.cache, request.tokens
    lease = cache.reserve(cache.match(cache.prompt(tokens)))
    assert lease is not None and lease.cached_tokens == (len(tokens) - 1) // PAGE * PAGE
    (pool,) = play.bed.drafter.writes
    assert cache.carries(lease, pool)[: lease.cached_tokens // PAGE].all()
    cache.release(lease)
    cache.close()


def test_what_a_prompt_ends_with_is_not_deferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last token alone may be a step."""
    play = Play("eagle3-llama", tmp_path, {}, monkeypatch, graphs=False)
    (asked,) = prompts(4, PAGE + 2)
    play.bed.engine.scheduler.chunk_tokens = PAGE + 1
    play.bed.engine.submit(RequestParams(asked, 4, SAMPLING))
    play.bed.engine.step()
    play.bed.engine.step()
    assert play.passes == [PAGE + 1, 1]
    play.bed.cache.close()
