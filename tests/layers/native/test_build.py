"""The library of native kernels: kept once compiled, and never a reason not to start."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtide.layers import choose
from kvtide.layers.backend.torch_ops import TorchOps
from kvtide.layers.native import build
from kvtide.layers.native.native_ops import NativeOps

CPU = torch.device("cpu")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that has loaded no library, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(build.SWITCH, raising=False)
    build.library.cache_clear()
    yield tmp_path
    build.library.cache_clear()


def test_without_a_compiler_the_references_run_and_a_line_says_why(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    with caplog.at_level(logging.INFO, "kvtide"):
        assert type(choose(False, CPU)) is TorchOps
        assert type(choose(False, CPU)) is TorchOps
    assert [record.getMessage() for record in caplog.records] == [
        "CPU kernels are not available, torch computes instead: there is no g++ on PATH"
    ]


def test_a_compiler_that_fails_is_no_reason_not_to_start(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = fresh / "g++"
    wrong.write_text("#!/bin/sh\n[ $1 = --version ] || { echo no such flag >&2; exit 1; }\n")
    wrong.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fresh}{os.pathsep}/bin{os.pathsep}/usr/bin")
    assert type(choose(False, CPU)) is TorchOps
    with pytest.raises(build.BuildError, match="no such flag"):
        build.load(build.cache_folder())


def test_a_switch_turns_kernels_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, "0")
    assert type(choose(False, CPU)) is TorchOps


@pytest.mark.full
def test_a_second_start_compiles_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if build.shutil.which("g++") is None:
        pytest.skip("no compiler here")
    build.load(build.cache_folder())
    monkeypatch.setattr(build, "_compile", None)
    build.load(build.cache_folder())
    assert [path.suffix for path in build.cache_folder().iterdir()] == [".so"]


@pytest.mark.full
def test_a_process_has_one_openmp_runtime() -> None:
    """A second pool of threads would spin beside torch's."""
    if build.library() is None:
        pytest.skip("no compiler here")
    program = """
import re, torch
from pathlib import Path
from kvtide.layers import choose
ops = choose(False, torch.device("cpu"))
ops.arithmetic.linear(torch.ones(2, 8), torch.ones(200, 8))
torch.ones(300, 300) @ torch.ones(300, 300)
maps = Path("/proc/self/maps").read_text()
runtimes = set(re.findall(r"/\\S*lib(?:gomp|iomp5|omp)\\S*", maps))
print(type(ops).__name__, len(runtimes))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [NativeOps.__name__, "1"]
