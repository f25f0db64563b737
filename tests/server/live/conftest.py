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
        server.app.live.publisher.interval_s = 0.02
        return server

    return open_server
