"""The hash of a block: of its tokens and all before them.

`VllmHashes` is what vLLM computes by default (`--prefix-caching-hash-algo sha256`, no
PYTHONHASHSEED), so that a consumer of several engines compares hashes alone:

    NONE    = sha256(pickle("vllm-none-hash"))
    hash(i) = sha256(pickle((hash(i - 1) or NONE, tokens of block i as a tuple, extra keys)))

with pickle protocol 5; the extra keys are a tuple of the adapter's name (every block) and the
cache salt (the first block), or None. Published is the number in its last eight bytes.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Protocol

from kvtide.index import DEFAULT_NAMESPACE, Namespace

PICKLE_PROTOCOL = 5
NONE_HASH = hashlib.sha256(pickle.dumps("vllm-none-hash", PICKLE_PROTOCOL)).digest()
_NUMBER_BYTES = 8
_UINT64, _BIN8 = b"\xcf", b"\xc4"
"""What begins such a value in msgpack."""


class BlockHashes(Protocol):
    """A way to hash blocks."""

    def of(
        self, key: bytes, parent: bytes | None, tokens: tuple[int, ...], namespace: Namespace
    ) -> bytes:
        """The hash of the page with this key: of its tokens after the block hashed `parent`."""
        ...

    def published(self, digest: bytes) -> bytes:
        """The hash as events have it, in msgpack."""
        ...


def extra_keys(namespace: Namespace, first: bool) -> tuple[str, ...] | None:
    """What else than tokens a block's hash depends on; `first`: of a prompt."""
    if namespace == DEFAULT_NAMESPACE:
        return None
    named = (namespace.adapter, namespace.cache_salt if first else "")
    return tuple(filter(None, named)) or None


class VllmHashes:
    """See the module."""

    def of(
        self, key: bytes, parent: bytes | None, tokens: tuple[int, ...], namespace: Namespace
    ) -> bytes:
        hashed = (parent or NONE_HASH, tokens, extra_keys(namespace, parent is None))
        return hashlib.sha256(pickle.dumps(hashed, PICKLE_PROTOCOL)).digest()

    def published(self, digest: bytes) -> bytes:
        return _UINT64 + digest[-_NUMBER_BYTES:]


class PageKeyHashes:
    """The page keys of `kvtide.index.keys`, in full: what stores have."""

    def of(
        self, key: bytes, parent: bytes | None, tokens: tuple[int, ...], namespace: Namespace
    ) -> bytes:
        return key

    def published(self, digest: bytes) -> bytes:
        return _BIN8 + bytes([len(digest)]) + digest
