"""Requests in, tokens out: continuous batching over the cache.

One thread calls `step` again and again; `submit` and `abort` come from the same thread between
steps. A step never waits for a copy except where a layer needs it.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtide.cache import TieredCache, TransferError
from kvtide.engine.request import Ask, Finish, Request, RequestError, State
from kvtide.engine.runner import Runner
from kvtide.engine.sampler import Chosen, Drawing, choose_all
from kvtide.engine.scheduler import Scheduler, Share
from kvtide.models import Model
from kvtide.spec import Tier


class Update(NamedTuple):
    """A request got a token; `finish` says why it was its last, if it was."""

    request: Request
    chosen: Chosen | None
    finish: Finish | None


class Engine:
    def __init__(
        self,
        model: Model,
        cache: TieredCache,
        *,
        chunk_tokens: int = 512,
        most_running: int = 64,
    ) -> None:
        self.model = model
        self.cache = cache
        self.scheduler = Scheduler(cache, chunk_tokens, most_running)
        self._runner = Runner(model, cache)
        self._numbers = 0

    @property
    def idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    @property
    def most_tokens(self) -> int:
        """The longest sequence that can be served: prompt and answer."""
        return min(self.cache.most_tokens, self.model.max_positions)

    def submit(self, ask: Ask) -> Request:
        """Queue a request, or refuse what can never be served."""
        self._check(ask)
        self._numbers += 1
        prompt = self.cache.prompt(ask.tokens, ask.namespace)
        request = Request(self._numbers, ask, prompt, list(ask.tokens))
        self.scheduler.queue(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request at any moment; what it computed stays in the cache."""
        if request.state is not State.FINISHED:
            self._finish(request, Finish.ABORT)

    def step(self) -> list[Update]:
        """One forward pass over everybody's next tokens."""
        self._retract(self._failed())
        self.scheduler.admit()
        shares = self.scheduler.plan()
        if not shares:
            return []
        try:
            logits = self._runner.run(shares)
        except TransferError:
            return self._restart(shares)
        for share in shares:
            self._commit(share)
        ended = [share.request for share in shares if share.end == share.request.length]
        drawings = [Drawing(r.ask.sampling, r.ask.tokens, r.tokens) for r in ended]
        chosen = choose_all(logits, drawings)
        return [self._advance(*pair) for pair in zip(ended, chosen, strict=True)]

    # -- the steps of a step ----------------------------------------------------------------

    def _failed(self) -> list[Request]:
        """Requests whose prefix will not come: they compute it, or find it elsewhere."""
        self.cache.poll()
        return [request for request in self.scheduler.running if request.held.failed]

    def _restart(self, shares: list[Share]) -> list[Update]:
        """A prefix did not come in the midst of a pass: nobody in it knows how far it got."""
        self._retract([share.request for share in shares])
        return []

    def _retract(self, requests: list[Request]) -> None:
        """Let them wait again; who waited for the host does not ask it a second time."""
        for request in requests:
            if request.held.loading or request.held.failed:
                request.slowest = Tier.DEVICE
            self.scheduler.retract(request)

    def _commit(self, share: Share) -> None:
        request, end = share
        request.computed = end
        self.cache.commit(request.held, end)

    def _advance(self, request: Request, chosen: Chosen) -> Update:
        """A request has its next token, perhaps its last."""
        request.generated(chosen)
        finish = None
        if chosen.token in request.ask.stop_ids:
            finish = Finish.STOP
        elif len(request.output) == request.ask.max_tokens:
            finish = Finish.LENGTH
        if finish is not None:
            self._finish(request, finish)
        return Update(request, chosen, finish)

    def _finish(self, request: Request, finish: Finish) -> None:
        if request.lease is not None and request.lease.loading:
            self.cache.poll()  # What it computed is kept only once its prefix has landed.
        self.scheduler.remove(request)
        request.state, request.finish = State.FINISHED, finish
        if request.ask.session is not None:
            self.cache.keep(request.ask.session, request.prompt, request.ask.priority)

    def _check(self, ask: Ask) -> None:
        if not ask.tokens:
            raise RequestError("the prompt has no tokens; send at least one")
        if not all(0 <= token < self.model.vocabulary for token in ask.tokens):
            raise RequestError(f"token ids must lie in 0..{self.model.vocabulary - 1}")
        if problem := ask.sampling.problem():
            raise RequestError(problem)
        if ask.max_tokens < 1:
            raise RequestError(f"max_tokens is {ask.max_tokens}; ask for at least 1")
        total = len(ask.tokens) + ask.max_tokens
        if total > self.most_tokens:
            raise RequestError(
                f"a prompt of {len(ask.tokens)} tokens and an answer of up to {ask.max_tokens} "
                f"are {total}; this engine serves {self.most_tokens}: shorten one of them"
            )
