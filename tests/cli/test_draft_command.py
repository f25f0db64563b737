"""`kvtide draft`: from prompts to a folder that opens, what it is worth, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvtide.cli.main import main
from kvtide.models.draft_checkpoint import open_draft
from kvtide.training.acceptance import METHODS
from tests.server import tiny_model

FEW = ["--draft-vocab", "100", "--steps", "8", "--answers", "2", "--answer-tokens", "12",
       "--batch-tokens", "256", "--predict-every", "50", "--device", "cpu"]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    path = tmp_path / "chat.txt"
    path.write_text("What is rain?\nTell me of boats.\nBread?\n")
    return path


def test_a_draft_is_trained_measured_and_published(
    model: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unseen, out = tmp_path / "unseen.txt", tmp_path / "draft"
    unseen.write_text("Why is the sea salty?\n\nList three\ntrees.\n")
    words = ["draft", "train", str(model), "--text", str(chat), "--out", str(out)]
    assert main([*words, "--held-out", str(unseen), *FEW]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"generated 72 tokens in 6 answers to 3 prompts", printed)
    assert re.search(r"100 tokens cover \d+\.\d% of the answers", printed)
    assert re.search(r"step 8: loss \d+\.\d+, top-1 by draft [\d.]+ [\d.]+ [\d.]+", printed)
    size = (out / "model.safetensors").stat().st_size
    assert f"{out}: {size:,} bytes, " in printed
    assert "tokens per step, 3 drafts" in printed
    assert re.search(r"\| unseen +\| +2 \| +\d+ \| +\d\.\d\d \|", printed)
    assert open_draft(out).config.count("draft_vocab_size") == 100

    assert main([*words, "--resume", *FEW]) == 0
    printed = capsys.readouterr().out
    assert "answers.safetensors has 72 tokens" in printed and "goes on from the draft" in printed

    other = tmp_path / "other"
    words[words.index("--out") + 1] = str(other)
    more = ["--resume", str(out), "--draft-vocab", "120", "--lm-head", "fp8"]
    assert main([*words, *FEW, *more]) == 0
    printed = capsys.readouterr().out
    assert f"goes on from the draft in {out}, of 100 tokens" in printed
    assert open_draft(other).config.count("draft_vocab_size") == 120
    assert open_draft(out).config.count("draft_vocab_size") == 100
    evaluate = ["draft", "evaluate", str(model), "--text", str(unseen), "--draft", str(other)]
    assert main([*evaluate, "--answer-tokens", "8", "--device", "cpu"]) == 0


def test_answers_of_several_processes_are_trained_on(
    model: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "answers" / f"{part}.safetensors" for part in (1, 2)]
    plan = ["--answers", "2", "--answer-tokens", "12", "--device", "cpu"]
    for part, file in enumerate(files, 1):
        words = ["draft", "answer", str(model), "--text", str(chat), "--out", str(file)]
        assert main([*words, "--part", f"{part}/2", *plan]) == 0
        prompts = 3 - part
        line = f"{12 * 2 * prompts} tokens in {2 * prompts} answers to {prompts} prompts"
        assert line in capsys.readouterr().out
    out = tmp_path / "draft"
    words = ["draft", "train", str(model), "--text", str(chat), "--out", str(out), *FEW]
    assert main([*words, "--answered", *map(str, files)]) == 0
    assert "2 files have 72 tokens in 6 answers" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]

    evaluate = ["draft", "evaluate", str(model), "--text", str(chat), "--draft", str(out)]
    few = ["--answer-tokens", "16", "--device", "cpu"]
    assert main([*evaluate, *few]) == 0
    greedy = capsys.readouterr().out
    assert re.search(r"\| chat +\| +3 \| +\d+ \| +\d\.\d\d \| +\d\.\d\d \|", greedy)
    assert main([*evaluate, *few, "--temperature", "0.8", "--draft-tokens", "2"]) == 0
    measured, expected = capsys.readouterr().out.split("\n\n")
    assert "tokens per step, 2 drafts" in measured and "predicted" not in measured
    for method in METHODS:
        assert re.search(rf"\| chat +\| {method} +\| +\d\.\d\d\d \| +\d\.\d\d \|", expected)


def test_answers_and_evaluations_that_cannot_be_are_refused(
    model: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ["draft", "answer", str(model), "--text", str(chat), "--out", str(tmp_path / "a")]
    evaluate = ["draft", "evaluate", str(model), "--text", str(chat)]
    for words, sentence in (
        ([*answer, "--part", "3/2"], "--part is '3/2'; use a number and how many there are"),
        ([*answer, "--part", "5/9"], "--part is 5/9, and there are 3 prompts; use fewer parts"),
        ([*answer, "--minutes", "0"], "--minutes is 0; use more than 0"),
        (evaluate, "has no draft that comes with it; name one with --draft"),
        ([*evaluate, "--draft", str(tmp_path / "none")], "no such file or folder"),
        ([*evaluate, "--draft-tokens", "0"], "--draft-tokens is 0; use 1 to 16"),
    ):
        assert main([*words, "--device", "cpu"]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--steps", "0"], "--steps is 0; use at least 1"),
        (["--draft-vocab", "-4"], "--draft-vocab is -4; use at least 1"),
        (["--draft-tokens", "17"], "--draft-tokens is 17; use 1 to 16"),
        (["--minutes", "0"], "--minutes is 0; use more than 0"),
        (["--learning-rate", "0"], "--learning-rate is 0; use more than 0"),
        (["--answer-tokens", "1"], "--answer-tokens is 1, and a draft predicts tokens after it"),
        (["--capture", "2,x"], "--capture is '2,x'; use numbers of layers, like 2,15,27"),
        (["--capture", "1,9"], "layer 9 cannot be captured: the model has 2 layers"),
        (["--max-size", "much"], "much"),
        (["--max-size", "10KB"], "10,000 were asked for; use a smaller --draft-vocab"),
        (["--answer-tokens", "4090"], "tokens, and 6 fit beside an answer; shorten it"),
        (["--held-out", "{chat}"], "3 prompts are both trained on and held out, 'Bread?' for one"),
        (["--text", "{folder}/none.txt"], "none.txt: not readable as text"),
        (["--temperature", "-1"], "--temperature is -1; use 0 to 100"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    words: list[str],
    sentence: str,
    model: Path,
    chat: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = [word.format(chat=chat, folder=tmp_path) for word in words]
    command = ["draft", "train", str(model), "--text", str(chat), "--out", str(tmp_path / "d")]
    assert main([*command, *FEW, *asked]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvtide draft: ") and sentence in error, error
    assert not (tmp_path / "d").exists()


def test_a_model_that_is_not_there_or_has_no_tokenizer_is_refused(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tiny_model.save(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    for place, sentence in ((bare, "the model has no tokenizer"), (tmp_path / "x", "no such file")):
        words = ["draft", "train", str(place), "--text", str(chat), "--out", str(tmp_path / "d")]
        assert main([*words, *FEW]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(
    model: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["draft", "train", str(model), "--text", str(chat), "--out", str(tmp_path / "d")]
    assert main([*words, "--device", "cuda"]) == 2
    assert "--device cuda: torch finds no such device here; use cpu" in capsys.readouterr().err
