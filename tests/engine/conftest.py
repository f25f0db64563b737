"""Models that many tests share are checked once for what they keep, not with every engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtide.engine import engine
from kvtide.engine.declared_state.state_check import check_declared_state
from kvtide.models import Model
from kvtide.models.draft import DraftModel
from tests.engine.restoring import SHARED


@pytest.fixture(scope="session", autouse=True)
def _checked_once() -> Iterator[None]:
    known: list[Model] = []

    def check(model: Model, device: torch.device, draft: DraftModel | None) -> None:
        if not any(model is one for one in known):
            check_declared_state(model, device, draft)
            known.extend(one for one in SHARED if one is model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "check_declared_state", check)
        yield
