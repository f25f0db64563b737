"""Reading a GGUF file's metadata: typed look-ups, and one way to refuse an odd one.

Values are Python's: numbers, strings, booleans and lists of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtide.models.model_errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Metadata:
    """What one file says of itself. Look-ups without a default refuse a key that is missing."""

    path: Path
    values: Mapping[str, object]

    def refusal(self, sentence: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {sentence}")

    def has(self, key: str) -> bool:
        return key in self.values

    def count(self, key: str, default: int | None = None) -> int:
        value = self._find(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._odd(key, value, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._find(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._odd(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._find(key, default)
        if not isinstance(value, bool):
            raise self._odd(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._find(key, default)
        if not isinstance(value, str):
            raise self._odd(key, value, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._find(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._odd(key, value, "a list of strings")
        return value

    def numbers(self, key: str) -> list[float]:
        value = self._find(key, None)
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise self._odd(key, value, "a list of numbers")
        return value

    def _find(self, key: str, default: object) -> object:
        value = self.values.get(key, default)
        if value is None:
            raise self.refusal(
                f"the metadata has no `{key}`; convert the model again with llama.cpp's "
                "convert_hf_to_gguf.py"
            )
        return value

    def _odd(self, key: str, value: object, wanted: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) < 60 else f"{shown[:60]}…"
        return self.refusal(f"the metadata's `{key}` is {shown}; it should be {wanted}")
