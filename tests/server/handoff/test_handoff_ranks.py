"""Handoffs between servers of several ranks: pages are paired by pool, layer and field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.handoff.test_prefill_and_decode import COMMON, PROMPT, answer, ask
from tests.server.serving import PAGE, Child

PROMPTS = (PROMPT, PROMPT[: 9 * PAGE][::-1], [3, *PROMPT])
STAGES, TENSORS = ("--pp", "2"), ("--tp", "2")
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> Iterator[list[dict[str, Any]]]:
    with Child((str(model_folder), *COMMON)) as alone:
        yield [ask(alone.client(), prompt) for prompt in PROMPTS]


@pytest.mark.full
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(STAGES, ()), ((), STAGES), (TENSORS, ()), ((), TENSORS), (STAGES, TENSORS)],
    ids=lambda flags: "".join(flags) or "one",
)
def test_ranks_of_one_side_need_no_ranks_on_the_other(
    model_folder: Path,
    expected: list[dict[str, Any]],
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
) -> None:
    """Stages give equal bits; tensor ranks add in another order."""
    common = (str(model_folder), *COMMON)
    with Child((*common, "--role", "prefill", *prefill), patience_s=PATIENCE_S) as there:
        url = f"http://127.0.0.1:{there.client().port}"
        few = ("--handoff-min-tokens", "16")
        with Child(
            (*common, "--role", "decode", "--prefill-from", url, *few, *decode),
            patience_s=PATIENCE_S,
        ) as here:
            clients = there.client(), here.client()
            for prompt, wanted in zip(PROMPTS, expected, strict=True):
                found = ask(clients[1], prompt)
                assert [each["state"] for each in found["usage"]["handoffs"]] == ["decoding"]
                if TENSORS not in (prefill, decode):
                    assert answer(found) == answer(wanted)
                    continue
                ours, theirs = (
                    each["choices"][0]["logprobs"]["token_logprobs"] for each in (found, wanted)
                )
                assert ours == pytest.approx(theirs, abs=1e-5)
            for client in clients:
                assert client.get("/admin/cache").json()["violations"] == []
