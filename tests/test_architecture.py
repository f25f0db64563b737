"""Which way imports run, which names we write, and how long things get: DESIGN.md §2, STYLE.md.

Every test goes over all modules in a loop and lists everything that is wrong.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvtide"

_CORE = {"spec", "index", "tiers", "storage", "transfer", "cache"}
SEES: dict[str, set[str]] = {
    "spec": set(),
    "index": {"spec"},
    "tiers": {"spec"},
    "storage": {"spec"},
    "layers": {"spec"},
    "models": {"spec", "layers"},
    "planner": {"spec", "index"},
    "bench": {*_CORE, "planner", "layers", "models", "engine", "server"},
    "transfer": {"spec", "tiers", "storage"},
    "cache": _CORE - {"cache"},
    "engine": {*_CORE, "layers", "models"},
    "server": {*_CORE, "layers", "models", "engine"},
    "training": {*_CORE, "layers", "models", "engine"},
    "doctor": {
        *("spec", "storage", "tiers", "transfer", "layers", "models", "engine", "planner"),
        *("bench", "server"),
    },
    "cli": {
        *(*_CORE, "layers", "models", "engine", "planner", "bench", "server", "training"),
        "doctor",
    },
    "integrations": {*_CORE, "models"},
    "testing": {*_CORE},
}
"""Room → the rooms it may import. Rooms that do not exist yet stand here already."""

IMPORTED_WITHIN_FUNCTIONS = {
    ("kvtide/storage/mooncake/library.py", "mooncake.store.MooncakeDistributedStore"),
    ("kvtide/transfer/peer/mooncake_engine.py", "mooncake.engine.TransferEngine"),
    ("kvtide/transfer/copy_engine.py", "cuda.bindings.driver"),
    ("kvtide/integrations/engine_settings.py", "huggingface_hub.try_to_load_from_cache"),
    (
        "kvtide/integrations/sglang.py",
        "sglang.srt.observability.metrics_collector.StorageMetrics",
    ),
}
"""Libraries that are optional, or read the environment or start much when they are loaded."""
NOT_IN_THE_INDEX = {
    "asyncio", "concurrent", "io", "multiprocessing", "os", "pathlib", "queue", "random",
    "shutil", "socket", "subprocess", "sys", "tempfile", "threading", "time", "torch",
}  # fmt: skip

WORDS_WE_DO_NOT_WRITE = re.compile(
    r"(^|_)(manager|helper|helpers|info|util|utils|v2)(_|$)|^_?maybe_", re.IGNORECASE
)
NOT_COMPONENTS = re.compile(r"\b(some|no|every)body\b|\b(whoever|told|said)\b", re.IGNORECASE)
TEXTS_FOR_MODELS = {"kvtide/bench/drafts/speculate.py"}
NAMED_BY_OTHERS = {
    *("batch_exists_v2", "batch_get_v2", "batch_set_v2", "register_mem_host_pool_v2"),
}
"""Methods that other engines call."""
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_COLUMNS = 100
CODE = ("kvtide", "gpu", "bench", "examples")
"""Folders whose Python code keeps to MAX_COLUMNS, comments to tools included: ruff's E501 does not
count these."""
MAX_MODULES = 16
"""In a folder, beside its `__init__.py`."""
CROWDED = {"models"}
"""Folders that may have more: `models` has one file per family."""
CALLED_FROM_OUTSIDE = {"integrations", "testing"}
"""Rooms whose functions other engines call, or tests."""
KERNELS = {"layers/kernels", "layers/kernels/attention", "layers/kernels/recurrent"}
NAMESAKES = (({"layers"}, {"layers/reference"}, KERNELS), ({"models"}, {"spec/families"}))
"""Folders whose modules of one name belong together, one of each set: a layer, its reference in
torch and its kernel; a family's model and its memory."""

MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted({*(ROOT / "tests").rglob("*.py")} - {Path(__file__).resolve()})


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def _package(path: Path) -> list[str]:
    """The dotted package a module's relative imports start from."""
    return list(path.relative_to(ROOT).parent.parts)


def _imports(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """Every module imported anywhere, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from kvtide import index` names a room only in its second half.
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            yield from _imported_by_name(node)


def _imported_by_name(call: ast.Call) -> Iterator[str]:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in {"import_module", "__import__"} and call.args:
        argument = call.args[0]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def arrows(tree: ast.AST, package: list[str]) -> set[str]:
    """The rooms of kvtide that a module imports."""
    named = (module.split(".") for module in _imports(tree, package))
    return {parts[1] for parts in named if parts[0] == "kvtide" and len(parts) > 1}


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def test_imports_run_one_way() -> None:
    unknown = {room for room in map(_room, MODULES) if room} - SEES.keys()
    assert not unknown, f"new rooms: say in SEES what they may import: {sorted(unknown)}"
    upward = {}
    for path in MODULES:
        room = _room(path)
        allowed = SEES[room] | {room} if room else set()
        if wrong := (arrows(_parse(path), _package(path)) & SEES.keys()) - allowed:
            upward[_name(path)] = sorted(wrong)
    assert upward == {}


@pytest.mark.parametrize(
    "source",
    [
        "import kvtide.server",
        "from kvtide import server",
        "from kvtide.server.app import App",
        "from ..server import cli",
        "from .. import server",
        "def f():\n    from kvtide.server import cli",
        "if TYPE_CHECKING:\n    from kvtide.server.app import App",
        "importlib.import_module('kvtide.server')",
    ],
)
def test_no_way_of_importing_hides_an_arrow(source: str) -> None:
    assert "server" in arrows(ast.parse(source), ["kvtide", "index"])


def test_rooms_form_no_cycle() -> None:
    open_rooms = dict(SEES)
    while free := [room for room, sees in open_rooms.items() if not sees & open_rooms.keys()]:
        for room in free:
            del open_rooms[room]
    assert not open_rooms
    assert not any("testing" in sees for sees in SEES.values())


def test_every_room_has_a_line_in_the_table() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert {"spec", "index", "planner"} <= rooms
    assert rooms <= SEES.keys()


def test_only_what_is_optional_is_imported_within_functions() -> None:
    within = {
        (_name(path), module)
        for path in MODULES
        for function in _definitions(_parse(path))
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in _imports(node, _package(path))
    }
    assert within == IMPORTED_WITHIN_FUNCTIONS


def test_index_has_no_torch_threads_or_io() -> None:
    modules = [path for path in MODULES if _room(path) == "index"]
    assert modules
    wrong = {}
    for path in modules:
        tree = _parse(path)
        used = {module.split(".")[0] for module in _imports(tree, _package(path))}
        calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call)
                 and isinstance(n.func, ast.Name)}  # fmt: skip
        if found := used & NOT_IN_THE_INDEX | calls & {"open", "print", "input"}:
            wrong[_name(path)] = sorted(found)
    assert wrong == {}


def _definitions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)


def test_names_avoid_the_words_we_do_not_write() -> None:
    wrong = [
        f"{_name(path)}: {name}"
        for path in MODULES
        for name in (path.stem, *(node.name for node in _definitions(_parse(path))))
        if WORDS_WE_DO_NOT_WRITE.search(_snake(name)) and name not in NAMED_BY_OTHERS
    ]
    assert wrong == []


def test_components_are_the_subjects_of_prose_and_names() -> None:
    """In code and comments; the same words may occur in texts for models."""
    assert [
        f"{_name(path)}:{number}: {found[0]}"
        for path in (*MODULES, *TESTS)
        if _name(path) not in TEXTS_FOR_MODELS
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for found in [NOT_COMPONENTS.search(line)]
        if found
    ] == []


@pytest.mark.parametrize(
    "name", ["CacheManager", "slot_helper", "page_info", "utils", "match_v2", "_maybe_evict"]
)
def test_the_words_are_recognised_in_names(name: str) -> None:
    assert WORDS_WE_DO_NOT_WRITE.search(_snake(name))


def _too_long(path: Path) -> Iterator[str]:
    if (lines := len(path.read_text("utf-8").splitlines())) > MAX_MODULE_LINES:
        yield f"{_name(path)}: {lines} lines"
    for node in _definitions(_parse(path)):
        assert node.end_lineno is not None
        lines = node.end_lineno - node.lineno + 1
        if not isinstance(node, ast.ClassDef) and lines > MAX_FUNCTION_LINES:
            yield f"{_name(path)}: {node.name}: {lines} lines"


def test_modules_and_functions_stay_short() -> None:
    assert [problem for path in MODULES for problem in _too_long(path)] == []


def test_lines_of_code_have_at_most_100_columns() -> None:
    """But for those with a URL, which ruff lets be as long as it is."""
    paths = sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    assert {path.relative_to(ROOT).parts[0] for path in paths} == {*CODE}
    assert [
        f"{_name(path)}:{number}: {len(line)} columns"
        for path in paths
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if len(line) > MAX_COLUMNS and "://" not in line
    ] == []


def _names_in(tree: ast.AST) -> Iterator[str]:
    """Every name that code could call by, also as `name` or `module:name` in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.:]+", str(node.value)):
            yield from re.split("[.:]", str(node.value))


def test_every_public_function_and_class_is_named_by_code_other_than_tests() -> None:
    """By name alone, so that one whose name is used elsewhere is not found."""
    paths = sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    named = {name for path in paths for name in _names_in(_parse(path))}
    assert {"open_copier", "TieredCache"} <= named
    assert [
        f"{_name(path)}: {node.name}"
        for path in MODULES
        if _room(path) not in CALLED_FROM_OUTSIDE
        for node in _definitions(_parse(path))
        if not node.name.startswith("_") and node.name not in named
    ] == []


def test_a_public_name_of_a_type_stands_for_one_type() -> None:
    """Classes, and names that modules give to other types."""
    defined: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in _parse(path).body:
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(_name(path))
            elif (alias := _alias(node)) and alias[1] not in defined[alias[0]]:
                defined[alias[0]].append(alias[1])
    assert {
        name: found
        for name, found in defined.items()
        if len(found) > 1 and not name.startswith("_")
    } == {}


def _alias(node: ast.stmt) -> tuple[str, str] | None:
    """`Name = type`: the name, and the type without the modules that its parts are from."""
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return None
    name = node.targets[0].id
    if not re.fullmatch(r"[A-Z]+[a-z]\w*", name):
        return None
    return name, re.sub(r"\b\w+\.", "", ast.unparse(node.value))


def test_modules_of_one_name_are_declared_pairs() -> None:
    folders: dict[str, set[str]] = defaultdict(set)
    for path in MODULES:
        if path.stem != "__init__":
            folders[path.stem].add(path.relative_to(PACKAGE).parent.as_posix())
    alike = {name: found for name, found in folders.items() if len(found) > 1}
    assert {name: found for name, found in alike.items() if not _belong_together(found)} == {}


def _belong_together(folders: set[str]) -> bool:
    return any(
        folders <= set().union(*kinds) and all(len(folders & kind) <= 1 for kind in kinds)
        for kinds in NAMESAKES
    )


def test_two_kernels_of_one_name_do_not_belong_together() -> None:
    assert _belong_together({"layers", "layers/reference", "layers/kernels/attention"})
    assert not _belong_together({"layers", "layers/kernels", "layers/kernels/recurrent"})
    assert not _belong_together({"layers", "models"})


def test_no_folder_shows_more_modules_than_a_reader_takes_in() -> None:
    modules: dict[str, int] = defaultdict(int)
    for path in MODULES:
        modules[path.relative_to(PACKAGE).parent.as_posix()] += path.stem != "__init__"
    crowded = {folder: count for folder, count in modules.items() if count > MAX_MODULES}
    assert {folder: count for folder, count in crowded.items() if folder not in CROWDED} == {}


# -- files ---------------------------------------------------------------------------------------

LAYERS = PACKAGE / "layers"
SEEN_BY_KERNELS = {"backend/kernel_args", "elementwise", "forward", "packing", "step"}
"""The modules of `layers/` that kernels may import: none of them imports a layer or a kernel."""


def imported_files(path: Path) -> set[Path]:
    """The files of the package that a module imports, in whatever way."""
    found = set()
    for name in _imports(_parse(path), _package(path)):
        parts = name.split(".")
        if parts[0] != PACKAGE.name:
            continue
        for count in (len(parts), len(parts) - 1):
            module = ROOT.joinpath(*parts[:count])
            file = next(
                (f for f in (module.with_suffix(".py"), module / "__init__.py") if f.exists()), None
            )
            if file is not None:
                found.add(file)
                break
    return found - {path}


def test_files_form_no_cycle() -> None:
    open_files = {path: imported_files(path) for path in MODULES}
    while free := [path for path, sees in open_files.items() if not sees & open_files.keys()]:
        for path in free:
            del open_files[path]
    tangled = {
        _name(path): sorted(_name(other) for other in sees & open_files.keys())
        for path, sees in open_files.items()
    }
    assert not tangled, f"these import each other, or import those that do: {tangled}"


def test_kernels_import_no_layer() -> None:
    allowed = {LAYERS / f"{name}.py" for name in SEEN_BY_KERNELS}
    kernels = {path for path in MODULES if LAYERS / "kernels" in path.parents}
    assert {path.parent.relative_to(PACKAGE).as_posix() for path in kernels} == KERNELS
    for path in sorted(kernels):
        seen = {file for file in imported_files(path) if LAYERS in file.parents} - kernels
        assert seen <= allowed, f"{_name(path)} imports {sorted(map(_name, seen - allowed))}"
    for path in allowed:
        outside = imported_files(path) & kernels
        assert not outside, f"{_name(path)} imports {sorted(map(_name, outside))}"


def test_triton_is_imported_by_kernels_alone() -> None:
    kernels, triton_ops = LAYERS / "kernels", LAYERS / "backend" / "triton_ops.py"
    choice = LAYERS / "backend" / "choice.py"
    offers = {triton_ops, PACKAGE / "engine" / "device_kernels.py"}
    for path in (path for path in MODULES if _room(path) in ("layers", "models", "engine")):
        if kernels in path.parents:
            continue
        named = {name.split(".")[0] for name in _imports(_parse(path), _package(path))}
        assert "triton" not in named, f"{_name(path)} imports triton"
        seen = {file for file in imported_files(path) if kernels in file.parents}
        assert path in offers or not seen, f"{_name(path)} imports {sorted(map(_name, seen))}"
    assert {path for path in MODULES if triton_ops in imported_files(path)} == {choice}
    copies = {PACKAGE / "transfer" / f"{name}.py" for name in ("copy_kernel", "row_kernel")}
    assert copies | {triton_ops, choice} | offers <= set(MODULES)
    offering = {path for path in MODULES if copies & imported_files(path)}
    assert {path for path in offering if _room(path) == "transfer"} == {
        PACKAGE / "transfer" / "triton_copies.py"
    }
