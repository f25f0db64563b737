"""Programs of other projects: installed once, each set into a folder of its own."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

INSTALLED = ".installed"


def installed(name: str, wanted: Sequence[str], beside: Sequence[str] = ()) -> Path:
    """The folder with these packages, beside what is installed for the tests; made if need be.

    `wanted` come without what they depend on, `beside` with it. Processes of one run take turns:
    the first one installs.
    """
    folder = Path(sys.prefix) / name
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark, named = folder / INSTALLED, "\n".join((*wanted, *beside))
        if not mark.exists() or mark.read_text() != named:
            shutil.rmtree(folder, ignore_errors=True)
            _pip(folder, "--no-deps", *wanted)
            if beside:
                _pip(folder, *beside)
            mark.write_text(named)
    return folder


def _pip(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--upgrade", "--target", str(folder), *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
