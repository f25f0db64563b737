"""Eviction policies: a key per node, the smallest goes first. No wall time, no chance.

A policy reads what `Books` keeps in the node: `last` (tick of the latest use), `born` (tick of
its insertion), `hits` (how often it was reused), `priority` (the highest a request gave it).
`rises` promises that a node's key never falls while it is cached; the eviction queue then needs
no second entry when the node is used. `tide` has the default policy, `choice` the list of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from kvtide.index.tree.node import Node


class Policy:
    """The interface, and its do-nothing hooks. One instance serves one cell.

    `bets`: the policy chooses among candidates (`victim`), and wants to know what happens.
    """

    rises: ClassVar[bool] = True
    bets: ClassVar[bool] = False

    def key(self, node: Node) -> Any:
        raise NotImplementedError

    def asked(self, pages: int) -> None:
        """A request with a prompt of so many pages begins."""

    def used(self, node: Node) -> None:
        """The node's pages were found by a match and will be read."""

    def inserted(self, node: Node, first: int) -> None:
        """The node's pages from number `first` on came into the cell."""

    def removed(self, node: Node, first: int) -> None:
        """The node's pages from number `first` on are about to leave the cell."""

    def withdrawn(self, node: Node) -> None:
        """The node's pages are nobody's any more, whatever any policy would have kept."""

    def merged(self, upper: Node, lower: Node) -> None:
        """The lower node is about to take over the upper one's pages."""

    def victim(self, oldest: Node, some: Callable[[], list[Node]]) -> Node:
        """Who goes: the node with the smallest key, or one of a sample that `some()` draws."""
        return oldest


class Lru(Policy):
    """Least recently used."""

    def key(self, node: Node) -> Any:
        return node.last


class Mru(Policy):
    """Most recently used first: for cyclic scans over more than fits."""

    rises = False

    def key(self, node: Node) -> Any:
        return -node.last


class Fifo(Policy):
    """First in, first out, however often used."""

    def key(self, node: Node) -> Any:
        return node.born


class Filo(Policy):
    """Last in, first out."""

    rises = False

    def key(self, node: Node) -> Any:
        return -node.born


class Lfu(Policy):
    """Least often used; among equals the least recently used."""

    def key(self, node: Node) -> Any:
        return (node.hits, node.last)


class Slru(Policy):
    """Two segments: what was never reused goes before what was, each least recently used first."""

    def key(self, node: Node) -> Any:
        return (node.hits > 0, node.last)


class Priority(Policy):
    """The lowest request priority first; among equals the least recently used."""

    def key(self, node: Node) -> Any:
        return (node.priority, node.last)
