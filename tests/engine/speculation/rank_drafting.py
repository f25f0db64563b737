"""What every rank of `test_rank_drafts` plays: an engine that drafts, beside a single rank's.

Checkpoints lie in the world's folder: nothing here needs `transformers`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kvtide.cache import CacheConfig, FetchPatience, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams, SamplingParams
from kvtide.engine.speculation.drafter import Drafter
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.engine.speculation.ngram import NgramDrafter
from kvtide.models import build, build_mtp
from kvtide.models.checkpoint import open_checkpoint
from kvtide.models.draft import DraftModel
from kvtide.models.draft_checkpoint import open_draft
from kvtide.models.model import Decoder
from kvtide.spec import Tier
from kvtide.spec.families import KVDType
from kvtide.spec.residency import ALL_RESIDENT, Residency
from kvtide.storage import open_store
from tests.engine.rank_serving import Grid, Place, Solo, text
from tests.engine.speculation.drafting import ConsistentDrafter, Seen
from tests.worlds import Scenario

PAGE, ANSWER = 16, 10
ASKED = (text(5, 2 * PAGE), text(6, PAGE + 7), text(7, 5) * 6)
"""The last repeats itself, so that n-grams find something."""
SAMPLING = SamplingParams(logprobs=1)
DRAFTS, HOT = 3, Residency(4 * 24)
"""Hot buffers have just room for what the queries of a step select."""
DRAFTERS = ("ngram", "eagle3", "mtp", "mtp-v4", "mtp-hot")

Outputs = list[list[tuple[int, float]]]


def drafting(place: Place, kind: str) -> tuple[Decoder, DraftModel | None, tuple[int, ...]]:
    """The target's part on this rank, its draft if it is here, and what the draft captures."""
    saved = open_checkpoint(place.folder / "models" / kind)
    draft = open_draft(place.folder / "models" / "draft") if kind == "eagle3" else None
    target = build(
        saved.config,
        saved.weights,
        page_tokens=PAGE,
        kv_dtype=KVDType.FP32,
        deterministic=True,
        resident=HOT if kind == "mtp-hot" else ALL_RESIDENT,
        draft_tokens=DRAFTS,
        mtp=kind.startswith("mtp"),
        draft=draft,
        stage=place.topology.stage,
        stages=place.topology.stages,
        ranks=place.topology.tensor,
    )
    if draft is not None:
        captures = draft.captures(target.memory)
        return target, draft.build(target) if target.is_last else None, captures
    if kind.startswith("mtp"):
        model = build_mtp(saved.config, saved.weights, target) if target.is_last else None
        return target, model, (target.memory.layers,)
    return target, None, ()


class Life:
    """A rank's engine that drafts, over a store. Drafts are compared with those of other lives."""

    def __init__(self, place: Place, kind: str, seen: Seen) -> None:
        target, draft, captures = drafting(place, kind)
        config = CacheConfig(
            Tokens(640),
            Tokens(2560),
            device="cpu",
            tokens_per_checkpoint=32,
            patience=FetchPatience("wait_complete", min_tokens=1),
        )
        self.cache = cache = TieredCache(target.memory, config, agreement=place.agreement())
        folder = place.folder / "stored" / f"{kind}-{place.topology.stages}-{place.ranks}"
        cache.storage.attach(open_store(f"file://{folder}?sync=never", cache.storage.space))
        (vocabulary,) = cache.agreement.all_min([target.vocabulary])
        inner: Drafter = NgramDrafter()
        if kind != "ngram":
            inner = ModelDrafter(draft, captures, cache, vocabulary, place.topology)
        self._engine = Engine(
            target,
            cache,
            chunk_tokens=32,
            topology=place.topology,
            drafter=ConsistentDrafter(inner, seen),
            draft_tokens=DRAFTS,
            fixed_drafts=True,
        )
        guard, pools = self._engine.accept_length_guard, target.memory.draft_sidecars
        assert (guard.pools if guard else ()) == pools and bool(pools) == (kind != "ngram")
        assert bool(target.memory.hot_pools) == (kind == "mtp-hot")

    def answers(self, tier: Tier | None) -> Outputs:
        """Some of their prefixes come from this tier."""
        requests = [self._engine.submit(RequestParams(one, ANSWER, SAMPLING)) for one in ASKED]
        while not self._engine.idle:
            self._engine.step()
        assert self.cache.drain(20) and self.cache.validate() == []
        assert tier is None or any(request.by_tier.get(tier, 0) for request in requests)
        return [_output(request) for request in requests]


def served(place: Place, kind: str) -> tuple[Outputs, Seen]:
    """Answers cold, from the device, from the host and, in another life, from storage; and all
    drafts, which are the same wherever their pages came from. Windows are kept at a second try."""
    seen: Seen = {}
    life = Life(place, kind, seen)
    outputs = life.answers(None) + life.answers(None) + life.answers(Tier.DEVICE)
    life.cache.flush(Tier.DEVICE)
    outputs += life.answers(Tier.HOST)
    assert life.cache.close() and seen, "nothing was drafted"
    life = Life(place, kind, seen)
    outputs += life.answers(Tier.STORAGE)
    assert life.cache.close()
    return outputs, seen


def _output(request: Request) -> list[tuple[int, float]]:
    return [(one.token, one.logprob) for one in request.output]


def every_rank_accepts_the_same(grid: Grid, kind: str) -> None:
    outputs, seen = served(grid, kind)
    grid.same(([[token for token, _ in each] for each in outputs], sorted(seen.items())))
    expected, expected_drafts = grid.expected[kind]
    if grid.exact:
        assert outputs == expected and seen == expected_drafts
    else:
        assert [[t for t, _ in one] for one in outputs] == [[t for t, _ in one] for one in expected]


def expected(folder: Path) -> dict[str, object]:
    """What one rank says and drafts."""
    return {kind: served(Solo(folder), kind) for kind in DRAFTERS}


def scenarios() -> dict[str, Scenario]:
    return {kind: partial(every_rank_accepts_the_same, kind=kind) for kind in DRAFTERS}
