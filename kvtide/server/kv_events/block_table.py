"""The index's changes as blocks that appear on a medium, or leave it.

The table follows the changes of one index, and never looks at the index. It knows the block in
every slot, so that a removal needs no hashing, and all blocks with their tokens, so that it can
list what is there to a consumer that knows nothing.

What it shows keeps two rules that consumers rely on:

- A block is shown once per medium and group. Pages that differ only in the tokens after them (the
  holdback) are one block, which leaves with the last of them.
- On the GPU, a block of the history is shown after the block before it and leaves before it.
  Copies may land in another order; then the later block waits.

On STORAGE it shows what a folder has of the history's blocks whose tokens are known: from the
index, or from prompts that the store was asked for (`name`). `settle` looks there before it forgets
a block that left the index, so a page that is stored and then evicted from the host stays known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from struct import Struct
from typing import NamedTuple

from kvtide.index import Namespace
from kvtide.index.keys import page_key, root_key
from kvtide.server.kv_events.block_hashes import BlockHashes
from kvtide.server.kv_events.folder_pages import FolderPages
from kvtide.server.kv_events.index_feed import PageChange, PagesRemoved, PagesStored, cell_names
from kvtide.server.kv_events.kv_groups import MEDIA, KVGroup
from kvtide.spec import Tier

RECENT_PAGES = 8192
"""So many blocks are remembered by their pages' tokens."""
MAX_STORED_BLOCKS = 250_000
"""So many are shown on STORAGE; then the first of them leave. Each takes about 1 kB here."""


class Block:
    """One page's tokens after `parent`, as events have them. `held`, `shown`: a bit per cell.

    digest, parent  hashes of the block and of the one before it
    key     the page's, by which stores find it
    below   blocks after it that are shown on the GPU
    copies  further pages of this block that a cell holds, by the cell's bit
    """

    __slots__ = (
        "below",
        "copies",
        "digest",
        "held",
        "key",
        "namespace",
        "parent",
        "shown",
        "tokens",
    )

    def __init__(
        self, digest: bytes, key: bytes, parent: bytes | None, tokens: bytes, namespace: Namespace
    ) -> None:
        self.digest = digest
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.namespace = namespace
        self.drop()

    def drop(self) -> None:
        """No cell holds it."""
        self.held = self.shown = self.below = 0
        self.copies: Counter[int] | None = None


class BlockPlace(NamedTuple):
    """Behind a block, or at the beginning of a namespace's prompts: with the key of the page
    before, or what such keys begin with."""

    key: bytes
    digest: bytes | None
    namespace: Namespace


def _behind(block: Block) -> BlockPlace:
    return BlockPlace(block.key, block.digest, block.namespace)


class BlockCell(NamedTuple):
    """A group on a medium. `ordered`: see the module."""

    bit: int
    tier: Tier
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
    """See the module. `changes` are those since they were last taken, of `pages` blocks.

    whole        all that is readable in the index has come
    pack         writes a block's tokens as events have them
    fingerprint  what page keys begin with: the index's
    """

    def __init__(
        self,
        groups: Mapping[str, KVGroup],
        hashes: BlockHashes,
        page_tokens: int,
        pack: Callable[[tuple[int, ...]], bytes],
        fingerprint: bytes = b"",
    ) -> None:
        self._hashes = hashes
        self._pack = pack
        self._page = Struct(f"<{page_tokens}i")
        self._fingerprint = fingerprint
        self._cells = _cells(groups)
        on_storage = (cell for cell in self._cells if cell.published and cell.tier is Tier.STORAGE)
        self._storage = next(on_storage, None)
        self._folder: FolderPages | None = None
        self._stored: dict[bytes, Block] = {}
        self._watched: dict[bytes, Block] = {}
        self._unwatched: dict[bytes, Block] = {}
        self._left: list[Block] = []
        self.blocks: dict[bytes, Block] = {}
        self.clear()

    def clear(self) -> None:
        """Forget what the index has, which is read anew; what the folder has stays."""
        bit = self._storage.bit if self._folder is not None and self._storage is not None else 0
        for block in self.blocks.values():
            kept = block.held & bit
            block.drop()
            block.held = block.shown = kept
        self._left += [block for block in self.blocks.values() if not block.held]
        self.changes: list[Change] = []
        self.pages = 0
        self._slots: list[dict[int, Block]] = [{} for _ in self._cells]
        self._waiting: dict[bytes, dict[bytes, Block]] = {}
        self._recent: dict[tuple[bytes, bytes], Block] = {}
        self.whole = False
        self._forget_left()

    def take(self) -> list[Change]:
        taken, self.changes, self.pages = self.changes, [], 0
        return taken

    def hear(self, change: PageChange) -> None:
        """Follow the index by one change; all must come, in order.

        Until the table is whole, a change may be of pages behind one that is not here yet, or
        repeat what is here (`TreeReading`).
        """
        cell, slots = self._cells[change.cell], self._slots[change.cell]
        numbers = memoryview(change.slots).cast("i").tolist()
        if isinstance(change, PagesRemoved):
            for slot in reversed(numbers):  # The last leave first.
                if slot in slots or self.whole:
                    self._lose(cell, slots.pop(slot))
            return
        place = self._place(change)
        if place is None:
            return
        for slot, piece in zip(numbers, self._pieces(change.tokens), strict=True):
            if slot not in slots:
                slots[slot] = block = self._known(self._block(place, piece))
                self._hold(cell, block)
            assert slots[slot].parent == place.digest, f"slot {slot} has another page"
            place = _behind(slots[slot])

    # -- which block ------------------------------------------------------------------------

    def _pieces(self, tokens: bytes) -> list[bytes]:
        size = self._page.size
        return [tokens[start : start + size] for start in range(0, len(tokens), size)]

    def _block(self, place: BlockPlace, piece: bytes) -> Block:
        """The block of these packed tokens.

        A page comes to one medium soon after another, and is then not hashed again.
        """
        block = self._recent.get((place.key, piece))
        if block is None:
            tokens = self._page.unpack(piece)
            key = page_key(place.key, piece)
            digest = self._hashes.of(key, place.digest, tokens, place.namespace)
            block = Block(digest, key, place.digest, self._pack(tokens), place.namespace)
            if len(self._recent) >= RECENT_PAGES:
                self._recent.clear()
            self._recent[place.key, piece] = block
        return block

    def _known(self, block: Block) -> Block:
        """The block that stands for all pages of its hash."""
        known = self.blocks.setdefault(block.digest, block)
        if known is block and self._folder is not None and block.key not in self._watched:
            self._unwatched[block.key] = block
        return known

    def _place(self, change: PagesStored) -> BlockPlace | None:
        """Where the change's pages begin; None behind a page that is not here yet."""
        if change.above is None:
            assert change.namespace is not None
            place = self._beginning(Namespace(*change.namespace))
        else:
            cell, slot = change.above
            above = self._slots[cell].get(slot)
            if above is None:
                assert not self.whole, f"nothing is in slot {slot} of cell {cell}"
                return None
            place = _behind(above)
        for piece in self._pieces(change.between):
            place = _behind(self._block(place, piece))
        return place

    def _beginning(self, namespace: Namespace) -> BlockPlace:
        return BlockPlace(root_key(self._fingerprint, namespace), None, namespace)

    # -- what the folder has ----------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether a folder is followed."""
        return self._folder is not None

    def follow(self, folder: FolderPages | None) -> None:
        """Show on STORAGE what this folder has; None: nothing."""
        for block in list(self._stored.values()):
            self._note_stored(block, there=False)
        self._watched.clear()
        self._folder = folder if self._storage is not None else None
        if self._folder is None:
            self._unwatched = {}
        else:
            self._unwatched = {block.key: block for block in self.blocks.values()}

    def name(self, namespace: Namespace, tokens: bytes) -> None:
        """The store was asked for this prompt: the folder may have its whole pages."""
        if self._folder is None:
            return
        place, size = self._beginning(namespace), self._page.size
        for piece in self._pieces(tokens[: len(tokens) // size * size]):
            block = self._block(place, piece)
            self._left.append(self._known(block))
            place = _behind(block)

    def settle(self) -> None:
        """Take in what the folder has, and forget blocks that are nowhere."""
        if self._folder is not None:
            for key, there in self._folder.look():
                self._note_stored(self._watched[key], there)
            new, self._unwatched = self._unwatched, {}
            self._watched |= new
            for block, there in zip(new.values(), self._folder.watch(list(new)), strict=True):
                self._note_stored(block, there)
            excess = max(0, len(self._stored) - MAX_STORED_BLOCKS)
            for block in list(islice(self._stored.values(), excess)):
                self._note_stored(block, there=False)
                self._unwatch(block)
        self._forget_left()

    def _note_stored(self, block: Block, there: bool) -> None:
        assert self._storage is not None
        if there == (block.key in self._stored):
            return
        if there:
            self._stored[block.key] = block
            self._hold(self._storage, block)
        else:
            del self._stored[block.key]
            self._lose(self._storage, block)

    def _unwatch(self, block: Block) -> None:
        if self._folder is not None and self._watched.pop(block.key, None) is not None:
            self._folder.forget(block.key)

    def _forget_left(self) -> None:
        left, self._left = self._left, []
        for block in left:
            if not block.held and self.blocks.get(block.digest) is block:
                del self.blocks[block.digest]
                self._unwatched.pop(block.key, None)
                self._unwatch(block)

    # -- what is held -----------------------------------------------------------------------

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
            self._left.append(block)

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
        for cell in self._cells:
            shown = [block for block in self.blocks.values() if block.shown & cell.bit]
            after = _children(shown)
            here = {block.digest for block in shown}
            for first in shown:
                if first.parent is None or first.parent not in here:
                    yield from _runs(cell, first, after)


def _cells(groups: Mapping[str, KVGroup]) -> list[BlockCell]:
    """On storage only blocks of the history are published: consumers count all blocks there."""
    cells = []
    for number, (tier, anchor) in enumerate(cell_names(groups)):
        group = groups[anchor]
        published = tier is not Tier.STORAGE or group.history
        ordered = tier is Tier.DEVICE and group.history
        cells.append(BlockCell(1 << number, tier, MEDIA[tier], group, published, ordered))
    return cells


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
