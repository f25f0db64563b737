"""How many drafts a request gets: as many as pay, by how often its drafts were accepted.

If a draft is accepted with probability p after an accepted one, k drafts add p + p² + … + pᵏ tokens
to a step, and cost k times the drafter's cost. The estimate of p is a moving average over the
request's verified drafts; it begins with that of all requests.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from kvtide.engine.request import Request

MEMORY = 0.9
"""The weight of what is known already, per verified draft."""
TRIAL_TOKENS = 32
"""A request for which no draft pays gets one again after so many tokens."""
HOPE = 0.8
"""The estimate of p before any draft was verified."""


class _Estimate:
    def __init__(self, chance: float, length: int) -> None:
        self.chance, self.tried_at = chance, length

    def verified(self, drafts: int, accepted: int) -> None:
        """Drafts behind the first rejected one say nothing."""
        outcomes = [1.0] * accepted + [0.0] * (accepted < drafts)
        for outcome in outcomes:
            self.chance += (1 - MEMORY) * (outcome - self.chance)


class DraftLength:
    """`longest`: drafts at the most; always as many if `fixed`. Every rank sees the same outcomes,
    and decides the same."""

    def __init__(self, longest: int, cost: float, *, fixed: bool = False) -> None:
        self.longest, self._cost, self._fixed = longest, cost, fixed
        self._all = _Estimate(HOPE, 0)
        self._of: WeakKeyDictionary[Request, _Estimate] = WeakKeyDictionary()

    def of(self, request: Request) -> int:
        """How many drafts the request should have now."""
        if self._fixed:
            return self.longest
        known = self._of.get(request)
        if known is None:
            known = self._of[request] = _Estimate(self._all.chance, request.length)
        length = self._best(known.chance)
        if length == 0 and request.length - known.tried_at >= TRIAL_TOKENS:
            return 1
        return length

    def verified(self, request: Request, drafts: int, accepted: int) -> None:
        self._all.verified(drafts, accepted)
        known = self._of.get(request)
        if known is not None:
            known.verified(drafts, accepted)
            known.tried_at = request.length

    def _best(self, chance: float) -> int:
        """The number of drafts with the most tokens per cost of a step."""
        best, best_rate, tokens, power = 0, 1.0, 1.0, 1.0
        for count in range(1, self.longest + 1):
            power *= chance
            tokens += power
            rate = tokens / (1 + self._cost * count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best
