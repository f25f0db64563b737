"""The hash of a block: of its tokens and all before them.

`VllmHashes` is what vLLM 0.32 computes by default (`--prefix-caching-hash-algo sha256`, no
PYTHONHASHSEED), so that a consumer of several engines compares hashes alone:

    NONE    = sha256(pickle("vllm-none-hash"))
    hash(i) = sha256(pickle((hash(i - 1) or NONE, tokens of block i as a tuple, extra keys)))

with pickle protocol 5. The extra keys are a tuple, or None without any: ("lora", name, path) of the
adapter in every block, ("cache_salt", salt) in the first one. Published is the number in the last
eight bytes. Our namespaces have names of adapters and no paths, so their blocks have other hashes.
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


def hash_keys(namespace: Namespace, first: bool) -> tuple[tuple[str, ...], ...] | None:
    """What else than tokens a block's hash depends on; `first`: of a prompt."""
    if namespace == DEFAULT_NAMESPACE:
        return None
    keys: list[tuple[str, ...]] = []
    if namespace.adapter:
        keys.append(("lora", _copy(namespace.adapter), ""))
    if namespace.cache_salt and first:
        keys.append(("cache_salt", _copy(namespace.cache_salt)))
    return tuple(keys) or None


def _copy(name: str) -> str:
    """Pickle writes one object that comes twice as a reference: an adapter may be named "lora"."""
    return name.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


def extra_keys(namespace: Namespace, first: bool) -> tuple[str, ...] | None:
    """The same as events have it: without what each is."""
    keys = hash_keys(namespace, first)
    return None if keys is None else tuple(key[1] for key in keys)


class VllmHashes:
    """See the module."""

    def of(
        self, key: bytes, parent: bytes | None, tokens: tuple[int, ...], namespace: Namespace
    ) -> bytes:
        hashed = (parent or NONE_HASH, tokens, hash_keys(namespace, parent is None))
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
