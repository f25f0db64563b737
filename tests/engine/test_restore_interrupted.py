"""Requests that are aborted, retracted or lose a load, at any moment: no other's bits change.

Everything follows from the seed in the test's name, also how far copies have come.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from kvtide.cache import CacheConfig, EveryPages, Ratio, TieredCache, Tokens
from kvtide.engine import Engine, Finish, Request, RequestParams, RequestState
from kvtide.tiers import Layout
from tests.engine.restoring import (
    HOT_NAMES,
    INTERRUPTED,
    NAMES,
    SAMPLING,
    WRITING,
    Family,
    Stand,
    alone,
    model_of,
    text,
)

ACTIONS = {
    "abort": ("waiting", "coming", "loading", "prefill", "decode"),
    "retract": ("coming", "loading", "prefill", "decode"),
    "break": ("coming", "prefill", "decode"),
}
"""What is done to requests in which stages. It is the next load of any request that breaks."""

Injury = tuple[str, str]

LONG = (*NAMES, *(family.name for family in INTERRUPTED))
LONG_HOT_NAMES = [name for name in HOT_NAMES if Family(name).model in LONG]
"""Their conversations have all turns: with fewer there is little to load, and to break."""

MAX_ROUNDS = 4
"""One is nearly always enough."""


def stage_of(request: Request) -> str:
    """`coming`: it was admitted and had no chunk yet; `loading`: it had, without a poll since."""
    if request.state is RequestState.WAITING:
        return "waiting"
    if request.held.loading:
        return "coming" if request.computed == request.held.cached_tokens else "loading"
    return "prefill" if request.computed < len(request.params.tokens) else "decode"


class Injuries:
    """Done at random steps: of what is possible then, what was done least so far.

    What was never done is done at nearly the first chance, so that no kind is left out.
    """

    def __init__(self, stand: Stand) -> None:
        self.done: Counter[Injury] = Counter()
        self._stand = stand

    def __call__(self, requests: list[Request]) -> None:
        possible = list(self._possible(requests))
        fewest = min((self.done[injury] for injury, _ in possible), default=0)
        if possible and self._stand.rng.random() < (0.3 if fewest else 0.9):
            rarest = [pair for pair in possible if self.done[pair[0]] == fewest]
            injury, request = self._stand.rng.choice(rarest)
            self.done[injury] += 1
            self._injure(injury[0], request)
            assert self._stand.cache.validate() == [], injury

    @staticmethod
    def _possible(requests: list[Request]) -> Iterator[tuple[Injury, Request]]:
        for request in requests:
            if request.state is not RequestState.FINISHED:
                stage = stage_of(request)
                for action, stages in ACTIONS.items():
                    if stage in stages:
                        yield (action, stage), request

    def _injure(self, action: str, request: Request) -> None:
        if action == "abort":
            self._stand.engine.abort(request)
        elif action == "retract":
            self._stand.engine.scheduler.retract(request)
        else:
            self._stand.cache.break_load()


def converse_injured(family: str, writing: str, seed: int) -> Counter[Injury]:
    """Serve the conversations in steps of all sizes; what was done to them.

    In small steps there are requests that were admitted and had no chunk yet while they load.
    """
    chance = random.Random(seed)
    stand = Stand(
        family,
        seed=seed,
        layouts=(chance.choice(list(Layout)), chance.choice(list(Layout))),
        write_policy=writing,
    )
    stand.cache.ledger.partings = False  # Seven at a time leave no room for what is only a wish.
    injure = Injuries(stand)
    for requests in stand.converse(at_once=7):
        injure(requests)
        stand.engine.scheduler.chunk_tokens = stand.rng.choice((3, 20, 64, 257))
    finished = Counter(request.finish for request in stand.served)
    assert finished[Finish.LENGTH] > 0 and finished[Finish.ABORT] > 0
    assert stand.cache.stats().transfers["load", "failed"] > 0 and stand.loads > 0
    stand.end()
    return injure.done


@pytest.mark.quick(family=["llama"])
@pytest.mark.parametrize("seed", [12])
@pytest.mark.parametrize("family", [*NAMES, *LONG_HOT_NAMES])
def test_aborts_retractions_and_broken_loads_change_no_other_requests_bits(
    family: str, seed: int
) -> None:
    """Until everything has happened at every stage: which stages there are differs by family."""
    done: Counter[Injury] = Counter()
    missed = {(action, stage) for action, stages in ACTIONS.items() for stage in stages}
    for number in range(seed, seed + MAX_ROUNDS * len(WRITING), len(WRITING)):
        for each, writing in enumerate(WRITING):
            print(f"{writing}, seed {number + each}")  # Shown when it fails.
            done += converse_injured(family, writing, number + each)
        missed -= done.keys()
        if not missed:
            break
    assert not missed, done


@pytest.mark.quick(family=["gemma3"])
@pytest.mark.parametrize("family", ["falcon_h1", "gemma3"])
def test_a_chunk_that_was_cut_short_goes_on_with_what_the_next_step_leaves_it(family: str) -> None:
    rng = random.Random(11)
    model = model_of(family)
    config = CacheConfig(Tokens(2048), host_size=Ratio(2), tokens_per_checkpoint=16)
    cache = TieredCache(model.memory, config, placement=EveryPages(3))
    engine = Engine(model, cache, chunk_tokens=90)
    requests = [engine.submit(RequestParams(text(rng, 150), 12, SAMPLING)) for _ in range(4)]
    while not engine.idle:
        engine.scheduler.chunk_tokens = rng.choice((9, 20, 90))
        engine.step()
        assert cache.validate() == []
    for request in requests:
        assert tuple(request.output) == alone(family, request.params.tokens, 12)
    cache.close()
