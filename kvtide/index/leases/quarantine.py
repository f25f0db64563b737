"""Quarantine: pages that no match may find again, dropped as soon as nothing pins them.

A *hidden* tree hangs on a root that no prompt names. Quarantined pages are moved to one, and a
lease of a scratch prompt computes in one. Leases and arrivals in it work unchanged: they use their
node and its parents, not the root's name. Hidden pages that nothing pins are dropped by the verb
that unpinned them, so that eviction and demotion never meet one.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtide.index.keys import PageKey, Prompt
from kvtide.index.tree.node import Node
from kvtide.index.tree.tree import Tree


def quarantine(tree: Tree, prompt: Prompt) -> int:
    """Hide all pages behind the prompt's first page; returns their number over all cells."""
    tops = _tops(tree, prompt)
    if not tops:
        return 0
    tree.tick += 1
    pages = sum(tree.hide(top) for top in tops)
    sweep(tree, hidden_roots(tops))
    return pages


def keys_below(tree: Tree, prompt: Prompt) -> list[PageKey]:
    """The keys of all pages known that share the prompt's first page."""
    return [
        key
        for top in _tops(tree, prompt)
        for node in (top, *tree.below(top))
        for key in tree.page_keys(node)
    ]


def _tops(tree: Tree, prompt: Prompt) -> list[Node]:
    """The nodes that begin with the prompt's first page, whatever the tokens after that page.

    A store keeps one object for all of them, so that they are corrupt together.
    """
    root = tree.roots.get((prompt.namespace, prompt.head))
    first = tree.page_bytes - tree.after_bytes
    if root is None or len(prompt.body) < first:
        return []
    if not tree.after_bytes:
        top = root.children.get(prompt.body[:first])
        return [] if top is None else [top]
    begin = prompt.body[:first]
    return [top for top in root.children.values() if top.tokens.startswith(begin)]


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
