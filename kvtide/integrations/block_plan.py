"""What of an engine's requests is stored, is to be loaded, and is to be saved, by blocks.

The scheduler's half of a connector: it asks the store and plans; `block_moves` in the workers moves
bytes. An engine's request has an id, its number of tokens, and a hash of each whole block, chained
over all tokens from the first one on: the block's name.

- A look-up is a task: the scheduler asks again at a later step, and is never kept waiting.
- Every rank has a part of a block. A block is there if all parts are.
- A block is saved at the step that computes its last token, or the next one if the engine learns
  that token later. It is immutable from then on.
- A request whose load failed in part computes; it is not looked up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvtide.integrations.page_objects import PageObjects, PagePool, leading
from kvtide.integrations.page_tasks import Page, PageTasks, Wakening

ASKING = 2
"""Threads for look-ups."""


class HashedRequest(Protocol):
    """What the plan reads of an engine's request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks of a request: their names in the store, their numbers in the cache."""

    request: str
    names: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a request that a step computes."""

    request: str
    computed_tokens: int
    tokens: int


@dataclass(slots=True)
class _LookUp:
    """Blocks from `first` on. `found` of them are there, once the task has ended."""

    task: int
    first: int
    found: int | None = None
    computed: int = 0


class BlockPlan:
    """The requests of one scheduler, which calls it from one thread.

    asked ──answer──▶ found ──blocks allocated──▶ loading ──ended──▶ running ──finished──▶ forgotten

    pools  of the ranks, in which a block has a page each
    """

    def __init__(self, objects: PageObjects, block_tokens: int) -> None:
        self.pools: Sequence[PagePool] = ()
        self._objects = objects
        self._block_tokens = block_tokens
        self._tasks: PageTasks[int] = PageTasks("look-up", ASKING, objects, Wakening())
        self._lookups: dict[str, _LookUp] = {}
        self._requests: dict[str, HashedRequest] = {}
        self._loading: dict[str, frozenset[int]] = {}
        self._failed: set[str] = set()
        self._saved: dict[str, int] = {}
        """How many blocks at the front of a request are saved, or need not be."""
        self._saving: set[str] = set()
        self._loads: list[Move] = []
        self._saves: list[Move] = []

    def found(self, request: HashedRequest, computed_tokens: int) -> int | None:
        """Tokens in the store behind those that are computed; None: ask again at a later step.

        The last token is never among them: its logits are computed.
        """
        first = computed_tokens // self._block_tokens
        last = min(len(request.block_hashes), (request.num_tokens - 1) // self._block_tokens)
        if first >= last or request.request_id in self._failed:
            return 0
        one = self._lookups.get(request.request_id)
        if one is None or first < one.first:
            one = self._lookups[request.request_id] = self._look_up(request, first, last)
        self._answer()
        if one.found is None:
            return None
        one.computed = first
        return max(0, one.first + one.found - first) * self._block_tokens

    def allocated(self, request: HashedRequest, blocks: Sequence[int], tokens: int) -> None:
        """Of the request's blocks, those for the tokens that were found are to be loaded."""
        one = self._lookups.pop(request.request_id, None)
        self._requests[request.request_id] = request
        if tokens:
            assert one is not None
            part = slice(one.computed, one.computed + tokens // self._block_tokens)
            self._loads.append(_move(request, blocks, part))
            self._loading[request.request_id] = frozenset(blocks[part])

    def loaded(self, requests: Iterable[str], failed_blocks: Iterable[int]) -> None:
        """Requests whose loads ended, and blocks of any request that could not be loaded."""
        failed = frozenset(failed_blocks)
        self._failed |= {request for request, some in self._loading.items() if some & failed}
        for request in requests:
            self._loading.pop(request, None)

    def step(
        self, chunks: Iterable[Chunk], blocks_of: Callable[[str], Sequence[int]]
    ) -> tuple[list[Move], list[Move]]:
        """What is to be loaded, and what is to be saved once this step has computed its chunks."""
        for chunk in chunks:
            request, computed = self._requests[chunk.request], chunk.computed_tokens
            first = min(computed // self._block_tokens, self._saved.get(chunk.request, computed))
            self._save(request, first, computed + chunk.tokens, blocks_of)
        loads, self._loads, saves, self._saves = self._loads, [], self._saves, []
        return loads, saves

    def finished(self, request: HashedRequest, computed_tokens: int, blocks: Sequence[int]) -> bool:
        """Are blocks of the request being saved? Then its last ones are in the next step's moves.

        What the last token computes is not: the engine may stop before.
        """
        known = request.request_id
        if known in self._saved:
            computed = min(computed_tokens, request.num_tokens - 1)
            self._save(request, self._saved[known], computed, lambda _: blocks)
        self._lookups.pop(known, None)
        self._requests.pop(known, None)
        self._saved.pop(known, None)
        self._failed.discard(known)
        is_saving = known in self._saving
        self._saving.discard(known)
        return is_saving

    def close(self) -> None:
        self._tasks.close()

    # -- the steps --------------------------------------------------------------------------

    def _look_up(self, request: HashedRequest, first: int, last: int) -> _LookUp:
        names = request.block_hashes[first:last]
        pages = [Page(None, bytes(name), pool) for pool in self.pools for name in names]
        return _LookUp(self._tasks.submit(pages, self._exists, partial(_common, len(names))), first)

    def _exists(self, pool: PagePool, pages: list[Page]) -> list[bool]:
        return self._objects.exists(pool, [page.name for page in pages])

    def _answer(self) -> None:
        """Hand out the answers that there are; those to forgotten questions go."""
        answers = self._tasks.take_all()
        for one in self._lookups.values() if answers else ():
            one.found = answers.get(one.task, one.found)

    def _save(
        self,
        request: HashedRequest,
        first: int,
        computed_tokens: int,
        blocks_of: Callable[[str], Sequence[int]],
    ) -> None:
        end = min(computed_tokens // self._block_tokens, len(request.block_hashes))
        self._saved[request.request_id] = first
        if first < end:
            blocks = blocks_of(request.request_id)
            self._saves.append(_move(request, blocks, slice(first, end)))
            self._saved[request.request_id] = end
            self._saving.add(request.request_id)


def _move(request: HashedRequest, blocks: Sequence[int], part: slice) -> Move:
    names = tuple(bytes(name) for name in request.block_hashes[part])
    assert len(names) == len(blocks[part])
    return Move(request.request_id, names, tuple(blocks[part]))


def _common(blocks: int, there: list[bool]) -> int:
    """How many blocks from the first on have the parts of all ranks."""
    return min(leading(there[at : at + blocks]) for at in range(0, len(there), blocks))
