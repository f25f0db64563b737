"""The bytes that tokens stand for.

A token is a run of bytes, not of characters: a character may be spread over several tokens. So text
is made by joining bytes and reading them as UTF-8 once, and never by joining texts of tokens.
Vocabularies write bytes as text in one of two ways:

- byte-level: a character for each of the 256 bytes, the printable ones themselves;
- pieces: text with `▁` for a space, and `<0x0A>` for a byte that no piece has.

A token with characters that neither way gives a meaning to is written as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

SPACE = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a vocabulary writes bytes.

    token          how the vocabulary writes a token; None where it has no such token.
    read           the bytes of a token that is written so.
    silent         tokens that are no text: where it begins, where a turn ends.
    leading_space  the vocabulary puts a space before a text, and reading takes it away again.
    """

    token: Callable[[int], str | None]
    read: Callable[[str], bytes]
    silent: frozenset[int]
    leading_space: bool = False
    _known: dict[int, bytes] = field(default_factory=dict, repr=False)

    def __getitem__(self, token_id: int) -> bytes:
        """What a token stands for; nothing where the vocabulary has no such token.

        Models have more rows than tokens where a round number suits the hardware better.
        """
        found = self._known.get(token_id)
        if found is None:
            written = self.token(token_id)
            found = b"" if written is None else self.read(written)
            self._known[token_id] = found
        return found


def _byte_characters() -> dict[str, int]:
    """The characters of byte-level vocabularies. Bytes that do not print are 256 and up."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    characters = {chr(byte): byte for byte in printing}
    return characters | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()


def byte_level(written: str) -> bytes:
    """A token of a byte-level vocabulary. One that was added may have other characters."""
    if all(character in _BYTES for character in written):
        return bytes(_BYTES[character] for character in written)
    return written.encode()


def piece(written: str) -> bytes:
    """A token of a vocabulary of pieces."""
    single = _BYTE_PIECE.fullmatch(written)
    if single is not None:
        return bytes.fromhex(single[1])
    return written.replace(SPACE, " ").encode()
