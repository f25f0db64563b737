"""How settings are written: a row of the table (`settings`), the parsers of values, and secrets.

A parser raises `SettingsError` with the end of a sentence; its beginning names the setting.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from kvtide.byte_sizes import parse_bytes
from kvtide.spec import SpecError
from kvtide.spec.residency import Residency

MIN_SECRET_BYTES = 16


class SettingsError(Exception):
    """Settings that cannot be served, in a sentence that names the remedy."""


def parse_text(value: str) -> str:
    if not value:
        raise SettingsError("is empty")
    return value


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in choices:
            raise SettingsError(f"is '{value}'; use {', '.join(choices)}")
        return value

    return parse


def number(low: float, high: float, kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(value: str) -> float:
        try:
            given = kind(value)
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise SettingsError(f"is '{value}'; use {expected}") from None
        if not low <= given <= high:
            raise SettingsError(f"is {given}; use {low:,} to {high:,}")
        return given

    return parse


def count(low: int = 1, high: int = 1 << 40) -> Callable[[str], float]:
    return number(low, high, int)


def seconds(high: float = 86400.0) -> Callable[[str], float]:
    return number(0, high, float)


def fraction(high: float = 1.0) -> Callable[[str], float]:
    return number(0.0, high, float)


def parse_size(value: str) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise SettingsError(f"is no size: {error}") from None


def parse_resident(value: str) -> str:
    try:
        return str(Residency.parse(value))
    except SpecError:
        raise SettingsError(f"is '{value}'; use all, auto, or hot:B, like hot:4096") from None


def parse_flag(value: str) -> bool:
    named = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if value.lower() not in named:
        raise SettingsError(f"is '{value}'; use true or false")
    return named[value.lower()]


def setting(default: Any, parse: Callable[[str], Any], text: str, metavar: str = "X") -> Any:
    """A row of the table: default, parser, help text, and the value's name in the help."""
    return field(default=default, metadata={"parse": parse, "help": text, "metavar": metavar})


def is_address(host: str) -> bool:
    """Whether a host is an address; names may be anywhere."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host; a name other than localhost may be anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_secret(
    option: str, file: str | None, variable: str, environment: Mapping[str, str]
) -> bytes | None:
    """A secret that processes share, from a file or from the environment; None if neither has one.
    A command line is seen by every user, so it has none."""
    given = environment.get(variable)
    if file is not None and given is not None:
        raise SettingsError(f"{option} and {variable} are both given; keep one of them")
    if file is None and given is None:
        return None
    source = variable if file is None else f"{option} {file}"
    try:
        secret = (given or "").encode() if file is None else Path(file).read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"{source}: {error.strerror}; pass a file with the secret") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise SettingsError(
            f"{source} has {len(secret)} bytes, which can be guessed; use at least "
            f"{MIN_SECRET_BYTES}"
        )
    return secret
