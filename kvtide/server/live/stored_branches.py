"""Which branches of the tree's outline a store has, for their colour.

The tree does not know what a store holds. So the last page of every shown branch is looked for: in
one call of the store every ten seconds, while there are viewers, and not waited for. Keys of pages
are computed on the engine's thread, one branch at a time within the caller's bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from kvtide.engine import Engine
from kvtide.index import TreeBranch
from kvtide.spec import RankShape
from kvtide.storage import Store
from kvtide.storage.objects import object_key

ASK_EVERY_S = 10.0


class StoredBranches:
    """See the module. `shape`: the ranks whose objects make up a page."""

    def __init__(self, shape: RankShape) -> None:
        self._shape = shape
        self._pending: deque[TreeBranch] = deque()
        self._keys: dict[bytes, list[TreeBranch]] = {}
        self._there: set[bytes] = set()
        self._asked: Sequence[bytes] = ()
        self._answer: Future[list[bool]] | None = None
        self._ask_at = 0.0

    def begin(self, branches: Sequence[TreeBranch]) -> None:
        """An outline with these branches, parents first, takes the place of the one before."""
        self._pending, self._keys = deque(branches), {}

    def advance(self, engine: Engine, now: float, in_time: Callable[[], bool]) -> bool:
        """Go on while it is in time; whether more is known of the branches."""
        was_pending = bool(self._pending)
        while self._pending and in_time():
            branch = self._pending.popleft()
            key = engine.cache.index.last_page_key(branch)
            if key is not None:
                self._keys.setdefault(key, []).append(branch)
        if self._pending:
            return False
        answered = self._hear()
        self._ask(engine, now)
        return (was_pending or answered) and self._mark()

    def _hear(self) -> bool:
        """Take in the store's answer, if it has come; an error says nothing."""
        answer = self._answer
        if answer is None or not answer.done():
            return False
        self._answer = None
        if answer.cancelled() or answer.exception() is not None:
            return False
        found, parts = answer.result(), len(answer.result()) // max(1, len(self._asked))
        self._there = {
            key
            for number, key in enumerate(self._asked)
            if all(found[number * parts : (number + 1) * parts])
        }
        return True

    def _ask(self, engine: Engine, now: float) -> None:
        if self._answer is not None or not self._keys or now < self._ask_at:
            return
        storage, index = engine.cache.storage, engine.cache.index
        suffixes = storage.object_suffixes(index.counted_anchor, self._shape)
        self._asked, self._ask_at = list(self._keys), now + ASK_EVERY_S
        objects = [object_key(key, suffix) for key in self._asked for suffix in suffixes]
        self._answer = storage.ask(partial(_exist, objects))

    def _mark(self) -> bool:
        """Whether any branch is another one than it was marked as."""
        changed = False
        for key, branches in self._keys.items():
            there = key in self._there
            for branch in branches:
                changed = changed or branch.stored != there
                branch.stored = there
        return changed


def _exist(objects: Sequence[bytes], store: Store) -> list[bool]:
    return store.exists(objects)
