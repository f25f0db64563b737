"""Accept lengths: how many tokens a verify step gives, by where the request's prefix came from.

A restored prefix whose draft pages are missing or wrong shows here and nowhere else: the text stays
right, and steps give fewer tokens.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

from kvtide.engine.request import Request
from kvtide.spec import Tier


class PrefixOrigin(Enum):
    """The slowest tier that gave part of a request's prefix; COMPUTED where none did. A request
    that was retracted has that of its last admission while it runs."""

    COMPUTED = "computed"
    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"

    @classmethod
    def of(cls, request: Request) -> PrefixOrigin:
        if request.prompt.fetched:
            return cls.STORAGE
        given = [tier for tier, tokens in request.given.items() if tokens]
        return _OF_TIER[max(given)] if given else cls.COMPUTED


_OF_TIER = {
    Tier.DEVICE: PrefixOrigin.DEVICE,
    Tier.HOST: PrefixOrigin.HOST,
    Tier.STORAGE: PrefixOrigin.STORAGE,
}


class AcceptLengthStats:
    """Verify steps by origin and tokens given; drafts accepted and rejected, over all requests."""

    def __init__(self) -> None:
        self.steps: dict[PrefixOrigin, Counter[int]] = {each: Counter() for each in PrefixOrigin}
        self.accepted = self.rejected = 0

    def verified(self, request: Request, drafts: int, accepted: int) -> None:
        self.steps[PrefixOrigin.of(request)][accepted + 1] += 1
        self.accepted += accepted
        self.rejected += drafts - accepted
        request.accepted_drafts += accepted
        request.rejected_drafts += drafts - accepted
        request.verify_steps += 1

    def mean(self, *origins: PrefixOrigin) -> float:
        """Tokens per verify step, over all origins if none is named; 0 without any step."""
        counts = [self.steps[origin] for origin in origins or PrefixOrigin]
        steps = sum(each.total() for each in counts)
        tokens = sum(length * times for each in counts for length, times in each.items())
        return tokens / steps if steps else 0.0
