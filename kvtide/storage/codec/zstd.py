"""Entropy coding by the system's libzstd.

Every Linux distribution has the library, for its package manager needs it; Python has it from 3.14
on. Calls release the interpreter, and read and write memory in place.

Planes of floating-point numbers hardly ever repeat themselves. So the match finder is kept from
finding anything but long runs, whose search would cost more than it saves: what is left is the
library's entropy coder.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from kvtide.storage.store import StoreError

ByteArray = npt.NDArray[np.uint8]

LIBRARY = "libzstd.so.1"
MIN_VERSION = 10400
"""1.4.0: the first with `ZSTD_compress2`."""

_PARAMETERS = {100: 1, 101: 17, 102: 6, 105: 7}
"""Level 1, windows of 128 KiB, a hash table of 64 places, matches of at least 7 bytes."""


class ZstdError(ValueError):
    """Bytes that do not decompress to the expected length."""


@cache
def library() -> ctypes.CDLL:
    """The library, or a refusal."""
    try:
        found = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise StoreError(
            f"codecs need {LIBRARY}, which cannot be loaded ({error}); install it "
            "(apt-get install libzstd1), or leave out ?codec="
        ) from None
    if found.ZSTD_versionNumber() < MIN_VERSION:
        raise StoreError(f"codecs need {LIBRARY} of version 1.4 or later; update it")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, result, arguments in (
        ("ZSTD_createCCtx", pointer, []),
        ("ZSTD_createDCtx", pointer, []),
        ("ZSTD_freeCCtx", size, [pointer]),
        ("ZSTD_freeDCtx", size, [pointer]),
        ("ZSTD_CCtx_setParameter", size, [pointer, ctypes.c_int, ctypes.c_int]),
        ("ZSTD_compress2", size, [pointer, pointer, size, pointer, size]),
        ("ZSTD_decompressDCtx", size, [pointer, pointer, size, pointer, size]),
        ("ZSTD_isError", ctypes.c_uint, [size]),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def compress(source: ByteArray, target: ByteArray) -> int | None:
    """Compress into the target; the length, or None if that does not fit."""
    return _call("compress2", _contexts().compressor.handle, source, target)


def decompress(source: ByteArray, target: ByteArray) -> None:
    """Fill the target."""
    if _call("decompressDCtx", _contexts().decompressor.handle, source, target) != len(target):
        raise ZstdError(f"{len(source):,} bytes do not decompress to {len(target):,}")


def _call(name: str, handle: int, source: ByteArray, target: ByteArray) -> int | None:
    assert source.flags.c_contiguous and target.flags.c_contiguous and target.flags.writeable
    call: Callable[..., int] = getattr(library(), f"ZSTD_{name}")
    size = call(handle, target.ctypes.data, len(target), source.ctypes.data, len(source))
    return None if library().ZSTD_isError(size) else size


class _Context:
    """What the library needs for a call. One at a time may use it."""

    def __init__(self, kind: str) -> None:
        self.handle: int = getattr(library(), f"ZSTD_create{kind}")()
        assert self.handle, "libzstd has no memory"
        self._free: Callable[[int], int] = getattr(library(), f"ZSTD_free{kind}")

    def __del__(self) -> None:
        if hasattr(self, "_free"):
            self._free(self.handle)


class _OfThread(threading.local):
    """Every thread's own contexts."""

    def __init__(self) -> None:
        self.compressor, self.decompressor = _Context("CCtx"), _Context("DCtx")
        for parameter, value in _PARAMETERS.items():
            wrong = library().ZSTD_CCtx_setParameter(self.compressor.handle, parameter, value)
            assert not library().ZSTD_isError(wrong)


@cache
def _contexts() -> _OfThread:
    """Made by the first call: importing needs no library."""
    return _OfThread()
