"""What a decode server and a prefill server tell each other about one handoff.

    decode ──▶ prefill   Ask, Reserve, StopWriting, Done
    prefill ──▶ decode   Written, First, Complete, Failed, Silent

A *room* names the handoff on both sides. An *epoch* names the slots that the decode side took for
it: news of another epoch are ignored. Messages travel as JSON; arrays of numbers are packed.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Ask:
    """Prefill this prompt for a room: the request as `request_fields` writes it."""

    room: str
    request: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class PagePlaces:
    """Slots of one anchor of the decode side: place `first + i` is page `pages[i]`."""

    anchor: str
    first: int
    pages: Numbers
    slots: Numbers

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + len(self.pages))


@dataclass(frozen=True, slots=True, eq=False)
class Reserve:
    """Write these pages to these slots, then the tail to its row.

    prompt     a digest of the prompt and its namespace (`prompt_digest`): both sides must have the
               same, or pages of one prompt would be taken for those of another
    boundary   the page at which the tail begins
    """

    room: str
    epoch: int
    prompt: str
    boundary: int
    places: tuple[PagePlaces, ...]
    tail_row: int

    @property
    def name(self) -> tuple[str, int]:
        """Room and epoch."""
        return self.room, self.epoch

    @property
    def count(self) -> int:
        return sum(len(some.pages) for some in self.places)


@dataclass(frozen=True, slots=True)
class StopWriting:
    """Write no more for this epoch, and answer `Silent`."""

    room: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing more is needed for the room: what it holds may go. `epoch`: of the reservation that
    is done, 0 if there was none."""

    room: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """The bytes of these places are there. `absent`: optional sidecars, with the numbers of the
    places that came without them."""

    room: str
    epoch: int
    numbers: tuple[int, ...]
    absent: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class First:
    """The first token of the answer, as sampled; pages and the tail may be on their way.

    cached  tokens that the prefill side's tiers had, by tier
    """

    room: str
    epoch: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    cached: dict[str, int]


@dataclass(frozen=True, slots=True)
class Complete:
    """All is written, the tail too, and nothing more will be.

    tail      whether the tail has every pool of the decode side, the draft's too
    captured  what the target captured of the prompt's last token, in its own dtype: the decode
              side's first draft needs it. Empty if no draft ran
    """

    room: str
    epoch: int
    tail: bool
    captured: bytes = b""


@dataclass(frozen=True, slots=True)
class Failed:
    """The handoff has ended here. `silent`: no byte of it comes any more."""

    room: str
    epoch: int
    reason: str
    silent: bool


@dataclass(frozen=True, slots=True)
class Silent:
    """No byte comes any more for this epoch; answers `StopWriting`."""

    room: str
    epoch: int


HandoffMessage = Ask | Reserve | StopWriting | Done | Written | First | Complete | Failed | Silent
_KINDS: dict[str, Any] = {
    kind.__name__.lower(): kind
    for kind in (Ask, Reserve, StopWriting, Done, Written, First, Complete, Failed, Silent)
}


class MessageError(ValueError):
    """A message that this side does not understand."""


def to_json(message: HandoffMessage) -> dict[str, Any]:
    return {"kind": type(message).__name__.lower(), **_plain(message)}


def from_json(values: dict[str, Any]) -> HandoffMessage:
    """Raises `MessageError` for what is not one of these messages."""
    try:
        given = dict(values)
        kind = _KINDS.get(str(given.pop("kind", "")))
        if kind is None:
            raise KeyError("kind")
        if kind is Reserve:
            given["places"] = tuple(_places(each) for each in given["places"])
        if kind is Written:
            given["numbers"] = tuple(map(int, given["numbers"]))
            absent = given["absent"].items()
            given["absent"] = {str(name): tuple(map(int, each)) for name, each in absent}
        if kind is First:
            given["top"] = tuple((int(token), float(value)) for token, value in given["top"])
        if kind is Complete:
            given["captured"] = base64.b64decode(given["captured"], validate=True)
        message: HandoffMessage = kind(**given)
        _check_types(message)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MessageError(f"no message of a handoff: {type(error).__name__}: {error}") from None
    return message


def _plain(value: Any) -> dict[str, Any]:
    return {each.name: _value(getattr(value, each.name)) for each in fields(value)}


def _value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return base64.b64encode(value.astype("<i4").tobytes()).decode()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, tuple):
        return [_value(each) for each in value]
    return _plain(value) if isinstance(value, PagePlaces) else value


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "dict[str, Any]": (dict,),
    "dict[str, int]": (dict,),
}
"""What JSON has for a field, by its annotation; other fields are converted."""


def _check_types(message: HandoffMessage) -> None:
    """Raise `TypeError` where a field is not what is declared: the engine relies on it."""
    for each in fields(message):
        value, wanted = getattr(message, each.name), _TYPES.get(str(each.type))
        if wanted is None:
            continue
        counts = list(value.values()) if each.type == "dict[str, int]" else []
        if type(value) not in wanted or any(type(count) is not int for count in counts):
            raise TypeError(f"{each.name} is {value!r}")


def _places(values: dict[str, Any]) -> PagePlaces:
    pages, slots = (
        np.frombuffer(base64.b64decode(values[name]), "<i4") for name in ("pages", "slots")
    )
    if len(pages) != len(slots):
        raise ValueError("as many pages as slots")
    return PagePlaces(str(values["anchor"]), int(values["first"]), pages, slots)
