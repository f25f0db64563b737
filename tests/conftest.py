"""Which device the tests run on: `pytest --device cuda` where there is one, else the CPU."""

from __future__ import annotations

import os
import sys
import tempfile

import pytest

from tests.proofs import Proofs, proves

__all__ = ["proves"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="device under test")
    parser.addoption(
        "--write-families", action="store_true", help="write what is proven to docs/FAMILIES.md"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Tensors here are small: threads that wait for each other on a busy machine cost six times
    # what they bring. Read when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Servers keep their pages in the user's cache directory: not these.
    os.environ["KVTIDE_STORAGE"] = "none"
    caches = tempfile.TemporaryDirectory(prefix="kvtide-", ignore_cleanup_errors=True)
    os.environ["XDG_CACHE_HOME"] = caches.name
    config.add_cleanup(caches.cleanup)
    if not hasattr(config, "workerinput"):  # Of several processes, who hears of all tests.
        config.pluginmanager.register(Proofs(config))
        shared = tempfile.TemporaryDirectory(prefix="kvtide-", ignore_cleanup_errors=True)
        os.environ["KVTIDE_TEST_RUN"] = shared.name
        config.add_cleanup(shared.cleanup)
    # Triton reads this when a kernel is defined, so it is set before any test module is imported.
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        config.addinivalue_line(
            "filterwarnings", "ignore:Conversion of an array:DeprecationWarning:triton"
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("--device") == "cpu" and "triton" in sys.modules:
        from tests.interpreting import quicken

        quicken()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest):
    import torch  # Most rooms do without it, and their tests should start as fast as they do.

    chosen = torch.device(request.config.getoption("--device"))
    assert chosen.type == "cpu" or torch.cuda.is_available(), "--device cuda needs a CUDA device"
    return chosen
