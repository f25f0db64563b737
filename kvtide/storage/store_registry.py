"""From a URL to a store.

| URL | store |
|---|---|
| `file:///path?cap=200GB&floor=10GB` | large files in a folder; the default |
| `mooncake://host:port` | Mooncake Store, over many machines |
| `redis://host:port/0` | Redis or Valkey |
| `s3://bucket/prefix?endpoint=…` | any S3-compatible object store |
| `memory:` | a dictionary |
| `package.module:Class?…` | a store of your own: called with the URL and the space |

Behind `?codec=` any of them keeps its objects coded (`codec`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from kvtide.storage.codec.opening import open_with_codec
from kvtide.storage.store import SPACE_BYTES, Store, StoreError
from kvtide.storage.url import StoreURL

Opener = Callable[[StoreURL, bytes], Store]

STORES = {
    "file": "kvtide.storage.file:FileStore",
    "mooncake": "kvtide.storage.mooncake:MooncakeStore",
    "redis": "kvtide.storage.redis:RedisStore",
    "rediss": "kvtide.storage.redis:RedisStore",
    "s3": "kvtide.storage.s3_store:S3Store",
    "memory": "kvtide.storage.memory_store:MemoryStore",
}

EXTRAS = {"s3": "pip install 'kvtide[s3]'"}
"""What a store needs that kvtide itself does not."""


def open_store(url: str, space: bytes) -> Store:
    """Open a store for the objects of one space, or refuse in a sentence."""
    assert len(space) == SPACE_BYTES
    parsed = StoreURL.parse(url)
    path = STORES.get(parsed.scheme)
    if path is None:
        path = _import_path(url, parsed)
    return open_with_codec(parsed, space, _opener(path))


def _import_path(url: str, parsed: StoreURL) -> str:
    """A URL that begins with `package.module:Class`."""
    path = url.partition("?")[0]
    module, _, name = path.partition(":")
    if not (name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        known = ", ".join(f"{scheme}:" for scheme in STORES)
        raise StoreError(f"storage {parsed}: no such store; use {known} or package.module:Class")
    return path


def _opener(path: str) -> Opener:
    module, _, name = path.partition(":")
    try:
        return cast(Opener, getattr(import_module(module), name))
    except (ImportError, AttributeError) as error:
        extras = (how for scheme, how in EXTRAS.items() if STORES[scheme] == path)
        remedy = next(extras, "install the package it is in")
        raise StoreError(f"storage {path}: cannot be imported ({error}); {remedy}") from error
