"""Import single modules of an unpacked wheel without running its packages' `__init__`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def bare(root: Path, *packages: str) -> None:
    for name in packages:
        module = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
