"""All that is readable, as events of being stored, a few nodes at a time.

A tree may have a million nodes, and its owner serves requests. So `advance` visits a bounded number
of nodes, and continues in the next call where it stopped. Between two calls the tree changes, and
its listeners get the changes. A listener that takes events and readings in the order in which they
were made knows all that is readable once the reading is complete, if it does this:

- An event of being stored behind a page that it does not know: skip it. The page is below a node
  that will be visited.
- A page stored where it knows one: it is the same page. Removal of a page that it does not know:
  skip it.

Parents are visited before their children. A node that was visited bears the reading's number. A
child of such a node is visited, is below another pending one, or its events were not to be skipped.
The tree reports what would break this: a split gives pages of a pending node to a new one, and
joining gives them to the lowest node of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtide.index.events import EventFields
from kvtide.index.tree.event_source import EventSource
from kvtide.index.tree.node import Node, Root


class TreeReading:
    """See the module. Of several readings of a tree the last one counts."""

    def __init__(self, events: EventSource, number: int, roots: Iterable[Root]) -> None:
        self._events = events
        self.number = number
        self._pending: list[list[Node]] = [found] if (found := list[Node](roots)) else []

    @property
    def complete(self) -> bool:
        return not self._pending

    def advance(self, nodes: int) -> list[EventFields]:
        """Events of so many further nodes at most, numbered like the last event that was made."""
        found: list[EventFields] = []
        for _ in range(nodes):
            if not self._pending:
                break
            self._visit(self._next(), found)
        return found

    def _next(self) -> Node:
        siblings = self._pending[-1]
        node = siblings.pop()
        if not siblings:
            self._pending.pop()
        return node

    def _visit(self, node: Node, found: list[EventFields]) -> None:
        above = node.parent
        if node.hidden or node.read == self.number:
            return
        if above is None and not isinstance(node, Root):  # It was removed or merged since.
            return
        if above is not None and above.read != self.number:  # It comes again behind that one.
            return
        node.read = self.number
        found.extend(self._events.readable(node))
        if node.children:
            self._pending.append([*node.children.values()])

    # -- what the tree reports --------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        if self._pending and lower.read != self.number:
            self._pending.append([upper])

    def joined(self, run: Sequence[Node]) -> None:
        """The last node of the run has the pages of all."""
        if self._pending and any(node.read != self.number for node in run):
            run[-1].read = 0
            self._pending.append([run[-1]])
