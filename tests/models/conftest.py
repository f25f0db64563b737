"""Real models, opened once. Where one is not installed its tests fail and say what to run."""

from __future__ import annotations

import pytest

from tests.gemma3_file import gemma3_file


@pytest.fixture(scope="session")
def smollm2():
    # A conftest is imported before the settings that torch reads on import are made.
    from kvtide.models.checkpoint import open_checkpoint
    from kvtide.models.default_model import default_model

    return open_checkpoint(default_model())


@pytest.fixture(scope="session")
def gemma3(pytestconfig: pytest.Config):
    from kvtide.models.checkpoint import open_checkpoint

    return open_checkpoint(gemma3_file(pytestconfig))
