"""The same model in Hugging Face `transformers`, the reference that runs without a server."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch

from kvtide.bench.gpu.engine_bed import Bed, flush, median_s, ttft_s
from kvtide.bench.gpu.throughput import decode_step_s
from kvtide.engine import Engine, RequestParams
from kvtide.spec import Tier


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """The load of both: one prompt of `first` tokens, and a batch of prompts of `context`."""

    first: int = 16_384
    context: int = 1024
    batch: int = 64
    answer: int = 64
    steps: int = 48

    @property
    def names(self) -> tuple[str, ...]:
        prompts = f"{self.batch} prompts of {self.context:,} tokens"
        return (
            f"TTFT of {self.first:,} tokens",
            "decode, batch 1",
            f"decode, batch {self.batch}",
            f"{prompts}, {self.answer} output tokens each, continuous batching",
        )


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Seconds of transformers and of kvtide; `why` is the reason of a missing figure."""

    what: str
    transformers_s: float | None
    kvtide_s: float
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    bed: Bed, config: Mapping[str, Any], work: PeerLoad | None = None
) -> Iterator[PeerResult]:
    """`generate` and `generate_batch` of transformers beside this engine, one result at a time."""
    work = work or PeerLoad()
    own = _ours(bed, work)
    theirs = _Transformers(bed, config, work)
    calls: list[Callable[[], tuple[float | None, str]]] = [
        lambda: (theirs.first_s(), ""),
        lambda: (theirs.token_s(1), ""),
        lambda: (theirs.token_s(work.batch), ""),
        theirs.continuous,
    ]
    for what, ours, call in zip(work.names, own, calls, strict=True):
        seconds, why = call()
        yield PeerResult(what, seconds, ours, why)


# -- this engine ------------------------------------------------------------------------------


def _ours(bed: Bed, work: PeerLoad) -> list[float]:
    page = bed.model.memory.page_tokens
    longest = work.context + max(work.answer, 2 * work.steps) + 3 * page + 64
    capacity = max(work.first + 2 * page, work.batch * longest)
    with bed.engine(capacity, max_running=work.batch) as engine:
        engine.warm_up()

        def first_s() -> float:
            flush(engine, Tier.DEVICE)
            return ttft_s(engine, bed.prompt(work.first, 5))[0]

        first_s()
        found = [median_s(first_s, 3)]
        for batch in (1, work.batch):
            flush(engine, Tier.DEVICE)
            found.append(decode_step_s(bed, engine, batch, work.context, work.steps))
        seeds = count(1)

        def all_s() -> float:
            flush(engine, Tier.DEVICE)
            return _all_s(bed, engine, work, next(seeds))

        return [*found, median_s(all_s, 3)]


def _all_s(bed: Bed, engine: Engine, work: PeerLoad, seed: int) -> float:
    prompts = _prompts(bed, work, seed)
    bed.synchronize()
    start = time.perf_counter()
    requests = [engine.submit(RequestParams(prompt, work.answer)) for prompt in prompts]
    while not engine.idle:
        engine.step()
    bed.synchronize()
    assert all(len(request.output) == work.answer for request in requests)
    return time.perf_counter() - start


def _prompts(bed: Bed, work: PeerLoad, seed: int) -> list[tuple[int, ...]]:
    """Prompts that no earlier round used."""
    return [bed.prompt(work.context, 10_000 * seed + number) for number in range(work.batch)]


# -- transformers -----------------------------------------------------------------------------


class _Transformers:
    def __init__(self, bed: Bed, config: Mapping[str, Any], work: PeerLoad) -> None:
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
        """Seconds a decode token: the difference of a long and a short generation."""
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
            self._bed.synchronize()
            start = time.perf_counter()
            self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
            self._bed.synchronize()
            return time.perf_counter() - start

        once()
        return median_s(once, 3)

    def continuous(self) -> tuple[float | None, str]:
        """Continuous batching, set up before the clock starts where the library allows it."""
        work, generate_batch = self._work, self._model.generate_batch
        keeps = "persistent_manager" in inspect.signature(generate_batch).parameters
        more = {"persistent_manager": True} if keeps else {}
        greedy = self._library.GenerationConfig(
            do_sample=False, max_new_tokens=work.answer, eos_token_id=-1, pad_token_id=0
        )
        seeds = count(1)

        def once() -> float:
            prompts = [list(prompt) for prompt in _prompts(self._bed, work, next(seeds))]
            self._bed.synchronize()
            start = time.perf_counter()
            outputs = generate_batch(inputs=prompts, generation_config=greedy, **more)
            self._bed.synchronize()
            seconds = time.perf_counter() - start
            counts = sorted(len(one.generated_tokens) for one in outputs.values())
            assert counts == [work.answer] * work.batch, f"it generated {counts} tokens"
            return seconds

        try:
            once()
            return once(), "" if keeps else "with its set-up"
        except Exception as error:  # The library's failure is the result of this row.
            return None, f"{type(error).__name__}: {error}"
        finally:
            if keeps:
                self._model.destroy_cached_continuous_batching_manager()
