"""A trained pair, target and EAGLE3 draft, that both look things up in the prompt (tests/data).

`Served` counts what verify steps gave while some prompts were answered. Every answer is compared
with that of an engine without speculation and without anything cached.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path

from kvtide.cache import CacheConfig, FetchPatience, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams
from kvtide.engine.speculation.accept_length_stats import PrefixOrigin
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.models import build
from kvtide.models.checkpoint import open_checkpoint
from kvtide.models.draft_checkpoint import DraftCheckpoint, open_draft
from kvtide.models.eagle3 import Eagle3
from kvtide.models.model import Decoder
from kvtide.spec.families import KVDType
from kvtide.storage import Store, open_store
from tests.data.lookup_task import Walk, walk

DATA = Path(__file__).resolve().parents[2] / "data"
PAGE, PAIRS, ANSWER = 16, 40, 32
PATIENT = FetchPatience("wait_complete", min_tokens=1)


@dataclass(frozen=True, slots=True)
class Pair:
    target: Decoder
    draft: Eagle3
    source: DraftCheckpoint


@cached
def pair() -> Pair:
    checkpoint, source = open_checkpoint(DATA / "lookup_target"), open_draft(DATA / "lookup_draft")
    target = build(
        checkpoint.config,
        checkpoint.weights,
        page_tokens=PAGE,
        kv_dtype=KVDType.FP32,
        deterministic=True,
        draft=source,
    )
    return Pair(target, source.build(target), source)


@cached
def plain_target() -> Decoder:
    """The target without its draft's pools."""
    checkpoint = open_checkpoint(DATA / "lookup_target")
    return build(
        checkpoint.config,
        checkpoint.weights,
        page_tokens=PAGE,
        kv_dtype=KVDType.FP32,
        deterministic=True,
    )


def walks(count: int, pairs: int = PAIRS, seed: int = 4) -> list[Walk]:
    rng = random.Random(seed)
    return [walk(rng, pairs) for _ in range(count)]


@cached
def alone(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The answer without speculation, of an engine that has never seen anything."""
    target = pair().target
    cache = TieredCache(target.memory, CacheConfig(Tokens(2048), None))
    engine = Engine(target, cache, chunk_tokens=2048)
    request = engine.submit(RequestParams(prompt, count))
    while not engine.idle:
        engine.step()
    cache.close()
    return tuple(sampled.token for sampled in request.output)


@dataclass(frozen=True, slots=True)
class Served:
    """What verify steps gave, and the requests. Steps at an answer's end have fewer drafts and do
    not count."""

    steps: int
    tokens: int
    requests: list[Request]

    @property
    def accept_length(self) -> float:
        assert self.steps, "nothing was drafted"
        return self.tokens / self.steps

    @property
    def origins(self) -> set[PrefixOrigin]:
        return {PrefixOrigin.of(request) for request in self.requests}


class LookupServer:
    """An engine with the pair.

    store  a folder that outlives it; `wrap` may stand between the cache and the store there
    sizes  of device and host
    """

    def __init__(
        self,
        store: Path | None = None,
        *,
        drafts: int = 3,
        sizes: tuple[int, int] = (4096, 8192),
        wrap: Callable[[Store], Store] = lambda store: store,
    ) -> None:
        target, draft, self._drafts = pair().target, pair().draft, drafts
        config = CacheConfig(
            *map(Tokens, sizes),
            patience=PATIENT,
            fingerprint=b"lookup",
            draft_fingerprint=pair().source.fingerprint(),
        )
        self.cache = TieredCache(target.memory, config)
        if store is not None:
            opened = open_store(f"file://{store}", self.cache.storage.space)
            self.cache.storage.attach(wrap(opened))
        drafter = ModelDrafter(draft, draft.captures, self.cache, target.vocabulary)
        self.engine = Engine(
            target,
            self.cache,
            chunk_tokens=256,
            drafter=drafter,
            draft_tokens=drafts,
            fixed_drafts=True,
        )

    def serve(
        self,
        prompts: Iterable[tuple[int, ...]],
        *,
        count: int = ANSWER,
        speculate: bool = True,
        between: Callable[[Request], None] | None = None,
    ) -> Served:
        """Answer the prompts one after another; `between` is called after every step."""
        steps, tokens, requests = 0, 0, []
        for prompt in prompts:
            params = RequestParams(tuple(prompt), count, speculate=speculate)
            request = self.engine.submit(params)
            while not self.engine.idle:
                whole = len(request.drafts) == self._drafts
                given = len(self.engine.step())
                steps, tokens = steps + whole, tokens + given * whole
                if between is not None:
                    between(request)
            assert self.cache.validate() == []
            assert tuple(one.token for one in request.output) == alone(params.tokens, count)
            requests.append(request)
        return Served(steps, tokens, requests)

    def settle(self) -> None:
        assert self.cache.drain(30)

    def close(self) -> None:
        assert self.cache.close()
