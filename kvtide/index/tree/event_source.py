"""Makes the index's events (see `events`) from the tree's nodes, at the cost of a tuple each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtide.index.events import (
    CellName,
    EventFields,
    EventKind,
    FieldsListener,
    PackedSizes,
)
from kvtide.index.tree.node import Node, Root
from kvtide.index.tree.node_keys import NodeKeys

_STORED, _REMOVED = EventKind.STORED, EventKind.REMOVED


class EventSource:
    """Notifies listeners. `cells` are the tree's, by number."""

    def __init__(self, cells: Sequence[CellName], keys: NodeKeys, sizes: PackedSizes) -> None:
        self.listeners: list[FieldsListener] = []
        self.number = 0
        self._notify: FieldsListener = self._notify_all
        self._cells = cells
        self._keys = keys
        self._sizes = sizes

    def subscribe(self, listener: FieldsListener) -> None:
        self.listeners.append(listener)
        self._notify = listener if len(self.listeners) == 1 else self._notify_all

    def _notify_all(self, fields: EventFields) -> None:
        for listener in self.listeners:
            listener(fields)

    def stored(self, node: Node, cell: int, first: int) -> None:
        """The node's pages from `first` on became readable in this cell."""
        self.number = number = self.number + 1
        above = node.parent
        beside = above.slots[cell]  # type: ignore[union-attr]
        if beside is None and not first:
            self._notify(self._from_start(node, cell))
            return
        name, slots, tokens = self._cells[cell], node.slots[cell], node.tokens
        lead = above.tokens  # type: ignore[union-attr]
        self._notify((number, _STORED, name, first, slots, tokens, self._sizes, lead, name, beside))

    def removed(self, node: Node, cell: int, first: int) -> None:
        """The node's pages from `first` on are about to be dropped from this cell."""
        self.number = number = self.number + 1
        self._notify((number, _REMOVED, self._cells[cell], first, node.slots[cell]))

    def readable(self, node: Node) -> Iterator[EventFields]:
        """STORED events of all cells of the node, numbered like the last event that was made."""
        for cell in range(len(self._cells)):
            if node.resident >> cell & 1:
                yield self._from_start(node, cell)

    def _from_start(self, node: Node, cell: int) -> EventFields:
        """All pages of the node were stored; the one before them may be in any cell, or in none."""
        above = node.parent
        assert above is not None
        lead, between, namespace, where, beside = above.tokens, b"", None, None, None
        if not above.resident and above.parent is not None:
            above, between = self._passed(above)
        if isinstance(above, Root):
            namespace, lead = above.name[0], lead or above.name[1]
        else:
            lowest = (above.resident & -above.resident).bit_length() - 1
            where, beside = self._cells[lowest], above.slots[lowest]
        name, slots = self._cells[cell], node.slots[cell]
        return (
            *(self.number, _STORED, name, 0, slots, node.tokens, self._sizes),
            *(lead, where, beside, namespace, between),
        )

    def _passed(self, node: Node) -> tuple[Node, bytes]:
        """The first node above that a tier has, or the root, and the tokens, by position, of the
        nodes from there to this one."""
        passed: list[Node] = []
        while not node.resident and node.parent is not None:
            passed.append(node)
            node = node.parent
        joined = self._keys.after(node) + b"".join(each.tokens for each in reversed(passed))
        return node, joined[: len(joined) - self._sizes.after_bytes]
