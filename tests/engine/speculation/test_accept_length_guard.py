"""The accept-length guard: an alarm where restored prefixes draft worse, and none by chance."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.engine import Request, RequestParams
from kvtide.engine.speculation import accept_length_guard
from kvtide.engine.speculation.accept_length_guard import RESTORED, AcceptLengthGuard
from kvtide.engine.speculation.accept_length_stats import PrefixOrigin
from kvtide.index import DEFAULT_NAMESPACE, Prompt
from kvtide.spec import Tier

DRAFTS = 7
TIER = {
    PrefixOrigin.DEVICE: Tier.DEVICE,
    PrefixOrigin.HOST: Tier.HOST,
    PrefixOrigin.STORAGE: Tier.STORAGE,
}

RESTORED_LEASE: Any = SimpleNamespace(by_tier={Tier.DEVICE: 4})


class Traffic:
    """Requests whose drafts are accepted with a chance that differs from request to request."""

    def __init__(self, seed: int) -> None:
        self.guard = AcceptLengthGuard(("draft", "draft_swa"), lambda prompt: b"\xab\xcd")
        self._random = random.Random(seed)
        self._numbers = 0

    def request(self, origin: PrefixOrigin, chance: float, steps: int | None = None) -> None:
        self._numbers += 1
        tokens = (1, 2, 3, 4)
        prompt = Prompt(tokens, DEFAULT_NAMESPACE, 0)
        request = Request(self._numbers, RequestParams(tokens, 8), prompt, list(tokens))
        if origin is not PrefixOrigin.COMPUTED:
            request.by_tier = {TIER[origin]: 4}
        own = min(0.98, max(0.02, self._random.gauss(chance, 0.15)))
        for _ in range(steps or self._random.randint(1, 25)):
            accepted = 0
            while accepted < DRAFTS and self._random.random() < own:
                accepted += 1
            self.guard.verified(request, accepted + 1)

    def mixed(self, requests: int, restored: float, computed: float = 0.7) -> None:
        for _ in range(requests):
            origin = self._random.choice(tuple(PrefixOrigin))
            self.request(origin, computed if origin is PrefixOrigin.COMPUTED else restored)

    @property
    def alarms(self) -> int:
        return self.guard.alarms.total()


@pytest.mark.parametrize("seed", range(12))
def test_equal_origins_raise_no_alarm_by_chance(seed: int) -> None:
    traffic = Traffic(seed)
    traffic.mixed(1500, 0.7)
    assert traffic.alarms == 0


@pytest.mark.parametrize("seed", range(6))
def test_lost_drafts_are_noticed(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """As with drafts lost on restores: from three tokens a step to less than two."""
    traffic = Traffic(seed)
    with caplog.at_level(logging.WARNING, "kvtide"):
        traffic.mixed(600, 0.4)
    assert traffic.guard.alarms == dict.fromkeys(RESTORED, 1), "once, whatever goes on"
    assert len(caplog.messages) == len(RESTORED)


def test_the_warning_names_origin_means_pools_and_prefix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    traffic = Traffic(1)
    for _ in range(100):
        traffic.request(PrefixOrigin.COMPUTED, 0.75)
        traffic.request(PrefixOrigin.STORAGE, 0.3)
    (message,) = caplog.messages
    assert message.startswith("prefixes from storage accept 1.")
    assert "computed ones 4." in message and "pools (draft, draft_swa)" in message
    assert "a restored prefix of 4 tokens (request " in message
    assert message.endswith("; its first page has the key abcd.")
    assert {origin.value: n for origin, n in traffic.guard.alarms.items()} == {
        "device": 0,
        "host": 0,
        "storage": 1,
    }


def test_an_alarm_is_raised_again_after_it_recovered() -> None:
    traffic = Traffic(2)
    traffic.mixed(600, 0.3)
    traffic.mixed(400, 0.7)
    assert traffic.alarms == 3
    traffic.mixed(accept_length_guard.WINDOW, 0.3)
    assert traffic.alarms == 6


def test_few_requests_say_nothing() -> None:
    """However many steps they have: one text may be hard to draft."""
    traffic = Traffic(3)
    for _ in range(200):
        traffic.request(PrefixOrigin.COMPUTED, 0.8)
    for _ in range(accept_length_guard.MIN_REQUESTS - 1):
        traffic.request(PrefixOrigin.HOST, 0.1, steps=500)
    assert traffic.alarms == 0
    traffic.request(PrefixOrigin.HOST, 0.1, steps=500)
    assert traffic.alarms == 1


def test_without_computed_prefixes_there_is_no_verdict() -> None:
    traffic = Traffic(4)
    for _ in range(500):
        traffic.request(PrefixOrigin.DEVICE, 0.1)
    assert traffic.alarms == 0


def test_a_request_has_the_origin_of_its_last_admission() -> None:
    """Computed requests are retracted and find their own pages, without the draft's."""
    traffic = Traffic(5)
    for _ in range(100):
        traffic.request(PrefixOrigin.COMPUTED, 0.8)
    assert traffic.alarms == 0
    for number in range(100):
        tokens = (1, 2, 3, 4)
        prompt = Prompt(tokens, DEFAULT_NAMESPACE, 0)
        request = Request(1000 + number, RequestParams(tokens, 8), prompt, list(tokens))
        for request.admissions, request.lease, given in ((1, None, 6), (2, RESTORED_LEASE, 1)):
            for _ in range(10):
                traffic.guard.verified(request, given)
    assert traffic.guard.alarms == {
        PrefixOrigin.DEVICE: 1,
        PrefixOrigin.HOST: 0,
        PrefixOrigin.STORAGE: 0,
    }


def test_requests_and_not_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with steps as the sample, chance does raise alarms."""

    def as_if_independent(
        tallies: list[accept_length_guard._Tally],
    ) -> accept_length_guard.MeanLength | None:
        steps = sum(each.steps for each in tallies)
        if steps < accept_length_guard.MIN_STEPS:
            return None
        return accept_length_guard.MeanLength(
            sum(each.tokens for each in tallies) / steps, 1 / steps
        )

    monkeypatch.setattr(accept_length_guard.MeanLength, "of", as_if_independent)
    alarms = 0
    for seed in range(6):
        traffic = Traffic(seed)
        for _ in range(20):
            for origin in (PrefixOrigin.COMPUTED, PrefixOrigin.HOST):
                traffic.request(origin, 0.7, steps=200)
        alarms += traffic.alarms
    assert alarms > 0
