"""Rounds are priced by the engine's own steps, on a clock that charges for them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvtide.cache import Alone, CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams, SamplingParams
from kvtide.engine.speculation.draft_length import DraftLength
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.engine.speculation.round_prices import (
    EPOCH,
    PLAIN_STEPS,
    SAMPLES,
    RoundPrices,
    StepRows,
)
from tests.engine.restoring import alone, model_of, text
from tests.engine.speculation.drafting import Asking, ErringDrafter

LONGEST = 3
Seconds = Callable[[int], float]
"""Of a step with so many drafts."""


def rounds_of(decode: float, round_s: float) -> Seconds:
    """Rounds whose time grows with their drafts; `round_s` has three."""
    return lambda drafts: decode + (round_s - decode) * drafts / LONGEST


# docs/benchmarks.md, "What does a round cost?": decode step and round of three drafts.
DENSE = rounds_of(5.10e-3, 6.23e-3)
V4 = rounds_of(3.91e-3, 8.10e-3)


def host_bound(drafts: int) -> float:
    """The first draft costs most of a round."""
    return 4e-3 if drafts == 0 else 7e-3 + 0.4e-3 * drafts


class Machine:
    """Decodes one request on a clock of its own. `noise`: the chance of a step to take five times
    as long. `steps` by whether they have drafts."""

    def __init__(self, chance: float, *, measures: bool = True, noise: float = 0.0) -> None:
        self.now, self.tokens, self.steps = 0.0, 0, Counter[bool]()
        self._random, self._chance, self._noise = random.Random(5), chance, noise
        self.prices = RoundPrices(Alone(), 1 + LONGEST, lambda: self.now)
        self.lengths = DraftLength(
            LONGEST, ModelDrafter.cost, prices=self.prices if measures else None
        )
        self._asking: Any = Asking()

    @property
    def drafting(self) -> float:
        """The fraction of steps with drafts."""
        return self.steps[True] / self.steps.total()

    def run(self, seconds: Seconds, steps: int) -> float:
        """Tokens a second."""
        begun, before = self.now, self.tokens
        for _ in range(steps):
            self.step(seconds)
        return (self.tokens - before) / (self.now - begun)

    def step(self, seconds: Seconds) -> None:
        drafts = self.lengths.of(self._asking)
        slow = 5 if self._random.random() < self._noise else 1
        self.now += slow * seconds(drafts)
        accepted = 0
        while accepted < drafts and self._random.random() < self._chance:
            accepted += 1
        self._asking.length += 1 + accepted
        self.tokens += 1 + accepted
        self.steps[drafts > 0] += 1
        if drafts:
            self.lengths.verified(self._asking, drafts, accepted)
        self.lengths.ran(StepRows([1 + drafts], drafts), [self._asking])


@pytest.mark.quick(chance=[0.5])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.4, 0.5, 0.6, 0.8])
@pytest.mark.parametrize("seconds", [DENSE, V4, host_bound], ids=["dense", "v4", "host bound"])
def test_speculation_is_not_slower_than_decode(seconds: Seconds, chance: float) -> None:
    speed = Machine(chance).run(seconds, EPOCH)
    assert speed >= 0.95 / seconds(0)


def test_constants_alone_would_draft_where_it_does_not_pay() -> None:
    machine = Machine(0.5, measures=False)
    assert machine.run(host_bound, EPOCH // 2) < 0.92 / host_bound(0)
    assert machine.drafting > 0.9


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_drafts_that_pay_are_found_also_beside_steps_that_take_long(noise: float) -> None:
    for seconds, least, most in ((DENSE, 0.9, 1.0), (host_bound, 0.0, 0.15)):
        machine = Machine(0.5, noise=noise)
        machine.run(seconds, EPOCH // 2)
        assert least <= machine.drafting <= most


def test_prices_are_measured_anew_as_contexts_grow() -> None:
    machine = Machine(0.5)
    machine.run(DENSE, EPOCH)
    for later, least, most in ((host_bound, 0.0, 0.15), (DENSE, 0.9, 1.0)):
        machine.run(later, EPOCH)
        machine.steps.clear()
        machine.run(later, EPOCH // 2)
        assert least <= machine.drafting <= most


def test_where_all_steps_have_prefill_drafts_go_by_assumed_costs() -> None:
    prices = RoundPrices(Alone(), 1 + LONGEST, lambda: 0.0)
    for _ in range(PLAIN_STEPS - 1):
        assert prices.wants_plain(2)
        prices.ran(StepRows([1, 512], 0), 2)
    prices.ran(StepRows([1, 512], 0), 2)
    assert not prices.wants_plain(2) and prices.cost(2, 3, lambda drafts: 1 + drafts) == 4


def test_steps_beside_prefill_and_after_a_change_are_not_timed() -> None:
    now = [0.0]
    prices = RoundPrices(Alone(), 1 + LONGEST, lambda: now[0])

    def ran(rows: Sequence[int], drafts: int, seconds: float) -> None:
        now[0] += seconds
        prices.ran(StepRows(rows, drafts), 2)

    for _ in range(SAMPLES):
        ran([1, 64], 0, 9.0)  # Prefill.
        ran([1, 1], 0, 9.0)  # The first behind it.
        ran([1, 1], 0, 1.0)
        ran([2, 1], 1, 9.0)  # The first with drafts.
        ran([4, 4], 6, 2.0)
    assert prices.cost(2, 3, lambda drafts: 1 + drafts) == pytest.approx(2.0)
    assert prices.cost(2, 1, lambda drafts: 1 + drafts) == pytest.approx(1 + 1 / 3)


def test_few_requests_with_drafts_give_no_price() -> None:
    now = [0.0]
    prices = RoundPrices(Alone(), 1 + LONGEST, lambda: now[0])
    for _ in range(SAMPLES + 1):
        now[0] += 1.0
        prices.ran(StepRows([1] * 8, 0), 8)
    for _ in range(4 * SAMPLES):
        now[0] += 1.0
        prices.ran(StepRows([4] + [1] * 7, 3), 8)
    assert prices.cost(8, 3, lambda drafts: 1 + drafts) == 4


class AtMost(Alone):
    """Stands for another rank: its values are lower."""

    def all_min(self, values: Sequence[int], clock: int = 0) -> list[int]:
        return [min(value, 1_000_000_000) for value in values]


def test_ranks_agree_on_prices() -> None:
    now = [0.0]
    prices = RoundPrices(AtMost(), 1 + LONGEST, lambda: now[0])
    for drafts in (0, LONGEST):
        for _ in range(SAMPLES + 1):
            now[0] += 3.0 if drafts == 0 else 2.0
            prices.ran(StepRows([1 + drafts], drafts), 1)
    assert prices.cost(1, 3, lambda drafts: 9.0) == 1.0  # All took a second there.


def test_the_batch_of_the_next_step_decides() -> None:
    """As requests resume, before a step of them."""
    now = [0.0]
    prices = RoundPrices(Alone(), 1 + LONGEST, lambda: now[0])
    for batch, round_s in ((1, 1.1), (2, 4.0)):
        for drafts in (0, LONGEST):
            for _ in range(SAMPLES + 1):
                now[0] += round_s if drafts else 1.0
                prices.ran(StepRows([1 + drafts] * batch, drafts * batch), batch)
    lengths, asking = DraftLength(LONGEST, ModelDrafter.cost, prices=prices), Asking(0)
    for batch, pays in ((1, True), (2, False), (1, True)):
        lengths.decide_for([Asking(number) for number in range(batch)])
        assert (lengths.paying(asking) > 0) == pays


def test_an_engine_decodes_plainly_until_it_knows_what_that_takes() -> None:
    prompt, count = text(random.Random(3), 40), 4 * SAMPLES
    answer = [each.token for each in alone("llama", prompt, count, SamplingParams())]
    cache = TieredCache(model_of("llama").memory, CacheConfig(Tokens(1024), None))
    drafter = ErringDrafter({prompt: answer}, errors=0.0)
    engine = Engine(model_of("llama"), cache, drafter=drafter)
    request = engine.submit(RequestParams(prompt, count))
    while not engine.idle:
        engine.step()
        # The first token is prefill's; the step behind it is not timed.
        assert drafter.proposed == 0 or len(request.output) >= SAMPLES + 2
    assert drafter.proposed and [each.token for each in request.output] == answer
    cache.close()
