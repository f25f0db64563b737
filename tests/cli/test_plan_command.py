"""`kvtide plan`: the tables, the JSON and the files agree, and a refusal leaves nothing behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.main import main
from kvtide.cli.plan_command import parse_checkpoints
from kvtide.planner import workloads
from kvtide.spec import catalog
from kvtide.spec.residency import hot_bytes, served_hot

SMALL = ["--workload", "chat:users=12,turns=4", "--device", "200MB", "--host", "400MB"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _plots() -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(capsys, "--json", *arguments))
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence with which the command ends; it must leave no file and no output."""
    before = sorted(Path().rglob("*"))
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sorted(Path().rglob("*")) == before
    sentence = str(err)
    assert sentence.startswith("kvtide plan: ")
    assert len(sentence.splitlines()) == 1
    return sentence


# -- what is printed ------------------------------------------------------------------------


@pytest.mark.usefixtures("_plots")
def test_tables_show_every_setting_and_which_are_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = plan(capsys, *SMALL)
    assert re.search(r"\| model +\| deepseek-v4-flash \(default\)", out)
    assert re.search(r"\| device +\| 200MB +\|", out)
    assert re.search(r"\| storage +\| 64GB \(default\)", out)
    assert re.search(r"\| link +\| 55 GB/s \(default\)", out)
    assert "13G active parameters at 400 TFLOP/s (default)" in out
    for title in ("Where prompt tokens come from", "Time saved", "What moves", "Pages"):
        assert title in out
    assert re.search(r"90% of what is possible at .*B; knee at .*B", out)
    assert "What checkpoint placement costs" in out


def test_json_is_all_that_is_printed_and_without_out_no_file_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = planned(capsys, *SMALL)
    assert found["files"] == []
    assert list(Path().iterdir()) == []
    assert set(found) == {
        "model", "page_tokens", "trace", "settings", "assumptions", "tiers", "hit_rate",
        "hit_rate_by_tier", "hit_tokens_by_tier", "prefill_tokens_saved", "seconds",
        "moved_bytes", "skipped_copies", "unfit_requests", "misses", "capacity", "placements",
        "write_policies", "sweep", "handoff", "files",
    }  # fmt: skip


def test_json_figures_agree_with_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *SMALL)
    assert found["trace"]["requests"] == 48
    assert set(found["tiers"]) == {"device", "host", "storage"}
    tokens = found["trace"]["prompt_tokens"]
    assert sum(found["hit_tokens_by_tier"].values()) == found["prefill_tokens_saved"]
    assert found["hit_rate"] == pytest.approx(found["prefill_tokens_saved"] / tokens)
    seconds = found["seconds"]
    assert seconds["saved"] == pytest.approx(seconds["prefill_saved"] - seconds["waited"])
    assert 0 < found["hit_rate"] <= found["capacity"]["best_hit_rate"] < 1
    ninety = found["capacity"]["ninety_percent"]["hit_rate"]
    assert ninety >= 0.9 * found["capacity"]["best_hit_rate"]
    assert found["sweep"] is None


def test_assumptions_change_times_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    usual = planned(capsys, *SMALL)
    slow = planned(capsys, *SMALL, "--prefill-rate", "100", "--link-gbps", "1")
    assert slow["hit_rate"] == usual["hit_rate"]
    assert slow["moved_bytes"] == usual["moved_bytes"]
    assert slow["seconds"]["prefill_saved"] == slow["prefill_tokens_saved"] / 100
    assert slow["seconds"]["waited"] > usual["seconds"]["waited"]


def test_tier_of_no_bytes_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *SMALL, "--storage", "0", "--host", "0")
    assert set(found["tiers"]) == {"device"}
    assert found["moved_bytes"] == {}


def test_placements_are_compared_for_models_with_checkpoints_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hybrid = planned(capsys, *SMALL)
    names = [row["checkpoints"] for row in hybrid["placements"]]
    assert names == ["every page (ideal)", "last", "branch", "cost", "every:8192", "every:2048"]
    full = planned(capsys, *SMALL, "--model", "qwen3-8b")
    assert full["placements"] == []


def test_chosen_checkpoints_are_what_the_main_replay_keeps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = planned(capsys, *SMALL, "--checkpoints", "last")
    last = next(row for row in found["placements"] if row["checkpoints"] == "last")
    assert found["hit_rate"] == last["hit_rate"]
    assert found["moved_bytes"] == last["moved_bytes"]


def test_write_policies_are_compared_where_there_is_storage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = planned(capsys, *SMALL, "--write-policy", "storage_on_second_use")
    through, selective, second = found["write_policies"]
    names = [row["write_policy"] for row in (through, selective, second)]
    assert names == ["write_through", "write_through_selective", "storage_on_second_use"]
    assert [row["served"] for row in (through, selective, second)] == [True, True, False]
    assert second["moved_bytes"] == found["moved_bytes"]
    assert second["stored_bytes"] == found["moved_bytes"]["store"] < through["stored_bytes"]
    assert second["saved"] == pytest.approx(1 - second["stored_bytes"] / through["stored_bytes"])
    assert found["settings"]["write policy"] == "storage_on_second_use"
    assert planned(capsys, *SMALL, "--storage", "0")["write_policies"] == []


@pytest.mark.usefixtures("_plots")
def test_policy_that_writes_least_at_an_equal_hit_rate_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    roomy = ["--workload", "chat:users=12,turns=4", "--device", "200MB", "--host", "8GB"]
    out = plan(capsys, *roomy)
    assert "What write policies write to storage" in out
    assert re.search(r"\| storage_on_second_use +\| no +\|", out)
    assert re.search(r"storage_on_second_use writes \d+\.\d% less to storage than", out)
    assert "kvtide serve does not offer it." in out


@pytest.mark.parametrize("model", ["gpt-oss-120b", "qwen3-next-80b", "deepseek-v3.2"])
def test_every_kind_of_model_can_be_planned(capsys: pytest.CaptureFixture[str], model: str) -> None:
    found = planned(capsys, "--workload", "chat:users=3,turns=3", "--model", model)
    assert found["hit_rate"] > 0


def test_trace_without_a_whole_page_finds_nothing_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("t.jsonl").write_text('{"tokens": [1, 2, 3]}\n{"tokens": [1, 2, 3]}\n')
    found = planned(capsys, "--trace", "t.jsonl", "--sweep", "device", "--points", "2")
    assert found["hit_rate"] == found["capacity"]["best_hit_rate"] == 0


# -- residency ------------------------------------------------------------------------------


def test_a_residency_is_a_setting_and_its_hot_buffers_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    out = plan(capsys, *SMALL, "--resident", "hot:1024", "--running", "2")
    assert out.startswith("deepseek-v4-flash, resident hot:1024: 48 requests")
    assert re.search(r"\| resident +\| hot:1024 +\|", out)
    assert re.search(r"\| running requests +\| 2 +\|", out)
    assert re.search(r"Hot buffers take .* MB of the device, for 2 running requests and", out)
    assert "Entries that steps swap in from the host or write there are not counted." in out
    assert re.search(r"\| device +\| (kv|swa) ", out)
    assert not re.search(r"\| device +\| c4 ", out)
    assert re.search(r"\| host +\| c4 ", out)


def test_json_has_the_bytes_of_hot_buffers(capsys: pytest.CaptureFixture[str]) -> None:
    usual = planned(capsys, *SMALL)
    assert usual["settings"]["resident"] == "all (default)"
    assert usual["tiers"]["device"]["hot_bytes"] == 0
    one = planned(capsys, *SMALL, "--resident", "hot:1024")
    two = planned(capsys, *SMALL, "--resident", "hot:1024", "--running", "2")
    assert one["settings"]["running requests"] == "1 (default)"
    memory = served_hot(catalog.resolve("deepseek-v4-flash"), 1024)
    pages = -(-workloads.parse(SMALL[1]).longest_tokens // 256)
    for running, found in ((1, one), (2, two)):
        assert found["tiers"]["device"]["hot_bytes"] == hot_bytes(memory, running, pages)
    assert one["tiers"]["host"]["hot_bytes"] == 0
    assert set(one["tiers"]["device"]["slots"]) == {"kv", "swa"}
    assert set(one["tiers"]["host"]["slots"]) == {"kv", "swa", "c4"}


def test_served_hot_the_same_tokens_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    roomy = ["--workload", "chat:users=12,turns=4", "--device", "4GB", "--host", "8GB"]
    usual = planned(capsys, *roomy)
    hot = planned(capsys, *roomy, "--resident", "hot:4096")
    assert hot["unfit_requests"] == 0
    assert hot["hit_rate"] == usual["hit_rate"] > 0


# -- files ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("_plots")
def test_plan_and_sweep_are_written_whole(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *SMALL, "--sweep", "host", "--points", "3", "--out", "deep/er")
    names = ["plan.html", "plan.png", "sweep-host.html", "sweep-host.png"]
    assert sorted(path.name for path in Path("deep/er").iterdir()) == names
    assert sorted(found["files"]) == [f"deep/er/{name}" for name in names]
    for path in Path("deep/er").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG\r\n")
        assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
    for path in Path("deep/er").glob("*.html"):
        page = path.read_text()
        assert page.startswith("<!doctype html>")
        assert page.rstrip().endswith("</html>")
        assert "deepseek-v4-flash" in page
        assert not re.search(r"(src|href)=", page)


def test_sweep_tries_as_many_sizes_as_points_around_the_size_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = planned(capsys, *SMALL, "--sweep", "host", "--points", "3")["sweep"]
    assert found["tier"] == "host"
    sizes = [point["bytes"] for point in found["points"]]
    assert sizes[-1] == pytest.approx(4 * 400e6, rel=1e-6)
    assert len(sizes) == 3
    fractions = [point["hit_rate_by_tier"]["host"] for point in found["points"]]
    assert fractions[0] <= fractions[-1]


def test_sweep_of_a_tier_without_a_size_goes_around_the_footprint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = planned(capsys, *SMALL, "--sweep", "storage", "--points", "2")
    last = found["sweep"]["points"][-1]["bytes"]
    assert last == pytest.approx(4 * found["capacity"]["footprint_bytes"], rel=1e-6)


# -- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "nonesuch"], "neither a built-in model nor a folder"),
        (["--workload", "chess"], "no workload named 'chess'; use chat"),
        (["--workload", "chat:users=many"], "needs a number"),
        (["--trace", "absent.jsonl"], "No such file"),
        (["--device", "lots"], "'lots' is not a size; write it like 80GB"),
        (["--device", "0"], "give it a size"),
        (["--device", "1MB"], "use at least .* or 0 to leave the tier out"),
        (["--host", "0"], "or --storage 0"),
        (["--eviction", "random"], "no such policy; use lru, lhd, lfu"),
        (["--write-policy", "write_back"], "no such policy; use write_through, write_through_sel"),
        (["--write-policy", "storage_on_second_use", "--storage", "0"], "give --storage a size"),
        (
            ["--write-policy", "write_through_selective", "--host", "0", "--storage", "0"],
            "it writes to the host; give --host a size",
        ),
        (["--write-policies", "--storage", "0"], "--write-policies: .*give --storage a size"),
        (["--checkpoints", "often"], "use last, branch, cost or every:TOKENS"),
        (["--checkpoints", "every:300"], "use a multiple of 256 tokens"),
        (["--checkpoints", "every:0"], "use a multiple of 256 tokens"),
        (["--sweep", "tape"], "no such tier; use device, host, storage"),
        (["--sweep", "host", "--points", "1"], "use 2 to 64"),
        (["--points", "4"], "name its tier"),
        (["--link-gbps", "0"], "--link-gbps 0: use a number above 0"),
        (["--prefill-rate", "nan"], "use a number above 0"),
        (["--page-tokens", "100"], "use a multiple of"),
        (["--model", "qwen3-8b", "--placements"], "leave the option out"),
        (["--kv-dtype", "int3"], "int3"),
        (["--resident", "hot:511"], "up to 512 of c4; use --resident hot:512"),
        (["--resident", "auto"], "use all or hot:4096"),
        (["--resident", "hot"], "is no residency; use all, auto, or hot:4096"),
        (["--model", "qwen3-8b", "--resident", "hot:4096"], "use --resident all"),
        (["--running", "4"], "use it with --resident hot:4096"),
        (["--resident", "hot:512", "--running", "0"], "--running 0: use at least 1"),
        (
            ["--resident", "hot:512", "--host", "0", "--storage", "0"],
            "keeps pages of running requests there; give it a size, or use --resident all",
        ),
        (
            ["--resident", "hot:4096", "--running", "64"],
            "--device 2.00 GB: hot buffers take 3.2. GB of the device, for 64 running requests "
            "and prompts of up to .* tokens; use at least 3.2. GB, or fewer hot entries",
        ),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert re.search(says, refusal(capsys, "--json", *arguments))


def test_broken_line_of_a_trace_is_named_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("t.jsonl").write_text('{"tokens": [1, 2, 3]}\n{"tokens": "abc"}\n')
    sentence = refusal(capsys, "--trace", "t.jsonl", "--out", "made", "--json")
    assert "t.jsonl, line 2: tokens must be a list of integers" in sentence


@pytest.mark.usefixtures("_plots")
def test_out_that_is_a_file_is_refused_before_anything_is_replayed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("taken").write_text("")
    assert "--out taken" in refusal(capsys, "--out", "taken")
    assert "name a folder you can write" in refusal(capsys, "--out", "taken/deeper")


def test_model_of_unknown_speed_asks_for_a_prefill_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 10,
    }  # fmt: skip
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text(json.dumps(config))
    asked = ["--model", "tiny", "--workload", "chat:users=2,turns=2"]
    assert "give --prefill-rate" in refusal(capsys, "--json", *asked)
    assert planned(capsys, *asked, "--prefill-rate", "5000")["model"] == "tiny"


def test_trace_and_workload_exclude_each_other() -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--trace", "a", "--workload", "chat"])
    assert stopped.value.code == 2


def test_checkpoints_are_read_in_tokens() -> None:
    assert parse_checkpoints("every:8192", 256).name == "every:8192"
    placement = parse_checkpoints("every:512", 256).placement()
    assert set(placement.checkpoints(0, 6, ())) | {6} == {2, 4, 6}


def test_sweep_shows_a_tier_that_the_plan_itself_does_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    out = plan(capsys, *SMALL, "--storage", "0", "--host", "0", "--sweep", "host", "--points", "2")
    assert re.search(r"\| +host \| +from device \| +from host \|", out)


# -- machines of two roles ------------------------------------------------------------------


def test_machines_of_both_roles_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, *SMALL)["handoff"] is None
    few = planned(capsys, *SMALL, "--handoff")
    many = planned(capsys, *SMALL, "--handoff", "--requests-per-second", "500")
    assert few["handoff"]["rates"]["peer_bytes_s"] == 51.2e9
    assert many["handoff"]["mean"]["requests"] == pytest.approx(500)
    for side in ("prefill", "decode"):
        assert many["handoff"]["mean_machines"][side] > few["handoff"]["mean_machines"][side]
    assert many["settings"]["requests per second"] == "500"
    assert few["settings"]["decode step ms"] == "10 (default)"


@pytest.mark.usefixtures("_plots")
def test_tables_of_machines_are_printed_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    printed = plan(capsys, *SMALL, "--handoff", "--requests-per-second", "500")
    assert "| prefill machines" in printed and "requests are handed over" in printed
    assert "prefill machines" in Path("kvtide-plan/plan.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--busy", "0.5"), "add --handoff"),
        (("--requests-per-second", "5"), "add --handoff"),
        (("--handoff", "--busy", "1.5"), "a fraction up to 1"),
        (("--handoff", "--peer-gbps", "0"), "a number above 0"),
    ],
)
def test_bad_machines_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert sentence in refusal(capsys, *SMALL, *arguments)
