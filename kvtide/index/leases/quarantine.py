"""Pages that nobody may find again: out of the tree at once, out of every tier when they can be.

A *hidden* tree hangs on a root that no prompt names. What was quarantined lies in one, and so does
what a lease computes for a scratch prompt. Leases and arrivals in it go on as ever: they know
their node and its parents, and not the root's name. What differs is what happens to pages that
nobody needs: they are dropped when the verb that let go of them ends, so that eviction and
demotion never meet a hidden page, whatever a tier keeps.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtide.index.keys import Prompt
from kvtide.index.tree.node import Node
from kvtide.index.tree.tree import Tree


def quarantine(tree: Tree, prompt: Prompt) -> int:
    """Hide all that shares the prompt's first page; how many pages that is, in all cells."""
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
    """The hidden trees in which nodes are, each once. To be asked while they are in a tree."""
    roots: dict[Node, None] = {}
    for node in nodes:
        above = node
        while above.hidden and above.parent is not None:
            above = above.parent
        if above.hidden:
            roots[above] = None
    return list(roots)


def sweep(tree: Tree, roots: Iterable[Node]) -> None:
    """Drop what nobody needs of hidden trees, the last pages of a path first."""
    for node in (node for root in roots for node in reversed(list(tree.below(root)))):
        for number, cell in enumerate(tree.cells):
            if cell.queue.evictable(node):
                tree.drop(node, number)
