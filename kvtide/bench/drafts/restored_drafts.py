"""What a draft accepts behind restored prefixes, beside computed ones, by the tier they come from.

Conversations have two turns. The second is answered by an engine that has computed the first, by
one that finds it on the device, on the host, and in a store after a restart. A last engine finds
pages without the draft's: what is lost where restores bring no drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtide.bench.drafts.speculate import ModelBed
from kvtide.cache import CacheConfig, FetchPatience, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams
from kvtide.engine.speculation.accept_length_stats import PrefixOrigin
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.models.chat import Conversation
from kvtide.spec import Tier
from kvtide.storage import open_store

FOLLOW_UP = "Tell me more about the first of these points."
COMPUTED, NO_DRAFTS = "computed", "device, without the draft's pages"
DRAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class RestoredLength:
    """`prefix`: where it comes from. `restored_tokens`: of all prompts. `of_computed`: of the
    accept length behind computed prefixes."""

    prefix: str
    prompt_tokens: int
    restored_tokens: int
    verify_steps: int
    accept_length: float
    of_computed: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    bed: ModelBed, questions: Sequence[str], answer_tokens: int, draft_tokens: int, folder: Path
) -> Iterator[RestoredLength]:
    """`folder` is for a store. Every step has `draft_tokens` drafts; answers are greedy."""
    first = [bed.params(text, answer_tokens) for text in questions]
    with _engine(bed, first, draft_tokens, folder) as engine:
        answers = _served(engine, first)
        second = [
            _second_turn(bed, text, answer, answer_tokens)
            for text, answer in zip(questions, answers, strict=True)
        ]
        with _engine(bed, second, draft_tokens) as fresh:
            computed = _served(fresh, second)
        yield _length(COMPUTED, computed, computed)
        yield _length(PrefixOrigin.DEVICE.value, _served(engine, second), computed)
        engine.cache.flush(Tier.DEVICE)
        yield _length(PrefixOrigin.HOST.value, _served(engine, second), computed)
    with _engine(bed, second, draft_tokens, folder) as restarted:
        yield _length(PrefixOrigin.STORAGE.value, _served(restarted, second), computed)
    with _engine(bed, second, draft_tokens) as without:
        _served(without, second, speculate=False)
        yield _length(NO_DRAFTS, _served(without, second), computed)


def _second_turn(
    bed: ModelBed, question: str, answered: Request, answer_tokens: int
) -> RequestParams:
    answer = bed.tokenizer.decode([one.token for one in answered.output])
    turns = (("user", question), ("assistant", answer), ("user", FOLLOW_UP))
    messages = [{"role": role, "content": content} for role, content in turns]
    return RequestParams(tuple(bed.tokenizer.encode_chat(Conversation(messages))), answer_tokens)


@contextmanager
def _engine(
    bed: ModelBed, asked: Sequence[RequestParams], draft_tokens: int, store: Path | None = None
) -> Iterator[Engine]:
    """With room for two turns of all conversations, in both tiers."""
    assert bed.draft is not None, "a draft drafts"
    longest = max(len(each.tokens) + each.max_tokens for each in asked)
    tokens = 3 * len(asked) * (longest + 2 * bed.model.memory.page_tokens)
    config = CacheConfig(
        *(Tokens(tokens), Tokens(tokens)),
        device=str(bed.device),
        patience=FetchPatience("wait_complete", min_tokens=1),
        draft_fingerprint=b"draft",
    )
    cache = TieredCache(bed.model.memory, config)
    try:
        if store is not None:
            cache.storage.attach(open_store(f"file://{store}", cache.storage.space))
        yield Engine(
            bed.model,
            cache,
            drafter=ModelDrafter(bed.draft, bed.draft.captures, cache, bed.model.vocabulary),
            draft_tokens=draft_tokens,
            fixed_drafts=True,
        )
        assert cache.drain(DRAIN_S), "transfers do not end"
    finally:
        cache.close()


def _served(
    engine: Engine, asked: Sequence[RequestParams], *, speculate: bool = True
) -> list[Request]:
    """One after another; what they leave has landed."""
    requests = []
    for params in asked:
        given = RequestParams(params.tokens, params.max_tokens, speculate=speculate)
        requests.append(engine.submit(given))
        while not engine.idle:
            engine.step()
    assert engine.cache.drain(DRAIN_S), "transfers do not end"
    return requests


def _length(
    prefix: str, requests: Sequence[Request], computed: Sequence[Request]
) -> RestoredLength:
    mean = _mean(requests)
    return RestoredLength(
        prefix,
        sum(len(each.params.tokens) for each in requests),
        sum(sum(each.by_tier.values()) for each in requests),
        sum(each.verify_steps for each in requests),
        mean,
        mean / _mean(computed),
    )


def _mean(requests: Sequence[Request]) -> float:
    """Tokens per verify step."""
    steps = sum(each.verify_steps for each in requests)
    return 1 + sum(each.accepted_drafts for each in requests) / steps
