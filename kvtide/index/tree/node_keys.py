"""The keys of a node's pages, computed on demand and kept in the node for the last one."""

from __future__ import annotations

from collections.abc import Iterator

from kvtide.index.keys import Hidden, Namespace, PageKey, page_keys, root_key
from kvtide.index.tree.node import Node, Root


class NodeKeys:
    """`fingerprint` is that of the weights; sizes are in bytes of packed tokens."""

    def __init__(self, fingerprint: bytes, page_bytes: int, after_bytes: int) -> None:
        self._fingerprint = fingerprint
        self._page_bytes = page_bytes
        self._after_bytes = after_bytes

    def of(self, node: Node) -> bytes:
        """The key of the node's last page; for a root, what its page keys begin with."""
        path = []
        above = node
        while above.key is None and above.parent is not None:
            path.append(above)
            above = above.parent
        key = above.key if above.key is not None else self._of_root(above)
        for below in reversed(path):
            *_, last = self._of_pages(below, key)
            key = below.key = last.key
        return key

    def of_pages(self, node: Node) -> list[PageKey]:
        """The keys of all pages of the node."""
        assert node.parent is not None
        return list(self._of_pages(node, self.of(node.parent)))

    def _of_pages(self, node: Node, above: bytes) -> Iterator[PageKey]:
        """The keys of the node's pages; `above` is that of the page before them."""
        assert node.parent is not None
        tokens = self.after(node.parent) + node.tokens
        return page_keys(above, tokens, self._page_bytes, self._after_bytes)

    def after(self, node: Node) -> bytes:
        """The tokens of the holdback behind the node's last page; of a root, its head."""
        if isinstance(node, Root):
            return node.name[1]
        return node.tokens[len(node.tokens) - self._after_bytes :]

    def _of_root(self, root: Node) -> bytes:
        assert isinstance(root, Root)
        root.key = self.of_namespace(root.name[0])
        return root.key

    def of_namespace(self, namespace: Namespace | Hidden) -> bytes:
        """What the page keys of a namespace's prompts begin with."""
        assert isinstance(namespace, Namespace), "hidden pages have no key"
        return root_key(self._fingerprint, namespace)
