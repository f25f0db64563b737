"""Every tensor that can be reached from an object, by what name, and whether it was changed since.

Followed are attributes, items, closures, whatever else an object refers to, its class, and the
data in the module of that class. Not followed are other modules, and what only a running function
knows. The nearest name of a tensor is the one reported.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType

import torch
from torch import Tensor

_LEAVES = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
_DEAD_ENDS = (ModuleType, CodeType, FrameType)
_FOREIGN = sys.stdlib_module_names | {"numpy", "torch"}
"""Packages whose classes and modules keep nothing of a model's."""

Named = tuple[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class Sighting:
    """A tensor as it was. It is held, so that nothing else can take its identity meanwhile."""

    path: str
    tensor: Tensor
    version: int
    address: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, path: str, tensor: Tensor) -> Sighting:
        version = 0 if tensor.is_inference() else tensor._version
        return cls(path, tensor, version, tensor.data_ptr(), tuple(tensor.shape))

    @property
    def state(self) -> tuple[object, ...]:
        return self.version, self.address, self.shape


def tensors(root: object, name: str) -> dict[int, Sighting]:
    """By identity."""
    found: dict[int, Sighting] = {}
    known: dict[int, object] = {}  # Held, as a sighting holds its tensor.
    coming = deque([(name, root)])
    while coming:
        path, value = coming.popleft()
        if id(value) in known or isinstance(value, _LEAVES):
            continue
        known[id(value)] = value
        if isinstance(value, Tensor):
            found[id(value)] = Sighting.of(path, value)
        elif not isinstance(value, _DEAD_ENDS):
            coming.extend(_parts(path, value))
    return found


def _parts(path: str, value: object) -> Iterator[Named]:
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"{path}[{number}]", item) for number, item in enumerate(value))
    elif isinstance(value, FunctionType):
        yield from _of_function(path, value)
    elif isinstance(value, type):
        yield from _of_class(value)
    else:
        yield from _of_object(path, value)


def _of_object(path: str, value: object) -> Iterator[Named]:
    """What has a name comes first, so that it is known by it."""
    yield from ((f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items())
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield f"{path}.{name}", getattr(value, name, None)
    unnamed = f"{path}<{type(value).__name__}>"
    yield from ((unnamed, item) for item in gc.get_referents(value))


def _of_function(path: str, function: FunctionType) -> Iterator[Named]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from ((f"{path}.{name}", item) for item in gc.get_referents(cell))
    yield f"{path}.__defaults__", function.__defaults__
    yield f"{path}.__kwdefaults__", function.__kwdefaults__
    yield f"{path}.__dict__", function.__dict__


def _of_class(kind: type) -> Iterator[Named]:
    if kind.__module__.partition(".")[0] in _FOREIGN:
        return
    yield from ((f"{kind.__name__}.{name}", item) for name, item in vars(kind).items())
    yield from ((base.__name__, base) for base in kind.__bases__)
    module = sys.modules.get(kind.__module__)
    for name, item in vars(module).items() if module else ():
        cached = hasattr(item, "cache_info") and item.__module__ == kind.__module__
        if cached or isinstance(item, Tensor | dict | list | set):
            yield f"{kind.__module__}.{name}", item
