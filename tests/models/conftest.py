"""The default model, opened once. Where it is not installed its tests fail and say what to run."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def smollm2():
    # A conftest is imported before the settings that torch reads on import are made.
    from kvtide.models.checkpoint import open_checkpoint
    from kvtide.models.default import default_model

    return open_checkpoint(default_model())
