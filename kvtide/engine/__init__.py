"""Requests in, tokens out: continuous batching over the cache.

`engine`     submit, abort, step; start here
`scheduler`  who runs next, and how many of its tokens
`runner`     a step's tokens through the model
`tables`     page tables of a step's sequences
`staging`       numbers between host and device
`recording`  passes of few tokens, recorded once and played again; `studio` is where
`sampler`    from logits to a token
`text`       from tokens to text, up to a stop string
`request`    what was asked, and how far it has come
`topology`       a rank's place among those that serve a model together, and what passes between
them
`kept`       refuses a model that keeps what it has not declared; `reachable` finds its tensors
"""

from kvtide.engine.engine import Engine, Update
from kvtide.engine.rank_topology import RankTopology
from kvtide.engine.request import (
    CheckedRequest,
    Finish,
    Request,
    RequestError,
    RequestParams,
    RequestState,
)
from kvtide.engine.sampler import SampledToken, SamplingParams
from kvtide.engine.state_check import EngineError

__all__ = [
    "CheckedRequest",
    "Engine",
    "EngineError",
    "Finish",
    "RankTopology",
    "Request",
    "RequestError",
    "RequestParams",
    "RequestState",
    "SampledToken",
    "SamplingParams",
    "Update",
]
