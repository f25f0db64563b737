"""The eviction policies, by name: a key per node, the smallest goes first.

Keys depend on neither wall time nor chance. A policy reads what `Tree` keeps in the node: `last`
(tick of the latest use), `born` (tick of its insertion), `hits` (how often it was reused) and
`priority` (the highest of its requests).
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvtide.index.tree.node import Node


class Policy:
    """The order in which the nodes of a cell lose their pages.

    rises  a node's key never falls while it is cached: it needs no second entry when used
    """

    rises: ClassVar[bool] = True

    def key(self, node: Node) -> Any:
        raise NotImplementedError


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


DEFAULT_POLICY = "lru"

POLICIES: dict[str, type[Policy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "fifo": Fifo,
    "mru": Mru,
    "filo": Filo,
    "priority": Priority,
}


def policy_named(name: str) -> Policy:
    if name not in POLICIES:
        raise ValueError(f"no eviction policy named {name}; use {', '.join(POLICIES)}")
    return POLICIES[name]()
