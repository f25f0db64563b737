"""Removal of quarantined prefixes from a store.

A removal takes time and may fail. Until it has succeeded on every rank, no prompt with that first
page is fetched. A failed removal is tried again when a request asks for the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvtide.index import Index, Prompt
from kvtide.index.keys import PageKey
from kvtide.transfer.store_link import StoreLink
from kvtide.transfer.transfers import Verdict

MAX_REMOVALS = 4
"""Removals per exchange between ranks; older ones come first."""


@dataclass(slots=True, eq=False)
class Removal:
    """The pages behind a prompt's first page. `answer` is None once a rank failed."""

    prompt: Prompt
    keys: list[PageKey]
    answer: Future[int] | None = None

    @classmethod
    def of(cls, index: Index, prompt: Prompt, known: Sequence[PageKey]) -> Removal:
        """Of the prompt's pages, and of those known by key."""
        keys = list(dict.fromkeys([*index.page_keys(prompt), *known]))
        return cls(Prompt(prompt.packed, prompt.namespace, prompt.holdback), keys)

    def joined_with(self, other: Removal, page_bytes: int) -> bool:
        """Take over the keys of a removal behind the same first page; False of another one."""
        if not self.prompt.same_first_page(other.prompt, page_bytes):
            return False
        self.keys = list(dict.fromkeys([*self.keys, *other.keys]))
        return True


class Removals:
    """The removals that have not succeeded on every rank, oldest first."""

    def __init__(self, index: Index, link: StoreLink) -> None:
        self._index = index
        self._link = link
        self._removals: list[Removal] = []

    def __len__(self) -> int:
        """How many removals the store is working on."""
        return len(self._open())

    def begin(self, prompt: Prompt, known: Sequence[PageKey]) -> list[bytes]:
        """Remove the prompt's pages, and those known by key; the keys of all these pages."""
        removal = Removal.of(self._index, prompt, known)
        if removal.keys:
            self._removals.append(removal)
            self._ask(removal)
        return [page.key for page in removal.keys]

    def forbid(self, prompt: Prompt) -> bool:
        """Whether the store may still hold quarantined pages of the prompt."""
        size = self._index.page_bytes
        against = [one for one in self._removals if one.prompt.same_first_page(prompt, size)]
        for one in against:
            if one.answer is None:
                self._ask(one)
        return bool(against)

    def give_up(self) -> list[Removal]:
        """Stop asking this store; returns the removals that did not succeed."""
        given_up, self._removals = self._removals, []
        return given_up

    def verdicts(self) -> list[int]:
        return [_verdict(one.answer) for one in self._open()[:MAX_REMOVALS]]

    def settle(self, agreed: Sequence[int]) -> None:
        """Drop removals that succeeded on every rank; those that failed on any rank stay."""
        for one, verdict in zip(self._open(), agreed, strict=False):
            if verdict == Verdict.LANDED:
                self._removals.remove(one)
            elif verdict == Verdict.FAILED:
                one.answer = None

    def _open(self) -> list[Removal]:
        return [one for one in self._removals if one.answer is not None]

    def _ask(self, removal: Removal) -> None:
        removal.answer = self._link.remove(list(removal.keys))


def _verdict(answer: Future[int] | None) -> Verdict:
    assert answer is not None
    if not answer.done():
        return Verdict.PENDING
    return Verdict.FAILED if answer.exception() is not None else Verdict.LANDED
