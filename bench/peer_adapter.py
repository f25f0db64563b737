"""kvtide's index for a prefix-index benchmark that takes adapters by import path.

PYTHONPATH=bench python bench_prefix.py … --adapters peer_adapter:Full,peer_adapter:DeepSeekV4
"""

from kvtide.bench.contestants import (
    DeepSeekV4Default,
    DeepSeekV4Index,
    Default,
    Full,
    Recurrent,
    Window,
)

__all__ = ["DeepSeekV4Default", "DeepSeekV4Index", "Default", "Full", "Recurrent", "Window"]
