"""Requests in, tokens out: continuous batching over the cache.

One thread calls `step` again and again; `submit` and `abort` come from the same thread between
steps. A step never waits for a copy except where a layer needs it.

Several ranks that serve one model have an engine each, which are given the same calls in the same
order (`topology`): what a rank learns by itself decides nothing before all have agreed on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kvtide.cache import TieredCache, TransferError
from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.declared_state.state_check import check_declared_state
from kvtide.engine.failed_loads import FailedLoads
from kvtide.engine.grammar.grammar_compiler import GrammarCompiler
from kvtide.engine.grammar.step_masks import StepMasks
from kvtide.engine.handoff.handoffs import HANDOFF_MIN_TOKENS, Handoffs
from kvtide.engine.launch_ahead import LaunchAhead
from kvtide.engine.overlap import CurrentStep, Overlap, OverlapState
from kvtide.engine.rank_topology import RankTopology
from kvtide.engine.request import (
    CheckedRequest,
    Finish,
    Request,
    RequestParams,
    RequestState,
    ServedLimits,
    check_request,
)
from kvtide.engine.residency.hot_counts import HotPoolCounts
from kvtide.engine.restore_oracle import RestoreOracle
from kvtide.engine.runner import Runner, StepOutput, score_prompt
from kvtide.engine.sampling.sampler import SampledToken, SamplingBatch, warm_up_sampling
from kvtide.engine.scheduler import Scheduler
from kvtide.engine.speculation.accept_length_guard import AcceptLengthGuard
from kvtide.engine.speculation.accept_length_stats import AcceptLengthStats
from kvtide.engine.speculation.draft_acceptance import accept_drafts
from kvtide.engine.speculation.drafter import Drafter
from kvtide.engine.speculation.speculation import Speculation, VerifiedChunk
from kvtide.engine.staging import Staging
from kvtide.engine.updates import Update, append
from kvtide.index import Prompt
from kvtide.models import Model
from kvtide.models.tokenizer import Tokenizer

_ALONE = RankTopology()
DRAFT_TOKENS = 3
"""The default: drafts of a request in a step."""


class Engine:
    """`computed`: tokens of the last step. `cuda_graphs`: small steps run as CUDA graphs where the
    device can. `token_s`: measured seconds to prefill a token, 0 while unknown. `fixed_drafts`:
    requests get `draft_tokens` drafts also where they do not pay; for benchmarks. `on_waiting` is
    called before the host waits for a step's tokens, and where it `computes_in_launch`, as on a
    CPU, before it launches the step."""

    def __init__(
        self,
        model: Model,
        cache: TieredCache,
        tokenizer: Tokenizer | None = None,
        *,
        chunk_tokens: int = 512,
        max_running: int = 64,
        oracle: RestoreOracle | None = None,
        topology: RankTopology = _ALONE,
        cuda_graphs: bool = True,
        drafter: Drafter | None = None,
        draft_tokens: int = DRAFT_TOKENS,
        fixed_drafts: bool = False,
        handoff_min_tokens: int = HANDOFF_MIN_TOKENS,
    ) -> None:
        draft = drafter.model if drafter is not None else None
        check_declared_state(model, cache.config.torch_device, draft)
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self.oracle = oracle
        self.vocabulary, self._positions = cache.agreement.all_min(
            [model.vocabulary, model.max_positions]
        )
        self.grammars = GrammarCompiler(tokenizer, self.vocabulary)
        self._staging = Staging(cache.config.torch_device)
        self.masks = StepMasks(self.vocabulary, self._staging)
        has_graphs = cuda_graphs and topology.ranks == 1 and model.uses_kernels
        self.scheduler = Scheduler(cache, chunk_tokens, max_running, has_graphs)
        self._speculation: Speculation | None = None
        if drafter is not None:
            hidden = model.carried(torch.zeros(1, dtype=torch.int64, device=self._staging.device))
            self._speculation = Speculation(
                cache, self.scheduler, drafter, hidden, draft_tokens, fixed_drafts=fixed_drafts
            )
        self._runner = Runner(
            model,
            cache,
            topology,
            max_running,
            chunk_tokens,
            self._staging,
            has_graphs,
            drafter.captures if drafter is not None else (),
            self._speculation.verify_rows if self._speculation is not None else 0,
        )
        if self._speculation is not None and self._runner.capture is not None:
            self._speculation.use_graphs(self._runner.capture, max_running)
        self.overlap = Overlap(cache, self._runner)
        self._ahead = LaunchAhead(self.overlap, cache, self.scheduler, self._speculation)
        self.handoffs = Handoffs(cache, handoff_min_tokens, self.abort, self._speculation)
        self.scheduler.on_admitted = self.handoffs.admitted
        self.on_waiting: Callable[[], None] = _unnoticed
        self.computes_in_launch = self._staging.device.type == "cpu"
        self.computed, self.token_s = 0, 0.0
        self._numbers = 0
        self._failed_loads = FailedLoads(cache, self.scheduler)

    @property
    def idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that can be served: prompt and answer."""
        return min(self.cache.max_sequence_tokens, self._positions)

    @property
    def steps_by_kind(self) -> Counter[str]:
        """Steps launched, by kind: decode_graph, verify_graph, mixed_graph, eager."""
        return self._runner.launched

    def hot_counts(self) -> Mapping[str, HotPoolCounts]:
        """Of each hot pool, as of a second ago; of now where no request runs."""
        if self.idle:
            self._runner.hot_counts.read_now()
        return self._runner.hot_counts.last

    @property
    def accept_length_stats(self) -> AcceptLengthStats | None:
        """What verify steps gave; None without speculation."""
        return None if self._speculation is None else self._speculation.lengths

    @property
    def accept_length_guard(self) -> AcceptLengthGuard | None:
        """None without a draft that keeps state in pages."""
        return None if self._speculation is None else self._speculation.guard

    def warm_up(self) -> None:
        """Capture CUDA graphs and compile kernels, so that no request waits for them."""
        self._runner.warm_up(self.max_sequence_tokens)
        if self._speculation is not None:
            self._speculation.warm_up(self.max_sequence_tokens)
        warm_up_sampling(self.vocabulary, self._staging)
        self.grammars.warm_up()

    def submit(self, params: RequestParams) -> Request:
        """Queue a request, or refuse what can never be served."""
        return self.submit_checked(self.check(params))

    def submit_checked(self, checked: CheckedRequest) -> Request:
        """Queue a request that `check` has accepted."""
        params, prompt = checked.params, self._prompt(checked)
        self._numbers += 1
        request = Request(self._numbers, params, prompt, list(params.tokens))
        self.handoffs.check(request)
        if self.tokenizer is not None:
            request.text = params.output_text(self.tokenizer)
        request.matcher = self.grammars.matcher(checked)
        if params.pin is not None:
            ttl_s, sessions = params.session_ttl_s, self.cache.sessions
            request.prompt_change = sessions.asked(params.pin, prompt, ttl_s)
        request.fetch = self.cache.storage.fetch(request.prompt, self.token_s)
        if self._written_late(request):
            request.supplement = self.cache.supplements.begin(request.prompt)
        self.handoffs.queued(request)
        self.scheduler.queue(request)
        return request

    def find(self, number: int) -> Request | None:
        """The unfinished request of this number."""
        return self.scheduler.find(number)

    def abort(self, request: Request) -> None:
        """End a request at any moment; what it computed stays in the cache."""
        if request.state is not RequestState.FINISHED:
            self._finish(request, Finish.ABORT)

    def step(self) -> list[Update]:
        """One forward pass over every running request's next tokens."""
        self._failed_loads.retract(self._failed_loads.found(self.oracle))
        if first := self._first_of_handoffs():
            return first  # At once: the client need not wait for a step.
        admits_beside = self._ahead.admits_beside
        if not admits_beside:
            self.scheduler.admit()
        step = self._schedule()
        if self.computes_in_launch:
            self.on_waiting()
        output = self._launch(step)
        if output is None:
            return []
        self.masks.begin(step.chunks)
        if admits_beside:
            self.scheduler.admit_without_preemption()
        self._overlap_copies(step.chunks)
        self._commit(step.chunks, output)
        updates, checks = self._sample(step.chunks, output)
        self._commit_accepted(step.chunks, output, updates)
        self.handoffs.prefill.advance()
        self._finish_and_draft(updates)
        self._runner.hot_counts.sample()
        return [update for update in updates if update.request not in checks]

    def _prompt(self, checked: CheckedRequest) -> Prompt:
        if checked.params.alone:
            return self.cache.scratch(checked.packed)
        return self.cache.prompt(checked.packed, checked.params.namespace)

    # -- the parts of a step ----------------------------------------------------------------

    def _first_of_handoffs(self) -> list[Update]:
        """First tokens that peers have sampled."""
        self.handoffs.decode.poll()
        if first := self.handoffs.take_updates():
            self._finish_ended(first)
            self.computed = 0
        return first

    def _schedule(self) -> CurrentStep:
        """The step that was planned ahead, if it still holds; else a new one."""
        if not self.cache.config.patience.waits:
            self.scheduler.stop_fetches()
        planned = self.overlap.take(self.scheduler)
        if planned is None and self._speculation is not None:
            self._speculation.draft_resumed()
        step = planned or self.overlap.afresh(self.scheduler.schedule())
        if step.launched and self._speculation is not None:
            step = step._replace(chunks=self._speculation.read_drafts(step.chunks))
        self.computed = step.tokens
        if not step.chunks and self.scheduler.blocked and not self.scheduler.running:
            self.handoffs.prefill.drop_unclaimed()
        return step

    def _launch(self, step: CurrentStep) -> StepOutput | None:
        """None where nothing is computed, or a prefix failed to load."""
        if not step.chunks:
            return None
        if self._speculation is not None and not step.launched:
            self._speculation.before(step.chunks)
        try:
            return step.launch()
        except TransferError:
            self.computed = 0
            self._failed_loads.recompute([chunk.request for chunk in step.chunks])
            return None

    def _overlap_copies(self, chunks: list[ScheduledChunk]) -> None:
        """Poll the cache while the device computes.

        The step waits for its loads and no request has a token before: so the loads are joined
        here, and what is computed on top of them is committed at once.
        """
        for chunk in chunks:
            chunk.request.held.join()
        self._failed_loads.poll()

    def _commit(self, chunks: list[ScheduledChunk], output: StepOutput) -> None:
        """Put the computed pages into the cache, and score prompt tokens if asked to.

        Where there are drafts, or a draft's own state to write, acceptance comes first.
        """
        for number, chunk in enumerate(chunks):
            score_prompt(chunk, number, output, self._staging)
            if not chunk.drafts:
                chunk.request.computed = chunk.end
                if not self._written_late(chunk.request):
                    self._commit_computed(chunk.request)

    def _written_late(self, request: Request) -> bool:
        """A draft model writes its own state of the request's tokens once they are accepted."""
        return self._speculation is not None and self._speculation.writes(request)

    def _commit_computed(self, request: Request) -> None:
        absent = () if self._written_late(request) else self.cache.memory.draft_sidecars
        self.cache.commit(request.held, request.computed, without=absent)

    def _sample(
        self, chunks: list[ScheduledChunk], output: StepOutput
    ) -> tuple[list[Update], Collection[Request]]:
        """Sample the next token of each request whose tokens are all computed, and one after each
        of its drafts; also returns which requests are an oracle's.

        The device samples; before the host reads the tokens, it works on the next step.
        """
        numbers = [number for number, chunk in enumerate(chunks) if chunk.completes]
        if not numbers:
            return [], ()
        chunks = [chunks[number] for number in numbers]
        requests = [chunk.request for chunk in chunks]
        counts = [1 + len(chunk.drafts) for chunk in chunks]
        firsts = list(accumulate(counts, initial=0))
        logits = output.last(numbers, counts)
        checks = self._show_oracle(requests, self._runner.select(logits, firsts[:-1]))
        sampling = SamplingBatch(logits, self.masks.sampling_inputs(chunks), self._staging)
        self._overlap_next(chunks, sampling, output)
        if not self.computes_in_launch:
            self.on_waiting()
        sampled = sampling.read()
        of_chunks = [sampled[first:end] for first, end in pairwise(firsts)]
        for row in reversed(sampling.resampled):
            number = bisect_right(firsts, row) - 1
            if self._ahead.drop(requests[number]):
                # The device knew no token there, and has overwritten what may be accepted behind.
                of_chunks[number] = sampled[firsts[number] : row + 1]
        return self._accept(chunks, of_chunks), checks

    def _overlap_next(
        self, chunks: list[ScheduledChunk], sampling: SamplingBatch, output: StepOutput
    ) -> None:
        """Before the host reads what is sampled: the next step, of requests that get no drafts; of
        others drafts alone can be known.

        An oracle may retract requests after every step: nothing is launched ahead of it.
        """
        requests = [chunk.request for chunk in chunks]
        if self._speculates(requests):
            if self.oracle is None:
                self._ahead.launch_verify_ahead(chunks, sampling, output)
        elif self.oracle is None:
            self._ahead.launch_next(requests, sampling, output)
        else:
            self._ahead.prepare_next()

    def _show_oracle(self, requests: list[Request], logits: Tensor) -> Collection[Request]:
        """Show the oracle these logits; returns its own requests."""
        return self.oracle.look(requests, logits, self.submit) if self.oracle else ()

    def _speculates(self, requests: list[Request]) -> bool:
        """Drafts depend on the sampled tokens: the next step is not planned before these."""
        return self._speculation is not None and any(map(self._speculation.wants, requests))

    def _accept(
        self, chunks: list[ScheduledChunk], sampled: list[list[SampledToken]]
    ) -> list[Update]:
        """Append what was sampled, as far as it was drafted and no request ends before."""
        updates: list[Update] = []
        verified = []
        for chunk, tokens in zip(chunks, sampled, strict=True):
            if chunk.drafts:
                tokens = list(accept_drafts(chunk, tokens))
            chunk.request.drafts = ()  # Verified, or void behind a new token.
            own = append(chunk.request, tokens)
            updates += own
            if chunk.drafts:
                verified.append(VerifiedChunk(chunk, len(own) - 1, len(own) < len(tokens)))
        if self._speculation is not None:
            self._speculation.commit_verified(verified)
        return updates

    def _commit_accepted(
        self, chunks: list[ScheduledChunk], output: StepOutput, updates: list[Update]
    ) -> None:
        """Commit what waited for acceptance, drafts' own state with it; begin to draft."""
        if self._speculation is None:
            return
        last = {update.request: update.finish for update in updates}
        decoding = [request for request, finish in last.items() if finish is None]
        # A next step that is planned already has no place for drafts.
        planned = self.overlap.state is not OverlapState.IDLE
        waits = planned and not self._speculation.drafted_ahead
        self._speculation.extend(chunks, output, () if waits else decoding)
        for chunk in chunks:
            if chunk.drafts or self._written_late(chunk.request):
                self._commit_computed(chunk.request)

    def _finish_and_draft(self, updates: list[Update]) -> None:
        """Finish requests that had their last token, and retract those whose states are wrong; the
        others get drafts."""
        ended = self._finish_ended(updates)
        self._failed_loads.retract(self._ahead.wrong_states)
        speculation = self._speculation
        if speculation is None or self.overlap.state is OverlapState.LAUNCHED:
            return
        reads_first = self.oracle is not None or (ended and self.scheduler.waiting > 0)
        if reads_first or not self._ahead.launch_verify():
            speculation.propose()

    def _finish_ended(self, updates: list[Update]) -> bool:
        """Finish requests that had their last token; whether there were any."""
        ended = [(update.request, update.finish) for update in updates if update.finish is not None]
        for request, finish in ended:
            self._finish(request, finish)
        return bool(ended)

    def _finish(self, request: Request, finish: Finish) -> None:
        if request.lease is not None and request.lease.loading:
            self.cache.poll()  # Its commits wait for its prefix to land.
        for bringing in (request.fetch, request.supplement):
            if bringing is not None:
                bringing.stop()
        self.handoffs.ending(request, finish)
        self.scheduler.remove(request)
        request.state, request.finish = RequestState.FINISHED, finish
        self.handoffs.ended(request)
        params, sessions = request.params, self.cache.sessions
        if params.pin is not None:
            sessions.keep(params.pin, request.prompt, params.priority, params.session_ttl_s)

    def check(self, params: RequestParams) -> CheckedRequest:
        """Pack the prompt, compile the grammar, and raise `RequestError` for what can never be
        served.

        Any thread may call it: it reads what is fixed when the engine is made.
        """
        limits = ServedLimits(self.vocabulary, self.max_sequence_tokens, self.tokenizer is not None)
        return self.grammars.compiled(check_request(params, limits))


def _unnoticed() -> None:
    """No caller uses the wait."""
