"""Requests in, tokens out: continuous batching over the cache.

`engine`     submit, abort, step; start here
`scheduler`  who runs next, and how many of its tokens
`runner`     a step's tokens through the model
`sampler`    from logits to a token
`request`    what was asked, and how far it has come
"""

from kvtide.engine.engine import Engine, Update
from kvtide.engine.request import Ask, Finish, Request, RequestError, State
from kvtide.engine.sampler import Chosen, Sampling

__all__ = [
    "Ask",
    "Chosen",
    "Engine",
    "Finish",
    "Request",
    "RequestError",
    "Sampling",
    "State",
    "Update",
]
