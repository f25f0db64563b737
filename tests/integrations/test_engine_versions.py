"""Engines of untested versions are refused in a sentence, before anything of them is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvtide.integrations import engine_versions
from kvtide.integrations.engine_versions import EngineVersionError, require_version


def test_a_tested_version_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_versions, "version", lambda package: "2.1")
    assert require_version("engine", ["engine"], ["2.0", "2.1"]) == "2.1"


def test_an_untested_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_versions, "version", lambda package: "9.9")
    with pytest.raises(EngineVersionError, match=r"tested with engine 2\.0 and 2\.1, and 9\.9 is"):
        require_version("engine", ["engine"], ["2.0", "2.1"])


def test_a_missing_engine_is_refused() -> None:
    with pytest.raises(EngineVersionError, match=r"needs no-such-engine 2\.0, and none is inst"):
        require_version("engine", ["no-such-engine"], ["2.0"])


def test_importing_the_package_imports_no_engine() -> None:
    engines = ("vllm", "sglang", "lmcache", "transformers", "torch")
    code = f"import sys, kvtide.integrations; print({{*{engines}}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
