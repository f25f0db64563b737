"""Servers of a tiny model: one for most tests, opened once, and others as a test wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# A conftest is imported before the settings that torch reads on import are made, so everything
# that knows it is imported by the fixtures.


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template."""
    from tests.server.serving import save_model, save_tokenizer

    return save_tokenizer(save_model(tmp_path_factory.mktemp("models") / "tiny-0.1"))


@pytest.fixture(scope="session")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a tokenizer."""
    from tests.server.serving import save_model

    return save_model(tmp_path_factory.mktemp("models") / "bare")


@pytest.fixture(scope="session")
def _shared_server(model_folder: Path) -> Iterator[Any]:
    from kvtide.server.settings import Settings
    from tests.server.serving import PAGE, InProcess

    server = InProcess(Settings(model=str(model_folder), port=0, page_tokens=PAGE, storage="none"))
    yield server
    server.close()


@pytest.fixture
def server(_shared_server: Any) -> Iterator[Any]:
    """After every test nothing may be going on in it, and nothing may be missing."""
    yield _shared_server
    _shared_server.settled()


@pytest.fixture
def client(server: Any) -> Any:
    return server.client


@pytest.fixture
def serve(model_folder: Path) -> Iterator[Callable[..., Any]]:
    """A server with other settings."""
    from kvtide.server.settings import Settings
    from tests.server.serving import PAGE, InProcess

    opened: list[InProcess] = []

    def open_server(**settings: Any) -> InProcess:
        chosen = {"model": str(model_folder), "port": 0, "page_tokens": PAGE, "storage": "none"}
        opened.append(InProcess(Settings(**{**chosen, **settings})))
        return opened[-1]

    yield open_server
    for server in opened:
        server.close()
