"""Prompts from files, and the prompts that come with the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.draft_prompts import compose
from kvtide.models.checkpoint import open_checkpoint
from kvtide.models.tokenizer import load_tokenizer
from kvtide.training.prompts import (
    PromptFile,
    TrainingError,
    encode_prompts,
    overlapping,
    read_prompts,
)
from tests.server import tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS = ROOT / "examples" / "draft_prompts"


def written(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_a_file_without_empty_lines_has_a_prompt_in_every_line(tmp_path: Path) -> None:
    found = read_prompts(written(tmp_path / "chat.txt", "one\n  two \nthree\n\n"))
    assert found == PromptFile("chat", ("one", "two", "three"))


def test_a_file_with_empty_lines_has_a_prompt_in_every_paragraph(tmp_path: Path) -> None:
    found = read_prompts(written(tmp_path / "a.b.txt", "\none\nand more\n \n\n\ntwo\n"))
    assert found == PromptFile("a.b", ("one\nand more", "two"))


@pytest.mark.parametrize("text", ["", " \n \n"])
def test_a_file_without_a_prompt_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="there is no prompt in it; put one in every line"):
        read_prompts(written(tmp_path / "empty.txt", text))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "x", tmp_path / "nothing", tmp_path):
        with pytest.raises(TrainingError, match=f"{path.name}: not readable as text"):
            read_prompts(path)


def test_prompts_are_a_user_s_messages_where_the_model_has_a_template(tmp_path: Path) -> None:
    file = PromptFile("chat", ("Hi", "Hello there"))
    for template in (tiny_model.TEMPLATE, None):
        folder = tiny_model.save(tmp_path / str(template is None), template=template)
        tokenizer = load_tokenizer(open_checkpoint(folder))
        assert tokenizer is not None
        found = encode_prompts(file, tokenizer, 100)
        framed = "<|user|>{}<|end|><|assistant|>" if template else "{}"
        wanted = [tokenizer.encode(framed.format(one), add_special=False) for one in file.prompts]
        assert found.prompts == tuple(map(tuple, wanted))
        with pytest.raises(TrainingError, match=r"'Hello there' is .* tokens, and 8 fit beside"):
            encode_prompts(file, tokenizer, 8)


def test_prompts_of_the_repository_are_those_of_its_script(tmp_path: Path) -> None:
    compose.write(tmp_path)
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.txt"))
    assert len(files) == 6
    for file in files:
        assert (PROMPTS / file).read_text("utf-8") == (tmp_path / file).read_text("utf-8"), file


def test_prompts_of_the_repository_are_many_and_held_out_ones_are_others() -> None:
    training = [read_prompts(path) for path in sorted(PROMPTS.glob("train/*.txt"))]
    held_out = [read_prompts(path) for path in sorted(PROMPTS.glob("held_out/*.txt"))]
    assert len({prompt for file in training for prompt in file.prompts}) == compose.PROMPTS
    assert [(file.category, len(set(file.prompts))) for file in held_out] == [
        ("chat", 30),
        ("code", 30),
        ("summary", 30),
    ]
    assert not overlapping(training, held_out)
    templates = {*compose.CHAT, *compose.CODE, *compose.SUMMARY, *compose.FIRST_FACTS}
    seen = templates | {line for lines in compose.words().values() for line in lines}
    unseen = {
        *compose.HELD_OUT_CHAT, *compose.HELD_OUT_CODE, *compose.HELD_OUT_SUMMARY,
        *compose.HELD_OUT_HOBBIES, *compose.HELD_OUT_JOBS, *compose.HELD_OUT_EVENTS,
        *compose.HELD_OUT_FIRST_FACTS, *compose.HELD_OUT_FACTS,
    }  # fmt: skip
    assert not seen & unseen


def test_thousands_of_different_prompts_can_be_composed() -> None:
    found = compose.prompts(12_000)
    few = compose.prompts()
    for name, some in found.items():
        assert len(set(some)) == len(some), name
        assert name.startswith("train/") or some == few[name], "held-out prompts stay the same"
    assert sum(len(some) for name, some in found.items() if name.startswith("train/")) == 12_000
    assert not [one for some in found.values() for one in some if "{" in one]
