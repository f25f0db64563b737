"""Stand-ins for GPU-only packages, so that the CPU side of a peer imports without them.

An import of a listed package that is not installed yields an object that accepts any attribute,
call, subscript or use as a decorator. None of it runs in what the benchmarks measure.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

GPU_ONLY = (
    "triton", "sgl_kernel", "flashinfer", "tvm_ffi", "torch_memory_saver", "decord", "outlines",
    "llguidance", "xgrammar", "interegular", "soundfile", "tiktoken", "sentencepiece", "gguf",
    "openai", "openai_harmony", "modelscope", "compressed_tensors", "torchao", "torchvision",
    "torchaudio", "blobfile", "datasets", "av", "scipy",
)  # fmt: skip


def install(names: Iterable[str] = GPU_ONLY) -> None:
    """Answer imports of those packages that are not installed."""
    missing = {name for name in names if importlib.util.find_spec(name) is None}
    sys.meta_path.insert(0, _Finder(missing))


class _Anything:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: Any, **options: Any) -> Any:
        decorates = len(args) == 1 and not options and callable(args[0])
        return args[0] if decorates else _Anything()

    def __getitem__(self, key: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (type("StubBase", (), {}),)

    def __bool__(self) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __lt__(self, other: Any) -> bool:
        return True

    __le__ = __lt__

    def __ge__(self, other: Any) -> bool:
        return False

    __gt__ = __ge__

    def __index__(self) -> int:
        return 0

    __int__ = __index__

    def __mul__(self, other: Any) -> int:
        return 0

    __rmul__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 (a package, as the import system wants it)
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        found = _Anything()
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__file__ = "<stub>"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """A stub has no code."""
