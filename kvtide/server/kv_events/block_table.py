"""The index's events as blocks that appear on a medium, or leave it.

The table follows the events of one index on a thread of its own, and never looks at the index. It
knows the block in every slot, so that a removal needs no hashing, and all blocks with their
tokens, so that it can list what is there to a consumer that knows nothing.

What it shows keeps two rules that consumers rely on:

- A block is shown once per medium and group. Pages that differ only in the tokens after them (the
  holdback) are one block, which leaves with the last of them.
- On the GPU, a block of the history is shown after the block before it and leaves before it.
  Copies may land in another order; then the later block waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from struct import Struct
from typing import NamedTuple

from kvtide.index import Event, EventKind, Namespace
from kvtide.index.events import CellName
from kvtide.server.kv_events.block_hashes import BlockHashes
from kvtide.server.kv_events.kv_groups import MEDIA, KVGroup
from kvtide.spec import Tier

PAUSE_PAGES = 16
RECENT_PAGES = 8192
"""So many blocks are remembered by their pages' tokens."""


class Block:
    """One page's tokens after `parent`, as events have them. `held`, `shown`: a bit per cell.

    below   blocks after it that are shown on the GPU
    copies  further pages of this block that a cell holds, by the cell's bit
    """

    __slots__ = ("below", "copies", "digest", "held", "namespace", "parent", "shown", "tokens")

    def __init__(
        self, digest: bytes, parent: bytes | None, tokens: bytes, namespace: Namespace
    ) -> None:
        self.digest = digest
        self.parent = parent
        self.tokens = tokens
        self.namespace = namespace
        self.held = self.shown = self.below = 0
        self.copies: Counter[int] | None = None


class BlockCell(NamedTuple):
    """A group on a medium. `ordered`: see the module."""

    bit: int
    medium: str
    group: KVGroup
    published: bool
    ordered: bool


class Appeared(NamedTuple):
    """Blocks that follow each other, on a medium."""

    cell: BlockCell
    blocks: list[Block]


class Left(NamedTuple):
    cell: BlockCell
    digests: list[bytes]


Change = Appeared | Left


class BlockTable:
    """See the module. `changes` are those since they were last taken.

    pack   writes a block's tokens as events have them
    pause  is called now and then, so that other threads get the interpreter
    """

    def __init__(
        self,
        groups: Mapping[str, KVGroup],
        hashes: BlockHashes,
        page_tokens: int,
        pack: Callable[[tuple[int, ...]], bytes],
        pause: Callable[[], None],
    ) -> None:
        self._hashes = hashes
        self._pack = pack
        self._pause = pause
        self._page = Struct(f"<{page_tokens}i")
        self._cells = dict(_cells(groups))
        self.clear()

    def clear(self) -> None:
        self.blocks: dict[bytes, Block] = {}
        self.changes: list[Change] = []
        self.pages = 0
        self._slots: dict[CellName, dict[int, Block]] = {name: {} for name in self._cells}
        self._waiting: dict[bytes, dict[bytes, Block]] = {}
        self._recent: dict[tuple[bytes | None, bytes, Namespace], Block] = {}

    def take(self) -> list[Change]:
        taken, self.changes, self.pages = self.changes, [], 0
        return taken

    def hear(self, event: Event) -> None:
        """Follow the index by one event; all must come, in order."""
        cell = self._cells[event.cell]
        if event.kind is EventKind.STORED:
            self._store(event, cell)
            return
        slots, blocks = self._slots[event.cell], self.blocks
        for number, slot in enumerate(reversed(event.slots.tolist()), 1):  # The last leave first.
            self._lose(cell, blocks[slots.pop(slot).digest])
            if not number % PAUSE_PAGES:
                self._pause()

    # -- what is held -----------------------------------------------------------------------

    def _store(self, event: Event, cell: BlockCell) -> None:
        slots = self._slots[event.cell]
        parent, namespace = self._origin(event)
        pieces = self._pieces(event.tokens)
        for number, (slot, piece) in enumerate(zip(event.slots.tolist(), pieces, strict=True), 1):
            # vLLM's hashes do not tell an adapter from a salt of the same name in first blocks:
            # the slot remembers its own.
            slots[slot] = block = self._block(parent, piece, namespace)
            parent = block.digest
            self._hold(cell, self.blocks.setdefault(parent, block))
            if not number % PAUSE_PAGES:
                self._pause()

    def _pieces(self, tokens: bytes) -> list[bytes]:
        size = self._page.size
        return [tokens[start : start + size] for start in range(0, len(tokens), size)]

    def _block(self, parent: bytes | None, piece: bytes, namespace: Namespace) -> Block:
        """The block of these packed tokens.

        A page comes to one medium soon after another, and is then not hashed again.
        """
        key = (parent, piece, namespace)
        block = self._recent.get(key)
        if block is None:
            tokens = self._page.unpack(piece)
            digest = self._hashes.of(parent, tokens, namespace)
            block = Block(digest, parent, self._pack(tokens), namespace)
            if len(self._recent) >= RECENT_PAGES:
                self._recent.clear()
            self._recent[key] = block
        return block

    def _origin(self, event: Event) -> tuple[bytes | None, Namespace]:
        """The hash of the block before the event's, and whose prompt it is."""
        parent: bytes | None
        if event.above is None:
            assert event.namespace is not None
            parent, namespace = None, event.namespace
        else:
            name, slot = event.above
            above = self._slots[name][slot]
            parent, namespace = above.digest, above.namespace
        for piece in self._pieces(event.between):
            parent = self._block(parent, piece, namespace).digest
        return parent, namespace

    def _hold(self, cell: BlockCell, block: Block) -> None:
        if block.held & cell.bit:
            block.copies = block.copies or Counter()
            block.copies[cell.bit] += 1
            return
        block.held |= cell.bit
        if not cell.published:
            return
        if cell.ordered and not self._follows_shown(cell, block):
            assert block.parent is not None
            self._waiting.setdefault(block.parent, {})[block.digest] = block
            return
        self._show(cell, block)

    def _lose(self, cell: BlockCell, block: Block) -> None:
        if block.copies and block.copies[cell.bit]:
            block.copies[cell.bit] -= 1
            return
        block.held &= ~cell.bit
        if block.shown & cell.bit:
            if cell.ordered and block.below:
                self._hide_below(cell, block)
            self._hide(cell, block)
        elif cell.ordered:
            self._wait_no_longer(block)
        if not block.held:
            del self.blocks[block.digest]

    # -- what is shown ----------------------------------------------------------------------

    def _follows_shown(self, cell: BlockCell, block: Block) -> bool:
        if block.parent is None:
            return True
        parent = self.blocks.get(block.parent)
        return parent is not None and bool(parent.shown & cell.bit)

    def _show(self, cell: BlockCell, block: Block) -> None:
        pending = [block]
        while pending:
            block = pending.pop()
            block.shown |= cell.bit
            self._note_shown(cell, block)
            if cell.ordered:
                if block.parent is not None:
                    self.blocks[block.parent].below += 1
                pending.extend(self._waiting.pop(block.digest, {}).values())

    def _note_shown(self, cell: BlockCell, block: Block) -> None:
        self.pages += 1
        last = self.changes[-1] if self.changes else None
        if isinstance(last, Appeared) and last.cell is cell:
            before = last.blocks[-1]
            if before.digest == block.parent:
                last.blocks.append(block)
                return
        self.changes.append(Appeared(cell, [block]))

    def _hide(self, cell: BlockCell, block: Block) -> None:
        block.shown &= ~cell.bit
        if cell.ordered and block.parent is not None:
            self.blocks[block.parent].below -= 1
        self.pages += 1
        last = self.changes[-1] if self.changes else None
        if isinstance(last, Left) and last.cell is cell:
            last.digests.append(block.digest)
        else:
            self.changes.append(Left(cell, [block.digest]))

    def _hide_below(self, cell: BlockCell, top: Block) -> None:
        """Blocks that lose the one before them leave, the last ones first, and wait for it."""
        after = _children(block for block in self.blocks.values() if block.shown & cell.bit)
        below, pending = [], [top]
        while pending:
            found = after.get(pending.pop().digest, [])
            below += found
            pending += found
        for block in reversed(below):
            self._hide(cell, block)
            assert block.parent is not None
            self._waiting.setdefault(block.parent, {})[block.digest] = block

    def _wait_no_longer(self, block: Block) -> None:
        assert block.parent is not None
        waiting = self._waiting[block.parent]
        del waiting[block.digest]
        if not waiting:
            del self._waiting[block.parent]

    def everything(self) -> Iterator[Appeared]:
        """All that is shown, each block after the one before it."""
        for cell in self._cells.values():
            shown = [block for block in self.blocks.values() if block.shown & cell.bit]
            after = _children(shown)
            here = {block.digest for block in shown}
            for first in shown:
                if first.parent is None or first.parent not in here:
                    yield from _runs(cell, first, after)


def _cells(groups: Mapping[str, KVGroup]) -> Iterator[tuple[CellName, BlockCell]]:
    """On storage only blocks of the history are published: consumers count all blocks there."""
    for number, (tier, (anchor, group)) in enumerate(
        (tier, row) for tier in Tier for row in groups.items()
    ):
        published = tier is not Tier.STORAGE or group.history
        ordered = tier is Tier.DEVICE and group.history
        yield CellName(tier, anchor), BlockCell(1 << number, MEDIA[tier], group, published, ordered)


def _children(blocks: Iterator[Block] | list[Block]) -> dict[bytes, list[Block]]:
    after: dict[bytes, list[Block]] = {}
    for block in blocks:
        if block.parent is not None:
            after.setdefault(block.parent, []).append(block)
    return after


def _runs(cell: BlockCell, first: Block, after: Mapping[bytes, list[Block]]) -> Iterator[Appeared]:
    pending = [first]
    while pending:
        run = [pending.pop()]
        while following := after.get(run[-1].digest):
            pending += following[1:]
            run.append(following[0])
        yield Appeared(cell, run)
