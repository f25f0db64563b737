"""The eviction policies, by name: a key per node, the smallest goes first.

Keys depend on neither wall time nor chance. A policy reads what `Tree` keeps in the node: `last`
(tick of the latest use), `born` (tick of its insertion), `hits` (how often it was reused) and
`priority` (the highest of its requests).
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvtide.index.evict.reuse_rates import CLASSES, ReuseRates
from kvtide.index.tree.node import Node


class Policy:
    """The order in which the nodes of a cell lose their pages.

    rises   a node's key never falls while it is cached: it needs no second entry when used
    learns  `evicts` is called with a victim per eviction, and `reuse_rates` learns from every use
    """

    rises: ClassVar[bool] = True
    learns: ClassVar[bool] = False

    def key(self, node: Node) -> Any:
        raise NotImplementedError

    def evicts(self, node: Node) -> None:
        """The node is the first victim of an eviction."""


class Lru(Policy):
    """Least recently used."""

    def key(self, node: Node) -> Any:
        return node.last


class Lhd(Policy):
    """Least hit density: LRU, but pages of a class that is worth less go sooner (`reuse_rates`).

    The class that is worth most at the age at which it goes stays as long as there is room. Another
    goes at the age at which it is worth nearly as much: rates are estimates. Without learned rates
    all go at the same age, as in LRU. The tree learns none for memories with windows or states,
    where LRU finds more: a page is of no use without a checkpoint behind it.

    Keys of nodes change with the rates. An entry under a higher key than the present one stays
    where it is: entering all nodes of a class again would cost more than a late victim.
    """

    learns = True

    def __init__(self, rates: ReuseRates) -> None:
        self._rates = rates
        self._sooner = [0] * CLASSES
        self._evictions = 0

    def key(self, node: Node) -> Any:
        hits = node.hits
        return node.last - self._sooner[hits if hits < CLASSES else -1]

    def evicts(self, node: Node) -> None:
        self._evictions += 1
        if self._evictions % _LEARNED_EVICTIONS == 0:
            age = max(self._rates.now - self.key(node), 1)
            self._rates.note_life(age)
            self._sooner = [age - each for each in self._rates.even_ages(age, _NEARLY)]


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


_LEARNED_EVICTIONS = 8
"""Of so many evictions one is learned from."""
_NEARLY = 0.7
"""As a fraction of the worth of the class that is worth most."""

DEFAULT_POLICY = "lhd"

POLICIES: dict[str, type[Policy]] = {
    "lru": Lru,
    "lhd": Lhd,
    "lfu": Lfu,
    "slru": Slru,
    "fifo": Fifo,
    "mru": Mru,
    "filo": Filo,
    "priority": Priority,
}


def policy_named(name: str, rates: ReuseRates) -> Policy:
    """A policy for one cell; `rates` are those of its tree."""
    if name not in POLICIES:
        raise ValueError(f"no eviction policy named {name}; use {', '.join(POLICIES)}")
    policy = POLICIES[name]
    return policy(rates) if issubclass(policy, Lhd) else policy()
