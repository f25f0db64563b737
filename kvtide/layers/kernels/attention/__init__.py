"""Triton kernels of attention over pages: prefill, decode and cascade by head; MLA; the indexer."""
