"""GGUF files, as llama.cpp writes them.

`gguf_file`      the container: metadata, tensor table, mapped bytes
`metadata`       typed look-ups
`quants`         stored numbers back to float32
`architectures`  llama.cpp's names and changes undone: HF's names, HF's config
`vocabulary`     the tokenizer that the metadata describes
`tensors`        tensors for torch; the other modules import no torch, so that `kvtide memory` does
                 without it
"""

from __future__ import annotations

from kvtide.models.gguf.gguf_file import GGUF, StoredTensor, is_gguf
from kvtide.models.gguf.metadata import Metadata

__all__ = ["GGUF", "Metadata", "StoredTensor", "is_gguf"]
