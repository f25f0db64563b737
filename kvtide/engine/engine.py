"""Requests in, tokens out: continuous batching over the cache.

One thread calls `step` again and again; `submit` and `abort` come from the same thread between
steps. A step never waits for a copy except where a layer needs it.

Several ranks that serve one model have an engine each, which are given the same calls in the same
order (`topology`): what a rank learns by itself decides nothing before all have agreed on it.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvtide.cache import TieredCache, TransferError
from kvtide.engine.oracle import Oracle
from kvtide.engine.rank_topology import RankTopology
from kvtide.engine.request import (
    CheckedRequest,
    Finish,
    Request,
    RequestError,
    RequestParams,
    RequestState,
)
from kvtide.engine.runner import Runner, StepOutput
from kvtide.engine.sampler import SampledToken, SamplingBatch, SamplingInput, score, warm_up
from kvtide.engine.scheduler import ScheduledChunk, Scheduler
from kvtide.engine.staging import Staging
from kvtide.engine.state_check import check_kept
from kvtide.engine.text import OutputText
from kvtide.index import Prompt
from kvtide.index.keys import highest, pack
from kvtide.models import Model
from kvtide.models.tokenizer import Tokenizer
from kvtide.spec import Tier

_ALONE = RankTopology()
SCORED = 512
"""So many tokens of a prompt are scored at a time: each takes a number for every word there is."""


class Update(NamedTuple):
    """A request got a token and some text; `finish` says why that was its last, if it was."""

    request: Request
    chosen: SampledToken | None
    text: str
    finish: Finish | None


class Engine:
    """`computed`: how many tokens the last step took through the model.

    `token_s`: how long computing a prompt's token takes, for those who know; 0 if nobody does.
    `records`: whether passes of few tokens are recorded where a device can do that.
    """

    def __init__(
        self,
        model: Model,
        cache: TieredCache,
        tokenizer: Tokenizer | None = None,
        *,
        chunk_tokens: int = 512,
        max_running: int = 64,
        oracle: Oracle | None = None,
        topology: RankTopology = _ALONE,
        records: bool = True,
    ) -> None:
        check_kept(model, cache.config.torch_device)
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self.oracle = oracle
        self.vocabulary, self._positions = cache.agreement.all_min(
            [model.vocabulary, model.max_positions]
        )
        self._staging = Staging(cache.config.torch_device)
        self._runner = Runner(
            model, cache, topology, max_running, chunk_tokens, self._staging, records
        )
        self.scheduler = Scheduler(cache, chunk_tokens, max_running, self._runner.records)
        self.computed = 0
        self.token_s = 0.0
        self._numbers = 0
        self._polled = False

    @property
    def idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that can be served: prompt and answer."""
        return min(self.cache.max_sequence_tokens, self._positions)

    @property
    def passes(self) -> Counter[str]:
        """How many passes there were, by kind, as the runner counts them."""
        return self._runner.passes

    def prepare(self) -> None:
        """Do beforehand what would keep the first requests waiting."""
        self._runner.prepare(self.max_sequence_tokens)
        warm_up(self.vocabulary, self._staging)

    def submit(self, params: RequestParams) -> Request:
        """Queue a request, or refuse what can never be served."""
        return self.submit_checked(self.check(params))

    def submit_checked(self, checked: CheckedRequest) -> Request:
        """Queue a request that `check` has accepted."""
        params, prompt = checked.params, self._prompt(checked)
        self._numbers += 1
        request = Request(self._numbers, params, prompt, list(params.tokens))
        if self.tokenizer is not None:
            request.text = OutputText(self.tokenizer.detokenizer(params.tokens), params.stop)
        request.fetch = self.cache.storage.fetch(request.prompt, self.token_s)
        self.scheduler.queue(request)
        return request

    def find(self, number: int) -> Request | None:
        """The request of this number, unless it is finished."""
        return self.scheduler.find(number)

    def abort(self, request: Request) -> None:
        """End a request at any moment; what it computed stays in the cache."""
        if request.state is not RequestState.FINISHED:
            self._finish(request, Finish.ABORT)

    def step(self) -> list[Update]:
        """One forward pass over everybody's next tokens."""
        self._retract(self._astray())
        admits_beside = self._runner.records and self.scheduler.crowded
        if not (admits_beside and self.scheduler.running):
            self.scheduler.admit()
        if not self.cache.config.patience.waits:
            self.scheduler.hurry()
        shares = self.scheduler.plan()
        self.computed = sum(share.tokens for share in shares)
        if not shares:
            return []
        if not self._runner.has_begun(shares):
            self.cache.mark()
        try:
            passed = self._runner.run(shares)
        except TransferError:
            return self._restart(shares)
        if admits_beside:
            self.scheduler.admit(makes_room=False)
        self._look_after(shares)
        for number, share in enumerate(shares):
            self._score(share, number, passed)
            self._commit(share)
        return self._choose(shares, passed)

    def _prompt(self, checked: CheckedRequest) -> Prompt:
        if checked.params.alone:
            return self.cache.scratch(checked.packed)
        return self.cache.prompt(checked.packed, checked.params.namespace)

    # -- the steps of a step ----------------------------------------------------------------

    def _astray(self) -> list[Request]:
        """Requests whose prefix will not come, or is wrong: they compute it.

        The cache was polled during the last pass, while the device was at work, if there was one.
        What has landed since matters to those whose prefix is on its way, and to those who wait
        and could be taken in.
        """
        running = self.scheduler.running
        if not self._polled:
            self.cache.poll()
        elif self.scheduler.open or any(request.held.loading for request in running):
            self.cache.land()
        self._polled = False
        failed = [request for request in running if request.held.failed]
        return [*failed, *(self.oracle.misled(running, failed) if self.oracle else ())]

    def _look_after(self, shares: list[ScheduledChunk]) -> None:
        """Poll the cache while the device is at work on a pass.

        That waits for the prefixes of its shares, and nobody has a token before: so they are waited
        for here, and what is computed on them is committed at once.
        """
        for share in shares:
            share.request.held.join()
        self.cache.poll()
        self._polled = True

    def _restart(self, shares: list[ScheduledChunk]) -> list[Update]:
        """A prefix did not come in the midst of a pass, here or elsewhere: it was for nothing."""
        self.computed = 0
        self.cache.poll()
        self._retract([share.request for share in shares])
        return []

    def _retract(self, requests: list[Request]) -> None:
        """Let them wait again; whom the host has failed does not ask it a second time."""
        for request in requests:
            if request.held.failed:
                request.slowest, request.noted = Tier.DEVICE, bool(request.output)
            self.scheduler.retract(request)

    def _score(self, share: ScheduledChunk, number: int, passed: StepOutput) -> None:
        """The prompt's tokens that follow the share's, if they are to be given a probability."""
        request, end = share
        prompt, count = request.params.tokens, request.params.score
        if count is not None:
            said = prompt[request.computed + 1 : end + 1]
            for first in range(0, len(said), SCORED):
                some = said[first : first + SCORED]
                rows = passed.rows(number, first, len(some))
                request.scores += score(rows, some, count, self._staging)

    def _choose(self, shares: list[ScheduledChunk], passed: StepOutput) -> list[Update]:
        """The next token of each request whose tokens are all computed, or its end."""
        ended = [number for number, share in enumerate(shares) if share.ends]
        if not ended:
            return []
        requests = [shares[number].request for number in ended]
        logits = passed.last(ended)
        checks = self.oracle.look(requests, logits, self.submit) if self.oracle else ()
        drawings = [SamplingInput(r.params.sampling, r.params.tokens, r.tokens) for r in requests]
        choosing = SamplingBatch(logits, drawings, self._staging)
        self._go_ahead(requests, choosing)
        chosen = choosing.read()
        for number in choosing.belated if self._runner.is_ahead else ():
            self.scheduler.leave_out(requests[number])
        updates = [self._advance(*pair) for pair in zip(requests, chosen, strict=True)]
        return [update for update in updates if update.request not in checks]

    def _go_ahead(self, requests: list[Request], choosing: SamplingBatch) -> None:
        """Lay out the next pass, and begin it while nobody but the device knows its tokens.

        Whoever turns out to be done by then has a row in it that nobody reads. Where somebody waits
        for room, it is laid out as late as can be, with those whose prefix has landed meanwhile. An
        oracle has a say in what comes next.
        """
        late = self.scheduler.pressed and self.oracle is None and self._runner.linger()
        if late:
            self.cache.land()
        self._runner.lay(self.scheduler.foresee(late))
        if self._runner.is_laid and self.scheduler.steady and self.oracle is None:
            choosing.keep()
            self.cache.mark()
            self._runner.go_ahead(requests, choosing.tokens)
            self.scheduler.began()

    def _commit(self, share: ScheduledChunk) -> None:
        request, end = share
        request.computed = end
        self.cache.commit(request.held, end)

    def _advance(self, request: Request, chosen: SampledToken) -> Update:
        """A request has its next token, perhaps its last, unless it wanted none."""
        if not request.params.max_tokens:
            return self._close(request, Finish.LENGTH)
        request.generated(chosen)
        if chosen.token in request.params.stop_ids:
            return self._close(request, Finish.STOP, chosen)
        text = request.text.feed(chosen.token) if request.text else ""
        if request.text and request.text.stopped:
            return self._close(request, Finish.STOP, chosen, text)
        if len(request.output) == request.params.max_tokens:
            return self._close(request, Finish.LENGTH, chosen, text)
        return Update(request, chosen, text, None)

    def _close(
        self, request: Request, finish: Finish, chosen: SampledToken | None = None, text: str = ""
    ) -> Update:
        """That was its last token; what was held back of its text comes too."""
        self._finish(request, finish)
        return Update(
            request, chosen, text + (request.text.finish() if request.text else ""), finish
        )

    def _finish(self, request: Request, finish: Finish) -> None:
        if request.lease is not None and request.lease.loading:
            self.cache.poll()  # What it computed is kept only once its prefix has landed.
        if request.fetch is not None:
            request.fetch.stop()
        self.scheduler.remove(request)
        request.state, request.finish = RequestState.FINISHED, finish
        if request.params.pin is not None and not request.params.alone:
            self.cache.keep(request.params.pin, request.prompt, request.params.priority)

    def check(self, params: RequestParams) -> CheckedRequest:
        """Pack the prompt, and raise `RequestError` for what can never be served.

        Any thread may call it: it reads what is fixed when the engine is made.
        """
        packed = self._packed(params.tokens)
        if problem := params.sampling.problem():
            raise RequestError(problem)
        if params.max_tokens < 0:
            raise RequestError(
                f"max_tokens is {params.max_tokens}; ask for 0 or more", param="max_tokens"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this model came without one; use the ids of "
                "tokens to stop at",
                param="stop",
            )
        if not all(params.stop):
            raise RequestError("a stop string is empty; leave it out", param="stop")
        total = len(params.tokens) + params.max_tokens
        if total > self.max_sequence_tokens:
            raise RequestError(
                f"a prompt of {len(params.tokens)} tokens and an answer of up to "
                f"{params.max_tokens} "
                f"are {total}; this engine serves {self.max_sequence_tokens}: shorten one of them",
                code="context_length_exceeded",
            )
        return CheckedRequest(params, packed)

    def _packed(self, tokens: tuple[int, ...]) -> bytes:
        if not tokens:
            raise RequestError("the prompt has no tokens; send at least one", param="prompt")
        try:
            packed = pack(tokens)
            known = highest(packed) < self.vocabulary
        except ValueError:
            known = False
        if not known:
            raise RequestError(f"token ids must lie in 0..{self.vocabulary - 1}", param="prompt")
        return packed
