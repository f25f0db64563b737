"""Sizes in bytes, parsed from and formatted as text such as 80GB."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


def parse_bytes(text: str) -> int:
    """'80GB', '1.5 TiB', '4096' → bytes; decimal units are powers of 1000, 'iB' ones of 1024."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]?)(i?)(?:B|b)?\s*", text, re.I)
    if match is None:
        raise ValueError(f"'{text}' is not a size; write it like 80GB, 512GiB or 4096")
    number, unit, binary = match.groups()
    power = "KMGTP".find(unit.upper()) + 1 if unit else 0
    return int(float(number) * (1024**power if binary else _UNITS[unit.upper()]))


def format_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} PB"
