"""Where settings come from: flags, environment and config file.

A setting `page_tokens` is the flag `--page-tokens`, the variable `KVTIDE_PAGE_TOKENS` and the key
`page_tokens` of a TOML file. A flag overrides a variable, and a variable the file.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from kvtide.server.setting_values import SettingsError, parse_flag
from kvtide.server.settings import ALTERNATIVES, Settings, flag

PREFIX = "KVTIDE_"
CONFIG = "config"

ALIASES = {
    "layout": "host_layout",
    "prefetch_most_seconds": "prefetch_max_seconds",
    "prefetch_least_tokens": "prefetch_min_tokens",
}
"""Other names of settings, for flags, variables and keys of the config file."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for every setting. A flag that is not given is not in the namespace."""
    parser.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, help=_fields()["model"].metadata["help"]
    )
    parser.add_argument(
        flag(CONFIG), default=argparse.SUPPRESS, metavar="FILE", help="settings in TOML"
    )
    for name, row in _fields().items():
        text = row.metadata["help"] + (f" ({row.default})" if row.default else "")
        if row.metadata["parse"] is parse_flag:
            parser.add_argument(
                flag(name),
                action="store_const",
                const="true",
                default=argparse.SUPPRESS,
                help=text,
            )
            parser.add_argument(
                flag("no_" + name),
                dest=name,
                action="store_const",
                const="false",
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
        elif name != "model":
            parser.add_argument(
                flag(name),
                default=argparse.SUPPRESS,
                metavar=row.metadata["metavar"],
                help=text.replace("%", "%%"),
            )
    for alias in ALIASES:
        parser.add_argument(flag(alias), default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def variable(name: str) -> str:
    return PREFIX + name.upper()


def read(given: Mapping[str, str], environment: Mapping[str, str]) -> Settings:
    """The settings of flags, environment and config file together."""
    path = given.get(CONFIG, environment.get(variable(CONFIG)))
    in_file = {} if path is None else _file_values(Path(path))
    variables = _values(environment, variable, variable)
    flags = _values(given, str, flag)
    values: dict[str, tuple[str, str]] = {}
    for source in (in_file, variables, flags):
        overridden = {name for group in ALTERNATIVES if source.keys() & {*group} for name in group}
        values = {n: value for n, value in values.items() if n not in overridden} | source
    table = _fields()
    chosen = Settings(**{name: _parsed(table[name], *value) for name, value in values.items()})
    chosen.handoff.secret(environment)  # A secret that is missing is refused here too.
    return chosen


def _values(
    source: Mapping[str, str], key: Callable[[str], str], label: Callable[[str], str]
) -> dict[str, tuple[str, str]]:
    """Setting → the label for messages and the value, where the source has the key."""
    names = {**ALIASES, **{name: name for name in _fields()}}
    return {
        name: (label(alias), source[key(alias)])
        for alias, name in names.items()
        if key(alias) in source
    }


def _fields() -> dict[str, Field[Any]]:
    return {row.name: row for row in fields(Settings)}


def _parsed(row: Field[Any], source: str, value: str) -> Any:
    try:
        return row.metadata["parse"](value)
    except SettingsError as problem:
        raise SettingsError(f"{source} {problem}") from None


def _file_values(path: Path) -> dict[str, tuple[str, str]]:
    """Setting → the config file's key for messages, and its value as a flag would have it."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; pass a file with settings") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not TOML ({error}); write lines like port = 8000") from None
    values = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        name = ALIASES.get(name, name)
        if name not in _fields():
            near = difflib.get_close_matches(name, _fields(), 1)
            remedy = f"did you mean {near[0]}?" if near else f"use {', '.join(_fields())}"
            raise SettingsError(f"{path}: there is no setting '{key}'; {remedy}")
        if isinstance(value, dict | list):
            raise SettingsError(f"{path}: {key} is a table or list; write {key} = VALUE")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        values[name] = (f"{path}: {key}", text)
    return values
