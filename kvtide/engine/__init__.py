"""Requests in, tokens out: continuous batching over the cache.

`engine`            submit, abort, step; start here
`request`           a request's parameters, and how far it has come
`scheduler`         admission, preemption, and the chunks of each step (`chunks`)
`failed_loads`      requests whose prefix cannot be loaded: retracted, to recompute it
`overlap`           the step after the current one: planned, prepared, launched (a state machine)
`launch_ahead`      which step that is, and how far it goes while the device computes
`runner`            a step's chunks through the model, as a CUDA graph or eagerly
`device_kernels`    kernels of sampling and of small copies, where Triton is installed
`graphs`            CUDA graphs of steps: sizes, inputs, capture and replay
`speculation`       drafts: proposed, verified, accepted
`handoff`           one server prefills a prompt, another decodes it
`grammar`           structured output: grammars, matchers, masks of a step's rows
`residency`         pools that live on the host: tables of a step, hits and misses
`page_tables`       slots of a step's sequences, by anchor
`staging`           small step inputs and outputs between host and device
`sampling`          from logits to the next token
`updates`           what a step gives a request
`text`              from tokens to text, up to a stop string
`restore_oracle`    checks restored prefixes against recomputation while serving
`rank_topology`     a rank's stage and tensor rank, and what ranks exchange
`declared_state`    refuses a model with undeclared state
"""

from kvtide.engine.declared_state.state_check import EngineError
from kvtide.engine.engine import Engine
from kvtide.engine.rank_topology import RankTopology
from kvtide.engine.request import (
    CheckedRequest,
    Finish,
    Request,
    RequestError,
    RequestParams,
    RequestState,
    session_name,
)
from kvtide.engine.sampling.sampler import SampledToken
from kvtide.engine.sampling.sampling_params import SamplingParams
from kvtide.engine.updates import Update

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
    "session_name",
]
