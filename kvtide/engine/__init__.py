"""Requests in, tokens out: continuous batching over the cache.

`engine`     submit, abort, step; start here
`scheduler`  who runs next, and how many of its tokens
`runner`     a step's tokens through the model
`tables`     page tables of a step's sequences
`mail`       numbers between host and device
`recording`  passes of few tokens, recorded once and played again; `studio` is where
`sampler`    from logits to a token
`text`       from tokens to text, up to a stop string
`request`    what was asked, and how far it has come
`seat`       a rank's place among those that serve a model together, and what passes between them
`kept`       refuses a model that keeps what it has not declared; `reachable` finds its tensors
"""

from kvtide.engine.engine import Engine, Update
from kvtide.engine.kept import EngineError
from kvtide.engine.request import Ask, Finish, Request, RequestError, State
from kvtide.engine.sampler import Chosen, Sampling
from kvtide.engine.seat import Seat

__all__ = [
    "Ask",
    "Chosen",
    "Engine",
    "EngineError",
    "Finish",
    "Request",
    "RequestError",
    "Sampling",
    "Seat",
    "State",
    "Update",
]
