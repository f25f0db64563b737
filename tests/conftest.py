"""Options of the suite: the device under test, and the quick run or all of it (`tests.grids`)."""

from __future__ import annotations

import os
import sys
import tempfile

import pytest

from tests import grids
from tests.proofs import Proofs, proves

__all__ = ["proves"]

# Tensors are small here: threads that wait for each other on a busy machine cost six times what
# they save. Torch reads this when it is imported, which the conftest of a folder may do.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="device under test")
    parser.addoption("--all", action="store_true", help="every test and cell, not a selection")
    parser.addoption(
        "--write-pictures", action="store_true", help="write pictures of the live page to docs"
    )
    parser.addoption(
        "--write-families", action="store_true", help="write what is proven to docs/FAMILIES.md"
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in grids.MARKERS:
        config.addinivalue_line("markers", marker)
    # Compiling the package takes a second in every process that tests start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if config.getoption("--all"):
        os.environ["KVTIDE_TEST_ALL"] = "1"
    # Servers store pages in the user's cache directory unless this says otherwise.
    os.environ["KVTIDE_STORAGE"] = "none"
    caches = tempfile.TemporaryDirectory(prefix="kvtide-", ignore_cleanup_errors=True)
    os.environ["XDG_CACHE_HOME"] = caches.name
    config.add_cleanup(caches.cleanup)
    if not hasattr(config, "workerinput"):  # The process that receives all reports.
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("::" in argument for argument in config.args)
    everything = config.getoption("--all") or config.getoption("--device") != "cpu"
    everything = everything or "KVTIDE_LONG_TESTS" in os.environ
    items[:], left_out = grids.select(items, named or everything)
    if left_out:
        config.stash[grids.LEFT_OUT] = {item.nodeid for item in left_out}
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("--device") == "cpu" and "triton" in sys.modules:
        from tests.interpreting import quicken

        quicken(checks=session.config.getoption("--all"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest):
    import torch  # Most rooms do without it, and so do their tests.

    chosen = torch.device(request.config.getoption("--device"))
    assert chosen.type == "cpu" or torch.cuda.is_available(), "--device cuda needs a CUDA device"
    return chosen
