"""Reading a published `config.json`: typed look-ups, and one way to refuse an odd one.

Labs and `transformers` spell the same fact differently (`hybrid_override_pattern` and
`layers_block_type`), so every look-up takes the names a fact is known by. A missing or odd field
is a `SpecError` that says which field, what stood there and what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvtide.spec.pool import SpecError


@dataclass(frozen=True, slots=True)
class Config:
    """The fields of one model's config. `model` is the name that refusals begin with."""

    model: str
    values: Mapping[str, object]

    def refusal(self, sentence: str) -> SpecError:
        return SpecError(f"{self.model}: {sentence}")

    def find(self, *names: str) -> object | None:
        """The first of these fields that is present and not null."""
        return next((v for v in map(self.values.get, names) if v is not None), None)

    def count(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        value = self.find(*names)
        if value is None and default is not None:
            return default
        if value is None:
            known = " or ".join(f"`{name}`" for name in names)
            raise self.refusal(
                f"config.json has no {known}; add it, with the value the checkpoint was made with"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            name = next(n for n in names if self.values.get(n) is not None)
            raise self.refusal(f"`{name}` is {value!r}; use a whole number of at least {minimum}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A number, whole or not; infinite where the config says so."""
        value = self.find(*names)
        if value is None and default is not None:
            return default
        number = _number(value)
        if number is None:
            raise self.refusal(f"`{names[0]}` is {value!r}; use a number")
        return number

    def numbers(self, name: str, *default: float) -> tuple[float, ...]:
        """As many numbers as `default` has."""
        items = self.listing(name)
        found = default if items is None else tuple(map(_number, items))
        numbers = tuple(number for number in found if number is not None)
        if not len(numbers) == len(found) == len(default):
            raise self.refusal(f"`{name}` is {items}; use a list of {len(default)} numbers")
        return numbers

    def flag(self, name: str) -> bool:
        return bool(self.values.get(name))

    def listing(self, *names: str) -> list[object] | None:
        """A list, if the config has one under any of these names."""
        value = self.find(*names)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.refusal(f"`{names[0]}` is {value!r}; use a list with one item per layer")
        return list(value)

    def per_layer(self, layers: int, *names: str) -> list[object] | None:
        """A list with an item for each layer; what follows the last layer is an MTP layer's."""
        items = self.listing(*names)
        if items is not None and len(items) < layers:
            raise self.refusal(
                f"`{names[0]}` has {len(items)} items for {layers} layers; list every layer"
            )
        return None if items is None else items[:layers]

    def indices(self, layers: int, *names: str) -> tuple[int, ...] | None:
        """A list of layer numbers, ascending."""
        items = self.listing(*names)
        if items is None:
            return None
        numbers = [i for i in items if isinstance(i, int) and 0 <= i < layers]
        if len(numbers) != len(items):
            raise self.refusal(f"`{names[0]}` is {items}; use layer numbers in 0..{layers - 1}")
        return tuple(sorted(set(numbers)))

    def nested(self, name: str) -> Config | None:
        """A sub-object such as a multimodal wrapper's `text_config`."""
        value = self.values.get(name)
        return replace(self, values=value) if isinstance(value, Mapping) else None

    def beneath(self, defaults: Mapping[str, object]) -> Config:
        """This config with values for the fields it leaves out; a null stays a null."""
        return replace(self, values={**defaults, **self.values})


def _number(value: object) -> float | None:
    """JSON has no infinity: `transformers` writes it as an object of one field."""
    if isinstance(value, Mapping) and isinstance(value.get("__float__"), str):
        return float(value["__float__"])
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None
