"""Regular expressions of a schema's `format`: their texts are valid, though some valid texts are
not among them, such as leap seconds and letters of other scripts in addresses."""

from __future__ import annotations

_SIXTIETH = "[0-5][0-9]"
_YEAR_OF_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    f"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_YEAR_OF_LEAP}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = f"{_HOUR}:{_SIXTIETH}:{_SIXTIETH}(?:\\.[0-9]+)?(?:Z|[+-]{_HOUR}:{_SIXTIETH})"
_CLOCK = "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_CALENDAR = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_HOST = f"{_LABEL}(?:\\.{_LABEL}){{0,6}}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9A-Fa-f]{1,4}"
_PATH_LETTER = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_PATH = f"(?:{_PATH_LETTER}|/)"
_QUERY = f"(?:{_PATH_LETTER}|[/?])*"


def _ipv6() -> str:
    """Eight groups, or fewer with one gap for two groups or more."""
    whole = f"(?:{_GROUP}:){{7}}{_GROUP}"
    gaps = [
        f"{_groups(before)}::{_groups(after)}" for before in range(7) for after in range(7 - before)
    ]
    return "|".join([whole, *gaps])


def _groups(count: int) -> str:
    return ":".join([_GROUP] * count)


TEXT_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_CALENDAR}(?:T{_CLOCK})?|T{_CLOCK}|[0-9]+W)",
    "email": f"{_ATOM}(?:\\.{_ATOM}){{0,2}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": "\\.".join([_OCTET] * 4),
    "ipv6": _ipv6(),
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": (
        f"[A-Za-z][A-Za-z0-9+.-]*:"
        f"(?://(?:{_HOST}(?::[0-9]{{1,5}})?)?(?:/{_PATH}*)?|{_PATH_LETTER}{_PATH}*)"
        f"(?:\\?{_QUERY})?(?:#{_QUERY})?"
    ),
}
