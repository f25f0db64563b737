"""`kvtide bench serve --beside-engine` and `--stand-in-ms`: both ways, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtide.cli.main import main
from tests.server import tiny_model

SMALL = ["--users", "3", "--turns", "2", "--rounds", "1", "--answer-tokens", "4"]
SMALL += ["--system-tokens", "48", "--question-tokens", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("tiny"), template=None)


def test_a_model_is_served_both_ways(folder: Path, capsys) -> None:
    arguments = ["--", str(folder), "--page-tokens", "8", "--max-running", "2"]
    assert main(["bench", "serve", *SMALL, "--beside-engine", *arguments]) == 0
    printed = capsys.readouterr().out
    sized = "--storage none --max-waiting 3 --device-tokens 1024"
    assert f"kvtide serve {sized} {folder} --page-tokens 8 --max-running 2; " in printed
    assert "3 users, 2 turns; 48 system tokens" in printed and "6 requests" in printed
    assert "up to 2 requests run at once" in printed
    for row in ("requests/s", "TTFT p99 ms", "fairness (Jain)", "busiest client process"):
        assert f"| {row} " in printed
    assert "≥ 97% of the engine's requests/s: " in printed


def test_a_stand_in_for_the_device(capsys) -> None:
    options = ["--stand-in-ms", "2", "--stand-in-token-us", "0", "--json"]
    assert main(["bench", "serve", *SMALL, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "a model that computes nothing"
    assert found["device"] == "a stand-in: 2 ms and 0 µs per token"
    assert found["load"]["at_once"] == found["load"]["users"] == 3
    for way in ("engine", "http"):
        assert found[way]["requests"] == 6 and found[way]["step_ms"] > 2
        assert 0 < found[way]["slowest"] <= 1 and 1 / 3 <= found[way]["fairness"] <= 1
    ratio = found["http"]["requests_s"] / found["engine"]["requests_s"]
    assert found["http_to_engine"] == pytest.approx(ratio) and found["rounds"] == [
        found["http_to_engine"]
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--beside-engine", "--at-once", "2"], "drop --at-once and --think-seconds"),
        (["--beside-engine", "--think-seconds", "1"], "drop --at-once and --think-seconds"),
        (["--beside-engine", "--url", "http://x"], "cannot be stepped here; drop --url"),
        (["--beside-engine", "--output", "x"], "--output has no chart of both ways"),
        (["--beside-engine", "--", "--tp", "2"], "beside the engine there is one rank"),
        (["--beside-engine", "--", "--port", "-1"], "--port is -1"),
        (["--beside-engine", "--", "no-model"], "no-model"),
        (["--stand-in-ms", "0"], "--stand-in-ms must be above 0"),
        (["--stand-in-ms", "1", "--stand-in-token-us", "-1"], "--stand-in-token-us at least 0"),
        (["--stand-in-ms", "1", "--", "model"], "computes nothing; drop the model"),
    ],
)
def test_what_cannot_be_measured_both_ways_is_refused(
    options: list[str], sentence: str, capsys
) -> None:
    assert main(["bench", "serve", *SMALL, *options]) == 2
    assert sentence in capsys.readouterr().err
