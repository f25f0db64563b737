"""Decode with half of the batch under a grammar, against the same batch without one.

Weights are random. The vocabulary is that of a given tokenizer, else the default model's. The
grammar is what a server compiles for `response_format` of type json_schema: a list of records that
has no end, so that every request decodes until it is stopped.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from kvtide.bench.gpu.engine_bed import Bed, alternating, flush, start, step_s, stop
from kvtide.engine import Engine, RequestParams
from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.scheduler import MIXED_STEP_TOKENS
from kvtide.models.checkpoint import open_checkpoint
from kvtide.models.default_model import default_model
from kvtide.models.tokenizer import Tokenizer, load_tokenizer
from kvtide.spec import Tier

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["bird", "fish", "mammal"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 4},
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}},
            "required": ["lat", "lon"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "tags", "place"],
    "additionalProperties": False,
}
RECORDS = Grammar(
    "json_schema", json.dumps({"type": "array", "items": RECORD, "minItems": 100_000})
)


@dataclass(frozen=True, slots=True)
class ConstrainedResult:
    """Seconds of a step with half of the batch constrained (`on_s`) and without (`off_s`); of the
    former, `masks_s` is the host's time for masks."""

    what: str
    on_s: float
    off_s: float
    masks_s: float

    @property
    def relative_speed(self) -> float:
        return self.off_s / self.on_s

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "relative_speed": self.relative_speed}


def measure(bed: Bed, batch: int, context: int, steps: int, rounds: int) -> ConstrainedResult:
    capacity = batch * (context + steps + 8 * bed.model.memory.page_tokens)
    tokenizer = bed.tokenizer or learned_tokenizer()
    with bed.engine(capacity, 0, max_running=batch, tokenizer=tokenizer) as engine:
        engine.warm_up()

        def decoded(constrained: int) -> float:
            flush(engine, Tier.DEVICE)
            return _step_s(bed, engine, batch, context, steps, constrained)

        variants = [lambda: decoded(batch // 2), lambda: decoded(0)]
        alternating(variants, 1)
        masks = engine.masks
        seconds, computed = masks.seconds, masks.steps
        on_s, off_s = alternating(variants, rounds)
        masks_s = (masks.seconds - seconds) / (masks.steps - computed)
    what = f"decode, batch {batch}, half constrained, {tokenizer.size:,} learned tokens"
    return ConstrainedResult(what, on_s, off_s, masks_s)


def _step_s(
    bed: Bed, engine: Engine, batch: int, context: int, steps: int, constrained: int
) -> float:
    """Seconds of a step in which the whole batch decodes, so many of it under a grammar."""
    lead = context * batch // min(engine.scheduler.chunk_tokens, MIXED_STEP_TOKENS) + 16
    grammars = [RECORDS] * constrained + [None] * (batch - constrained)
    start(
        engine,
        [
            RequestParams(bed.prompt(context, 7000 + number), steps + lead, grammar=grammar)
            for number, grammar in enumerate(grammars)
        ],
    )
    seconds = step_s(bed, engine, steps)
    stop(engine)
    return seconds


def learned_tokenizer() -> Tokenizer:
    """The default model's."""
    found = load_tokenizer(open_checkpoint(default_model()))
    assert found is not None, "the default model has a tokenizer"
    return found
