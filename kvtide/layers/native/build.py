"""The native kernels as a library: compiled at the first start, kept in the user's cache.

A start never fails for it. Without a compiler, with one that does not know these flags, or with
`KVTIDE_NATIVE=0`, there is no library, and the torch references run.

The library brings no OpenMP runtime: it uses the one that torch has loaded. Two runtimes would each
keep a pool of threads, and the idle one spins beside the other.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

log = logging.getLogger("kvtide")

SWITCH = "KVTIDE_NATIVE"
_SOURCES = Path(__file__).parent
_COMPILE = (
    *("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math"),
    *("-fPIC", "-fopenmp"),
)
_COMPILE_SECONDS = 120
_OPENMP = re.compile(r"/\S*lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*$", re.MULTILINE)


class BuildError(Exception):
    """Why there is no library."""


@cache
def library() -> ctypes.CDLL | None:
    """The library, compiled if this machine has not compiled it yet."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return load(cache_folder())
    except (BuildError, OSError) as error:
        log.info("CPU kernels are not available, torch computes instead: %s", error)
        return None


def load(folder: Path) -> ctypes.CDLL:
    """The library out of this folder, or compiled into it."""
    _share_openmp()
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("there is no g++ on PATH")
    target = folder / f"kernels-{_fingerprint(compiler)}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(compiler, target)
    return ctypes.CDLL(str(target))


def cache_folder() -> Path:
    """Where libraries are kept: `XDG_CACHE_HOME`, or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvtide" / "native"


def _share_openmp() -> None:
    """Makes the functions of torch's OpenMP runtime visible to the library."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError as error:
        raise BuildError("loaded libraries are not listed here") from error
    found = _OPENMP.search(mapped)
    if found is None:
        raise BuildError("torch has loaded no OpenMP runtime")
    ctypes.CDLL(found.group(), mode=ctypes.RTLD_GLOBAL)


def _fingerprint(compiler: str) -> str:
    """Of all that the library depends on: sources, flags, compiler, instructions of the CPU."""
    found = hashlib.sha256()
    for path in sorted(_SOURCES.glob("*.[ch]*")):
        found.update(path.read_bytes())
    version = _run([compiler, "--version"])
    found.update("\0".join([*_COMPILE, compiler, version, _instructions()]).encode())
    return found.hexdigest()[:16]


def _instructions() -> str:
    cpu = Path("/proc/cpuinfo").read_text()
    flags = re.search(r"^(?:flags|Features)\s*:.*$", cpu, re.MULTILINE)
    return platform.machine() + (flags.group() if flags else "")


def _compile(compiler: str, target: Path) -> None:
    """Processes that start together each compile, and the last one's file stays."""
    log.info("compiling CPU kernels, once on this machine")
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        sources = sorted(_SOURCES.glob("*.cpp"))
        objects = [str(Path(work) / f"{source.stem}.o") for source in sources]
        pairs = zip(sources, objects, strict=True)
        with ThreadPoolExecutor(len(sources)) as compilers:
            list(
                compilers.map(
                    _run,
                    (
                        [compiler, *_COMPILE, "-c", str(source), "-o", made]
                        for source, made in pairs
                    ),
                )
            )
        # Linked without -fopenmp: the runtime is torch's.
        made = Path(work) / "kernels.so"
        _run([compiler, "-shared", *objects, "-o", str(made)])
        made.replace(target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        raise BuildError((done.stderr.strip().splitlines() or ["it failed"])[0])
    return done.stdout
