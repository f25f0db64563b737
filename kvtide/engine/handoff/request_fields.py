"""A request as JSON, for a prefill server that is asked to compute its prompt."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.handoff.handoff_source import HandoffTarget
from kvtide.engine.request import RequestParams
from kvtide.engine.sampling.sampling_params import SamplingParams
from kvtide.index import Namespace
from kvtide.index.keys import pack


def request_fields(params: RequestParams) -> dict[str, Any]:
    """What the first token depends on, and the namespace of its pages."""
    return {
        "tokens": base64.b64encode(pack(params.tokens)).decode(),
        "sampling": asdict(params.sampling),
        "grammar": None if params.grammar is None else asdict(params.grammar),
        "stop_ids": sorted(params.stop_ids),
        "namespace": list(params.namespace),
        "priority": params.priority,
        "speculate": params.speculate,
    }


def prompt_digest(params: RequestParams) -> str:
    """Equal for the same tokens in the same namespace."""
    digest = hashlib.sha256(json.dumps(list(params.namespace)).encode())
    digest.update(pack(params.tokens))
    return digest.hexdigest()


def asked_params(room: str, values: dict[str, Any]) -> RequestParams:
    """The request that `request_fields` wrote, for one token; `ValueError` if it is none."""
    try:
        packed = base64.b64decode(values["tokens"], validate=True)
        return RequestParams(
            tokens=tuple(np.frombuffer(packed, "<i4").tolist()),
            max_tokens=1,
            sampling=_sampling(values["sampling"]),
            grammar=_grammar(values["grammar"]),
            stop_ids=frozenset(int(token) for token in values["stop_ids"]),
            namespace=Namespace(*(str(part) for part in values["namespace"])),
            priority=int(values["priority"]),
            speculate=bool(values["speculate"]),
            handoff_to=HandoffTarget(room, asked=True),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no request: {type(error).__name__}: {error}") from None


def _sampling(values: dict[str, Any]) -> SamplingParams:
    """Every value of the type that it has by default; a seed of 64 bits."""
    bias = tuple((int(token), float(value)) for token, value in values["logit_bias"])
    found = SamplingParams(**{**values, "logit_bias": bias})
    for each in fields(SamplingParams):
        value, wanted = getattr(found, each.name), type(each.default)
        if type(value) not in (wanted, int):
            raise TypeError(f"{each.name} is {value!r}")
    if not -(2**63) <= found.seed < 2**64:
        raise ValueError(f"seed is {found.seed}")
    return found


def _grammar(values: dict[str, Any] | None) -> Grammar | None:
    return None if values is None else Grammar(str(values["kind"]), str(values["text"]))


def for_prefill(params: RequestParams, room: str) -> RequestParams:
    """A request of which another server decodes all but the first token."""
    return replace(
        params, max_tokens=min(1, params.max_tokens), handoff_to=HandoffTarget(room), stop=()
    )
