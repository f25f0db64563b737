"""When a replay copies pages down: to the host, and what is admitted to storage.

| policy                    | copied to the host               | written to storage       | served |
|---------------------------|----------------------------------|--------------------------|--------|
| `write_through`           | as soon as computed              | as soon as on the host   | yes    |
| `write_through_selective` | when a second prompt finds it    | as soon as on the host   | yes    |
| `storage_on_second_use`   | as soon as computed              | when a second prompt has | no     |
|                           |                                  | it, found or not         |        |

A served policy is one of `kvtide serve --write-policy`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from kvtide.planner.traces import TokenArray, prefix_keys
from kvtide.spec import Tier

_NOWHERE: frozenset[Tier] = frozenset()
_HOST = frozenset({Tier.HOST})
_STORAGE = frozenset({Tier.STORAGE})


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """The tiers that pages are copied to.

    computed         when a prompt has computed them
    found            when a prompt has found them in any tier
    requested_again  when a second prompt has them, whether it found or computed them
    served           whether an engine offers the policy
    """

    name: str
    computed: frozenset[Tier] = _NOWHERE
    found: frozenset[Tier] = _NOWHERE
    requested_again: frozenset[Tier] = _NOWHERE
    served: bool = True


WRITE_THROUGH = WritePolicy("write_through", computed=_HOST | _STORAGE)
SELECTIVE = WritePolicy("write_through_selective", found=_HOST | _STORAGE)
SECOND_USE = WritePolicy(
    "storage_on_second_use", computed=_HOST, requested_again=_HOST | _STORAGE, served=False
)

WRITE_POLICIES = {policy.name: policy for policy in (WRITE_THROUGH, SELECTIVE, SECOND_USE)}


class RequestedPages:
    """All pages that prompts had, kept or not, by the 64-bit keys of their prefixes."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._keys: set[int] = set()

    def add(self, prompt: TokenArray) -> int:
        """Add a prompt's pages; how many of its first ones an earlier prompt had as well."""
        keys = prefix_keys(prompt, self._page_tokens).tolist()
        known = bisect_left(keys, True, key=lambda key: key not in self._keys)
        self._keys.update(keys[known:])
        return known
