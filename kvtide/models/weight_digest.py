"""What stands for weights in the keys of stored pages, where equal has to mean equal.

A large weight is sampled: 64 bytes of each row and of each KiB. Training, merging, quantising and
patching rows change what is sampled; an edit of single numbers by hand may not.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SAMPLE_BYTES = 64
SAMPLE_EVERY_BYTES = 1024
HASHED_WHOLE_BYTES = 1 << 20
PIECE_BYTES = 256 << 20
"""Files are sampled by pieces, so that samples of large ones need little memory."""

WEIGHT_FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight as it lies on disk: what it is, its bytes, and how many of them make a row."""

    form: str
    data: NDArray[np.uint8]
    row_bytes: int


def digest_weight(name: str, stored: Stored, *, every_byte: bool = False) -> bytes:
    """32 bytes that stand for one weight: all of it, or a sample of every row of a large one."""
    digest = hashlib.sha256(f"{name} {stored.form} ".encode())
    whole = every_byte or stored.data.size <= HASHED_WHOLE_BYTES
    digest.update((stored.data if whole else _sample(stored)).data)
    return digest.digest()


def digest_files(place: Path) -> bytes | None:
    """32 bytes that stand for a model whose files kvtide need not read: a folder's weights and its
    config, or one file of weights. None if there are no weights."""
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    weights = [one for one in files if one.suffix in WEIGHT_FILES and one.is_file()]
    if not weights:
        return None
    digest = hashlib.sha256()
    for file in (*(one for one in files if one.name == "config.json"), *weights):
        data = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.empty(0, np.uint8)
        for start in range(0, max(1, data.size), PIECE_BYTES):
            piece = Stored(f"at {start}", data[start : start + PIECE_BYTES], SAMPLE_EVERY_BYTES)
            digest.update(digest_weight(file.name, piece))
    return digest.digest()


def _sample(stored: Stored) -> NDArray[np.uint8]:
    """64 bytes out of each row, or of each KiB where rows are longer."""
    step = min(stored.row_bytes, SAMPLE_EVERY_BYTES)
    steps = stored.data.size // step
    lines = stored.data[: steps * step].reshape(steps, step)[:, :SAMPLE_BYTES]
    return np.concatenate([lines.reshape(-1), stored.data[steps * step :]])
