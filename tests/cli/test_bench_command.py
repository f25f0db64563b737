"""`kvtide bench`: tables and JSON from one run, refusals in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtide.bench.contestants import Full, Handle, Timings
from kvtide.bench.drafts import speculate
from kvtide.cli.main import main
from kvtide.engine.speculation.draft_length import verify_cost
from kvtide.tiers import Layout
from tests.models.tiny_eagle3 import tiny_eagle3
from tests.server import tiny_model

SMALL = ["--workload", "chat:users=6,turns=3", "--repetitions", "1"]


def test_index_prints_a_table_with_a_row_per_contestant(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--contestants", "full,window", "--growth", "1000", "--growth-requests", "20"]
    assert main(["bench", "index", *SMALL, *arguments]) == 0
    printed = capsys.readouterr().out
    assert "| full " in printed and "| window " in printed
    assert "bytes of index per cached token" in printed
    assert "1,000" in printed


class Slower(Full):
    """A contestant of another project, with an operation that ours do not have."""

    def finish(self, handle: Handle, timings: Timings) -> None:
        super().finish(handle, timings)
        timings["hash"].append(1000)


def test_contestants_may_differ_in_their_operations(capsys: pytest.CaptureFixture[str]) -> None:
    names = f"{__name__}:Slower,full"
    assert main(["bench", "index", *SMALL, "--contestants", names, "--growth", ""]) == 0
    printed = capsys.readouterr().out
    assert (
        "hash p50/p99 µs" in printed and "1.0/1" in printed and "| –" in printed.replace("  ", "")
    )


@pytest.mark.full
def test_index_json_holds_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "index", *SMALL, "--growth", "", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["workloads"]
    assert len(result["contestants"]) == 4
    assert result["capacity_tokens"] > 0


@pytest.mark.full
def test_index_with_draft_prints_what_a_committed_page_costs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["bench", "index", "--draft", "--repetitions", "0"]
    assert main(arguments) == 0
    assert "µs/page with a draft" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["draft"]
    assert found["plain_us"] > 0 and found["drafted_us"] > 0 and found["ratio"] > 0


def test_hitrate_sets_policies_beside_the_optimum(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workload", "chat:users=6,turns=3", "--capacities", "0.3,1.2"]
    assert main(["bench", "hitrate", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "offline optimum" in printed
    assert "slru: gap closed" in printed
    assert main(["bench", "hitrate", *arguments, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert [row["fraction"] for row in result["rows"]] == [0.3, 1.2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["index", "--contestants", "other"], "no contestant named other; use full"),
        (["index", "--growth", "many"], "--growth takes numbers separated by commas"),
        (
            ["hitrate", "--policies", "best"],
            "no eviction policy named best; use lru, lhd, lfu",
        ),
        (["hitrate", "--trace", "/nowhere.jsonl"], "nowhere.jsonl"),
        (["index", "--workload", "tea"], "tea"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert sentence in capsys.readouterr().err


# -- transfer -------------------------------------------------------------------------------


def test_transfer_measures_every_goal_both_ways_and_every_cell(capsys) -> None:
    options = ["--device", "cpu", "--tokens", "256", "--repetitions", "1", "--cells", "--json"]
    assert main(["bench", "transfer", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["way"] for row in result["goals"]} == {"load", "backup"}
    assert {row["layout"] for row in result["cells"]} == {layout.value for layout in Layout}
    for row in result["goals"] + result["cells"]:
        assert row["bytes"] > 0 and row["gb_s"] > 0 and row["alone"] > 0 and row["back_to_back"] > 0
    assert {"µs", "share"} == {row["unit"] for row in result["beside"]}


def test_transfer_prints_tables_with_the_goals(capsys) -> None:
    assert (
        main(["bench", "transfer", "--device", "cpu", "--tokens", "256", "--repetitions", "1"]) == 0
    )
    text = capsys.readouterr().out
    assert "DeepSeek-V4-Flash, page 256" in text and "≥ 92%" in text and "< 200 µs" in text


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (["--tokens", "10"], "256 or more"),
        (["--repetitions", "0"], "of 1"),
        (["--device", "tpu"], "cpu or cuda"),
    ],
)
def test_transfer_refuses_what_cannot_be_measured(capsys, options, remedy) -> None:
    assert main(["bench", "transfer", *options]) == 2
    assert remedy in capsys.readouterr().err


# -- step -----------------------------------------------------------------------------------


def test_step_measures_every_kind_of_memory(capsys) -> None:
    options = ["--batch", "4", "--prompt-tokens", "100", "--steps", "20"]
    assert main(["bench", "step", *options, "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert [cost["memory"] for cost in costs] == ["full", "window", "recurrent"]
    assert all(0 < cost["p50_ms"] <= cost["p99_ms"] for cost in costs)
    assert main(["bench", "step", *options]) == 0
    assert "< 1 ms" in capsys.readouterr().out


def test_step_refuses_an_empty_batch(capsys) -> None:
    assert main(["bench", "step", "--batch", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


# -- speculate ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("tiny"))


@pytest.mark.full
def test_speculate_compares_tokens_a_second(
    talker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((talker / "config.json").read_text())
    draft = tiny_eagle3(config, tmp_path / "draft")
    few = ["--rounds", "1", "--answer-tokens", "12", "--draft", str(draft), "--json"]
    assert main(["bench", "speculate", "--model", str(talker), *few]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(gain["case"], gain["at_once"]) for gain in found] == [
        ("quotes", 1),
        ("chat", 1),
        ("questions", 1),
        ("never", 64),
    ]
    for gain in found:
        assert gain["generated_tokens"] == 12 * (64 if gain["case"] == "never" else 4)
        assert gain["on_tokens_s"] / gain["off_tokens_s"] == pytest.approx(gain["ratio"])
        assert 1 <= gain["accept_length"] <= 4
    assert found[0]["accepted"] + found[0]["rejected"] > 0
    assert found[3]["accepted"] == 0, "and few are drafted: the first round was a lesson"


@pytest.mark.full
def test_speculate_compares_prefixes_of_every_tier(
    talker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = tiny_eagle3(json.loads((talker / "config.json").read_text()), tmp_path / "draft")
    few = ["--only", "restored", "--answer-tokens", "12", "--draft", str(draft), "--json"]
    assert main(["bench", "speculate", "--model", str(talker), *few]) == 0
    computed, *restored = json.loads(capsys.readouterr().out)
    assert computed["prefix"] == "computed" and computed["restored_tokens"] == 0
    prefixes = [found["prefix"] for found in restored]
    assert prefixes[:3] == ["device", "host", "storage"] and "without" in prefixes[3]
    for found in restored:
        assert found["prompt_tokens"] > found["restored_tokens"] > 0 < found["verify_steps"]


def test_speculate_prints_a_table(
    talker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--rounds", "1", "--answer-tokens", "8", "--only", "quotes", "--draft-tokens", "2"]
    written = ["--json", str(tmp_path / "found.json")]
    assert main(["bench", "speculate", "--model", str(talker), *few, *written]) == 0
    header, _, row = capsys.readouterr().out.splitlines()
    assert "accept length" in header and row.startswith("| quotes |") and "≥ 1.6×" in row
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert found["case"] == "quotes" and found["draft_tokens"] == 2


def test_speculate_times_rows_beside_what_the_engine_assumes(
    talker: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculate, "ROW_BATCHES", (2,))
    monkeypatch.setattr(speculate, "ROW_STEPS", 3)
    assert main(["bench", "speculate", "--model", str(talker), "--only", "rows"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert "of a decode step" in header and len(rows) == 6
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert [cell[:2] for cell in cells] == [["2", str(drafts)] for drafts in range(6)]
    assert cells[0][3:] == ["1.00×", "1.00×"]
    assert cells[1][4] == f"{verify_cost(1):.2f}×" != "1.00×"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--draft-tokens", "17"], "--draft-tokens takes 1 to 16"),
        (["--rounds", "0"], "--answer-tokens and --rounds must be at least 1"),
        (["--only", "qoutes"], "qoutes is not known; use quotes, chat, questions, never"),
        (["--only", "chat"], "chat, questions, restored are drafted by a draft; name its folder"),
        (["--only", "rounds,quotes"], "rounds needs a GPU; use --device cuda"),
        (["--draft", "/nowhere"], "/nowhere: no such file or folder"),
        (["--model", "/nowhere"], "/nowhere: no such file or folder"),
    ],
)
def test_speculations_that_cannot_be_measured_are_refused(
    talker: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--model" in options else ["--model", str(talker)]
    assert main(["bench", "speculate", *model, *options]) == 2
    assert sentence in capsys.readouterr().err
