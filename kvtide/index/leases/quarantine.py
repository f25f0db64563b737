"""Quarantine: pages that no match may find again, dropped as soon as nothing pins them.

A *hidden* tree hangs on a root that no prompt names. Quarantined pages are moved to one, and a
lease of a scratch prompt computes in one. Leases and arrivals in it work unchanged: they use their
node and its parents, not the root's name. Hidden pages that nothing pins are dropped by the verb
that unpinned them, so that eviction and demotion never meet one.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtide.index.keys import Prompt
from kvtide.index.tree.node import Node
from kvtide.index.tree.tree import Tree


def quarantine(tree: Tree, prompt: Prompt) -> int:
    """Hide all pages behind the prompt's first page; returns their number over all cells."""
    root = tree.roots.get((prompt.namespace, prompt.head))
    top = root.children.get(prompt.body[: tree.page_bytes]) if root is not None else None
    if top is None:
        return 0
    tree.tick += 1
    pages = tree.hide(top)
    sweep(tree, hidden_roots([top]))
    return pages


def keys_below(tree: Tree, prompt: Prompt) -> list[bytes]:
    """The keys of all pages known that share the prompt's first page."""
    root = tree.roots.get((prompt.namespace, prompt.head))
    top = root.children.get(prompt.body[: tree.page_bytes]) if root is not None else None
    if top is None:
        return []
    return [key for node in (top, *tree.below(top)) for key in tree.page_keys(node)]


def hidden_roots(nodes: Iterable[Node]) -> list[Node]:
    """The hidden trees that contain these nodes, each once. Call it while they are in a tree."""
    roots: dict[Node, None] = {}
    for node in nodes:
        above = node
        while above.hidden and above.parent is not None:
            above = above.parent
        if above.hidden:
            roots[above] = None
    return list(roots)


def sweep(tree: Tree, roots: Iterable[Node]) -> None:
    """Drop the unpinned pages of hidden trees, the last pages of a path first."""
    for node in (node for root in roots for node in reversed(list(tree.below(root)))):
        for number, cell in enumerate(tree.cells):
            if cell.queue.evictable(node):
                tree.drop(node, number)
