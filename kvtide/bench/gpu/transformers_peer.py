"""The same model in `transformers`, which is what there is to run without a server."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch

from kvtide.bench.gpu.engine_bed import Bed, first_token_s, forget, median_s
from kvtide.bench.gpu.throughput import generating_s
from kvtide.engine import Engine, RequestParams
from kvtide.spec import Tier


@dataclass(frozen=True, slots=True)
class Work:
    """What both are asked for: a first token of `first`, and answers to prompts of `context`."""

    first: int = 16_384
    context: int = 1024
    batch: int = 64
    answer: int = 64
    steps: int = 48

    @property
    def names(self) -> tuple[str, ...]:
        prompts, answers = f"{self.batch} prompts of {self.context:,}", f"{self.answer} new tokens"
        return (
            f"first token of a prompt of {self.first:,}",
            "a token for one sequence",
            f"a token for each of {self.batch}",
            f"{prompts} with {answers} each, continuous batching: all of it",
        )


@dataclass(frozen=True, slots=True)
class Peer:
    """Seconds of theirs and ours; `why` says why theirs are missing."""

    what: str
    seconds: float | None
    ours_s: float
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(bed: Bed, config: Mapping[str, Any], work: Work | None = None) -> Iterator[Peer]:
    """Generation as users of `transformers` call it, and the same with this engine; each as soon
    as it is known."""
    work = work or Work()
    own = _ours(bed, work)
    theirs = _Theirs(bed, config, work)
    ways: list[Callable[[], tuple[float | None, str]]] = [
        lambda: (theirs.first_s(), ""),
        lambda: (theirs.token_s(1), ""),
        lambda: (theirs.token_s(work.batch), ""),
        theirs.continuous,
    ]
    for what, ours, way in zip(work.names, own, ways, strict=True):
        seconds, why = way()
        yield Peer(what, seconds, ours, why)


# -- this engine ------------------------------------------------------------------------------


def _ours(bed: Bed, work: Work) -> list[float]:
    page = bed.model.memory.page_tokens
    longest = work.context + max(work.answer, 2 * work.steps) + 3 * page + 64
    room = max(work.first + 2 * page, work.batch * longest)
    with bed.engine(room, max_running=work.batch) as engine:
        engine.warm_up()

        def first_s() -> float:
            forget(engine, Tier.DEVICE)
            return first_token_s(engine, bed.prompt(work.first, 5))[0]

        first_s()
        found = [median_s(first_s, 3)]
        for batch in (1, work.batch):
            forget(engine, Tier.DEVICE)
            found.append(generating_s(bed, engine, batch, work.context, work.steps))
        seeds = count(1)

        def all_s() -> float:
            forget(engine, Tier.DEVICE)
            return _all_s(bed, engine, work, next(seeds))

        return [*found, median_s(all_s, 3)]


def _all_s(bed: Bed, engine: Engine, work: Work, seed: int) -> float:
    prompts = _prompts(bed, work, seed)
    bed.finish()
    start = time.perf_counter()
    requests = [engine.submit(RequestParams(prompt, work.answer)) for prompt in prompts]
    while not engine.idle:
        engine.step()
    bed.finish()
    assert all(len(request.output) == work.answer for request in requests)
    return time.perf_counter() - start


def _prompts(bed: Bed, work: Work, seed: int) -> list[tuple[int, ...]]:
    """None of which was asked before."""
    return [bed.prompt(work.context, 10_000 * seed + number) for number in range(work.batch)]


# -- transformers -----------------------------------------------------------------------------


class _Theirs:
    def __init__(self, bed: Bed, config: Mapping[str, Any], work: Work) -> None:
        self._bed, self._work = bed, work
        self._library: Any = importlib.import_module("transformers")
        known = {name: value for name, value in config.items() if name != "kvtide"}
        settings = self._library.AutoConfig.for_model(**known)
        with bed.device:
            torch.set_default_dtype(torch.bfloat16)
            try:
                self._model = self._library.AutoModelForCausalLM.from_config(
                    settings, attn_implementation="sdpa"
                )
            finally:
                torch.set_default_dtype(torch.float32)
        self._model.eval()

    def first_s(self) -> float:
        return self._generated(1, self._work.first, 1)

    def token_s(self, batch: int) -> float:
        """What so many more tokens take, by token."""
        few, steps = 8, self._work.steps
        short, long = (
            self._generated(batch, self._work.context, new) for new in (few, few + steps)
        )
        return (long - short) / steps

    def _generated(self, batch: int, tokens: int, new: int) -> float:
        ids = torch.tensor(
            [self._bed.prompt(tokens, number) for number in range(batch)], device=self._bed.device
        )
        greedy = self._library.GenerationConfig(
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            max_new_tokens=new,
            min_new_tokens=new,
        )

        def once() -> float:
            self._bed.finish()
            start = time.perf_counter()
            self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
            self._bed.finish()
            return time.perf_counter() - start

        once()
        return median_s(once, 3)

    def continuous(self) -> tuple[float | None, str]:
        """Its continuous batching: set up for the same work before, where that can be kept."""
        work, ask = self._work, self._model.generate_batch
        keeps = "persistent_manager" in inspect.signature(ask).parameters
        more = {"persistent_manager": True} if keeps else {}
        greedy = self._library.GenerationConfig(
            do_sample=False, max_new_tokens=work.answer, eos_token_id=-1, pad_token_id=0
        )
        seeds = count(1)

        def once() -> float:
            prompts = [list(prompt) for prompt in _prompts(self._bed, work, next(seeds))]
            self._bed.finish()
            start = time.perf_counter()
            said = ask(inputs=prompts, generation_config=greedy, **more)
            self._bed.finish()
            seconds = time.perf_counter() - start
            counts = sorted(len(one.generated_tokens) for one in said.values())
            assert counts == [work.answer] * work.batch, f"it generated {counts} tokens"
            return seconds

        try:
            once()
            return once(), "" if keeps else "with its set-up"
        except Exception as error:  # Another project's: whatever it cannot do here is what is told.
            return None, f"{type(error).__name__}: {error}"
        finally:
            if keeps:
                self._model.destroy_cached_continuous_batching_manager()
