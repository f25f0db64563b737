"""What the documents say is there: code that runs, links that lead somewhere, every check named."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from dataclasses import fields
from pathlib import Path
from textwrap import indent

import pytest

from kvtide.cache.cache_invariants import CHECKS as CACHE_CHECKS
from kvtide.cli.main import main
from kvtide.index.index_invariants import CHECKS as INDEX_CHECKS
from kvtide.server.handoff.handoff_settings import Role
from kvtide.server.setting_sources import add_flags, read
from kvtide.server.settings import Settings, flag
from kvtide.spec import Tier

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TRACES = ROOT.parent / "shared" / "traces"
MAX_COLUMNS = 100


def test_readme_code_runs_as_it_stands() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 3
    names: dict[str, object] = {"tokens": list(range(300))}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    index, cache = names["index"], names["cache"]
    assert index.validate() == []
    assert index.match(index.prompt(list(range(300)))).boundary == 4
    assert cache.drain(timeout_s=10) and cache.validate() == []
    cache.flush(Tier.DEVICE)
    assert cache.match(cache.prompt(list(range(300)))).by_tier == {Tier.HOST: 256}
    cache.close()


def test_code_that_is_quoted_stands_in_the_file_named_before_it() -> None:
    """Word for word, but for how far it is indented and for what `...` leaves out."""
    parts = re.split(
        r"```python\n(.*?)```", (ROOT / "docs/ADDING_A_MODEL.md").read_text(), flags=re.S
    )
    named, quoted = "", 0
    for prose, block in zip(parts[::2], parts[1::2], strict=False):
        named = [named, *re.findall(r"`(kvtide/[\w/]+\.py)`", prose)][-1]
        source = (ROOT / named).read_text()
        for run in block.split("...\n"):
            indented = [indent(run, " " * columns) for columns in range(0, 17, 4)]
            assert any(f"\n{each}" in source for each in indented), f"not in {named}:\n{run}"
            quoted += 1
    assert quoted == 7


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize(
    "picture", sorted(ROOT.glob("docs/images/*.svg")), ids=lambda path: path.name
)
def test_pictures_have_colours_for_light_and_dark_pages(picture: Path) -> None:
    assert "@media (prefers-color-scheme: dark)" in picture.read_text()


def _too_long(text: str) -> list[int]:
    """Numbers of the lines of Markdown that are too long.

    Three kinds of lines may have any length, since they cannot be wrapped: rows of tables, lines of
    a fenced block, which are output or code as it stands, and lines of one word, such as a link.
    """
    found, fenced = [], False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        words = re.sub(r"^(\[[^]]+\]:|[-*]|\d+\.)? +", "", line).split()
        wraps = not fenced and len(words) > 1 and not words[0].startswith("|")
        if wraps and len(line) > MAX_COLUMNS:
            found.append(number)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_lines_of_prose_have_at_most_100_columns(document: Path) -> None:
    assert _too_long(document.read_text()) == []


def test_lines_that_are_too_long_are_found() -> None:
    words, link = "word " * 19 + "words.", f"https://{'a' * 100}"
    assert len(words) == 101
    text = [words, words[1:], f"    {words[3:]}", f"| {words} |", link, f"- {link}"]
    text += [f"[a link]: {link}", f"see {link}", "```", words, "```", words]
    assert _too_long("\n".join(text)) == [1, 3, 8, 12]


def test_invariants_are_all_explained() -> None:
    explained = (ROOT / "docs" / "INVARIANTS.md").read_text()
    for check in (*INDEX_CHECKS, *CACHE_CHECKS):
        assert f"`{check.__name__}`" in explained


def test_settings_are_all_explained() -> None:
    explained = (ROOT / "docs" / "SERVING.md").read_text()
    for row in fields(Settings):
        if row.name != "model":
            assert f"`{flag(row.name)}" in explained, row.name


# -- the maps of modules --------------------------------------------------------------------------

PACKAGE = ROOT / "kvtide"


def _code_words(text: str) -> set[str]:
    """The words of all `code` in a text."""
    return {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", code)}


def _maps() -> dict[str, str]:
    """The sections of ARCHITECTURE by room; one may be about two."""
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    found = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    return {room: section for title, section in found for room in title.split(" and ")}


def _docstrings(path: Path) -> str:
    """Those of the packages that a module is in, below kvtide."""
    packages = (each for each in path.parents if PACKAGE in each.parents)
    sources = ((each / "__init__.py").read_text("utf-8") for each in packages)
    return "\n".join(ast.get_docstring(ast.parse(source)) or "" for source in sources)


def test_every_module_is_named_in_a_map() -> None:
    """In its room's section of ARCHITECTURE, or in the docstring of a package that it is in. The
    few modules without a room are in the server's section."""
    maps = _maps()
    unnamed = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        room = parts[0] if len(parts) > 1 else "server"
        known = _code_words(f"{maps[room]}\n{_docstrings(path)}")
        if path.stem != "__init__" and path.stem not in known:
            unnamed.append(path.relative_to(ROOT).as_posix())
    assert unnamed == []


def _children(package: Path) -> set[str]:
    """A package's modules and packages, by name."""
    found = {path.stem for path in package.glob("*.py")} - {"__init__"}
    return found | {path.parent.name for path in package.glob("*/__init__.py")}


def _listed(docstring: str) -> set[str]:
    """What a docstring has at the beginning of its lines: `name`, `folder/` or `folder/name`, then
    two spaces or a column of a table."""
    lines = re.findall(r"^(?:\| )?((?:`[a-z_0-9/]+`(?:, )?)+)(?: {2}| \|)", docstring, re.M)
    return {name.split("/")[0] for line in lines for name in re.findall(r"`([^`]+)`", line)}


def test_packages_that_list_modules_list_all_of_them_and_no_others() -> None:
    wrong = {}
    for package in sorted(path.parent for path in PACKAGE.rglob("*/__init__.py")):
        docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or ""
        listed, children = _listed(docstring), _children(package)
        missing = children - _code_words(docstring) if len(listed) > 1 else set()
        if not docstring or missing or listed - children:
            wrong[package.relative_to(ROOT).as_posix()] = (missing, listed - children)
    assert wrong == {}


def test_only_code_of_a_map_names_a_module() -> None:
    assert _code_words("| `graphs/`, `a/b.py` | sizes, `c: d`") == {
        "graphs",
        "a",
        "b",
        "py",
        "c",
        "d",
    }
    assert {"spec", "layers", "models", "server", "cli"} <= _maps().keys()


# -- the guide to handoffs ----------------------------------------------------------------------


def _commands(document: Path, start: str) -> list[list[str]]:
    """Indented commands, with their continued lines, as words."""
    text = document.read_text().replace("\\\n", " ")
    lines = [line.strip().partition("  #")[0] for line in text.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(start)]


def test_servers_accept_the_commands_of_the_guide_to_handoffs(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    environment = {"KVTIDE_ADMIN_KEY": "a key"}
    commands = _commands(ROOT / "docs/HANDOFF.md", "kvtide serve ")
    roles = []
    for _, _, *words in commands:
        given = vars(parser.parse_args([str(secret) if "secret" in w[-6:] else w for w in words]))
        chosen = read(given, environment)
        roles.append(chosen.handoff.role.value)
        assert chosen.handoff.listens == (chosen.handoff.role is Role.PREFILL)
    assert roles == [*["prefill", "decode"] * 2, "decode"]


def test_servers_accept_the_commands_of_the_guide_to_scaling() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    commands = _commands(ROOT / "docs/SCALING.md", "kvtide serve ")
    chosen = [
        read(vars(parser.parse_args(words)), {"KVTIDE_ADMIN_KEY": "a key"})
        for _, _, *words in commands
    ]
    assert len(chosen) == 3
    for settings in chosen:
        assert settings.kv_event_settings is not None
        assert settings.kv_event_settings.replay_endpoint == f"tcp://{settings.address}:5558"


@pytest.mark.full
def test_the_sizing_example_is_what_the_planner_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    monkeypatch.chdir(tmp_path)
    trace = TRACES / "conversation_trace.jsonl"
    if not trace.exists():
        pytest.skip(f"no {trace}")
    Path(trace.name).symlink_to(trace)
    document = ROOT / "docs/HANDOFF.md"
    (command,) = _commands(document, "kvtide plan --handoff ")
    assert main(command[1:]) == 0
    printed = [re.sub(r" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    part = document.read_text().partition("| what, each second")[2].partition("\n\n")[0]
    rows = part.splitlines()[2:]
    assert len(rows) == 10
    for row in rows:
        assert row in printed, row
