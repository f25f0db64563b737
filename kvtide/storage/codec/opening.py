"""`?codec=lossless&coders=4` in the URL of any store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvtide.storage.codec import zstd
from kvtide.storage.codec.coded_store import CodedStore, coded_space
from kvtide.storage.codec.coder import Codec, Lossless
from kvtide.storage.codec.coder_threads import default_threads
from kvtide.storage.codec.fp8_codec import Fp8
from kvtide.storage.store import Store, StoreError
from kvtide.storage.url import StoreURL

CODECS: dict[str, Callable[[], Codec]] = {"lossless": Lossless, "fp8": Fp8}
NO_CODEC = "none"
_SETTINGS = ("codec", "coders")


def codec_of(url: StoreURL) -> Codec | None:
    """The codec that a URL asks for, or a refusal of one that is not known."""
    name = url.settings.get("codec", NO_CODEC)
    if name == NO_CODEC:
        return None
    if name not in CODECS:
        known = ", ".join((*CODECS, NO_CODEC))
        raise StoreError(f"storage {url}: codec={name} is not known; use {known}")
    return CODECS[name]()


def is_lossy(url: str) -> bool:
    """Whether pages come back from this store with rounded numbers."""
    codec = codec_of(StoreURL.parse(url))
    return codec is not None and codec.lossy


def open_with_codec(
    url: StoreURL, space: bytes, opener: Callable[[StoreURL, bytes], Store]
) -> Store:
    """The store that the opener gives, in a `CodedStore` if the URL asks for a codec."""
    codec = codec_of(url)
    settings = {name: text for name, text in url.settings.items() if name not in _SETTINGS}
    plain = replace(url, settings=settings)
    if codec is None:
        if "coders" in url.settings:
            raise StoreError(f"storage {url}: coders without a codec; add codec=lossless")
        return opener(plain, space)
    threads = url.count("coders", default_threads())
    zstd.library()
    return CodedStore(opener(plain, coded_space(space, codec)), codec, threads)
