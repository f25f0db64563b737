"""How many drafts a request gets: as many as pay, by how often its drafts were accepted.

If a draft is accepted with probability p after an accepted one, k drafts add p + p² + … + pᵏ tokens
to a step. They cost k passes of the drafter and the rows of the verify step. The estimate of p is a
moving average over the request's verified drafts; it begins with that of all requests.

What rows cost is a constant, so that equal requests get equal drafts on all ranks and in all runs.
A GPU reads the same weights for a few rows more. So does a CPU up to three rows; from four on its
fp32 GEMM takes another routine, which is much slower. The constants are set for such machines, not
measured where the engine runs; `kvtide bench speculate --only rows` shows how well they fit.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from kvtide.engine.request import Request

EWMA_DECAY = 0.9
"""The weight of what is known already, per verified draft."""
TRIAL_TOKENS = 32
"""A request for which no draft pays gets one again after so many tokens."""
HOPE = 0.8
"""The estimate of p before any draft was verified."""
GPU_ROW = 0.05
"""What a draft's row costs on a GPU, in decode steps, whatever the batch."""
CPU_ROW = 0.05
"""What a row more costs on a CPU, in decode steps of one request."""
CPU_FEW_ROWS, CPU_JUMP = 3, 0.55
"""More rows than these few cost so much more, once, in the same unit."""


def verify_cost(device: str, batch: int, drafts: int) -> float:
    """A verify step with so many drafts for each request of a batch, in decode steps of it."""
    if device != "cpu":
        return 1 + GPU_ROW * drafts
    return _cpu_step(batch * (1 + drafts)) / _cpu_step(batch)


def _cpu_step(rows: int) -> float:
    return 1 + CPU_ROW * (rows - 1) + (CPU_JUMP if rows > CPU_FEW_ROWS else 0.0)


class _Estimate:
    def __init__(self, chance: float, length: int) -> None:
        self.chance, self.tried_at = chance, length

    def verified(self, drafts: int, accepted: int) -> None:
        """Drafts behind the first rejected one say nothing."""
        outcomes = [1.0] * accepted + [0.0] * (accepted < drafts)
        for outcome in outcomes:
            self.chance += (1 - EWMA_DECAY) * (outcome - self.chance)


class DraftLength:
    """`longest`: drafts at the most; always as many if `fixed`. `cost`: of a drafter's pass.
    `batch`: how many requests decode. Every rank sees the same outcomes, and decides the same."""

    def __init__(self, longest: int, cost: float, device: str, *, fixed: bool = False) -> None:
        self.longest, self._cost, self._fixed = longest, cost, fixed
        self._device, self.batch = device, 1
        self._all = _Estimate(HOPE, 0)
        self._of: WeakKeyDictionary[Request, _Estimate] = WeakKeyDictionary()

    def of(self, request: Request) -> int:
        """How many drafts the request should have now: what pays, or one for a trial."""
        length = self.paying(request)
        if length == 0 and request.length - self._estimate(request).tried_at >= TRIAL_TOKENS:
            return 1
        return length

    def paying(self, request: Request) -> int:
        """How many drafts pay."""
        return self.longest if self._fixed else self._best(self._estimate(request).chance)

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
        for count in range(1, self.longest + 1):
            power *= chance
            tokens += power
            verify = verify_cost(self._device, self.batch, count)
            rate = tokens / (verify + self._cost * count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best
