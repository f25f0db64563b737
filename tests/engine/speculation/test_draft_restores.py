"""A draft's KV goes through every tier with its page: what is drafted stays the same to the bit.

The drafts have random weights and are hardly ever accepted; that equal tokens get equal drafts says
more than an accept length would.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvtide.cache import CacheConfig, FetchPatience, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams, SamplingParams
from kvtide.engine.speculation.accept_length_stats import PrefixOrigin
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.models import build
from kvtide.models.draft import DraftModel
from kvtide.models.draft_checkpoint import open_draft
from kvtide.models.model import Decoder
from kvtide.spec import Tier
from kvtide.spec.families import KVDType
from kvtide.storage import open_store
from tests.engine.speculation.drafting import ConsistentDrafter, Seen
from tests.engine.speculation.test_lossless import prompts
from tests.grids import everything
from tests.models import tiny_mtp
from tests.models.tiny import checkpoint, config_of
from tests.models.tiny_eagle3 import tiny_eagle3
from tests.models.tiny_mtp import V4

PAGE, ANSWER = 16, 12 if everything() else 8
# Cold: noise hides small differences of logits.
SAMPLING = SamplingParams(temperature=0.1, seed=5, logprobs=1)

Pair = tuple[Decoder, DraftModel]


def eagle3(family: str, folder: Path, layers: int = 1) -> Pair:
    config = json.loads(config_of(family).to_json_string())
    draft = open_draft(tiny_eagle3(config, folder / family, layers=layers, captures=(0, 1, 1)))
    saved = checkpoint(family)
    target = build(
        saved.config,
        saved.weights,
        page_tokens=PAGE,
        kv_dtype=KVDType.FP32,
        deterministic=True,
        draft=draft,
    )
    return target, draft.build(target)


def mtp(name: str, folder: Path) -> Pair:
    return tiny_mtp.pair(name, deterministic=True)


PAIRS: dict[str, Callable[[Path], Pair]] = {
    "eagle3-llama": lambda folder: eagle3("llama", folder),
    "eagle3-llama-two-layers": lambda folder: eagle3("llama", folder, layers=2),
    "eagle3-gpt_oss": lambda folder: eagle3("gpt_oss", folder),
    "eagle3-falcon_h1": lambda folder: eagle3("falcon_h1", folder),
    **{name: partial(mtp, name) for name in tiny_mtp.NAMES},
}


class Bed:
    """An engine that drafts, over tiers of its own."""

    def __init__(
        self,
        pair: Pair,
        drafts: int,
        chunk: int,
        seen: Seen,
        store: str = "",
        draft: bytes = b"",
        *,
        graphs: bool = False,
    ) -> None:
        target, model = pair
        sizes = Tokens(640), Tokens(2560)
        config = CacheConfig(
            *sizes,
            device="cpu",
            tokens_per_checkpoint=32,
            patience=FetchPatience("wait_complete", min_tokens=1),
            draft_fingerprint=draft,
        )
        self.cache = TieredCache(target.memory, config)
        if store:
            self.cache.storage.attach(open_store(store, self.cache.storage.space))
        self.inner = ModelDrafter(model, model.captures, self.cache, target.vocabulary)
        self.drafter = ConsistentDrafter(self.inner, seen)
        self.engine = Engine(
            target,
            self.cache,
            chunk_tokens=chunk,
            cuda_graphs=graphs,
            drafter=self.drafter,
            draft_tokens=drafts,
            fixed_drafts=True,
        )

    def serve(self, *asked: tuple[int, ...], speculate: bool = True) -> list[Request]:
        params = [RequestParams(one, ANSWER, SAMPLING, speculate=speculate) for one in asked]
        requests = [self.engine.submit(each) for each in params]
        while not self.engine.idle:
            self.engine.step()
            assert self.cache.validate() == []
        assert self.cache.drain(10)
        return requests

    def carried(self, asked: tuple[int, ...]) -> bool:
        """Whether the device has the draft's KV of any page of the prompt."""
        lease = self.cache.reserve(self.cache.match(self.cache.prompt(asked)))
        assert lease is not None and lease.cached_tokens == 3 * PAGE
        found = any(self.cache.carries(lease, pool).any() for pool in self.drafter.writes)
        self.cache.release(lease)
        return found


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return PAIRS[request.param](tmp_path_factory.mktemp("drafts"))


@pytest.mark.quick(pair=["eagle3-falcon_h1"])
@pytest.mark.parametrize("pair", PAIRS, indirect=True)
def test_drafts_are_the_same_from_every_tier(pair: Pair) -> None:
    asked = prompts(4, 2 * PAGE, 3 * PAGE + 2, PAGE - 1)
    seen: Seen = {}
    answers = []
    for drafts, chunk in ((3, 64), (5, 16)):
        bed = Bed(pair, drafts, chunk, seen)
        cold = [bed.serve(one)[0] for one in asked]
        again = bed.serve(*asked)
        assert all(one.by_tier.keys() == {Tier.DEVICE} for one in again if one.by_tier)
        bed.cache.flush(Tier.DEVICE)
        restored = bed.serve(*asked)
        assert sum(one.by_tier.get(Tier.HOST, 0) for one in restored) > PAGE
        assert bed.drafter.compared > 0
        answers += [[request.output for request in each] for each in (cold, again, restored)]
        bed.cache.close()
    assert all(each == answers[0] for each in answers)


RESTARTED = ("eagle3-llama-two-layers", V4)


@pytest.mark.parametrize(
    "pair",
    [
        *RESTARTED,
        *(pytest.param(name, marks=pytest.mark.full) for name in PAIRS if name not in RESTARTED),
    ],
    indirect=True,
)
def test_drafts_are_the_same_after_a_restart(pair: Pair, tmp_path: Path) -> None:
    """From a folder; with other draft weights the folder has the target's pages alone."""
    (asked,) = prompts(4, 3 * PAGE + 2)
    store, seen, outputs = f"file://{tmp_path}/store?cap=64MB&floor=0", Seen(), []
    for draft in (b"first", b"first", b"second"):
        bed = Bed(pair, 3, 64, seen if draft == b"first" else {}, store, draft)
        (request,) = bed.serve(asked)
        outputs.append(request.output)
        assert bool(request.prompt.fetched) == (len(outputs) > 1)
        if len(outputs) == 2:
            assert bed.drafter.compared > 0, "drafts of before the restart"
        if draft == b"second":
            lengths = bed.engine.accept_length_stats
            assert lengths is not None and lengths.steps[PrefixOrigin.STORAGE]
            assert not bed.carried(asked)
        bed.cache.close()
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("pair", ["eagle3-llama", "deepseek_v3-mtp"], indirect=True)
def test_pages_of_a_request_that_did_not_speculate_have_no_draft(pair: Pair) -> None:
    """They are left out of the draft's attention, and the text stays what it is."""
    (asked,) = prompts(4, 3 * PAGE + 2)
    bed = Bed(pair, 3, 64, {})
    (first,) = bed.serve(asked, speculate=False)
    assert not bed.carried(asked)
    (second,) = bed.serve(asked)
    assert second.by_tier == {Tier.DEVICE: 3 * PAGE} and second.output == first.output
    bed.cache.close()


@pytest.mark.parametrize("pair", ["eagle3-llama", "qwen3_next-mtp"], indirect=True)
def test_without_their_pages_drafts_are_others(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: these tests see it if restored pages lack the draft's KV."""
    (asked,) = prompts(4, 3 * PAGE + 2)
    bed = Bed(pair, 3, 64, {})
    bed.serve(asked)
    carries = bed.cache.carries
    monkeypatch.setattr(bed.cache, "carries", lambda *lease: carries(*lease) & False)
    with pytest.raises(AssertionError, match="another draft of the same tokens"):
        bed.serve(asked)
