"""The versions of engines that an integration was tested with."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


class EngineVersionError(ImportError):
    """An engine that is missing, or of a version that was not tested."""


def require_version(integration: str, packages: Sequence[str], tested: Sequence[str]) -> str:
    """The installed version, if it was tested; the first package that is installed counts.

    Integrations stand on interfaces that change between minor versions of an engine, so that an
    untested one is refused instead of tried.
    """
    remedy = f"{packages[0]}=={tested[-1]}"
    for package in packages:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if found in tested:
            return found
        raise EngineVersionError(
            f"kvtide.integrations.{integration} was tested with {package} {' and '.join(tested)}, "
            f"and {found} is installed; pip install '{remedy}'"
        )
    raise EngineVersionError(
        f"kvtide.integrations.{integration} needs {packages[0]} {' or '.join(tested)}, and none is "
        f"installed; pip install '{remedy}'"
    )
