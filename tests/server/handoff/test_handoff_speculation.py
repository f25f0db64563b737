"""Handoffs to a decode server that speculates: the same text, and drafts as good as one server's.

The state that a draft keeps travels with the pages. A prefill server without a draft gives none:
the text is the same all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtide.engine import Engine
from kvtide.models.default_model import default_model
from kvtide.server.settings import Settings
from tests.models import tiny_mtp
from tests.server.handoff.server_pairs import (
    PATH,
    Json,
    ServerPair,
    ask,
    body_of,
    handoff_of,
)
from tests.server.serving import PAGE, InProcess
from tests.server.talking import Client
from tests.server.test_speculation import REPETITIVE, save_draft, save_mtp

PROMPTS = [f"{n}, {3 * REPETITIVE}" for n in range(4)]
HELD_OUT = Path(__file__).parents[3] / "examples/draft_prompts/held_out/summary.txt"
ANSWER, LONG = 40, 96
KEPT, NEARLY = 0.98, 0.9
"""Of an accept length: of long answers, and of short ones. The first step of an answer may be
without drafts, so that later steps verify other tokens together."""
SAMPLED = {"temperature": 0.4, "seed": 5}
FIXED = "fixed_drafts"
FIX = f"from kvtide.engine import Engine; Engine.__init__.__kwdefaults__[{FIXED!r}] = True"
"""As many drafts in every step: how many pay depends on the machine."""


class Speculation(NamedTuple):
    """A model and the flags of a server that drafts."""

    model: Path
    flags: dict[str, Any]

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(w for name, value in self.flags.items() for w in (f"--{name}", value))


def speculation(kind: str, plain: Path, folder: Path) -> Speculation:
    if kind == "ngram":
        return Speculation(plain, {"speculate": kind})
    if kind == "eagle3":
        return Speculation(plain, {"draft": str(save_draft(plain, folder / "draft"))})
    return Speculation(save_mtp(kind, folder / "model"), {"speculate": "mtp"})


def answers_to(client: Client, prompts: list[str], **fields: Any) -> list[Json]:
    return [ask(client, prompt, max_tokens=ANSWER, **fields) for prompt in prompts]


def accept_length(answers: list[Json]) -> float:
    """Tokens that a verify step gave."""
    details = [found["usage"]["completion_tokens_details"] for found in answers]
    accepted = sum(each["accepted_prediction_tokens"] for each in details)
    steps = sum(found["usage"]["speculation"]["verify_steps"] for found in answers)
    return 1 + accepted / steps


def decode_steps(answers: list[Json]) -> int:
    """Steps behind first tokens: each gives a token, and the drafts that it accepts."""
    usages = [found["usage"] for found in answers]
    details = [each["completion_tokens_details"] for each in usages]
    tokens = sum(each["completion_tokens"] - 1 for each in usages)
    return tokens - sum(int(each["accepted_prediction_tokens"]) for each in details)


KINDS = ("ngram", "eagle3", *tiny_mtp.NAMES)


@pytest.fixture(autouse=True)
def fixed_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults: dict[str, Any] = Engine.__init__.__kwdefaults__ or {}
    assert FIXED in defaults
    monkeypatch.setitem(defaults, FIXED, True)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefills", ["drafts", "plain"])
def test_a_decode_server_drafts_as_one_server_does(
    model_folder: Path, tmp_path: Path, kind: str, prefills: str
) -> None:
    chosen = speculation(kind, model_folder, tmp_path)
    common: dict[str, Any] = {"port": 0, "page_tokens": PAGE, "deterministic": True}
    one = InProcess(Settings(model=str(chosen.model), storage="none", **common, **chosen.flags))
    words = chosen.words if prefills == "drafts" else ("--speculate", "none")
    with ServerPair(
        chosen.model, prefill_flags=words, decode_flags=chosen.words, before=FIX
    ) as pair:
        for fields in ({}, SAMPLED):
            prompts = [f"{len(fields)}{prompt}" for prompt in PROMPTS]
            wanted = answers_to(one.client, prompts, **fields)
            found = answers_to(pair.decode.client, prompts, **fields)
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours["choices"] == theirs["choices"]
                assert handoff_of(ours)["state"] == "decoding"
            if prefills == "drafts" or kind == "ngram":
                assert accept_length(found) >= NEARLY * accept_length(wanted)
                steps = decode_steps(wanted) / NEARLY + len(prompts)
                assert decode_steps(found) <= steps, "one without drafts for each request"
        pair.settled()
    one.close()


def streamed(client: Client, prompt: str) -> Json:
    """A long answer, which a slow machine gives piece by piece."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    pieces = list(client.start(PATH, **body_of(prompt, max_tokens=LONG, **usage)).events())
    choices = [choice for piece in pieces for choice in piece["choices"]]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    assert len(tokens) == LONG
    return {"tokens": tokens, "usage": pieces[-1]["usage"]}


@pytest.mark.full
def test_the_shipped_draft_is_as_good_behind_a_handoff() -> None:
    prompts = HELD_OUT.read_text().split("\n\n")[:4]
    common: dict[str, Any] = {"port": 0, "page_tokens": PAGE, "deterministic": True}
    one = InProcess(Settings(model=str(default_model()), storage="none", **common))
    with ServerPair(default_model(), before=FIX) as pair:
        wanted, found = (
            [streamed(client, prompt) for prompt in prompts]
            for client in (one.client, pair.decode.client)
        )
        pair.settled()
    one.close()
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert handoff_of(ours)["state"] == "decoding"
    assert accept_length(wanted) > 1.5
    assert accept_length(found) >= KEPT * accept_length(wanted)
    assert decode_steps(found) <= decode_steps(wanted) / KEPT + len(prompts)
