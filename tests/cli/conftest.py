"""Commands talk to the servers that `tests/server` opens, and read small GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.conftest import _shared_server, bare_folder, client, model_folder, serve, server

__all__ = ["_shared_server", "bare_folder", "client", "model_folder", "serve", "server"]


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A Gemma 3 of seven layers, of which every sixth attends to all of the prompt."""
    import torch  # A conftest is imported before the settings that torch reads on import are made.

    from tests.models.gguf_files import f32, write

    settings: dict[str, object] = {
        "block_count": 7, "context_length": 256, "embedding_length": 32,
        "feed_forward_length": 48, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 16, "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 16,
    }  # fmt: skip
    metadata = {f"gemma3.{key}": value for key, value in settings.items()}
    tensors = {"token_embd.weight": f32(torch.zeros(64, 32))}
    return write(tmp_path / "tiny-3.gguf", {"general.architecture": "gemma3", **metadata}, tensors)
