"""Servers whose viewers do not have to wait a second for a frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def watched(serve: Callable[..., Any]) -> Callable[..., Any]:
    """A server with other settings, and fifty frames a second."""

    def open_server(**settings: Any) -> Any:
        server = serve(**settings)
        publisher = server.app.live.publisher
        publisher.interval_s, publisher.snapshots.survey_every_s = 0.02, 0.0
        return server

    return open_server
