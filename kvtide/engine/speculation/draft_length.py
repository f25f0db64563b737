"""How many drafts a request gets: as many as pay, by how often its drafts were accepted.

If a draft is accepted with probability p after an accepted one, k drafts add p + p² + … + pᵏ tokens
to a step. They cost k passes of the drafter and the rows of the verify step. The estimate of p is a
moving average over the request's verified drafts; it begins with that of all requests.

Whether a step has drafts at all is decided for all running requests together: the tokens that they
are expected to gain against the time that all of them wait for the round. A round with few drafts
takes nearly as long as one with a draft for each request, so it counts as one.

What that costs is measured in the engine's own steps (`round_prices`): it depends on the machine,
the model, the batch and the context. A GPU, and a CPU with native kernels, reads the same weights
for a few rows more, but other experts and other selected entries. The first drafts go by constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from kvtide.engine.request import Request
from kvtide.engine.speculation.round_prices import RoundPrices, StepRows

EWMA_DECAY = 0.9
"""The weight of what is known already, per verified draft."""
TRIAL_TOKENS = 32
"""Where no draft pays, one is tried after so many tokens."""
MAX_TRIAL_TOKENS = 8 * TRIAL_TOKENS
"""The pause doubles with every trial that fails, up to this."""
HOPE = 0.8
"""The estimate of p before any draft was verified."""
ROW = 0.05
"""What a draft's row costs until rounds are timed, in decode steps. With 0.07 for a pass of a draft
model, a round of three drafts then costs 1.36: between a dense 8B model's at batch 1 and at 64 on a
GPU (`kvtide bench speculate --device cuda --only rounds`)."""


def verify_cost(drafts: float) -> float:
    """A verify step with so many drafts for each request, in decode steps, by constants."""
    return 1 + ROW * drafts


class _Estimate:
    def __init__(self, chance: float, length: int) -> None:
        self.chance, self.tried_at = chance, length

    def verified(self, drafts: int, accepted: int) -> None:
        """Drafts behind the first rejected one say nothing."""
        outcomes = [1.0] * accepted + [0.0] * (accepted < drafts)
        for outcome in outcomes:
            self.chance += (1 - EWMA_DECAY) * (outcome - self.chance)


class DraftLength:
    """`longest`: drafts at the most; always as many if `fixed`. `cost`: of a drafter's pass, by
    constants. `prices`: what was measured; None where constants hold. Every rank sees the same
    outcomes and prices, and decides the same."""

    def __init__(
        self,
        longest: int,
        cost: float,
        *,
        fixed: bool = False,
        prices: RoundPrices | None = None,
    ) -> None:
        self.longest, self._cost, self._fixed = longest, cost, fixed
        self._batch, self._prices = 1, prices
        self._costs = self._round_costs()
        self._all = _Estimate(HOPE, 0)
        self._of: WeakKeyDictionary[Request, _Estimate] = WeakKeyDictionary()
        self._pays = True
        self._decided_for: Sequence[int] | None = None
        self._trials = _Trials()

    def ran(self, step: StepRows, running: Sequence[Request]) -> None:
        """The host has the tokens of a step, while these requests run."""
        if not self._pays:
            self._trials.ran(drafted=step.drafts > 0)
        if self._prices is not None and self._prices.ran(step, max(1, len(running))):
            self._costs = self._round_costs()
            self._decided_for = None
        self.decide_for(running)

    def decide_for(self, running: Sequence[Request]) -> None:
        """These requests are in the next step."""
        numbers = [request.number for request in running]
        if self._fixed or numbers == self._decided_for:
            return
        before, self._batch = self._batch, max(1, len(running))
        if self._batch != before:
            self._costs = self._round_costs()
        self._decided_for, self._pays = numbers, self._pay_for(running)
        if self._pays:
            self._trials = _Trials()

    def _pay_for(self, running: Sequence[Request]) -> bool:
        """Whether drafts give all of these more tokens a second."""
        chances = [self._estimate(r).chance for r in running if r.params.speculate]
        best = [self._best(chance) for chance in (chances if running else [self._all.chance])]
        drafts = sum(count for count, _ in best) / self._batch
        gained = sum(tokens - 1 for _, tokens in best) / self._batch
        return drafts > 0 and 1 + gained > self._round_cost(max(drafts, 1.0))

    def of(self, request: Request) -> int:
        """How many drafts the request should have now: what pays, or one for a trial."""
        if self._fixed or self._waits_for_price:
            return self.paying(request)
        if not self._pays:
            return 1 if self._trials.due else 0
        tried = request.length - self._estimate(request).tried_at < TRIAL_TOKENS
        return self.paying(request) or (0 if tried else 1)

    def paying(self, request: Request) -> int:
        """How many drafts pay."""
        if self._fixed:
            return self.longest
        if self._waits_for_price or not self._pays:
            return 0
        return self._best(self._estimate(request).chance)[0]

    @property
    def _waits_for_price(self) -> bool:
        return self._prices is not None and self._prices.wants_plain(self._batch)

    def _estimate(self, request: Request) -> _Estimate:
        known = self._of.get(request)
        if known is None:
            known = self._of[request] = _Estimate(self._all.chance, request.length)
        return known

    def verified(self, request: Request, drafts: int, accepted: int) -> None:
        self._decided_for = None
        if not self._pays:
            self._trials.verified(drafts, accepted)
        self._all.verified(drafts, accepted)
        known = self._of.get(request)
        if known is not None:
            known.verified(drafts, accepted)
            known.tried_at = request.length

    def _best(self, chance: float) -> tuple[int, float]:
        """The number of drafts with the most tokens per cost of a step, and these tokens."""
        best, best_tokens, best_rate, tokens, power = 0, 1.0, 1.0, 1.0, 1.0
        for count, cost in enumerate(self._costs, 1):
            power *= chance
            tokens += power
            if tokens / cost > best_rate:
                best, best_tokens, best_rate = count, tokens, tokens / cost
        return best, best_tokens

    def _round_costs(self) -> list[float]:
        """Of one draft and more, in decode steps."""
        return [self._round_cost(count) for count in range(1, self.longest + 1)]

    def _round_cost(self, drafts: float) -> float:
        """Of a round with so many drafts for each request, in decode steps."""
        if self._prices is None:
            return self._assumed_cost(drafts)
        return self._prices.cost(self._batch, drafts, self._assumed_cost)

    def _assumed_cost(self, drafts: float) -> float:
        return verify_cost(drafts) + self._cost * drafts


class _Trials:
    """When drafts are tried again while they do not pay: all requests at once, so that few steps
    are rounds. A trial of which most drafts are accepted is repeated in the next step."""

    def __init__(self) -> None:
        self._pause, self._plain_steps = TRIAL_TOKENS, 0
        self._drafts = self._accepted = 0

    @property
    def due(self) -> bool:
        return self._plain_steps >= self._pause

    def verified(self, drafts: int, accepted: int) -> None:
        self._drafts += drafts
        self._accepted += accepted

    def ran(self, *, drafted: bool) -> None:
        """A step ran; its drafts are verified."""
        if not drafted:
            self._plain_steps += 1
        elif 2 * self._accepted <= self._drafts:
            self._plain_steps = 0
            self._pause = min(2 * self._pause, MAX_TRIAL_TOKENS)
        self._drafts = self._accepted = 0
