"""The command imports what the chosen verb needs, and torch only where a verb computes."""

import importlib
import subprocess
import sys

import pytest

from kvtide import __version__
from kvtide.cli.main import VERBS, main

RUN = """
import sys
from kvtide.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as exit:
    code = exit.code
heavy = [name for name in ("torch", "triton", "transformers") if name in sys.modules]
print("\\nimported:", *heavy)
sys.exit(code)
"""


def imported(*argv: str) -> tuple[int, list[str]]:
    """The exit code of a command in a process of its own, and the heavy packages it imports."""
    ran = subprocess.run([sys.executable, "-c", RUN, *argv], capture_output=True, text=True)
    last = ran.stdout.splitlines()[-1:]
    assert last and last[0].startswith("imported:"), ran.stderr
    return ran.returncode, last[0].split()[1:]


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["memory"],
        ["memory", "deepseek-v4-flash", "--tp", "2", "--json"],
        ["memory", "--help"],
        ["memory", "glm-5", "--resident", "hot:4096"],
        ["plan", "--workload", "chat:users=4,turns=2", "--json"],
        ["plan", "--help"],
        ["storage", "check", "memory:imports"],
        ["chat", "--help"],
        ["top", "--help"],
    ],
    ids=" ".join,
)
def test_verbs_that_compute_nothing_import_no_torch(argv):
    assert imported(*argv) == (0, [])


def test_memory_of_a_gguf_file_imports_no_torch(gguf_file):
    assert imported("memory", str(gguf_file)) == (0, [])


def test_a_refusal_imports_no_torch():
    assert imported("memory", "gpt-9") == (2, [])
    assert imported("sevre") == (2, [])
    assert imported("top", "http://127.0.0.1:9") == (2, [])


def test_the_probe_sees_torch_where_it_is_imported():
    assert "torch" in imported("serve", "--help")[1]


def test_help_names_every_verb_and_its_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, verb in VERBS.items():
        assert f"{name} {verb.help}" in text


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvtide {__version__}\n"


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_a_module_with_arguments_and_refusals(name, capsys):
    module = importlib.import_module(f"kvtide.cli.{VERBS[name].module}")
    assert all(issubclass(kind, Exception) for kind in module.REFUSALS)
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: kvtide {name} ")


@pytest.mark.parametrize("argv", [[], ["sevre"], ["--", "sevre"]])
def test_a_command_line_without_a_known_verb_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "usage: kvtide" in capsys.readouterr().err
