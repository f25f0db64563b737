"""The systemd unit and the container file: what they start, and whether a server takes it."""

from __future__ import annotations

import argparse
import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvtide.layers.native import build
from kvtide.server.setting_sources import add_flags, read
from kvtide.server.settings import Settings
from kvtide.storage.codec import zstd
from kvtide.storage.mooncake.library import PACKAGES

ROOT = Path(__file__).parent.parent.parent
UNIT = ROOT / "deploy" / "systemd" / "kvtide.service"
CONTAINER = ROOT / "deploy" / "Containerfile"


def settings(words: list[str], environment: dict[str, str]) -> Settings:
    """What `kvtide serve` makes of its arguments; it refuses those that it does not know."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return read(vars(parser.parse_args(words)), environment)


# -- systemd ------------------------------------------------------------------------------------


def service() -> dict[str, str]:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    return dict(unit["Service"])


def test_the_unit_starts_a_server_with_settings_that_exist(tmp_path: Path) -> None:
    config = tmp_path / "kvtide.toml"
    config.write_text('model = "/models/one"\n')
    program, verb, *words = shlex.split(service()["ExecStart"].replace("%d", str(tmp_path)))
    assert (Path(program).name, verb) == ("kvtide", "serve")
    chosen = settings(words, {})
    assert chosen.model == "/models/one"
    assert chosen.drain_seconds < float(service()["TimeoutStopSec"]), "it is killed while it drains"


def test_settings_that_cannot_work_are_not_tried_again() -> None:
    assert service()["Restart"] == "on-failure" and service()["RestartPreventExitStatus"] == "2"
    assert service()["LimitMEMLOCK"] == "infinity"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("broken", [False, True])
def test_systemd_understands_the_unit(tmp_path: Path, broken: bool) -> None:
    text = UNIT.read_text().replace("/opt/kvtide/bin/kvtide", sys.executable)
    unit = tmp_path / "kvtide.service"
    unit.write_text(text.replace("RestartSec=10", "RestartSex=10") if broken else text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert ("RestartSex" in done.stderr) == broken
    if not broken:
        assert "kvtide.service" not in done.stderr and done.returncode == 0, done.stderr


# -- the container ------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Every instruction and its argument; continued lines are one."""
    lines = [line for line in CONTAINER.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def of(kind: str) -> list[str]:
    return [argument for name, argument in instructions() if name == kind]


def variables() -> dict[str, str]:
    words = [word for argument in of("ENV") for word in shlex.split(argument)]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def test_the_container_starts_a_server_with_settings_that_exist() -> None:
    command = [*json.loads(of("ENTRYPOINT")[0]), *json.loads(of("CMD")[0])]
    assert command[:2] == ["kvtide", "serve"]
    environment = {**variables(), "KVTIDE_ADMIN_KEY": "a key"}
    chosen = settings(command[2:], environment)
    assert (chosen.address, chosen.model) == ("0.0.0.0", "/model")
    assert [str(chosen.port)] == of("EXPOSE")
    known = {f"KVTIDE_{name.upper()}" for name in Settings.__dataclass_fields__}
    assert {name for name in variables() if name.startswith("KVTIDE_")} <= known
    assert f":{chosen.port}/health" in of("HEALTHCHECK")[0]


def test_pages_of_a_container_are_on_its_volume() -> None:
    (volume,) = of("VOLUME")
    assert variables()["KVTIDE_STORAGE"].startswith(f"file://{volume}/")
    assert any(f"--owner {of('USER')[0]}" in run and volume in run for run in of("RUN"))


def packages() -> set[str]:
    """Those of the system that it installs."""
    (install,) = [run for run in of("RUN") if "apt-get install" in run]
    words = install.partition("apt-get install")[2].partition("&&")[0].split()
    return {word for word in words if not word.startswith("-")}


def test_the_container_has_the_compiler_of_the_cpu_kernels_and_keeps_what_it_makes() -> None:
    wanted = re.findall(r'shutil\.which\("([^"]+)"\)', Path(build.__file__).read_text())
    assert wanted and {*wanted} <= packages()
    (volume,) = of("VOLUME")
    assert Path(variables()["XDG_CACHE_HOME"]).is_relative_to(volume)


def test_the_container_has_what_documents_and_refusals_tell_to_install() -> None:
    texts = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    named = re.findall(r"pip install '?kvtide\[([\w,]+)\]", " ".join(texts))
    extras = re.findall(r"/src\[([\w,]+)\]", " ".join(of("RUN")))[0].split(",")
    assert named and {extra for one in named for extra in one.split(",")} <= {*extras}
    libraries = re.findall(r"apt-get install (lib\w+)", Path(zstd.__file__).read_text())
    assert libraries and {*libraries, *PACKAGES.values()} <= packages()


def test_what_the_container_copies_and_installs_is_there() -> None:
    for argument in of("COPY"):
        *sources, _ = argument.split()
        assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"/src\[([\w,]+)\]", " ".join(of("RUN")))
    assert extras and {*extras[0].split(",")} <= {*project["optional-dependencies"]}
    assert "kvtide" in project["scripts"] and project["readme"] in " ".join(of("COPY"))


@pytest.mark.full
def test_what_the_container_copies_is_installed_by_its_own_command(tmp_path: Path) -> None:
    """The packages that it requires are here already, and not installed once more."""
    copied, installed = tmp_path / "src", tmp_path / "installed"
    for argument in of("COPY"):
        *sources, target = argument.split()
        folder = tmp_path / target.lstrip("/")
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder, ignore=shutil.ignore_patterns("*.pyc"))
            else:
                folder.mkdir(exist_ok=True)
                shutil.copy(ROOT / source, folder)
    (install,) = [run for run in of("RUN") if "pip install" in run]
    assert "/src[" in install and install.endswith("rm -r /src")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_OPTIONS": f"--quiet --no-deps --target {installed}",
    }
    command = re.sub(r"(?<![\w/])/src\b", str(copied), install)
    subprocess.run(["sh", "-c", command], env=environment, check=True)
    assert not copied.exists()
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "kvtide").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {path.relative_to(installed).as_posix() for path in installed.rglob("*")}
    assert wanted - found == set(), "not in the package"
    name, verb = json.loads(of("ENTRYPOINT")[0])
    started = subprocess.run(
        [installed / "bin" / name, verb, "--help"],
        env=environment | {"PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--storage" in started.stdout
