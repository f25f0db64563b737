"""GGUF files, as llama.cpp writes them.

`file`           the container: metadata, tensor table, mapped bytes
`metadata`       typed look-ups
`quants`         stored numbers back to float32
`architectures`  llama.cpp's names and changes undone: HF's names, HF's config
`vocabulary`     the tokenizer that the metadata describes
"""

from __future__ import annotations

from kvtide.models.gguf.gguf_file import GGUF, StoredTensor
from kvtide.models.gguf.metadata import Metadata

__all__ = ["GGUF", "Metadata", "StoredTensor"]
