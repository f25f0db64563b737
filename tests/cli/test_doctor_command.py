"""`kvtide doctor` for people and programs; its command starts a server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.main import main
from kvtide.doctor import judged_store, probes
from tests.processes import free_port


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes that move little."""
    for name, value in (("CPU_BLOCK_BYTES", 1 << 20), ("CASE_BYTES", 1 << 20), ("CPU_GEMM", 64)):
        monkeypatch.setattr(probes, name, value)
    monkeypatch.setattr(judged_store, "MEASURED_BYTES", 1 << 20)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from tests.server.tiny_model import save

    return save(tmp_path / "tiny")


def advised(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["doctor", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_machine_alone(quick: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = advised(capsys, "--folder", str(tmp_path))
    assert found["model"] is None and found["layouts"] == []
    assert {"copy", "storage_read", "gemm"} <= {*found["measured"]}
    assert found["command"][:2] == ["kvtide", "serve"]
    assert found["machine"]["cores"] > 0


def test_a_models_settings_are_recommended_with_reasons(
    quick: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    found = advised(capsys, str(model), "--folder", str(tmp_path / "pages"))
    assert found["model"] == "tiny"
    names = ["device", "page_tokens", "device_bytes", "host_bytes"]
    assert list(found["settings"]) == [*names, "host_layout", "io_backend", "storage"]
    assert all(one["why"] for one in found["settings"].values())
    assert found["command"][2] == str(model)
    assert len(found["layouts"]) == 6, "three layouts, both ways"


def test_the_report_ends_with_the_command(
    quick: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "qwen3-8b", "--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith("kvtide serve ./qwen3-8b --device cpu")
    assert "./qwen3-8b in the command is a folder that is not here" in text
    assert "| storage read " in text and "| --host-bytes " in text


def test_a_named_store_is_measured_and_advised(
    quick: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    """Random numbers shrink little, and this store is memory: a codec cannot pay."""
    found = advised(capsys, str(model), "--storage", "memory:judged")
    assert found["settings"]["storage"]["value"] in ("memory:judged", "none")
    assert found["codec"]["codec"] == "lossless" and found["measured"]["storage_read"] > 0
    assert not [one for one in found["findings"] if one["name"] == "storage not usable"]


def test_a_named_store_that_is_not_there_is_a_problem(
    quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--storage", f"redis://127.0.0.1:{free_port()}?timeout=1"]) == 1
    assert "problem: redis://127.0.0.1" in capsys.readouterr().out


def test_two_stores_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--folder", "/tmp", "--storage", "memory:"]) == 2
    assert "name two stores; use one of them" in capsys.readouterr().err


def test_a_problem_is_an_exit_code(
    quick: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtide.cli import doctor_command
    from tests.doctor.examined import facts

    broken = facts(gpus=(), driver=None)
    monkeypatch.setattr(doctor_command, "machine_facts", lambda: broken)
    assert main(["doctor", "--folder", str(tmp_path)]) == 1
    assert "problem: 1 NVIDIA GPUs are on the bus" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_copies", lambda: pytest.fail("it was measured"))
    assert main(["doctor", "no-such-model"]) == 2
    assert "neither a built-in model nor a folder" in capsys.readouterr().err


@pytest.mark.full
def test_the_command_starts_a_server(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    from tests.server.serving import Child

    began = time.monotonic()
    found = advised(capsys, str(model), "--folder", str(tmp_path / "pages"))
    assert time.monotonic() - began < 30
    program, verb, *words = found["command"]
    assert (program, verb) == ("kvtide", "serve")
    with Child((*words, "--port", "0")) as server:
        client = server.client()
        answer = client.complete("once upon a time", max_tokens=4)
        assert answer["usage"]["completion_tokens"] == 4
        report = client.get("/admin/cache").json()
        assert report["settings"]["host_layout"] == found["settings"]["host_layout"]["value"]
        assert str(report["page_tokens"]) == found["settings"]["page_tokens"]["value"]
        stored = found["settings"]["storage"]["value"] != "none"
        assert report["storage"]["attached"] == stored
