"""Prefixes in quarantine, until a store has lost what it has of them.

A removal takes its time, and may fail; until it has worked on every rank, nothing that begins with
that page is fetched. One that failed is tried again when somebody asks for the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvtide.index import Index, Prompt
from kvtide.index.keys import chain
from kvtide.storage import Store
from kvtide.transfer.store_link import StoreLink, object_key
from kvtide.transfer.transfers import Verdict

MAX_REMOVALS = 4
"""How many removals ranks talk about at a time; the rest waits for the next."""


@dataclass(slots=True, eq=False)
class Removal:
    """What begins with the first page of a prompt. `answer` is None once it failed somewhere."""

    prompt: Prompt
    keys: list[bytes]
    answer: Future[int] | None = None

    def forbids(self, prompt: Prompt, page_bytes: int) -> bool:
        mine, its = self.prompt, prompt
        same_root = (mine.namespace, mine.head) == (its.namespace, its.head)
        return same_root and mine.body[:page_bytes] == its.body[:page_bytes]


class Removals:
    """All that were not done on every rank yet, oldest first."""

    def __init__(self, index: Index, link: StoreLink) -> None:
        self._index = index
        self._link = link
        self._removals: list[Removal] = []

    def __len__(self) -> int:
        """How many the store has in its hands."""
        return len(self._under_way())

    def begin(self, prompt: Prompt, known: list[bytes]) -> list[bytes]:
        """Remove the prompt's pages, and those known by key; the keys of all these pages."""
        root, size = self._index.prompt_key(prompt), self._index.page_bytes
        body = prompt.body[: len(prompt.body) // size * size]
        keys = list(dict.fromkeys([*chain(root, body, size), *known]))
        if keys:
            copy = Prompt(prompt.head + prompt.body, prompt.namespace, prompt.holdback)
            self._removals.append(Removal(copy, keys))
            self._ask(self._removals[-1])
        return keys

    def forbid(self, prompt: Prompt) -> bool:
        """Whether the store may still have what must not be found of the prompt."""
        size = self._index.page_bytes
        against = [one for one in self._removals if one.forbids(prompt, size)]
        for one in against:
            if one.answer is None:
                self._ask(one)
        return bool(against)

    def give_up(self) -> list[Removal]:
        """The store is asked no more: what it may still have."""
        given_up, self._removals = self._removals, []
        return given_up

    def verdicts(self) -> list[int]:
        return [_verdict(one.answer) for one in self._under_way()[:MAX_REMOVALS]]

    def settle(self, agreed: Sequence[int]) -> None:
        """What was removed on every rank is forgotten here; what failed anywhere stays."""
        for one, verdict in zip(self._under_way(), agreed, strict=False):
            if verdict == Verdict.LANDED:
                self._removals.remove(one)
            elif verdict == Verdict.FAILED:
                one.answer = None

    def _under_way(self) -> list[Removal]:
        return [one for one in self._removals if one.answer is not None]

    def _ask(self, removal: Removal) -> None:
        anchors = self._index.anchor_names
        objects = [object_key(key, anchor) for key in removal.keys for anchor in anchors]

        def remove(store: Store) -> int:
            return store.remove(objects)

        removal.answer = self._link.ask(remove)


def _verdict(answer: Future[int] | None) -> Verdict:
    assert answer is not None
    if not answer.done():
        return Verdict.PENDING
    return Verdict.FAILED if answer.exception() is not None else Verdict.LANDED
