"""The same model in `transformers`, which is what there is to run without a server."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvtide.bench.gpu.bed import median_s


@dataclass(frozen=True, slots=True)
class Peer:
    """Seconds; `why` says why one is missing."""

    what: str
    seconds: float | None
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(config: Mapping[str, Any], device: torch.device, prompt_tokens: int) -> list[Peer]:
    """Generation as its users call it: a first token, and further ones for one and for many."""
    transformers: Any = importlib.import_module("transformers")
    known = {name: value for name, value in config.items() if name != "kvtide"}
    settings = transformers.AutoConfig.for_model(**known)
    with device:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = transformers.AutoModelForCausalLM.from_config(
                settings, attn_implementation="sdpa"
            )
        finally:
            torch.set_default_dtype(torch.float32)
    model.eval()
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    found = [
        Peer(
            f"first token of a prompt of {prompt_tokens:,}",
            _generated(model, generation, device, 1, prompt_tokens, 1),
        ),
        Peer("a token for one sequence", _token_s(model, generation, device, 1)),
        Peer("a token for each of 64", _token_s(model, generation, device, 64)),
        _continuous(model, device),
    ]
    return found


def _generated(
    model: Any, generation: Any, device: torch.device, batch: int, tokens: int, new: int
) -> float:
    ids = torch.randint(100, 1000, (batch, tokens), device=device)

    def once() -> float:
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=generation,
            max_new_tokens=new,
            min_new_tokens=new,
        )
        torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    return median_s(once, 3)


def _token_s(model: Any, generation: Any, device: torch.device, batch: int) -> float:
    """What 48 more tokens take, by token."""
    short, long = (_generated(model, generation, device, batch, 1024, new) for new in (8, 56))
    return (long - short) / 48


def _continuous(model: Any, device: torch.device) -> Peer:
    """Its continuous batching: 64 prompts of 1,024 tokens, 64 new ones each."""
    transformers: Any = importlib.import_module("transformers")
    what = "64 prompts of 1,024 with 64 new tokens each, continuous batching: seconds in all"
    try:
        model.set_attn_implementation("paged|sdpa")
        generation = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=64, eos_token_id=-1, pad_token_id=0
        )
        prompts = [torch.randint(100, 1000, (1024,)).tolist() for _ in range(64)]
        model.generate_batch(inputs=prompts[:2], generation_config=generation)
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        said = model.generate_batch(inputs=prompts, generation_config=generation)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        counts = {len(one.generated_tokens) for one in said.values()}
        return Peer(what, seconds, "" if counts == {64} else f"tokens generated: {sorted(counts)}")
    except Exception as error:  # Another project's: whatever it cannot do here is what is told.
        return Peer(what, None, f"{type(error).__name__}: {error}")
