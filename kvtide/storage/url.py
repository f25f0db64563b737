"""URLs of stores: taken apart, with settings behind the question mark, and refused in sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtide.storage.store import DEFAULT_TIMEOUT_S, StoreError

UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", 1):
    UNITS |= {f"{_letter}": 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


@dataclass(frozen=True, slots=True)
class StoreURL:
    """`scheme://user:password@host:port/path?setting=value`, decoded. `str()` has no password."""

    scheme: str
    host: str = ""
    port: int | None = None
    path: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    settings: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> StoreURL:
        try:
            parts = urlsplit(text)
        except ValueError:
            raise StoreError("storage: the URL is none; write it like redis://host:6379") from None
        if parts.fragment or (parts.netloc and "@" in parts.path):
            # Half a password would be taken for a host, and be shown as one.
            raise StoreError(
                f"storage {parts.scheme}: the URL has a # or a late @; write %23, %2F and %40 in "
                "user, password and path"
            )
        try:
            port = parts.port
        except ValueError:
            # What stands there may be a password whose host was forgotten: it is not shown.
            place = f"{parts.scheme}://{parts.hostname or ''}"
            raise StoreError(f"storage {place}: the port is not a number") from None
        settings = dict(parse_qsl(parts.query, keep_blank_values=True))
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        host, path = parts.hostname or "", unquote(parts.path)
        return cls(parts.scheme, host, port, path, user, password, settings)

    def __str__(self) -> str:
        port = f":{self.port}" if self.port is not None else ""
        slashes = "//" if self.host or self.path.startswith("/") else ""
        scheme = f"{self.scheme}:" if self.scheme else ""
        return f"{scheme}{slashes}{self.host}{port}{self.path}"

    def only(self, *allowed: str) -> None:
        """Refuse settings that the store does not know."""
        for name in self.settings:
            if name not in allowed:
                known = ", ".join(allowed) or "none"
                raise StoreError(f"storage {self}: no setting {name}; it knows {known}")

    def bytes(self, name: str, default: int) -> int:
        """A size such as 200GB, 1.5TB or 512MiB."""
        text = self.settings.get(name)
        if text is None:
            return default
        number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        unit = UNITS.get(text[len(number) :].upper())
        try:
            size = float(number) * unit if unit is not None else math.nan
        except ValueError:
            size = math.nan
        if not 0 <= size < math.inf:
            raise StoreError(f"storage {self}: {name}={text} is no size; write 200GB or 512MiB")
        return int(size)

    def seconds(self, name: str = "timeout", default: float = DEFAULT_TIMEOUT_S) -> float:
        text = self.settings.get(name)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise StoreError(f"storage {self}: {name}={text} is no time; write seconds, like 2.5")
        return value

    def count(self, name: str, default: int) -> int:
        text = self.settings.get(name)
        if text is not None and not (text.isdecimal() and int(text) > 0):
            raise StoreError(f"storage {self}: {name}={text} is no count; write a number above 0")
        return default if text is None else int(text)
