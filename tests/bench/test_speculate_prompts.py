"""The chat prompts of the benchmark are held out of the shipped draft's training."""

from __future__ import annotations

from pathlib import Path

from kvtide.bench.drafts.speculate import CHAT, QUESTIONS

PROMPTS = Path(__file__).resolve().parents[2] / "examples" / "draft_prompts"


def lines(path: Path) -> list[str]:
    return [line for line in path.read_text("utf-8").splitlines() if line]


def test_chat_is_every_eighth_of_the_held_out_prompts() -> None:
    assert [*CHAT] == lines(PROMPTS / "held_out" / "chat.txt")[::8]


def test_no_question_is_trained_on() -> None:
    trained = {line for path in (PROMPTS / "train").glob("*.txt") for line in lines(path)}
    assert trained and not trained & {*CHAT, *QUESTIONS}
