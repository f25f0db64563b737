"""The identity of a page: its namespace, its tokens, and the key that stands for both in storage.

A page's key is a sha256 chained from page to page, beginning with the namespace's fingerprint:
equal keys mean equal namespaces and equal tokens from the first to the page's last. Keys are
computed only when something leaves the process (storage, events), and from the nearest known key.

With a holdback of h tokens (see `ModelMemory`) a page is whole only together with the h tokens
after it. The tree therefore runs over the prompt without its first h tokens, which go into the
root instead: page i then stands for positions [i·P, (i+1)·P) and is compared by tokens
[i·P + h, (i+1)·P + h). Keys do not depend on the holdback: page i's key is chained over tokens
[i·P, (i+1)·P), and `PageKey` has the h tokens after it beside the key.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4
MAX_TOKEN = 2**31 - 1
BEGINNING_BYTES = 1024
"""How much of a prompt a quick comparison of two prompts looks at."""

TokenSequence = npt.NDArray[np.integer] | Sequence[int] | bytes


class Namespace(NamedTuple):
    """Prompts of different namespaces never share a page, whatever their tokens."""

    adapter: str = ""
    cache_salt: str = ""

    def fingerprint(self, model: bytes) -> bytes:
        """The root of all page keys of this namespace in the model with that fingerprint."""
        digest = hashlib.sha256(model)
        for part in (self.adapter.encode(), self.cache_salt.encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()


DEFAULT_NAMESPACE = Namespace()


def root_key(fingerprint: bytes, namespace: Namespace) -> bytes:
    """What the page keys of a namespace's prompts begin with, in the model of this fingerprint."""
    return page_key(namespace.fingerprint(fingerprint), b"\0")


def page_key(key: bytes, tokens: bytes | memoryview) -> bytes:
    """The key of the page with these packed tokens, following a page whose key is `key`."""
    digest = hashlib.sha256(key)
    digest.update(tokens)
    return digest.digest()


class Hidden(NamedTuple):
    """A namespace that no request can name, so that no match ever finds what is in it.

    `number` identifies one hidden tree. Scratch prompts have number 0, which no tree has: each of
    their leases gets a tree of its own.
    """

    number: int = 0


SCRATCH = Hidden()


def pack(tokens: TokenSequence) -> bytes:
    """Token ids as little-endian int32 bytes, the form in which they are kept and compared."""
    if isinstance(tokens, bytes):
        assert len(tokens) % TOKEN_BYTES == 0, "packed tokens are 4 bytes each"
        return tokens
    if isinstance(tokens, list) and len(tokens) == 1:
        # The fast path of decode: one sampled token per request and step.
        (token,) = tokens
        if 0 <= token <= MAX_TOKEN:
            return int(token).to_bytes(TOKEN_BYTES, "little")
    if isinstance(tokens, np.ndarray):
        inside = not tokens.size or (tokens.min() >= 0 and tokens.max() <= MAX_TOKEN)
        packed = tokens.astype("<i4", copy=False).tobytes()
    else:
        try:
            packed = struct.pack(f"<{len(tokens)}I", *tokens)
            inside = highest(packed) <= MAX_TOKEN
        except struct.error:
            inside = False
    if not inside:
        raise ValueError(f"token ids must lie in 0..{MAX_TOKEN}")
    return packed


def highest(packed: bytes) -> int:
    """The highest token id; -1 if there is none."""
    return int(np.frombuffer(packed, "<u4").max()) if packed else -1


class Prompt:
    """A request's tokens as the index sees them. Grows while the model generates.

    head  the first `holdback` tokens: part of the root, not of any page
    body  the rest, packed; page i is `body[i·page_bytes : (i+1)·page_bytes]`
    tokens  how many there are in all
    fetched  pages [start, end) that were fetched from storage for this prompt
    checkpoints  page boundaries that a lease which computes them keeps resumable while it lives
    """

    __slots__ = (
        *("_appended", "_body", "checkpoints", "fetched", "head", "holdback", "namespace"),
        "tokens",
    )

    def __init__(self, tokens: TokenSequence, namespace: Namespace | Hidden, holdback: int) -> None:
        packed = pack(tokens)
        cut = holdback * TOKEN_BYTES
        self.namespace = namespace
        self.holdback = holdback
        self.head = packed[:cut]
        self._body = packed[cut:] if cut else packed
        self._appended = bytearray()  # Joined to `_body` when `body` is read.
        self.tokens = len(packed) // TOKEN_BYTES
        self.fetched = range(0)
        self.checkpoints: tuple[int, ...] = ()

    def extend(self, tokens: TokenSequence) -> None:
        """Append generated tokens."""
        packed = pack(tokens)
        missing = self.holdback * TOKEN_BYTES - len(self.head)
        self.head += packed[:missing]
        self._appended += packed[missing:]
        self.tokens += len(packed) // TOKEN_BYTES

    @property
    def packed(self) -> bytes:
        """All tokens, the head's included."""
        return self.head + self.body if self.head else self.body

    def same_first_page(self, other: Prompt, page_bytes: int) -> bool:
        """Whether both begin with the same whole page, whatever comes after it."""
        mine, its = self.packed[:page_bytes], other.packed[:page_bytes]
        return self.namespace == other.namespace and mine == its and len(mine) == page_bytes

    @property
    def beginning(self) -> bytes:
        """The first bytes of `body`; fewer while appended tokens are not joined to it."""
        return self._body[:BEGINNING_BYTES]

    @property
    def body(self) -> bytes:
        if self._appended:
            self._body += self._appended
            self._appended.clear()
        return self._body


def unlike_any_prompt(tokens: bytes) -> bytes:
    """The same run under a first page that no prompt has: its first token is below zero."""
    sign = TOKEN_BYTES - 1
    return tokens[:sign] + bytes((tokens[sign] ^ 0x80,)) + tokens[TOKEN_BYTES:]


class PageKey(NamedTuple):
    """A page as other processes know it. `after`: the packed tokens of the holdback behind it."""

    key: bytes
    after: bytes = b""

    @property
    def name(self) -> bytes:
        """The page as this tree tells it apart: by the tokens after it, too."""
        return hashlib.sha256(self.key + self.after).digest() if self.after else self.key


def page_keys(key: bytes, tokens: bytes, page_bytes: int, after_bytes: int) -> Iterator[PageKey]:
    """The whole pages in `tokens`, following a page whose key is `key`.

    The last one's `after` is short if the tokens end early.
    """
    whole = tokens[: len(tokens) // page_bytes * page_bytes]
    for number, of_page in enumerate(chain(key, whole, page_bytes), 1):
        end = number * page_bytes
        yield PageKey(of_page, tokens[end : end + after_bytes])


def chain(key: bytes, tokens: bytes, page_bytes: int) -> Iterator[bytes]:
    """The keys of the pages in `tokens`, following a page whose key is `key`."""
    view = memoryview(tokens)
    for start in range(0, len(tokens), page_bytes):
        key = page_key(key, view[start : start + page_bytes])
        yield key
