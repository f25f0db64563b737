"""kvtide: a tiered KV cache for hybrid language models. docs/ARCHITECTURE.md has the map."""

__version__ = "0.1.0"
