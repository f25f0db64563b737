"""Making room in a cell: promise slots, evicting what the policy gives up first."""

from __future__ import annotations

from collections.abc import Mapping

from kvtide.index.books import Books
from kvtide.index.node import Node


class Room:
    def __init__(self, books: Books) -> None:
        self._books = books

    def reserve(self, needs: Mapping[int, int]) -> bool:
        """Promise slots in several cells, in all or in none; evicts only if it can succeed."""
        cells = self._books.cells
        short = [cell for cell, count in needs.items() if count > cells[cell].slots.available]
        for cell in short:
            books = cells[cell]
            if needs[cell] > books.slots.available + books.resident_pages - books.pinned_pages:
                return False
        for cell in short:
            missing = needs[cell] - cells[cell].slots.available
            if self.evict(cell, max(missing, cells[cell].batch_pages)) < missing:
                return False
        for cell, count in needs.items():
            promised = cells[cell].slots.reserve(count)
            assert promised, "room was made, yet there is none"
        return True

    def evict(self, cell: int, pages: int) -> int:
        """Drop at least `pages` pages from a cell if so many are evictable; how many it were.

        Nodes that follow each other and were always used together go together.
        """
        books, queue = self._books, self._books.cells[cell].queue
        dropped = 0
        node = queue.pop()
        while node is not None:
            used, parent = (node.last, node.hits), node.parent
            count = self.share(node, cell, pages - dropped)
            dropped += count
            if count == node.pages:
                books.drop(node, cell)
            elif self._alone(node, cell):
                books.truncate(node, node.pages - count, cell)
            else:
                books.drop(self.tail(node, count), cell)
            if dropped >= pages:
                break
            if parent is None or (parent.last, parent.hits) != used or not queue.evictable(parent):
                parent = queue.pop()
            node = parent
        return dropped

    def share(self, node: Node, cell: int, pages: int) -> int:
        """How many pages to take off a victim's end when `pages` are wanted.

        Runs are cut in multiples of a batch. A window or a state is of no use in part, so those
        go whole.
        """
        books = self._books.cells[cell]
        if books.reach is not None or node.pages <= books.batch_pages:
            return node.pages
        return min(node.pages, -(-pages // books.batch_pages) * books.batch_pages)

    def tail(self, node: Node, pages: int) -> Node:
        """The last `pages` pages of the node as a node of their own."""
        if pages < node.pages:
            self._books.split(node, node.pages - pages)
        return node

    @staticmethod
    def _alone(node: Node, cell: int) -> bool:
        """Whether this cell is all that keeps the node in the tree."""
        return node.resident == 1 << cell and not (node.arriving or node.children or any(node.pins))
