"""How many drafts a request gets: as many as pay, by how often its drafts were accepted.

If a draft is accepted with probability p after an accepted one, k drafts add p + p² + … + pᵏ tokens
to a step. They cost k passes of the drafter and the rows of the verify step. The estimate of p is a
moving average over the request's verified drafts; it begins with that of all requests.

What that costs is measured in the engine's own steps (`round_prices`): it depends on the machine,
the model, the batch and the context. A GPU, and a CPU with native kernels, reads the same weights
for a few rows more, but other experts and other selected entries. The first drafts go by constants.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from kvtide.engine.request import Request
from kvtide.engine.speculation.round_prices import RoundPrices, StepRows

EWMA_DECAY = 0.9
"""The weight of what is known already, per verified draft."""
TRIAL_TOKENS = 32
"""A request for which no draft pays gets one again after so many tokens."""
HOPE = 0.8
"""The estimate of p before any draft was verified."""
ROW = 0.05
"""What a draft's row costs until rounds are timed, in decode steps. With 0.07 for a pass of a draft
model, a round of three drafts then costs 1.36: between a dense 8B model's at batch 1 and at 64 on a
GPU (`kvtide bench speculate --device cuda --only rounds`)."""


def verify_cost(drafts: int) -> float:
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

    def ran(self, step: StepRows, running: int) -> None:
        """The host has the tokens of a step, while so many requests run."""
        if self._prices is not None and self._prices.ran(step, max(1, running)):
            self._costs = self._round_costs()
        self.decide_for(running)

    def decide_for(self, running: int) -> None:
        """So many requests are in the next step."""
        before, self._batch = self._batch, max(1, running)
        if self._batch != before:
            self._costs = self._round_costs()

    def of(self, request: Request) -> int:
        """How many drafts the request should have now: what pays, or one for a trial."""
        length = self.paying(request)
        tried = request.length - self._estimate(request).tried_at < TRIAL_TOKENS
        if length or tried or self._waits_for_price:
            return length
        return 1

    def paying(self, request: Request) -> int:
        """How many drafts pay."""
        if self._fixed:
            return self.longest
        return 0 if self._waits_for_price else self._best(self._estimate(request).chance)

    @property
    def _waits_for_price(self) -> bool:
        return self._prices is not None and self._prices.wants_plain(self._batch)

    def _estimate(self, request: Request) -> _Estimate:
        known = self._of.get(request)
        if known is None:
            known = self._of[request] = _Estimate(self._all.chance, request.length)
        return known

    def verified(self, request: Request, drafts: int, accepted: int) -> None:
        self._all.verified(drafts, accepted)
        known = self._of.get(request)
        if known is not None:
            known.verified(drafts, accepted)
            known.tried_at = request.length

    def _best(self, chance: float) -> int:
        """The number of drafts with the most tokens per cost of a step."""
        best, best_rate, tokens, power = 0, 1.0, 1.0, 1.0
        for count, cost in enumerate(self._costs, 1):
            power *= chance
            tokens += power
            if tokens / cost > best_rate:
                best, best_rate = count, tokens / cost
        return best

    def _round_costs(self) -> list[float]:
        """Of one draft and more, in decode steps."""
        counts = range(1, self.longest + 1)
        if self._prices is None:
            return [self._assumed_cost(count) for count in counts]
        return [self._prices.cost(self._batch, count, self._assumed_cost) for count in counts]

    def _assumed_cost(self, drafts: int) -> float:
        return verify_cost(drafts) + self._cost * drafts
