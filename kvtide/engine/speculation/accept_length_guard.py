"""The accept-length guard: an alarm when restored prefixes accept less than computed ones.

A restored prefix whose draft pages are missing or wrong costs speed and nothing else, so no test of
text or logits finds it. The guard compares accept lengths while serving.

The rule. The guard looks at the last `WINDOW` requests that had drafts verified, by the origin of
their prefix. Origin o raises an alarm if both o and COMPUTED have at least `MIN_REQUESTS` requests
and `MIN_STEPS` verify steps among them, and

    0.9 · computed − restored  >  Z · √(0.81 · var(computed) + var(restored))

where each mean is tokens over verify steps. The requests are what was sampled, not the steps: steps
of one request accept alike. So the variance of a mean is that of a ratio of sums over requests,
n / (n − 1) · Σ (tokensᵢ − mean · stepsᵢ)² / (Σ stepsᵢ)².

Means that are equal in truth raise no alarm: they lie a tenth apart from what does, and Z standard
errors more. Texts that are harder to draft do raise one, if they come from one origin alone. One
window for all origins keeps both sides of the same hour.

An alarm stands until `MIN_REQUESTS` new requests of its origin have a mean of at least 0.9 of the
computed one's. While it stands the origin raises no other.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from kvtide.engine.request import Request
from kvtide.engine.speculation.accept_length_stats import PrefixOrigin
from kvtide.index import Prompt

FRACTION = 0.9
"""Restored prefixes should accept this much of what computed ones do."""
WINDOW = 1024
MIN_REQUESTS, MIN_STEPS = 32, 128
Z = 3.0
STEPS_PER_LOOK = 64
"""Verify steps between two looks at the window."""

RESTORED = tuple(origin for origin in PrefixOrigin if origin is not PrefixOrigin.COMPUTED)

log = logging.getLogger("kvtide")


@dataclass(slots=True)
class _Tally:
    """The verify steps of one request since an admission, and the tokens that they gave.

    first_key  the key of its first page; empty where nothing was restored
    """

    origin: PrefixOrigin
    request: int
    admission: int
    cached_tokens: int
    first_key: bytes
    steps: int = 0
    tokens: int = 0


class MeanLength(NamedTuple):
    """Tokens per verify step over some requests, and the variance of that mean."""

    mean: float
    variance: float

    @classmethod
    def of(cls, tallies: Sequence[_Tally]) -> MeanLength | None:
        """None of too few requests or verify steps."""
        count, steps = len(tallies), sum(each.steps for each in tallies)
        if count < MIN_REQUESTS or steps < MIN_STEPS:
            return None
        mean = sum(each.tokens for each in tallies) / steps
        spread = sum((each.tokens - mean * each.steps) ** 2 for each in tallies)
        return cls(mean, count / (count - 1) * spread / steps**2)

    def falls_short_of(self, computed: MeanLength) -> bool:
        error = math.sqrt(FRACTION**2 * computed.variance + self.variance)
        return FRACTION * computed.mean - self.mean > Z * error


class AcceptLengthGuard:
    """`alarms`: raised since the start, by origin. `pools`: the draft's, which the warning names;
    every stage knows them, whichever has the draft. `first_key` gives the key of a prompt's first
    page, by which stores and KV events know it."""

    def __init__(self, pools: Sequence[str], first_key: Callable[[Prompt], bytes]) -> None:
        self.alarms: Counter[PrefixOrigin] = Counter(dict.fromkeys(RESTORED, 0))
        assert pools, "drafts without state in pages depend on no restore"
        self.pools, self._first_key = tuple(pools), first_key
        self._window: deque[_Tally] = deque(maxlen=WINDOW)
        self._tallies: WeakKeyDictionary[Request, _Tally] = WeakKeyDictionary()
        self._raised: set[PrefixOrigin] = set()
        self._steps = 0

    def verified(self, request: Request, tokens: int) -> None:
        """A verify step of the request gave so many tokens."""
        tally = self._tallies.get(request)
        if tally is None or tally.admission != request.admissions:
            tally = self._tallies[request] = self._begun(request)
            self._window.append(tally)
        tally.steps += 1
        tally.tokens += tokens
        self._steps += 1
        if self._steps % STEPS_PER_LOOK == 0:
            self._look()

    def _begun(self, request: Request) -> _Tally:
        origin, cached = PrefixOrigin.of(request), sum(request.given.values())
        key = b"" if origin is PrefixOrigin.COMPUTED else self._first_key(request.prompt)
        return _Tally(origin, request.number, request.admissions, cached, key)

    def _look(self) -> None:
        by_origin: dict[PrefixOrigin, list[_Tally]] = {origin: [] for origin in PrefixOrigin}
        for tally in self._window:
            by_origin[tally.origin].append(tally)
        computed = MeanLength.of(by_origin[PrefixOrigin.COMPUTED])
        if computed is None:
            return
        for origin in RESTORED:
            if (restored := MeanLength.of(by_origin[origin])) is not None:
                self._judge(origin, by_origin[origin], restored, computed)

    def _judge(
        self,
        origin: PrefixOrigin,
        tallies: Sequence[_Tally],
        restored: MeanLength,
        computed: MeanLength,
    ) -> None:
        stands = origin in self._raised
        if stands and restored.mean >= FRACTION * computed.mean:
            self._raised.remove(origin)
        elif stands:
            self._forget(origin)
        elif restored.falls_short_of(computed):
            self._raised.add(origin)
            self.alarms[origin] += 1
            self._warn(origin, tallies, restored.mean, computed.mean)
            self._forget(origin)

    def _forget(self, origin: PrefixOrigin) -> None:
        others = (tally for tally in self._window if tally.origin is not origin)
        self._window = deque(others, maxlen=WINDOW)

    def _warn(
        self, origin: PrefixOrigin, tallies: Sequence[_Tally], restored: float, computed: float
    ) -> None:
        worst = min(tallies, key=lambda each: each.tokens - computed * each.steps)
        log.warning(
            "prefixes from %s accept %.2f tokens a verify step, computed ones %.2f: pages of the "
            "draft's pools (%s) are missing or wrong there, or these texts are harder to draft. "
            "The worst is a restored prefix of %d tokens (request %d); its first page has the key "
            "%s.",
            *(origin.value, restored, computed, ", ".join(self.pools)),
            *(worst.cached_tokens, worst.request, worst.first_key.hex()),
        )
