"""Makes the index's events (see `events`) from the tree's nodes, at the cost of a tuple each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvtide.index.events import CellName, Event, EventKind, Listener
from kvtide.index.keys import Namespace
from kvtide.index.tree.node import Node, Root
from kvtide.index.tree.node_keys import NodeKeys

_new = tuple.__new__
_STORED, _REMOVED = EventKind.STORED, EventKind.REMOVED

Origin = tuple[tuple[CellName, int] | None, Namespace | None, bytes]


class EventSource:
    """Notifies listeners. `cells` are the tree's, by number; sizes are bytes of packed tokens."""

    def __init__(
        self, cells: Sequence[CellName], keys: NodeKeys, page_bytes: int, after_bytes: int
    ) -> None:
        self.listeners: list[Listener] = []
        self.number = 0
        self._cells = cells
        self._keys = keys
        self._page_bytes = page_bytes
        self._after_bytes = after_bytes

    def stored(self, node: Node, cell: int, first: int) -> None:
        """The node's pages from `first` on became readable in this cell."""
        self.number += 1
        event = self._stored(node, cell, first)
        for listener in self.listeners:
            listener(event)

    def removed(self, node: Node, cell: int, first: int) -> None:
        """The node's pages from `first` on are about to be dropped from this cell."""
        self.number += 1
        slots = node.resident_slots(cell)
        if first:
            slots = slots[first:]
        fields = (self.number, _REMOVED, self._cells[cell], slots, b"", b"", None, None, b"")
        event = _new(Event, fields)
        for listener in self.listeners:
            listener(event)

    def everything(self, nodes: Iterable[Node]) -> Iterator[Event]:
        """STORED events of all that is readable, numbered like the last event that was made.

        `nodes` are all nodes, parents first.
        """
        for node in nodes:
            if not node.hidden:
                for cell in range(len(self._cells)):
                    if node.resident >> cell & 1:
                        yield self._stored(node, cell, 0)

    def _stored(self, node: Node, cell: int, first: int) -> Event:
        slots, tokens, after = node.resident_slots(cell), node.tokens, b""
        name = self._cells[cell]
        above: tuple[CellName, int] | None
        namespace, between = None, b""
        if first:
            above = (name, slots.item(first - 1))
            slots = slots[first:]
        else:
            above, namespace, between = self._origin(node, cell)
        if self._after_bytes:
            tokens, after = self._by_position(node, first)
        elif first:
            tokens = tokens[first * self._page_bytes :]
        return _new(
            Event,
            (self.number, _STORED, name, slots, tokens, after, above, namespace, between),
        )

    def _origin(self, node: Node, cell: int) -> Origin:
        """What comes before the node: see `Event`."""
        above = node.parent
        assert above is not None
        if (here := above.slots[cell]) is not None:
            return (self._cells[cell], here.item(-1)), None, b""
        passed: list[Node] = []
        while not above.resident and above.parent is not None:
            passed.append(above)
            above = above.parent
        between = self._between(passed, above) if passed else b""
        if isinstance(above, Root):
            namespace = above.name[0]
            assert isinstance(namespace, Namespace), "hidden pages cause no events"
            return None, namespace, between
        lowest = (above.resident & -above.resident).bit_length() - 1
        return (self._cells[lowest], above.resident_slots(lowest).item(-1)), None, between

    def _between(self, passed: Sequence[Node], above: Node) -> bytes:
        """The tokens, by position, of nodes that no tier has; the lowest comes first."""
        joined = self._keys.after(above) + b"".join(node.tokens for node in reversed(passed))
        return joined[: len(joined) - self._after_bytes]

    def _by_position(self, node: Node, first: int) -> tuple[bytes, bytes]:
        """The tokens of the node's pages from `first` on, and those of the holdback behind them."""
        assert node.parent is not None
        joined = self._keys.after(node.parent) + node.tokens
        end = len(joined) - self._after_bytes
        return joined[first * self._page_bytes : end], joined[end:]
