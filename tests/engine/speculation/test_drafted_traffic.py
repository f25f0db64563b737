"""Random traffic with a draft model: whatever is asked ends, and is answered as without drafts.

Samplers, penalties, stops, several answers to a prompt, priorities, sessions, namespaces, requests
that do not speculate or do not use the cache, aborts, retractions, flushes, a store, checks of
restores and quarantines, copies and stores that fail: random by a seed, on a device of a few pages.

The drafts are those of the model, or now and then the right tokens: so runs of every length are
accepted. Equal tokens have equal drafts of the model, wherever their pages came from, where every
request speculates and no stored draft is lost.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache as cached
from pathlib import Path
from typing import Any

import pytest

from kvtide.cache import CacheConfig, FetchPatience, Namespace, Ratio, TieredCache, Tokens
from kvtide.engine import Engine, Finish, Request, RequestParams, SamplingParams
from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.restore_oracle import RestoreOracle
from kvtide.engine.runner import StepOutput
from kvtide.engine.speculation.drafter import DraftWish, TokenDrafter
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.models.draft import DraftModel
from kvtide.models.token_bytes import Spelling
from kvtide.models.tokenizer import Detokenizer
from kvtide.spec import Tier
from kvtide.storage import open_store
from kvtide.testing.faults import FaultyBackend
from kvtide.testing.faulty_store import Draw, Fault, FaultyStore
from kvtide.transfer.lane import Lane
from tests.engine.speculation.test_draft_restores import PAIRS, Pair
from tests.grids import everything

PAGE = 16
MAX_ANSWER = 28
SEEDS = range(12 if os.environ.get("KVTIDE_LONG_TESTS") else 4)
NAMESPACES = (*[Namespace()] * 4, Namespace(adapter="a"), Namespace(cache_salt="b"))
FAULTS = (Fault.RAISE, Fault.MISSING, Fault.SHORT, Fault.FLIP, Fault.REFUSE, Fault.SLOW)
SAMPLERS = (
    SamplingParams(logprobs=1),
    SamplingParams(logprobs=1),
    SamplingParams(temperature=0.9, top_p=0.9, logprobs=1),
    SamplingParams(temperature=1.5, top_k=9, presence_penalty=1.2),
    SamplingParams(frequency_penalty=0.8, repetition_penalty=1.3, logprobs=2),
)


class Letters:
    """A tokenizer of tokens that are two letters each."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int) -> bytes:
        return _letters(str(token))

    def detokenizer(
        self, after: Sequence[int] = (), keep: frozenset[int] = frozenset()
    ) -> Detokenizer:
        spelling = Spelling(token=str, read=_letters, silent=frozenset())
        return Detokenizer(spelling, drop_space=False)


def _letters(written: str) -> bytes:
    high, low = divmod(int(written), 16)
    return bytes([97 + high % 16, 97 + low])


@cached
def reference(name: str, target: Any) -> Engine:
    cache = TieredCache(target.memory, CacheConfig(Tokens(2048), None, tokens_per_checkpoint=64))
    return Engine(target, cache, Letters(), chunk_tokens=2048)  # type: ignore[arg-type]


def alone(name: str, target: Any, asked: RequestParams) -> Request:
    """The same request to an engine that neither drafts nor uses anything it has kept."""
    engine = reference(name, target)
    request = engine.submit(replace(asked, recompute=asked.score is None, session=None))
    while not engine.idle:
        engine.step()
    return request


class Sometimes:
    """Numbers of copies that fail, chosen at random as they come."""

    def __init__(self, rng: random.Random, chance: float) -> None:
        self._random, self._chance = rng, chance

    def __contains__(self, number: object) -> bool:
        return self._random.random() < self._chance


class InformedDrafter(TokenDrafter):
    """Drafts of a model, or now and then of one that knows the answers."""

    def __init__(self, inner: ModelDrafter, rng: random.Random, *, consistent: bool) -> None:
        self._inner, self._random, self._consistent = inner, rng, consistent
        self.captures, self.writes, self.model = inner.captures, inner.writes, inner.model
        self.answers: dict[Request, list[int]] = {}
        self.seen: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.compared = 0

    def extend(
        self, chunks: Sequence[ScheduledChunk], output: StepOutput, wishes: Sequence[DraftWish]
    ) -> None:
        self._inner.extend(chunks, output, wishes)

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        proposed = self._inner.propose(wishes)
        if self._consistent:
            for wish, drafts in zip(wishes, proposed, strict=True):
                self._compare(wish.request, drafts)
        return [self._informed(*each) for each in zip(wishes, proposed, strict=True)]

    def _compare(self, request: Request, drafts: tuple[int, ...]) -> None:
        sampling = request.params.sampling
        if sampling.is_greedy and sampling.repetition_penalty == 1.0:
            before = self.seen.setdefault(tuple(request.tokens), drafts)
            self.compared += before is not drafts
            common = min(len(before), len(drafts))
            assert drafts[:common] == before[:common], "another draft of the same tokens"

    def _informed(self, wish: DraftWish, drafts: tuple[int, ...]) -> tuple[int, ...]:
        request = wish.request
        rest = self.answers[request][len(request.output) :] if request in self.answers else []
        if self._random.random() < 0.3 or not rest:
            return drafts
        right = tuple(rest[: self._random.randint(1, wish.limit)])
        return (right + drafts[len(right) :])[: wish.limit]


class Run:
    """One engine with settings of its own, and three conversations that branch."""

    max_running: tuple[int, ...] = (2, 4, 16)
    draft_tokens: tuple[int, ...] = (1, 3, 7, 16)
    check_rates: tuple[float, ...] = (0.0, 0.3)

    def __init__(self, name: str, pair: Pair, seed: int, folder: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.name, (self.target, model) = name, pair
        self.mixed = seed % 3 == 2
        """Some requests do not speculate: draft pages are absent."""
        config = CacheConfig(
            Tokens(rng.choice((6, 9, 14, 24)) * PAGE),
            host_size=Ratio(rng.choice((1, 2, 6))),
            tokens_per_checkpoint=rng.choice((16, 32, 64)),
            write_policy=rng.choice(("write_through", "write_through_selective", "write_back")),
            session_fraction=rng.choice((0.25, 0.5)),
            patience=FetchPatience(rng.choice(("best_effort", "wait_complete")), min_tokens=1),
            draft_fingerprint=b"draft",
        )
        self.cache = TieredCache(self.target.memory, config)
        self.faulty = seed % 4 == 3
        if self.faulty:
            self._break_copies(random.Random(seed))
        if seed % 2:
            url = f"file://{folder}/store?cap=64MB&floor=0"
            store = open_store(url, self.cache.storage.space)
            draw = Draw(seed, 0.15 if self.faulty else 0.0, FAULTS)
            self.cache.storage.attach(FaultyStore(store, draw))
        rate = rng.choice(self.check_rates)
        self.oracle = RestoreOracle(self.cache, rate, None) if rate else None
        self.drafter = self._drafter(model)
        self.engine = Engine(
            self.target,
            self.cache,
            Letters(),  # type: ignore[arg-type]
            chunk_tokens=rng.choice((16, 37, 64, 257)),
            max_running=rng.choice(self.max_running),
            oracle=self.oracle,
            drafter=self.drafter,
            draft_tokens=rng.choice(self.draft_tokens),
            fixed_drafts=True,
        )
        self.talks = [self._words(rng.randrange(1, 5 * PAGE)) for _ in range(3)]
        self.requests: list[tuple[int, Request, Request]] = []

    def _drafter(self, model: DraftModel) -> Any:
        inner = ModelDrafter(model, model.captures, self.cache, self.target.vocabulary)
        return InformedDrafter(inner, self.rng, consistent=not (self.mixed or self.faulty))

    def _break_copies(self, rng: random.Random) -> None:
        for lane in self.cache.hardware.copier.lanes.values():
            assert isinstance(lane, Lane)
            often = {"raises": Sometimes(rng, 0.01), "halves": Sometimes(rng, 0.01)}
            lane._backend = FaultyBackend(lane._backend, **often)

    def _words(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(3, self.target.vocabulary) for _ in range(count))

    def _grammar(self) -> Grammar | None:
        return None

    def submit(self) -> None:
        """One answer, or several to the same prompt with seeds of their own."""
        rng, max_tokens = self.rng, self.engine.max_sequence_tokens
        talk = rng.randrange(3)
        tokens = (self.talks[talk] + self._words(rng.randrange(12)))[: max_tokens - 1]
        answer = min(rng.choice((0, 1, 4, MAX_ANSWER, MAX_ANSWER)), max_tokens - len(tokens))
        asked = RequestParams(
            tokens,
            answer,
            recompute=rng.random() < 0.05,
            score=rng.choice((*[None] * 12, 1)),
            priority=rng.choice((0, 0, 0, 1, 3)),
            session=rng.choice((None, None, "a", "b")),
            namespace=rng.choice(NAMESPACES),
            speculate=not self.mixed or rng.random() < 0.6,
            grammar=self._grammar(),
        )
        sampler = rng.choice(SAMPLERS)
        for _ in range(rng.choice((1, 1, 2, 3))):
            own = replace(asked, sampling=replace(sampler, seed=rng.randrange(99)))
            wanted = alone(self.name, self.target, own)
            output = [one.token for one in wanted.output]
            stopped = self._stopped(own, output)
            if stopped is not own:
                wanted = alone(self.name, self.target, stopped)
            request = self.engine.submit(stopped)
            self.drafter.answers[request] = output
            self.requests.append((talk, request, wanted))

    def _stopped(self, asked: RequestParams, output: list[int]) -> RequestParams:
        """Often with a stop that the answer has somewhere, at a token or across two of them."""
        chance = self.rng.random()
        if len(output) < 3 or chance < 0.5:
            return asked
        if chance < 0.7:
            return replace(asked, stop_ids=frozenset([self.rng.choice(output)]))
        text = b"".join(_letters(str(token)) for token in output).decode()
        at = self.rng.randrange(1, len(text) - 2)
        return replace(asked, stop=(text[at : at + self.rng.randint(1, 4)], "never"))

    def disturb(self) -> None:
        rng = self.rng
        drafting = [one for _, one, _ in self.requests if one.finish is None and one.drafts]
        live = [one for _, one, _ in self.requests if one.finish is None]
        event = rng.random()
        if live and event < 0.02:
            self.engine.abort(rng.choice(drafting or live))
        elif drafting and event < 0.06:
            self.engine.scheduler.retract(rng.choice(drafting))
        elif event < 0.08:
            self.cache.flush(rng.choice((Tier.DEVICE, Tier.HOST)))
        elif live and event < 0.085:
            self.cache.quarantine(rng.choice(live).prompt)

    def play(self, count: int) -> None:
        quiet = 0
        while len(self.requests) < count or not self.engine.idle:
            if len(self.requests) < count and (self.rng.random() < 0.2 or self.engine.idle):
                self.submit()
            updates = self.engine.step()
            assert self.cache.validate() == []
            for talk, request, _ in self.requests:
                if any(update.request is request and update.finish for update in updates):
                    self.talks[talk] = tuple(request.tokens[: 6 * PAGE])
            self.disturb()
            quiet = 0 if updates else quiet + 1
            assert quiet < 5000, "a request waits for ever"
            if not self.engine.computed:
                time.sleep(0.0005)  # Copies are on their way.

    def check(self) -> None:
        for _, request, wanted in self.requests:
            if request.finish is Finish.ABORT:
                assert request.output == wanted.output[: len(request.output)]
            else:
                assert (request.output, request.scores) == (wanted.output, wanted.scores)
                assert request.finish is wanted.finish
                assert request.text is not None and wanted.text is not None
                assert request.text.stopped == wanted.text.stopped
        lengths = self.engine.accept_length_stats
        assert lengths is not None and lengths.accepted > 0
        assert self.oracle is None or self.oracle.counts.diverged == 0
        assert self.cache.drain(20) and self.cache.validate() == []
        for tier in (Tier.DEVICE, Tier.HOST):
            while self.cache.sessions.unpin_one():
                pass
            self.cache.flush(tier)
        for pages in self.cache.stats().pages.values():
            assert (pages.resident, pages.free) == (0, pages.capacity)
        assert not self.cache.index.leases and self.cache.close()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cached(lambda name: PAIRS[name](tmp_path_factory.mktemp("drafts")))


@pytest.mark.quick(seed=[1], name=["qwen3_next-mtp"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PAIRS)
def test_all_that_is_asked_ends_and_is_right(
    name: str, seed: int, pairs: Any, tmp_path: Path
) -> None:
    run = Run(name, pairs(name), seed, tmp_path)
    run.play(run.rng.randrange(14, 24) // (1 if everything() else 2))
    run.check()
