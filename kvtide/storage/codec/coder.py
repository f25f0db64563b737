"""What a codec is, and the one that loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtide.storage.codec import planes
from kvtide.storage.codec.planes import ByteArray
from kvtide.storage.objects import ObjectFormat


class Codec(Protocol):
    """A way to keep objects in fewer bytes. Calls come from several threads at once.

    name, version  in every coded object's label, and in the space it is kept in
    lossy          whether decoded numbers may differ from the ones that were encoded
    """

    name: str
    version: int
    lossy: bool

    def expect(self, formats: Sequence[ObjectFormat]) -> None:
        """Objects of these formats will be encoded. Others may be, too."""

    def bound(self, raw_bytes: int) -> int:
        """The most that so many bytes become; it grows with them."""

    def encode(self, raw: ByteArray, target: ByteArray) -> int:
        """Write to a target of `bound` bytes at least; how many were written."""

    def decode(self, coded: ByteArray, target: ByteArray) -> None:
        """Fill a target of the raw length; raises `CorruptObjectError`."""


class Lossless:
    """Byte planes: the same bytes come back."""

    name, version, lossy = "lossless", 1, False

    def expect(self, formats: Sequence[ObjectFormat]) -> None:
        """All objects are alike."""

    def bound(self, raw_bytes: int) -> int:
        return planes.bound(raw_bytes)

    def encode(self, raw: ByteArray, target: ByteArray) -> int:
        return planes.encode(raw, target)

    def decode(self, coded: ByteArray, target: ByteArray) -> None:
        planes.decode(coded, target)
