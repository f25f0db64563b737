"""`kvtide bench serve`: a server of its own or one that runs, tables, JSON and a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.bench import bench_agent
from kvtide.cli.client import Server, serving
from kvtide.cli.main import main
from tests.server import tiny_model
from tests.server.serving import save_model, save_tokenizer

SMALL = ["--system-tokens", "48", "--question-tokens", "16", "--answer-tokens", "4"]
SMALL += ["--users", "6", "--turns", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("tiny"), template=None)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving([str(folder), "--page-tokens", "8"]) as started:
        yield started


def test_its_own_server_serves_both_phases(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "new" / "out"
    arguments = ["--", str(folder), "--page-tokens", "8", "--device-tokens", "192"]
    assert main(["bench", "serve", *SMALL, "--output", str(out), *arguments]) == 0
    printed = capsys.readouterr().out
    assert f"kvtide serve --storage none --host-tokens 1536 {folder} --page-tokens 8" in printed
    assert "on cpu: pages of 8 tokens" in printed and "6 users, 2 at once, 2 turns" in printed
    assert "| TTFT p99 ms " in printed and "| prompt from host " in printed
    assert (out / "serve.png").read_bytes().startswith(b"\x89PNG")
    _check(json.loads((out / "serve.json").read_text()))


def _check(result: dict[str, Any]) -> None:
    on, off = result["on"], result["off"]
    assert on["requests"] == off["requests"] == 24
    assert on["hits"]["device"] > 0 and on["hits"]["host"] > 0
    assert set(off["hits"].values()) == {0.0}
    assert len(on["ttft_ms_by_turn"]) == len(off["ttft_ms_by_turn"]) == 2
    ratio = on["ttft_ms"]["p50"] / off["ttft_ms"]["p50"]
    assert result["on_to_off"]["TTFT p50 ms"] == pytest.approx(ratio)
    for event in result["events"]:
        assert event["prompt_tokens"] == 64 + 20 * event["turn"]
        assert event["generated_tokens"] == 4 and event["ttft_ms"] > 0 and event["tpot_ms"] > 0


@pytest.mark.full
def test_the_accept_length_of_a_server_that_speculates(
    folder: Path, server: Server, capsys
) -> None:
    small = ["--users", "1", "--turns", "1", "--answer-tokens", "40", "--rounds", "1"]
    arguments = ["--", str(folder), "--page-tokens", "8", "--speculate", "ngram"]
    assert main(["bench", "serve", *small, *arguments]) == 0
    lines = [line.replace(" ", "") for line in capsys.readouterr().out.splitlines()]
    (length,) = (line for line in lines if line.startswith("|acceptlength|"))
    assert 1 <= float(length.split("|")[2]) <= 4
    for verdict in ("accepted", "rejected"):
        (row,) = (line for line in lines if line.startswith(f"|drafts{verdict}|"))
        assert int(row.split("|")[2]) >= 0
    assert main(["bench", "serve", *small, "--url", server.url]) == 0
    assert "accept length" not in capsys.readouterr().out


@pytest.mark.full
def test_runs_on_one_server_do_not_help_each_other(server: Server, capsys) -> None:
    """Whatever ran before, a first turn finds the system prompt of those before it only."""
    options = ["--at-once", "1", "--rounds", "1", "--json", "--url", server.url]
    runs = []
    for _ in range(2):
        assert main(["bench", "serve", *SMALL, *options]) == 0
        runs.append(json.loads(capsys.readouterr().out))
    first, second = ([e["by_tier"] for e in run["events"]] for run in runs)
    assert first == second
    found = [sum(event["by_tier"].values()) for event in runs[0]["events"]]
    assert found[:7] == [0, 48, 48, 48, 48, 48, 64] and found[12:] == [0] * 12
    assert runs[0]["served"].endswith(f" at {server.url}")


def test_one_token_has_no_time_between_tokens(server: Server, capsys) -> None:
    options = ["--users", "1", "--turns", "1", "--answer-tokens", "1", "--url", server.url]
    assert main(["bench", "serve", *options]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "TPOT p50" in line)
    assert row.replace(" ", "") == "|TPOTp50ms|–|–|–|"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--users", "0"], "--users must be at least 1"),
        (["--at-once", "0"], "--at-once must be at least 1"),
        (["--think-seconds", "-1"], "--think-seconds must be at least 0"),
        (["--url", "http://x", "--", "--port", "1"], "'--port' is for a server started here"),
        (["--url", "127.0.0.1:1"], "run `kvtide serve` in another terminal"),
        (["--output", "/dev/null/x"], "name a folder that can be written to"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], sentence: str, capsys) -> None:
    assert main(["bench", "serve", *options]) == 2
    assert sentence in capsys.readouterr().err


# -- an agent -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows no tools: they are described in its first message."""
    return save_tokenizer(save_model(tmp_path_factory.mktemp("chatting") / "tiny"))


@pytest.mark.full
def test_an_agent_calls_tools_with_the_cache_and_without(chatting: Path, capsys) -> None:
    options = ["--agent", "--turns", "4", "--result-words", "8", "--json"]
    sizes = ["--device-tokens", "6144", "--host-tokens", "6144"]
    arguments = ["--", str(chatting), "--page-tokens", "16", *sizes]
    assert main(["bench", "serve", *options, *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["turns"] == 4 and found["cached_share"] > 0.5
    assert found["off_to_on"] == pytest.approx(found["seconds"]["off"] / found["seconds"]["on"])
    lengths = [part["prompt_tokens"] for part in found["parts"]]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert "50 turns" not in bench_agent.report(found)
    assert "4 turns with a tool call each" in bench_agent.report(found)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--turns", "0"], "--turns must be at least 1"),
        (["--result-words", "0"], "--result-words must be at least 1"),
        (["--output", "out"], "--output has no chart of an agent"),
        (["--url", "http://x", "--", "--port", "1"], "'--port' is for a server started here"),
    ],
)
def test_an_agent_that_cannot_be_measured_is_refused(
    options: list[str], sentence: str, capsys
) -> None:
    assert main(["bench", "serve", "--agent", *options]) == 2
    assert sentence in capsys.readouterr().err


def test_what_the_server_refuses_is_a_sentence(server: Server, capsys) -> None:
    assert main(["bench", "serve", "--url", server.url, "--system-tokens", "5000"]) == 2
    assert "shorten one of them" in capsys.readouterr().err
