"""`kvtide memory` prints what a model keeps, for people and for programs."""

import argparse
import json

import pytest

from kvtide.cli import memory_command
from kvtide.cli.console import CommandError
from kvtide.cli.main import main
from kvtide.cli.memory_command import context_bytes, describe, layer_ranges, resume_rule
from kvtide.models.checkpoint import open_checkpoint
from kvtide.spec import SpecError, catalog
from kvtide.spec.families import declare


@pytest.fixture
def command(capsys):
    """Run the command and return what it printed."""

    def run(*argv: str) -> str:
        parser = argparse.ArgumentParser()
        memory_command.add(parser)
        args = parser.parse_args(argv)
        assert args.run(args) == 0
        return capsys.readouterr().out

    return run


def cells(text: str, pool: str) -> list[str]:
    row = next(line for line in text.splitlines() if line.startswith(f"| {pool} "))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_every_pool_has_a_row_with_slots_layers_sizes_and_rule(command):
    text = command("deepseek-v4-flash")
    c4 = ["c4", "follows kv", "2–42 by 2", "64 entries × 584 B", "786,240", "3,071.2", "all pages"]
    assert cells(text, "c4") == c4
    assert cells(text, "kv") == ["kv", "own", "–", "–", "0", "0.0", "all pages"]
    assert cells(text, "swa")[-1] == "last 127 tokens (1 page)"
    assert cells(text, "c4_state")[3:6] == ["1 entry × 6,144 B", "129,024", "–"]
    assert cells(text, "c128_open")[-1] == "nothing: within a page only"


def test_the_summary_says_what_a_page_a_resume_and_a_context_cost(command):
    text = command("deepseek-v4-flash")
    assert "One page of kv with c4, c4_index, c128: 998,208 B" in text
    assert "History grows by 3,899.2 B per token" in text
    assert "To resume at a page's end: every page of kv, the last page of swa; 6.60 MB" in text
    assert "A context of 128k tokens: 517.68 MB" in text


def test_a_hybrid_resumes_at_a_checkpoint(command):
    text = command("qwen3-next-80b")
    assert cells(text, "state")[-1] == "checkpoint (every 64 tokens)"
    assert "every page of kv, a checkpoint of state there" in text


def test_a_model_that_keeps_its_whole_history_needs_nothing_beside_it(command):
    text = command("llama-3.1-8b")
    assert "To resume at a page's end: every page of kv\n" in text


def test_page_size_and_dtype_are_options(command):
    text = command("llama-3.1-8b", "--page-tokens", "16", "--kv-dtype", "fp8")
    assert "pages of 16 tokens" in text
    assert cells(text, "kv")[3] == "16 entries × 2,048 B"


def test_json_says_the_same(command):
    facts = json.loads(command("deepseek-v4-pro", "--json"))
    assert facts["slot_bytes"]["kv"] == 1_430_208
    assert facts["model_layers"] == 61
    assert facts["ranks"] == []
    window = next(pool for pool in facts["pools"] if pool["name"] == "swa")
    assert (window["reach"], window["required"], window["follows"]) == (127, True, None)
    assert window["page_bytes"] == 9_135_360
    assert facts["pools"][0]["reach"] == "all"
    assert facts["context_bytes"]["131072"] == 512 * 1_430_208 + facts["resume_bytes"]


def test_a_tensor_rank_shows_its_share(command):
    text = command("qwen3-8b", "--tp", "4")
    assert "layers 0–35, each of 4 tensor ranks" in text
    assert cells(text, "kv")[3] == "64 entries × 1,024 B"


def test_pipeline_stages_are_shown_one_by_one(command):
    text = command("gpt-oss-120b", "--pp", "2")
    assert "layers 0–17\n" in text
    assert "layers 18–35\n" in text
    ranks = json.loads(command("gpt-oss-120b", "--pp", "3", "--tp", "2", "--json"))["ranks"]
    assert [rank["part"]["first_layer"] for rank in ranks] == [0, 12, 24]
    assert {rank["part"]["tensor_ranks"] for rank in ranks} == {2}


def test_a_draft_is_optional_and_numbered_after_the_model(command):
    text = command("qwen3-8b", "--draft-layers", "3")
    assert cells(text, "draft")[1:3] == ["follows kv", "36–38"]
    assert cells(text, "draft")[-1] == "optional (all pages)"
    facts = json.loads(command("qwen3-8b", "--draft-layers", "3", "--json"))
    assert facts["holdback"] == 1


# -- residency ------------------------------------------------------------------------------


def test_a_residency_says_where_every_pool_lives(command):
    text = command("deepseek-v3.2", "--resident", "hot:4096")
    assert cells(text, "index")[1::6] == ["own", "device"]
    assert cells(text, "kv")[1::6] == ["own", "host; 4,096 entries hot"]
    assert "grows by 15,616.0 B per token on the device and 70,272.0 B on the host" in text
    assert "Its hot buffers take 289.98 MB on the device\n" in text
    gathers = "per token of the longest context 1,156.0 B on the device once, and 4.0 B for each"
    assert f"Prefill gathers kv one layer at a time: {gathers} request" in text


def test_both_residencies_stand_side_by_side(command):
    text = command("deepseek-v3.2", "--resident", "hot:4096")
    header = cells(text, "device")
    assert header[1:3] == ["longest context, all", "longest context, hot:4096"]
    assert header[3:5] == ["batch at 32k, all", "batch at 32k, hot:4096"]
    row = next(line for line in text.splitlines() if line.startswith("|  64 GB |"))
    found = [int(cell.replace(",", "")) for cell in row.strip("|").split("|")[1:]]
    assert found[0::2] == [745_152, 22, 5]
    assert all(hot > 3 * resident for resident, hot in zip(found[::2], found[1::2], strict=True))


def test_json_has_the_residency_too(command):
    facts = json.loads(command("deepseek-v4-flash", "--resident", "hot:1024", "--json"))
    assert facts["resident"] == "hot:1024"
    assert facts["home"]["c4"] == "host"
    assert {home for pool, home in facts["home"].items() if pool != "c4"} == {"device"}
    pools = {pool["name"]: pool["bytes_per_token"] for pool in facts["pools"]}
    assert facts["home_bytes_per_token"]["host"] == pools["c4"]
    assert facts["home_bytes_per_token"]["device"] == pools["c4_index"] + pools["c128"]
    assert set(facts["runs"]) == {"all", "hot:1024"}
    one_gb = facts["runs"]["hot:1024"][0]
    assert one_gb["device_bytes"] == 10**9
    assert set(one_gb["largest_batch"]) == {"32768", "131072"}


def test_ranks_and_drafts_have_a_residency_too(command):
    asked = ("glm-5", "--resident", "hot:4096", "--draft-layers", "1", "--pp", "2", "--json")
    facts = json.loads(command(*asked))
    assert facts["home"] == {"index": "device", "kv": "host", "draft": "device"}
    whole = facts["hot_bytes_per_request"]
    first, second = (rank["hot_bytes_per_request"] for rank in facts["ranks"])
    assert first == second > whole / 2  # Each stage has a ring of its own.


def test_all_resident_is_what_is_shown_without_the_option(command):
    for flags in ((), ("--json",), ("--pp", "2")):
        usual = command("deepseek-v3.2", *flags)
        assert command("deepseek-v3.2", "--resident", "all", *flags) == usual
        assert "hot" not in usual


def test_without_a_model_the_names_are_listed(command):
    text = command()
    for name in catalog.names():
        assert f"| {name} " in text
    assert json.loads(command("--json")) == catalog.names()


def test_a_folder_with_a_config_is_a_model(command, tmp_path):
    config = {
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "sliding_window": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = command(str(tmp_path), "--page-tokens", "16")
    assert cells(text, "swa")[-1] == "last 31 tokens (2 pages)"
    assert "the last 2 pages of swa" in text


def test_a_gguf_file_declares_what_the_server_declares(command, gguf_file):
    text = command(str(gguf_file), "--page-tokens", "16")
    assert text.startswith("tiny-3: 7 layers, pages of 16 tokens")
    assert cells(text, "kv")[2:4] == ["5", "16 entries × 128 B"]
    assert cells(text, "swa")[2] == "0–4, 6"
    assert cells(text, "swa")[-1] == "last 15 tokens (1 page)"
    served = declare(open_checkpoint(gguf_file).config, model="tiny-3", page_tokens=16)
    facts = json.loads(command(str(gguf_file), "--page-tokens", "16", "--json"))
    assert facts == describe(served) | {"ranks": []}


def test_a_gguf_file_goes_by_its_first_bytes_too(command, gguf_file):
    blob = gguf_file.rename(gguf_file.with_name("blob"))
    assert command(str(blob)).startswith("blob: 7 layers")


def test_a_damaged_gguf_file_is_refused_as_the_server_refuses_it(tmp_path, capsys):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF and no more")
    assert main(["memory", str(damaged)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kvtide memory: {damaged}: GGUF version")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["gpt-9"], "the built-in models are deepseek-v3.2"),
        (["deepseek-v4-flash", "--page-tokens", "96"], "use a multiple of 128"),
        (["qwen3-8b", "--page-tokens", "0"], "a page of 0 tokens; use at least 1"),
        (["qwen3-8b", "--kv-dtype", "int4"], "use one of bf16, fp16, fp32, fp8"),
        (["qwen3-8b", "--tp", "3"], "do not divide over 3 tensor ranks"),
        (["qwen3-8b", "--tp", "0"], "use at least 1 for each"),
        (["qwen3-8b", "--pp", "37"], "36 layers over 37 pipeline ranks; use 1 to 36"),
        (["qwen3-8b", "--draft-layers", "0"], "0 layers; use at least 1, or no draft"),
        (["qwen3-8b", "--resident", "hot:4096"], "none can stay on the host; use --resident all"),
        (["glm-5", "--resident", "hot:2047"], "up to 2,048 of kv; use --resident hot:2048"),
        (["glm-5", "--resident", "some"], "is no residency; use all, auto, or hot:4096"),
        (["glm-5", "--resident", "auto"], "a server chooses .* use all or hot:4096"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(command, argv, sentence):
    with pytest.raises((CommandError, SpecError), match=sentence):
        command(*argv)


def test_a_refusal_exits_with_2_and_no_traceback(capsys):
    assert main(["memory", "gpt-9"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kvtide memory: 'gpt-9' is neither a built-in model nor a folder")
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((), "–"),
        ((7,), "7"),
        ((0, 1), "0–1"),
        ((0, 1, 2, 5), "0–2, 5"),
        ((3, 5), "3, 5"),
        ((2, 4, 6), "2–6 by 2"),
        ((0, 1, 3, 4, 6), "0–1, 3–4, 6"),
        (tuple(i for i in range(62) if (i + 1) % 6), "0–4, 6–10, … 60–61 (52)"),
    ],
)
def test_layers_are_written_as_ranges(layers, words):
    assert layer_ranges(layers) == words


def test_a_short_context_needs_no_more_pages_than_it_has():
    memory = catalog.resolve("gemma-3-27b")
    page = memory.slot_bytes("kv") + memory.slot_bytes("swa")
    assert context_bytes(memory, 64) == page
    assert context_bytes(memory, 65) == 2 * page
    many = 100 * memory.slot_bytes("kv") + 16 * memory.slot_bytes("swa")
    assert context_bytes(memory, 6400) == many


def test_a_rule_counts_the_pages_it_touches():
    pool = catalog.resolve("gpt-oss-120b").pool("swa")
    assert resume_rule(pool, 128) == "last 127 tokens (1 page)"
    assert resume_rule(pool, 64) == "last 127 tokens (2 pages)"
