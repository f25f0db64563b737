"""A GGUF file: its metadata, the table of its tensors, and their bytes.

The file is mapped, not read: opening one costs the metadata, and a tensor costs its own bytes.
Whatever cannot be read is refused when the file is opened, be it a format that is not known here or
a tensor that reaches past the end, so that a model never fails half-way through loading.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtide.models.gguf.metadata import Metadata
from kvtide.models.gguf.quants import (
    FORMATS,
    OTHER_FORMATS,
    ByteArray,
    Format,
    Fp32Array,
    dequantise,
)
from kvtide.models.model_errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

# The value types of metadata: numbers as numpy spells them, and the two that are not numbers.
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"),
    4: np.dtype("<u4"), 5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"),
    10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies. `shape` is torch's: rows before the elements of a row."""

    shape: tuple[int, ...]
    form: Format
    offset: int

    @property
    def bytes(self) -> int:
        return self.form.stored_bytes(math.prod(self.shape))

    @property
    def row_bytes(self) -> int:
        return self.form.stored_bytes(self.shape[-1])


class GGUF:
    """An open file: what it says of itself, and its tensors under its own names for them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _mapped(path)
        cursor = _Cursor(self._map, path)
        tensors, keys = _counts(cursor)
        self.metadata = Metadata(path, dict(_pair(cursor) for _ in range(keys)))
        table = [_tensor(cursor) for _ in range(tensors)]
        alignment = max(1, self.metadata.count("general.alignment", DEFAULT_ALIGNMENT))
        base = -(-cursor.at // alignment) * alignment
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(shape, form, base + offset) for name, shape, form, offset in table
        }
        self._check_whole()

    def raw(self, name: str, rows: range | None = None) -> ByteArray:
        """The stored bytes of a tensor, or of these rows of it: a view of the file."""
        tensor = self.tensors[name]
        whole = np.frombuffer(self._map, np.uint8, tensor.bytes, tensor.offset)
        if rows is None:
            return whole
        row_bytes = tensor.bytes // tensor.shape[0]
        return whole[rows.start * row_bytes : rows.stop * row_bytes]

    def floats(self, name: str, rows: range | None = None) -> Fp32Array:
        """A tensor, or these rows of it, as float32, in memory of its own."""
        tensor = self.tensors[name]
        return dequantise(self.raw(name, rows), tensor.form).reshape(-1, *tensor.shape[1:])

    def _check_whole(self) -> None:
        parts = self.metadata.count("split.count", 1)
        if parts > 1:
            raise self.metadata.refusal(
                f"one of {parts} parts of a model; join them with `llama-gguf-split --merge`"
            )
        for name, tensor in self.tensors.items():
            if tensor.offset + tensor.bytes > len(self._map):
                raise self.metadata.refusal(
                    f"the file ends before tensor {name} does; download it again"
                )


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its name or by its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as flaw:
        raise CheckpointError(
            f"{path}: cannot be read ({flaw.strerror}); check the path and its permissions"
        ) from None
    raise CheckpointError(
        f"{path}: not a GGUF file; pass a .gguf file or a folder with a config.json"
    )


class _Cursor:
    """Reads one value after another, and never past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.at = len(MAGIC)

    def refusal(self, sentence: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {sentence}")

    def take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if self.at > len(self._data):
            raise self.refusal("the file ends in the middle of its header; download it again")
        return self._data[start : self.at]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        return self.take(self.u64()).decode("utf-8", errors="replace")

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.u32(), self.u64())
        return self._numbers(kind, 1)[0]

    def _array(self, kind: int, length: int) -> list[object]:
        """A length is believed only as far as the file reaches: each item takes bytes from it."""
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        return self._numbers(kind, length)

    def _numbers(self, kind: int, length: int) -> list[object]:
        if kind not in _NUMBERS:
            raise self.refusal(f"a metadata value of unknown type {kind}; download it again")
        dtype = _NUMBERS[kind]
        numbers: list[object] = np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()
        return numbers


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """How many tensors and how many metadata keys there are."""
    version = cursor.u32()
    if version not in VERSIONS:  # A big-endian file is one of version 3 << 24.
        raise cursor.refusal(
            f"GGUF version {version}; use a little-endian file of version 2 or 3, as llama.cpp's "
            "convert_hf_to_gguf.py writes it"
        )
    return cursor.u64(), cursor.u64()


def _pair(cursor: _Cursor) -> tuple[str, object]:
    key = cursor.string()
    return key, cursor.value(cursor.u32())


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], Format, int]:
    name = cursor.string()
    dimensions = cursor.u32()
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.refusal(f"tensor {name} has {dimensions} dimensions; download it again")
    shape = tuple(cursor.u64() for _ in range(dimensions))[::-1]
    if 0 in shape:
        raise cursor.refusal(f"tensor {name} has the shape {shape}; download it again")
    kind, offset = cursor.u32(), cursor.u64()
    if kind not in FORMATS:
        raise cursor.refusal(
            f"tensor {name} is stored as {OTHER_FORMATS.get(kind, f'type {kind}')}, which is not "
            f"read here; use a file of {', '.join(form.name for form in FORMATS.values())} "
            "tensors, such as a Q8_0 or Q4_K_M one"
        )
    form = FORMATS[kind]
    if shape[-1] % form.block_elements:
        raise cursor.refusal(
            f"tensor {name} has rows of {shape[-1]}, not whole {form.name} blocks of "
            f"{form.block_elements}; download it again"
        )
    return name, shape, form, offset
